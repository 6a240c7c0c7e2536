"""Pod networks in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from virtshim.domain.ids import SandboxId
from virtshim.domain.network import Interface, PodNetwork, Route
from virtshim.domain.sandbox import PodKey
from virtshim.domain.usage import InterfaceUsage
from virtshim.ports.network import AttachRequest


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


class FakePodNetworks:
    """Implements `virtshim.ports.PodNetworks`. `networks` is what exists, None for a half-made one; `leases` are the
    addresses in use, which only a release frees."""

    def __init__(self) -> None:
        self.networks: dict[SandboxId, PodNetwork | None] = {}
        self.leases: dict[SandboxId, str] = {}
        self.requests: list[AttachRequest] = []
        self.broken: dict[SandboxId, str] = {}
        self.why_not = ""
        self.counted: dict[SandboxId, Sequence[InterfaceUsage]] = {}

    def attach(self, request: AttachRequest, timeout: float) -> PodNetwork:
        self.requests.append(request)
        there = self.networks.get(request.sandbox)
        if there is not None:
            return there
        self.half_attach(request, timeout)
        address = self.leases[request.sandbox]
        network = PodNetwork(
            netns=f"/run/netns/vs-{request.sandbox.short}",
            interfaces=(
                Interface("eth0", "52:54:00:12:34:56", 1500, (f"{address}/16",), (Route("0.0.0.0/0", "10.88.0.1"),)),
            ),
            ips=(address, "fd00::5"),
            dns=request.dns,
            fetch_key=f"key-of-{request.sandbox.short}",
        )
        self.networks[request.sandbox] = network
        return network

    def half_attach(self, request: AttachRequest, timeout: float) -> None:
        """The namespace and an address are there, the rest is not."""
        free = (f"10.88.{n // 250}.{n % 250 + 2}" for n in range(60_000))
        self.leases[request.sandbox] = next(a for a in free if a not in self.leases.values())
        self.networks[request.sandbox] = None

    def release(self, sandbox: SandboxId, timeout: float) -> None:
        self.networks.pop(sandbox, None)
        self.leases.pop(sandbox, None)

    def attached(self, timeout: float) -> frozenset[SandboxId]:
        return frozenset(self.networks)

    def pod_of(self, sandbox: SandboxId, timeout: float) -> PodKey | None:
        found = [request.pod for request in self.requests if request.sandbox == sandbox]
        return dataclasses.replace(found[-1], attempt=0) if found and self.networks.get(sandbox) else None

    def counters(self, timeout: float) -> Mapping[SandboxId, Sequence[InterfaceUsage]]:
        """What a test put into `counted`, else a little traffic on each NIC."""
        return {
            sandbox: self.counted.get(sandbox) or [usage(nic.name) for nic in network.interfaces]
            for sandbox, network in self.networks.items()
            if network is not None
        }

    def lost(self, timeout: float) -> Mapping[SandboxId, str]:
        return dict(self.broken)

    def trouble(self) -> str:
        return self.why_not

    def lose(self) -> None:
        """What a reboot does to namespaces."""
        self.networks.clear()
        self.leases.clear()
