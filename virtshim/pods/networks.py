"""Pod networks, made by tapmanager. Implements `virtshim.pods.ports.PodNetworks`."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Mapping, Sequence

from tapmanager.fields import BadField, Json, as_object, number, objects, require, text, texts
from tapmanager.links import policy_routes
from virtshim.model.deadline import Deadline
from virtshim.model.errors import NotFound, ShimError, Unavailable
from virtshim.model.ids import SandboxId
from virtshim.model.network import Bandwidth, Dns, Interface, PluginRuns, PodNetwork, PolicyRule, Route, TableRoute
from virtshim.model.sandbox import Adoption, PodKey
from virtshim.model.usage import InterfaceUsage
from virtshim.pods.ports import AttachRequest
from virtshim.pods.tapmanager_connection import TapmanagerConnection
from virtshim.system.clock import Clock

# In seconds: the port promises that `trouble` answers within one second.
_STATUS_TIMEOUT = 0.9

_LARGEST_MTU = (1 << 32) - 1
_MOST = (1 << 63) - 1

_Usages = Mapping[SandboxId, Sequence[InterfaceUsage]]


class PodNetworkClient:
    """Stateless, thread-safe."""

    def __init__(self, tapmanager: TapmanagerConnection) -> None:
        self._tapmanager = tapmanager

    def await_answer(self, clock: Clock, seconds: float) -> None:
        """Returns when tapmanager answers; otherwise raises Unavailable. It does not wait for a missing CNI
        configuration, which is not tapmanager's fault."""
        deadline = Deadline.after(clock.monotonic(), seconds)
        never = threading.Event()
        while True:
            try:
                self.attached(timeout=5.0)
                return
            except Unavailable:
                if not deadline.left(clock.monotonic()):
                    raise
            clock.wait(never, 0.2)

    def attach(self, request: AttachRequest, timeout: float) -> PodNetwork:
        if request.existing is not None:
            return self._attach_existing(request, request.existing, timeout)
        limits = request.bandwidth
        args = {
            **_pod_args(request),
            "port_mappings": [
                {
                    "protocol": mapping.protocol,
                    "container_port": mapping.container_port,
                    "host_port": mapping.host_port,
                    "host_ip": mapping.host_ip,
                }
                for mapping in request.port_mappings
            ],
            "hostname": request.hostname,
            **({"filter": request.filter} if request.filter else {}),  # an older tapmanager does not know this argument
            **({"bandwidth": dataclasses.asdict(limits)} if limits != Bandwidth() else {}),
            **({"multi_queue": True} if request.multi_queue else {}),
            "policy_routes": True,
            **(
                {"addresses": {name: list(ips) for name, ips in request.addresses.items()}} if request.addresses else {}
            ),
        }
        newer = ("multi_queue", "policy_routes", "addresses")
        return self._tapmanager.ask("attach", args, timeout, _attaching(request), _network, newer=newer)

    def _attach_existing(self, request: AttachRequest, to: Adoption, timeout: float) -> PodNetwork:
        """The other runtime has given its plugins the rest, such as host ports and bandwidth."""
        args = {**_pod_args(request), "existing": {"path": to.netns, "addresses": list(to.addresses)}}
        return self._tapmanager.ask("attach", args, timeout, _attaching(request), _network)

    def release(self, sandbox: SandboxId, timeout: float) -> None:
        args = {"sandbox": sandbox.value}
        self._tapmanager.tell("release", args, timeout, f"releasing the network of sandbox {sandbox}")

    def attached(self, timeout: float) -> frozenset[SandboxId]:
        return self._tapmanager.ask("list", {}, timeout, "listing pod networks", _sandboxes)

    def pod_of(self, sandbox: SandboxId, timeout: float) -> PodKey | None:
        args, doing = {"sandbox": sandbox.value}, f"asking for the pod of sandbox {sandbox}"
        try:
            return self._tapmanager.ask("pod", args, timeout, doing, _pod)
        except NotFound:
            return None

    def counters(self, timeout: float) -> _Usages:
        found: dict[SandboxId, Sequence[InterfaceUsage]] = {}
        until = time.monotonic() + timeout
        after, doing = "", "reading the pods' network counters"
        while True:
            left = until - time.monotonic()
            page, following = self._tapmanager.ask("counters", {"after": after}, left, doing, _page)
            found |= page
            if following <= after:
                return found
            after = following

    def plugin_runs(self, timeout: float) -> Sequence[PluginRuns]:
        return self._tapmanager.ask("plugins", {}, timeout, "reading what CNI plugins did", _plugin_runs)

    def lost(self, timeout: float) -> Mapping[SandboxId, str]:
        return self._tapmanager.ask("lost", {}, timeout, "looking for lost pod networks", _lost)

    def trouble(self) -> str:
        try:
            return self._tapmanager.ask("status", {}, _STATUS_TIMEOUT, "asking for the network's state", _not_ready)
        except ShimError as exc:
            return str(exc)


def _attaching(request: AttachRequest) -> str:
    return f"attaching the network of pod {request.pod.readable}"


def _pod_args(request: AttachRequest) -> dict[str, object]:
    pod, dns = request.pod, request.dns
    return {
        "sandbox": request.sandbox.value,
        "pod": {"namespace": pod.namespace, "name": pod.name, "uid": pod.uid},
        "dns": {"servers": dns.servers, "searches": dns.searches, "options": dns.options},
        **({"macs": dict(request.macs)} if request.macs else {}),
    }


def _network(answer: Json) -> PodNetwork:
    require(answer, ("interfaces", "ips"), "answer")
    dns = as_object(answer.get("dns"), "answer.dns")
    require(dns, ("servers", "searches", "options"), "answer.dns")
    return PodNetwork(
        netns=text(answer, "netns", "answer"),
        interfaces=tuple(_interface(item) for item in objects(answer, "interfaces", "answer")),
        ips=texts(answer, "ips", "answer"),
        dns=Dns(*(texts(dns, name, "answer.dns") for name in ("servers", "searches", "options"))),
        fetch_key=text(answer, "fetch_key", "answer"),
        inode=number({"inode": 0, **answer}, "inode", "answer", 0, _MOST),
    )


def _interface(item: Json) -> Interface:
    where = "answer.interfaces"
    require(item, ("addresses", "routes"), where)
    routes = (
        Route(
            text(route, "destination", f"{where}.routes"),
            None if route.get("gateway") is None else text(route, "gateway", f"{where}.routes"),
        )
        for route in objects(item, "routes", where)
    )
    return Interface(
        text(item, "name", where),
        text(item, "mac", where),
        number(item, "mtu", where, 0, _LARGEST_MTU),
        texts(item, "addresses", where),
        tuple(routes),
        text(item, "function", where, ""),
        item.get("taken") is not False,
        tuple(_rule(rule) for rule in objects(item, "rules", where)),
        tuple(_table_route(route) for route in objects(item, "table_routes", where)),
    )


def _rule(item: Json) -> PolicyRule:
    return PolicyRule(**dataclasses.asdict(policy_routes.PolicyRule.from_json(item, "answer.interfaces.rules")))


def _table_route(item: Json) -> TableRoute:
    return TableRoute(**dataclasses.asdict(policy_routes.TableRoute.from_json(item, "answer.interfaces.table_routes")))


def _sandboxes(answer: Json) -> frozenset[SandboxId]:
    require(answer, ("sandboxes",), "answer")
    return frozenset(SandboxId(value) for value in texts(answer, "sandboxes", "answer"))


def _pod(answer: Json) -> PodKey:
    namespace, name, uid = (text(answer, field, "answer") for field in ("namespace", "name", "uid"))
    return PodKey(namespace, name, uid, 0)


def _page(answer: Json) -> tuple[_Usages, str]:
    sandboxes = as_object(answer.get("sandboxes"), "answer.sandboxes")
    found = {
        SandboxId(sandbox): tuple(_usage(name, numbers) for name, numbers in as_object(interfaces, sandbox).items())
        for sandbox, interfaces in sandboxes.items()
    }
    return found, text(answer, "last", "answer")


def _usage(name: str, numbers: object) -> InterfaceUsage:
    if not isinstance(numbers, list) or len(numbers) != 8 or not all(isinstance(number, int) for number in numbers):
        raise BadField(f"{name}: must be eight numbers")
    return InterfaceUsage(name, *numbers)


def _plugin_runs(answer: Json) -> Sequence[PluginRuns]:
    require(answer, ("bounds", "runs"), "answer")
    bounds = _numbers(answer, "bounds")
    return tuple(_runs(item, bounds) for item in objects(answer, "runs", "answer"))


def _runs(item: Json, bounds: Sequence[float]) -> PluginRuns:
    where = "answer.runs"
    counts = _numbers(item, "buckets")
    if len(counts) != len(bounds) + 1:
        raise BadField(f"{where}: must be one bucket more than bounds")
    totals = [int(total) for total in itertools.accumulate(counts)]
    return PluginRuns(
        command=text(item, "command", where),
        plugin=text(item, "plugin", where),
        failures=number(item, "failures", where, 0, _MOST),
        seconds=number(item, "ms", where, 0, _MOST) / 1000,
        buckets=tuple(zip((*bounds, math.inf), totals, strict=True)),
    )


def _numbers(item: Json, name: str) -> list[float]:
    found = item.get(name)
    if not isinstance(found, list) or not all(isinstance(one, int | float) and one >= 0 for one in found):
        raise BadField(f"answer.{name}: must be a list of numbers")
    return found


def _lost(answer: Json) -> Mapping[SandboxId, str]:
    found = as_object(answer.get("lost"), "answer.lost")
    return {SandboxId(sandbox): text(found, sandbox, "answer.lost") for sandbox in found}


def _not_ready(answer: Json) -> str:
    return "" if answer.get("ready") is True else text(answer, "reason", "answer") or "tapmanager says it is not ready"
