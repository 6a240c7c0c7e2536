"""The requests to tapmanager: a fixed table of verbs, with their users and typed arguments.

attach   {"sandbox", "pod": {"namespace", "name", "uid"}, "dns": {...}, "port_mappings": [...], "hostname"}  -> the network   root
         "multi_queue": the VMs may want several queues per NIC; a tap is made for one, or for any number. "policy_routes": the
         caller gives the guest what the answer's interfaces have under "rules" and "table_routes"; else such pods are refused.
         "macs": of the guest's NICs, by interface; of others the plugin decides. "addresses": wanted ones, by interface; the pod
         gets others if the plugins refuse them.
release  {"sandbox"}         -> {}                                                                             root
fetch    {"sandbox", "key"}  -> {"interfaces": [{"mac", "mtu", "queues", "vhost"}]} + descriptors               root, QEMU
         Works only after `group`, for one process, which becomes QEMU and enters that cgroup. Descriptors for each interface in
         turn: one of the tap per queue in "queues" (absent: 1), then with "vhost" (absent: false) as many of vhost-net.
group    {"sandbox", "uid", "container", "parent", "limits", "oom_score_adj", "queues"}  -> {"made"}           root
         Makes the container's cgroup with limits below `parent`; the sandbox's next VM goes into it. Opens the network to that
         VM: for two minutes, `fetch` answers one process of that user. "uid" 0: the common user of VMs. "queues": wanted queues
         per NIC; absent: the VM supports neither queues nor vhost-net, as in earlier versions.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tapmanager.attachments import Attachments
from tapmanager.cgroups.plan import RequestedLimits, cgroup_path
from tapmanager.cgroups.tree import VmCgroups
from tapmanager.drivers import PciDrivers, UsbDrivers
from tapmanager.errors import TapmanagerError, invalid
from tapmanager.fields import MAX_UID, BadField, Json, as_object, number, refuse_unknown, text
from tapmanager.ledger import Entry, Placement
from tapmanager.links import network_plan
from tapmanager.peer import Peer
from tapmanager.pod import MAX_QUEUES, Nic, NicFunction, Pod, sandbox_id
from tapmanager.server import Answer
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


@dataclass(frozen=True, slots=True)
class _Call:
    """One request: the arguments, the sender, and the end of its time (time.monotonic())."""

    args: Json
    peer: Peer
    until: float


@dataclass(frozen=True, slots=True)
class _Verb:
    run: Callable[[HostResources, _Call], Answer]
    open_to_qemu: bool = False


def perform(resources: HostResources, request: Json, peer: Peer, until: float) -> Answer:
    """Runs one request; `until` is a point in time of time.monotonic(). Raises TapmanagerError; OSError from the kernel."""
    name = request.get("verb")
    verb = _TABLE.get(name) if isinstance(name, str) else None
    if verb is None:
        raise invalid(f"verb: {str(name)[:40]!r} is not one of {', '.join(_TABLE)}")
    if not (peer.is_root or verb.open_to_qemu):
        raise TapmanagerError("permission", f"{name} is for root only")
    try:
        return verb.run(resources, _Call(as_object(request.get("args"), "args"), peer, until))
    except BadField as exc:
        raise invalid(str(exc)) from exc


def _attach(resources: HostResources, call: _Call) -> Answer:
    pod = Pod.from_json(call.args, "args")
    return Answer(_network(resources.attachments.attach(pod, call.until)))


def _network(entry: Entry) -> Json:
    by_name: dict[str, Nic | NicFunction] = {nic.link: nic for nic in entry.nics}
    by_name |= {function.link: function for function in entry.functions}
    names = network_plan.in_guest_order(entry.result or {}, list(by_name))
    return {
        "netns": entry.netns,
        "interfaces": [_interface(by_name[name]) for name in names],
        "ips": list(entry.ips),
        "dns": dataclasses.asdict(entry.dns),
        "fetch_key": entry.fetch_key,
    }


def _interface(one: Nic | NicFunction) -> Json:
    """`taken`: the function belongs to the pod, because its link was in the pod's namespace. For any other function, only
    kubelet's grant says whose it is."""
    rules = {"rules": [dataclasses.asdict(rule) for rule in one.rules]} if one.rules else {}
    tables = {"table_routes": [dataclasses.asdict(route) for route in one.table_routes]} if one.table_routes else {}
    function = {"function": one.pci, "taken": bool(one.driver)} if isinstance(one, NicFunction) else {}
    return {
        "name": one.link,
        "mac": one.mac,
        "mtu": one.guest_mtu if isinstance(one, Nic) else one.mtu,
        "addresses": list(one.addresses),
        "routes": [dataclasses.asdict(route) for route in one.routes],
        **rules,
        **tables,
        **function,
    }


def _release(resources: HostResources, call: _Call) -> Answer:
    refuse_unknown(call.args, ("sandbox",), "args")
    sandbox = _sandbox(call.args)
    resources.attachments.release(sandbox, call.until, resources.groups.forget)
    return Answer({})


def _fetch(resources: HostResources, call: _Call) -> Answer:
    refuse_unknown(call.args, ("sandbox", "key"), "args")
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
    return {"mac": tap.nic.mac, "mtu": tap.nic.guest_mtu, **queues, **({"vhost": True} if tap.vhost else {})}


def _group(resources: HostResources, call: _Call) -> Answer:
    names = ("sandbox", "uid", "container", "parent", "limits", "oom_score_adj", "queues")
    refuse_unknown(call.args, names, "args")
    sandbox, path = _sandbox(call.args), _path(call.args)
    given = {"uid": 0, "queues": 0, **call.args}  # missing in requests of earlier versions of virtshim
    uid, queues = number(given, "uid", "args", 0, MAX_UID), number(given, "queues", "args", 0, MAX_QUEUES)
    made = bool(path) and resources.groups.make(path, _limits(call.args))
    placement = Placement(path if made else "", _oom_score_adj(call.args), uid=uid, queues=queues)
    resources.attachments.taps.arm(sandbox, placement, call.until)
    return Answer({"made": made})


def _disarm(resources: HostResources, call: _Call) -> Answer:
    refuse_unknown(call.args, ("sandbox",), "args")
    resources.attachments.taps.disarm(_sandbox(call.args), call.until)
    return Answer({})


def _counters(resources: HostResources, call: _Call) -> Answer:
    """An `after` of "" starts from the beginning. If `last` is not "", it is the next call's `after`."""
    refuse_unknown(call.args, ("after",), "args")
    after = text(call.args, "after", "args", "")
    found, last = resources.attachments.counters(after)
    return Answer({"sandboxes": found, "last": last})


def _plugins(resources: HostResources, call: _Call) -> Answer:
    refuse_unknown(call.args, (), "args")
    return Answer(resources.attachments.plugin_runs.as_json())


def _limit(resources: HostResources, call: _Call) -> Answer:
    refuse_unknown(call.args, ("container", "parent", "limits", "oom_score_adj"), "args")
    path, limits, score = _path(call.args), _limits(call.args), _oom_score_adj(call.args)
    if path:
        resources.groups.limit(path, limits, score)
    return Answer({})


def _ungroup(resources: HostResources, call: _Call) -> Answer:
    refuse_unknown(call.args, ("container", "parent"), "args")
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


def _lost(resources: HostResources, call: _Call) -> Answer:
    refuse_unknown(call.args, (), "args")
    return Answer({"lost": dict(resources.attachments.lost(call.until))})


def _pod(resources: HostResources, call: _Call) -> Answer:
    refuse_unknown(call.args, ("sandbox",), "args")
    pod = resources.attachments.pod(_sandbox(call.args))
    return Answer({"namespace": pod.namespace, "name": pod.name, "uid": pod.uid})


def _list(resources: HostResources, call: _Call) -> Answer:
    refuse_unknown(call.args, (), "args")
    return Answer({"sandboxes": list(resources.attachments.sandboxes())})


def _status(resources: HostResources, call: _Call) -> Answer:
    refuse_unknown(call.args, (), "args")
    reason = resources.attachments.trouble
    return Answer({"ready": not reason, "reason": reason})


def _driver(resources: HostResources, call: _Call) -> Answer:
    refuse_unknown(call.args, ("address",), "args")
    return Answer({"driver": resources.drivers.driver(text(call.args, "address", "args"))})


def _bind(resources: HostResources, call: _Call) -> Answer:
    refuse_unknown(call.args, ("address", "driver"), "args")
    resources.functions.bind(text(call.args, "address", "args"), text(call.args, "driver", "args"))
    return Answer({})


def _function(resources: HostResources, call: _Call) -> Answer:
    refuse_unknown(call.args, ("address",), "args")
    return Answer(resources.functions.describe(text(call.args, "address", "args")))


def _reset(resources: HostResources, call: _Call) -> Answer:
    refuse_unknown(call.args, ("address",), "args")
    return Answer({"reset": resources.drivers.reset(text(call.args, "address", "args"))})


def _usb(resources: HostResources, call: _Call) -> Answer:
    refuse_unknown(call.args, ("bus", "device"), "args")
    place = (number(call.args, name, "args", 1, 999) for name in ("bus", "device"))
    return Answer({"interfaces": resources.usb.probe(*place)})


def _sandbox(args: Json) -> str:
    return sandbox_id(text(args, "sandbox", "args"), "args.sandbox")


_TABLE: Mapping[str, _Verb] = {
    "attach": _Verb(_attach),
    "release": _Verb(_release),
    "fetch": _Verb(_fetch, open_to_qemu=True),
    "group": _Verb(_group),
    "disarm": _Verb(_disarm),
    "limit": _Verb(_limit),
    "ungroup": _Verb(_ungroup),
    "list": _Verb(_list),
    "pod": _Verb(_pod),
    "lost": _Verb(_lost),
    "status": _Verb(_status),
    "driver": _Verb(_driver),
    "bind": _Verb(_bind),
    "reset": _Verb(_reset),
    "usb": _Verb(_usb),
    "function": _Verb(_function),
    "counters": _Verb(_counters),
    "plugins": _Verb(_plugins),
}
