"""The requests to virtshim-shares. Only root may send them:

check    {"mounts": [{"host_path", "readonly", "follows"}]}  -> {}       whether each can be shared
share    {"directory", "container", "uid", "parent", "mounts"}  -> {}    starts the container's daemon, in a cgroup below `parent`
unshare  {"directory", "name"}  -> {}                                     stops the daemon; can be repeated
list     {"directory"}  -> {"shares": {name: whether it is served}}       `name`: the first 20 digits of the container's id
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tapmanager.cgroups.plan import cgroup_path
from tapmanager.errors import TapmanagerError, invalid
from tapmanager.fields import MAX_UID, BadField, Json, as_object, number, refuse_unknown, text
from tapmanager.peer import Peer
from tapmanager.server import Answer
from tapmanager.shares import plan
from tapmanager.shares.daemons import Place, ShareDaemons

_Verb = Callable[[ShareDaemons, Json, float], Answer]


def perform(daemons: ShareDaemons, request: Json, peer: Peer, until: float) -> Answer:
    """Runs one request; `until` is a point in time of time.monotonic(). Raises TapmanagerError; OSError from the kernel."""
    name = request.get("verb")
    verb = _TABLE.get(name) if isinstance(name, str) else None
    if verb is None:
        raise invalid(f"verb: {str(name)[:40]!r} is not one of {', '.join(_TABLE)}")
    if not peer.is_root:
        raise TapmanagerError("permission", f"{name} is for root only")
    try:
        return verb(daemons, as_object(request.get("args"), "args"), until)
    except BadField as exc:
        raise invalid(str(exc)) from exc


def _check(daemons: ShareDaemons, args: Json, until: float) -> Answer:
    refuse_unknown(args, ("mounts",), "args")
    daemons.check(plan.mounts_of(args), until)
    return Answer({})


def _share(daemons: ShareDaemons, args: Json, until: float) -> Answer:
    refuse_unknown(args, ("directory", "container", "uid", "parent", "mounts"), "args")
    parent, container = text(args, "parent", "args"), text(args, "container", "args")
    group = f"{cgroup_path(parent or '/', container, 'args')}-volumes"  # also checks the id
    place = Place(f"{plan.parent_of(args)}/{container[:20]}")
    uid = number(args, "uid", "args", 0, MAX_UID)
    daemons.start(place, uid, plan.mounts_of(args), until, group if parent else "")
    return Answer({})


def _unshare(daemons: ShareDaemons, args: Json, until: float) -> Answer:
    refuse_unknown(args, ("directory", "name"), "args")
    daemons.end(Place(f"{plan.parent_of(args)}/{plan.name_of(args)}"), until)
    return Answer({})


def _list(daemons: ShareDaemons, args: Json, until: float) -> Answer:
    del until
    if not args:  # a ping
        return Answer({"shares": {}})
    refuse_unknown(args, ("directory",), "args")
    return Answer({"shares": dict(daemons.all(plan.parent_of(args)))})


_TABLE: Mapping[str, _Verb] = {"check": _check, "share": _share, "unshare": _unshare, "list": _list}
