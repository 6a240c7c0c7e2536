"""The requests to tapmanager: a fixed table of verbs, with their users and typed arguments.

attach   {"sandbox", "pod": {"namespace", "name", "uid"}, "dns": {...}, "port_mappings": [...], "hostname"}  -> the network   root
         "multi_queue": the VMs may want several queues per NIC; a tap is made for one, or for any number. "policy_routes": the
         caller gives the guest what the answer's interfaces have under "rules" and "table_routes"; else such pods are refused.
         "macs": of the guest's NICs, by interface; of others the plugin decides. "addresses": wanted ones, by interface; the pod
         gets others if the plugins refuse them. "existing": {"path", "addresses"}: the namespace that another runtime made, in
         which no plugin runs and nothing changes; the pod has these addresses there.
release  {"sandbox"}         -> {}                                                                             root
fetch    {"sandbox", "key"}  -> {"interfaces": [{"mac", "mtu", "queues", "vhost"}]} + descriptors               root, QEMU
         Works only after `group`, for one process, which becomes QEMU and enters that cgroup. Descriptors for each interface in
         turn: one of the tap per queue in "queues" (absent: 1), then with "vhost" (absent: false) as many of vhost-net. With
         "stream" (absent: false) the one descriptor is a connection to passt.
group    {"sandbox", "uid", "container", "parent", "limits", "oom_score_adj", "queues", "stream"}  -> {"made"}  root
         Makes the container's cgroup with limits below `parent`; the sandbox's next VM goes into it. Opens the network to that
         VM: for two minutes, `fetch` answers one process of that user. "uid" 0: the common user of VMs. "queues": wanted queues
         per NIC; absent: the VM supports neither queues nor vhost-net, as in earlier versions. "stream": the path of passt's
         socket, for a sandbox with "existing".
disarm   {"sandbox"}         -> {}         the start has failed: `fetch` answers no process any more               root
limit    {"container", "parent", "limits", "oom_score_adj"}  -> {}   all or nothing, on a running VM             root
ungroup  {"container", "parent"}  -> {}                                                                        root
list     {}                  -> {"sandboxes": [...]}    including half-made and unreadable ones                root
pod      {"sandbox"}         -> {"namespace", "name", "uid"}    of an attached sandbox                         root
lost     {}                  -> {"lost": {sandbox: what is gone, or fails}}    of attached sandboxes           root
status   {}                  -> {"ready", "reason"}     whether pods can be attached now                       root
driver   {"address"}         -> {"driver"}    of a PCI function of the host; "" for none                        root
bind     {"address", "driver"}  -> {}         binds it to that driver; "" for none                             root
function {"address"}         -> {"driver"}, for a network card's VF also the current {"card", "number", "settings"}    root
reset    {"address"}         -> {"reset"}     False if it does not support a reset                             root
usb      {"bus", "device"}   -> {"interfaces"}    the USB device's interfaces that got a missing driver        root
plugins  {}                  -> {"bounds", "runs": [{"command", "plugin", "failures", "ms", "buckets"}]}    CNI's runs    root
counters {"after"}           -> {"sandboxes": {id: {interface: [8 numbers]}}, "last"}   see `counters.Counters`   root
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from tapmanager.attachments import Attachments
from tapmanager.cgroups.plan import RequestedLimits, cgroup_path
from tapmanager.cgroups.tree import VmCgroups
from tapmanager.drivers import PciDrivers, UsbDrivers
from tapmanager.fields import MAX_UID, BadField, Json, as_object, number, text
from tapmanager.ledger import Entry, Placement
from tapmanager.links import network_plan
from tapmanager.peer import Peer
from tapmanager.pod import MAX_QUEUES, Nic, NicFunction, Pod, SharedNic, sandbox_id
from tapmanager.server import Answer, Call, Verb, run_verb
from tapmanager.sriov.nic_functions import NicFunctions
from tapmanager.tap_handover import OpenTap


@dataclass(frozen=True, slots=True)
class HostResources:
    """The objects that verbs act on."""

    attachments: Attachments
    groups: VmCgroups
    drivers: PciDrivers
    functions: NicFunctions
    usb: UsbDrivers = field(default_factory=UsbDrivers)


def perform(resources: HostResources, request: Json, peer: Peer, until: float) -> Answer:
    return run_verb(_TABLE, resources, request, peer, until)


def _attach(resources: HostResources, call: Call) -> Answer:
    pod = Pod.from_json(call.args, "args")
    return Answer(_network(resources.attachments.attach(pod, call.until)))


def _network(entry: Entry) -> Json:
    by_name: dict[str, Nic | NicFunction | SharedNic] = {nic.link: nic for nic in entry.nics}
    by_name |= {function.link: function for function in entry.functions}
    if entry.shared is not None:
        by_name = {entry.shared.link: entry.shared}
    names = network_plan.in_guest_order(entry.result or {}, list(by_name))
    return {
        "netns": entry.netns,
        "interfaces": [_interface(by_name[name]) for name in names],
        "ips": list(entry.ips),
        "dns": dataclasses.asdict(entry.dns),
        "fetch_key": entry.fetch_key,
        **({"inode": entry.shared.inode} if entry.shared else {}),
    }


def _interface(one: Nic | NicFunction | SharedNic) -> Json:
    """`taken`: the function belongs to the pod, because its link was in the pod's namespace. For any other function, only
    kubelet's grant says whose it is."""
    more: dict[str, object] = {}
    if not isinstance(one, SharedNic):
        more |= {"rules": [dataclasses.asdict(rule) for rule in one.rules]} if one.rules else {}
        more |= {"table_routes": [dataclasses.asdict(route) for route in one.table_routes]} if one.table_routes else {}
    if isinstance(one, NicFunction):
        more |= {"function": one.pci, "taken": bool(one.driver)}
    return {
        "name": one.link,
        "mac": one.mac,
        "mtu": one.mtu if isinstance(one, NicFunction) else one.guest_mtu,
        "addresses": list(one.addresses),
        "routes": [dataclasses.asdict(route) for route in one.routes],
        **more,
    }


def _release(resources: HostResources, call: Call) -> Answer:
    sandbox = _sandbox(call.args)
    resources.attachments.release(sandbox, call.until, resources.groups.forget)
    return Answer({})


def _fetch(resources: HostResources, call: Call) -> Answer:
    sandbox, key = _sandbox(call.args), text(call.args, "key", "args")

    def admit(placement: Placement) -> None:
        resources.groups.admit(placement.group, placement.oom_score_adj, call.peer)

    taps = resources.attachments.taps.fetch(sandbox, key, call.peer, admit, call.until)
    return Answer(
        {"interfaces": [_fetched(one) for one in taps]}, [fd for one in taps for fd in (*one.fds, *one.vhost)]
    )


def _fetched(tap: OpenTap) -> Json:
    """One queue without vhost-net has the same form as in earlier versions."""
    queues = {"queues": len(tap.fds)} if len(tap.fds) > 1 else {}
    if isinstance(tap.nic, SharedNic):
        return {"mac": tap.nic.mac, "mtu": tap.nic.guest_mtu, "stream": True}
    return {"mac": tap.nic.mac, "mtu": tap.nic.guest_mtu, **queues, **({"vhost": True} if tap.vhost else {})}


def _group(resources: HostResources, call: Call) -> Answer:
    sandbox, path = _sandbox(call.args), _path(call.args)
    # Requests of earlier versions of virtshim lack these two.
    uid, queues = number(call.args, "uid", "args", 0, MAX_UID, 0), number(call.args, "queues", "args", 0, MAX_QUEUES, 0)
    made = bool(path) and resources.groups.make(path, _limits(call.args))
    placement = Placement(
        path if made else "", _oom_score_adj(call.args), uid=uid, queues=queues, stream=_stream(call.args)
    )
    resources.attachments.taps.arm(sandbox, placement, call.until)
    return Answer({"made": made})


def _stream(args: Json) -> str:
    path = text(args, "stream", "args", "")
    if path and not path.startswith("/"):
        raise BadField(f"args.stream: not an absolute path: {path[:200]!r}")
    return path


def _disarm(resources: HostResources, call: Call) -> Answer:
    resources.attachments.taps.disarm(_sandbox(call.args), call.until)
    return Answer({})


def _counters(resources: HostResources, call: Call) -> Answer:
    """An `after` of "" starts from the beginning. If `last` is not "", it is the next call's `after`."""
    after = text(call.args, "after", "args", "")
    found, last = resources.attachments.counters(after)
    return Answer({"sandboxes": found, "last": last})


def _plugins(resources: HostResources, call: Call) -> Answer:
    del call
    return Answer(resources.attachments.plugin_runs.as_json())


def _limit(resources: HostResources, call: Call) -> Answer:
    path, limits, score = _path(call.args), _limits(call.args), _oom_score_adj(call.args)
    if path:
        resources.groups.limit(path, limits, score)
    return Answer({})


def _ungroup(resources: HostResources, call: Call) -> Answer:
    if path := _path(call.args):
        resources.groups.remove(path)
    return Answer({})


def _path(args: Json) -> str:
    """The cgroup's path; "" without a parent, where libvirt places the VM."""
    parent, container = text(args, "parent", "args"), text(args, "container", "args")
    return cgroup_path(parent, container, "args") if parent else ""


def _limits(args: Json) -> RequestedLimits:
    return RequestedLimits.from_json(as_object(args.get("limits"), "args.limits"), "args.limits")


def _oom_score_adj(args: Json) -> int:
    return number(args, "oom_score_adj", "args", -1000, 1000)


def _lost(resources: HostResources, call: Call) -> Answer:
    return Answer({"lost": dict(resources.attachments.lost(call.until))})


def _pod(resources: HostResources, call: Call) -> Answer:
    pod = resources.attachments.pod(_sandbox(call.args))
    return Answer({"namespace": pod.namespace, "name": pod.name, "uid": pod.uid})


def _list(resources: HostResources, call: Call) -> Answer:
    del call
    return Answer({"sandboxes": list(resources.attachments.sandboxes())})


def _status(resources: HostResources, call: Call) -> Answer:
    del call
    reason = resources.attachments.trouble
    return Answer({"ready": not reason, "reason": reason})


def _driver(resources: HostResources, call: Call) -> Answer:
    return Answer({"driver": resources.drivers.driver(text(call.args, "address", "args"))})


def _bind(resources: HostResources, call: Call) -> Answer:
    resources.functions.bind(text(call.args, "address", "args"), text(call.args, "driver", "args"))
    return Answer({})


def _function(resources: HostResources, call: Call) -> Answer:
    return Answer(resources.functions.describe(text(call.args, "address", "args")))


def _reset(resources: HostResources, call: Call) -> Answer:
    return Answer({"reset": resources.drivers.reset(text(call.args, "address", "args"))})


def _usb(resources: HostResources, call: Call) -> Answer:
    place = (number(call.args, name, "args", 1, 999) for name in ("bus", "device"))
    return Answer({"interfaces": resources.usb.probe(*place)})


def _sandbox(args: Json) -> str:
    return sandbox_id(text(args, "sandbox", "args"), "args.sandbox")


_TABLE: Mapping[str, Verb[HostResources]] = {
    "attach": Verb(_attach, None),
    "release": Verb(_release, ("sandbox",)),
    "fetch": Verb(_fetch, ("sandbox", "key"), open_to_qemu=True),
    "group": Verb(_group, ("sandbox", "uid", "container", "parent", "limits", "oom_score_adj", "queues", "stream")),
    "disarm": Verb(_disarm, ("sandbox",)),
    "limit": Verb(_limit, ("container", "parent", "limits", "oom_score_adj")),
    "ungroup": Verb(_ungroup, ("container", "parent")),
    "list": Verb(_list),
    "pod": Verb(_pod, ("sandbox",)),
    "lost": Verb(_lost),
    "status": Verb(_status),
    "driver": Verb(_driver, ("address",)),
    "bind": Verb(_bind, ("address", "driver")),
    "reset": Verb(_reset, ("address",)),
    "usb": Verb(_usb, ("bus", "device")),
    "function": Verb(_function, ("address",)),
    "counters": Verb(_counters, ("after",)),
    "plugins": Verb(_plugins),
}
