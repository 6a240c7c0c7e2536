"""The requests to virtshim-shares. Only root may send them:

check    {"mounts": [{"host_path", "readonly", "follows"}]}  -> {}       whether each can be shared
passt    {}  -> {}                                                        whether it is installed
share    {"directory", "container", "uid", "parent", "mounts"}  -> {}    starts the container's daemon, in a cgroup below `parent`
         "network": see `passt.Network`; starts passt, too. Without mounts, there is only passt.
unshare  {"directory", "name"}  -> {}                                     stops the daemons; can be repeated
list     {"directory"}  -> {"shares": {name: whether it is served}, "networks": {name: whether passt runs}}
         `name`: the first 20 digits of the container's id. Only shares with passt are in "networks".
"""

from __future__ import annotations

from collections.abc import Mapping

from tapmanager.cgroups.plan import cgroup_path
from tapmanager.fields import MAX_UID, Json, number, text
from tapmanager.peer import Peer
from tapmanager.server import Answer, Call, Verb, run_verb
from tapmanager.shares import passt, plan
from tapmanager.shares.daemons import Place, ShareDaemons


def perform(daemons: ShareDaemons, request: Json, peer: Peer, until: float) -> Answer:
    return run_verb(_TABLE, daemons, request, peer, until)


def _check(daemons: ShareDaemons, call: Call) -> Answer:
    daemons.check(plan.mounts_of(call.args), call.until)
    return Answer({})


def _passt(daemons: ShareDaemons, call: Call) -> Answer:
    del call
    daemons.require_passt()
    return Answer({})


def _share(daemons: ShareDaemons, call: Call) -> Answer:
    parent, container = text(call.args, "parent", "args"), text(call.args, "container", "args")
    group = f"{cgroup_path(parent or '/', container, 'args')}-volumes"  # also checks the id
    place = Place(f"{plan.parent_of(call.args)}/{container[:20]}")
    uid = number(call.args, "uid", "args", 0, MAX_UID)
    daemons.start(
        place, uid, plan.mounts_of(call.args), call.until, group if parent else "", passt.network_of(call.args)
    )
    return Answer({})


def _unshare(daemons: ShareDaemons, call: Call) -> Answer:
    daemons.end(Place(f"{plan.parent_of(call.args)}/{plan.name_of(call.args)}"), call.until)
    return Answer({})


def _list(daemons: ShareDaemons, call: Call) -> Answer:
    if not call.args:  # a ping
        return Answer({"shares": {}, "networks": {}})
    parent = plan.parent_of(call.args)
    return Answer({"shares": dict(daemons.all(parent)), "networks": dict(daemons.networks(parent))})


_TABLE: Mapping[str, Verb[ShareDaemons]] = {
    "check": Verb(_check, ("mounts",)),
    "passt": Verb(_passt),
    "share": Verb(_share, ("directory", "container", "uid", "parent", "mounts", "network")),
    "unshare": Verb(_unshare, ("directory", "name")),
    "list": Verb(_list, ("directory",)),
}
