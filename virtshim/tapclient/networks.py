"""Pod networks by way of tapmanager: implements `virtshim.ports.PodNetworks`.

Each call has a connection of its own, so a slow pod blocks nobody and a restart of tapmanager needs no reconnecting.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from tapmanager import protocol
from virtshim.domain.deadline import Deadline
from virtshim.domain.errors import (
    Aborted,
    AlreadyExists,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Kind,
    NotFound,
    PermissionRefused,
    ResourceExhausted,
    ShimError,
    Unavailable,
    Unimplemented,
    WrongState,
)
from virtshim.domain.ids import SandboxId
from virtshim.domain.network import Dns, Interface, PodNetwork, Route
from virtshim.domain.sandbox import PodKey
from virtshim.domain.usage import InterfaceUsage
from virtshim.ports.clock import Clock
from virtshim.ports.network import AttachRequest

_ERRORS: Mapping[Kind, type[ShimError]] = {
    error.kind: error
    for error in (
        InvalidRequest,
        NotFound,
        AlreadyExists,
        WrongState,
        DeadlineExceeded,
        Unavailable,
        ResourceExhausted,
        PermissionRefused,
        Unimplemented,
        Aborted,
        InternalError,
    )
}
# The port's promise for `trouble` is one second; in seconds.
_STATUS_TIMEOUT = 0.9
# tapmanager answers at once whatever its plugins do; one that says nothing for so long, in seconds, hangs.
_ALIVE_TIMEOUT = 5.0


class PodNetworkClient:
    """Stateless but for the socket's path, thread-safe."""

    def __init__(self, socket_path: str) -> None:
        self._path = socket_path

    def await_answer(self, clock: Clock, seconds: float) -> None:
        """Returns when tapmanager answers, or raises Unavailable; a missing CNI configuration is not its fault and not waited
        for."""
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
        """See the port."""
        pod, dns = request.pod, request.dns
        args = {
            "sandbox": request.sandbox.value,
            "pod": {"namespace": pod.namespace, "name": pod.name, "uid": pod.uid},
            "dns": {"servers": dns.servers, "searches": dns.searches, "options": dns.options},
            "port_mappings": [
                {
                    "protocol": mapping.protocol,
                    "container_port": mapping.container_port,
                    "host_port": mapping.host_port,
                    "host_ip": mapping.host_ip,
                }
                for mapping in request.port_mappings
            ],
        }
        with self._wire_errors(f"attaching the network of pod {pod.namespace}/{pod.name}"):
            return _network(self._call("attach", args, timeout))

    def release(self, sandbox: SandboxId, timeout: float) -> None:
        """See the port."""
        with self._wire_errors(f"releasing the network of sandbox {sandbox}"):
            self._call("release", {"sandbox": sandbox.value}, timeout)

    def attached(self, timeout: float) -> frozenset[SandboxId]:
        """See the port."""
        with self._wire_errors("listing pod networks"):
            return frozenset(SandboxId(value) for value in _texts(self._call("list", {}, timeout), "sandboxes"))

    def pod_of(self, sandbox: SandboxId, timeout: float) -> PodKey | None:
        """See the port."""
        with self._wire_errors(f"asking for the pod of sandbox {sandbox}"):
            try:
                found = self._call("pod", {"sandbox": sandbox.value}, timeout)
            except protocol.RemoteError as exc:
                if Kind(exc.kind) is Kind.NOT_FOUND:
                    return None
                raise
            return PodKey(_text(found, "namespace"), _text(found, "name"), _text(found, "uid"), 0)

    def counters(self, timeout: float) -> Mapping[SandboxId, Sequence[InterfaceUsage]]:
        """See the port."""
        found: dict[SandboxId, Sequence[InterfaceUsage]] = {}
        until = time.monotonic() + timeout
        with self._wire_errors("reading the pods' network counters"):
            after = ""
            while True:
                answer = self._call("counters", {"after": after}, until - time.monotonic())
                for sandbox, interfaces in _object(answer, "sandboxes").items():
                    found[SandboxId(sandbox)] = _usages(interfaces)
                following = _text(answer, "last")
                if following <= after:
                    return found
                after = following

    def lost(self, timeout: float) -> Mapping[SandboxId, str]:
        """See the port."""
        with self._wire_errors("looking for lost pod networks"):
            found = _object(self._call("lost", {}, timeout), "lost")
            return {SandboxId(sandbox): _text(found, sandbox) for sandbox in found}

    def trouble(self) -> str:
        """See the port."""
        try:
            with self._wire_errors("asking for the network's state"):
                answer = self._call("status", {}, _STATUS_TIMEOUT)
                return (
                    "" if answer.get("ready") is True else _text(answer, "reason") or "tapmanager says it is not ready"
                )
        except ShimError as exc:
            return str(exc)

    def ask(self, verb: str, args: Mapping[str, object], timeout: float, doing: str) -> Mapping[str, object]:
        """One request; `doing` says what for, in errors."""
        with self._wire_errors(doing):
            return self._call(verb, args, timeout)

    def _call(self, verb: str, args: Mapping[str, object], timeout: float) -> Mapping[str, object]:
        if timeout <= 0:
            raise TimeoutError
        if timeout > _ALIVE_TIMEOUT:
            self._require_alive()
        answer, fds = protocol.call(self._path, verb, args, timeout)
        protocol.close_all(fds)  # none of these verbs sends any
        return answer

    def _require_alive(self) -> None:
        """Before a request that may take long: nobody should wait that long for a process that hangs."""
        try:
            _, fds = protocol.call(self._path, "list", {}, _ALIVE_TIMEOUT)
        except TimeoutError as exc:
            raise Unavailable(
                f"tapmanager at {self._path} does not answer; restart it (systemctl restart tapmanager), pods keep their network"
            ) from exc
        except protocol.RemoteError:  # an answer
            return
        protocol.close_all(fds)

    @contextlib.contextmanager
    def _wire_errors(self, doing: str) -> Iterator[None]:
        """The one place where the wire's errors become the product's."""
        try:
            yield
        except protocol.RemoteError as exc:
            raise _ERRORS[Kind(exc.kind)](str(exc)) from exc
        except protocol.FrameError as exc:
            raise InternalError(f"{doing}: tapmanager's answer cannot be used: {exc}") from exc
        except TimeoutError as exc:
            raise DeadlineExceeded(f"{doing}: tapmanager did not finish in time; it continues; try again") from exc
        except OSError as exc:
            why = exc.strerror or str(exc)
            remedy = "check whether it is running: systemctl status tapmanager"
            raise Unavailable(f"{doing}: tapmanager at {self._path} cannot be reached: {why}; {remedy}") from exc


def _network(answer: Mapping[str, object]) -> PodNetwork:
    dns = _object(answer, "dns")
    return PodNetwork(
        netns=_text(answer, "netns"),
        interfaces=tuple(_interface(item) for item in _objects(answer, "interfaces")),
        ips=_texts(answer, "ips"),
        dns=Dns(_texts(dns, "servers"), _texts(dns, "searches"), _texts(dns, "options")),
        fetch_key=_text(answer, "fetch_key"),
    )


def _interface(item: Mapping[str, object]) -> Interface:
    mtu = item.get("mtu")
    if not isinstance(mtu, int):
        raise protocol.FrameError("mtu: must be a number")
    routes = tuple(
        Route(_text(route, "destination"), None if route.get("gateway") is None else _text(route, "gateway"))
        for route in _objects(item, "routes")
    )
    function = _text(item, "function") if "function" in item else ""
    addresses, taken = _texts(item, "addresses"), item.get("taken") is not False
    return Interface(_text(item, "name"), _text(item, "mac"), mtu, addresses, routes, function, taken)


def _usages(interfaces: object) -> tuple[InterfaceUsage, ...]:
    if not isinstance(interfaces, dict):
        raise protocol.FrameError("sandboxes: must be objects")
    return tuple(_usage(name, numbers) for name, numbers in interfaces.items())


def _usage(name: str, numbers: object) -> InterfaceUsage:
    if not isinstance(numbers, list) or len(numbers) != 8 or not all(isinstance(number, int) for number in numbers):
        raise protocol.FrameError(f"{name}: must be eight numbers")
    return InterfaceUsage(name, *numbers)


def _object(obj: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = obj.get(name)
    if not isinstance(value, dict):
        raise protocol.FrameError(f"{name}: must be an object")
    return value


def _objects(obj: Mapping[str, object], name: str) -> list[Mapping[str, object]]:
    value = obj.get(name)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise protocol.FrameError(f"{name}: must be a list of objects")
    return value


def _text(obj: Mapping[str, object], name: str) -> str:
    value = obj.get(name)
    if not isinstance(value, str):
        raise protocol.FrameError(f"{name}: must be a string")
    return value


def _texts(obj: Mapping[str, object], name: str) -> tuple[str, ...]:
    value = obj.get(name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise protocol.FrameError(f"{name}: must be a list of strings")
    return tuple(value)
