"""Pod networks in memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from virtshim.model.errors import InternalError, InvalidRequest, Unavailable
from virtshim.model.ids import SandboxId
from virtshim.model.network import Interface, PluginRuns, PodNetwork, Route
from virtshim.model.sandbox import Adoption, PodKey
from virtshim.model.usage import InterfaceUsage
from virtshim.pods.ports import AttachRequest


def usage(name: str = "eth0") -> InterfaceUsage:
    return InterfaceUsage(
        name,
        rx_bytes=1000,
        rx_packets=10,
        rx_errors=1,
        rx_dropped=2,
        tx_bytes=2000,
        tx_packets=20,
        tx_errors=3,
        tx_dropped=4,
    )


# Addresses in the order in which a network gives them out, lowest first.
_FREE = [f"10.88.{n // 250}.{n % 250 + 2}" for n in range(60_000)]


class FakePodNetworks:
    """Implements `virtshim.pods.ports.PodNetworks` and `virtshim.store.ports.KnownNetworks`. `networks` is what exists,
    None for a
    half-made one; `leases` are the addresses in use, which only a release frees. `gone`: tapmanager is not there. `why_not`: no
    network can be made now. `plugin_error`: what a CNI plugin says that fails."""

    def __init__(self) -> None:
        self.networks: dict[SandboxId, PodNetwork | None] = {}
        self.leases: dict[SandboxId, str] = {}
        self.requests: list[AttachRequest] = []
        self.broken: dict[SandboxId, str] = {}
        # Paths that are no namespace of another runtime's pod, and why.
        self.unfit: dict[str, str] = {}
        self.why_not = ""
        self.gone = False
        self.plugin_error = ""
        # Whether the plugins choose the MACs, whatever is asked for.
        self.own_macs = False
        self.ran: list[PluginRuns] = []
        self.counted: dict[SandboxId, Sequence[InterfaceUsage]] = {}

    def plugin_runs(self, timeout: float) -> Sequence[PluginRuns]:
        self._reach()
        return self.ran

    def attach(self, request: AttachRequest, timeout: float) -> PodNetwork:
        self._reach()
        self.requests.append(request)
        there = self.networks.get(request.sandbox)
        if there is not None:
            return there
        if self.why_not:
            raise Unavailable(self.why_not)
        if request.existing is not None:
            return self._existing(request, request.existing)
        self._count("ADD", failed=bool(self.plugin_error))
        if self.plugin_error:
            raise InternalError(self.plugin_error)
        self.half_attach(request, timeout)
        address = self.leases[request.sandbox]
        number = _FREE.index(address)
        mac = (0x525400123456 + number).to_bytes(6).hex(":")
        network = PodNetwork(
            netns=f"/run/netns/vs-{request.sandbox.short}",
            interfaces=(
                Interface(
                    "eth0",
                    mac if self.own_macs else request.macs.get("eth0", mac),
                    1500,
                    (f"{address}/16",),
                    (Route("0.0.0.0/0", "10.88.0.1"),),
                ),
            ),
            ips=(address, f"fd00::{5 + number:x}"),
            dns=request.dns,
            fetch_key=f"key-of-{request.sandbox.short}",
        )
        self.networks[request.sandbox] = network
        return network

    def _existing(self, request: AttachRequest, to: Adoption) -> PodNetwork:
        if why := self.unfit.get(to.netns):
            raise InvalidRequest(why)
        nic = Interface(
            "eth0",
            request.macs.get("eth0", "52:54:00:aa:bb:cc"),
            65520,
            tuple(f"{address}/24" for address in to.addresses),
            (Route("0.0.0.0/0", "10.88.0.1"),),
        )
        network = PodNetwork(to.netns, (nic,), to.addresses, request.dns, f"key-of-{request.sandbox.short}", 7)
        self.networks[request.sandbox] = network
        return network

    def _count(self, command: str, *, failed: bool = False) -> None:
        self.ran = [*self.ran, PluginRuns(command, f"plugin-{len(self.ran)}", int(failed), 0.1, ((math.inf, 1),))]

    def half_attach(self, request: AttachRequest, timeout: float) -> None:
        """Leaves a half-made network: the namespace and an address exist, the rest does not."""
        taken = set(self.leases.values())
        self.leases[request.sandbox] = next(address for address in _FREE if address not in taken)
        self.networks[request.sandbox] = None

    def release(self, sandbox: SandboxId, timeout: float) -> None:
        self._reach()
        had = self.networks.pop(sandbox, None) is not None
        if self.leases.pop(sandbox, None) is not None and had:
            self._count("DEL")

    def attached(self, timeout: float) -> frozenset[SandboxId]:
        self._reach()
        return frozenset(self.networks)

    def pod_of(self, sandbox: SandboxId, timeout: float) -> PodKey | None:
        self._reach()
        found = [request.pod for request in self.requests if request.sandbox == sandbox]
        return dataclasses.replace(found[-1], attempt=0) if found and self.networks.get(sandbox) else None

    def counters(self, timeout: float) -> Mapping[SandboxId, Sequence[InterfaceUsage]]:
        """The values of `counted`, otherwise a little traffic on each NIC."""
        self._reach()
        return {
            sandbox: self.counted.get(sandbox) or [usage(nic.name) for nic in network.interfaces]
            for sandbox, network in self.networks.items()
            if network is not None
        }

    def lost(self, timeout: float) -> Mapping[SandboxId, str]:
        self._reach()
        return {sandbox: why for sandbox, why in self.broken.items() if sandbox in self.networks}

    def trouble(self) -> str:
        return "tapmanager cannot be reached" if self.gone else self.why_not

    def _reach(self) -> None:
        if self.gone:
            raise Unavailable("tapmanager cannot be reached")

    def lose(self) -> None:
        """Removes the namespaces as a reboot does."""
        self.networks.clear()
        self.leases.clear()
