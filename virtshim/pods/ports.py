"""Ports to tapmanager: pods' networks and the cgroups of VMs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from virtshim.model.cgroup import VmCgroup
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.network import Bandwidth, Dns, PluginRuns, PodNetwork
from virtshim.model.sandbox import Adoption, PodKey, PortMapping
from virtshim.model.usage import InterfaceUsage

# Pods' networks.


@dataclass(frozen=True, slots=True)
class AttachRequest:
    sandbox: SandboxId
    pod: PodKey
    dns: Dns
    port_mappings: tuple[PortMapping, ...] = ()
    hostname: str = ""
    # Which forged sender addresses are filtered: off, mac or mac+ip; "" for the node's default.
    filter: str = ""
    bandwidth: Bandwidth = Bandwidth()
    # Whether its VMs may use several queues for each NIC.
    multi_queue: bool = False
    # Of the guest's NICs, by the name of the interface in the pod. The plugins decide about others.
    macs: Mapping[str, str] = field(default_factory=dict)
    # Wanted addresses as CIDRs, by the name of the interface. The pod gets others if they are taken.
    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # The namespace of another runtime's sandbox, to which the VMs are attached with passt. No CNI plugin runs for it.
    existing: Adoption | None = None


class PodNetworks(Protocol):
    """Pod networks, made by tapmanager. Errors: Unavailable (tapmanager does not answer), InternalError (a CNI plugin
    failed; the message quotes it), DeadlineExceeded."""

    def attach(self, request: AttachRequest, timeout: float) -> PodNetwork:
        """Makes network namespace, CNI ADD, bridge, tap and DHCP. After an error either nothing is left, or `release`
        must be called, which is always allowed. For an attached sandbox this returns the same network again."""

    def release(self, sandbox: SandboxId, timeout: float) -> None:
        """Runs CNI DEL and removes everything. No error if there was nothing."""

    def attached(self, timeout: float) -> frozenset[SandboxId]:
        """The sandboxes that have anything in tapmanager, half-made ones included."""

    def counters(self, timeout: float) -> Mapping[SandboxId, Sequence[InterfaceUsage]]:
        """Counters of the guest NICs of all attached sandboxes since the attach. Unreadable NICs are left out."""

    def plugin_runs(self, timeout: float) -> Sequence[PluginRuns]:
        """What CNI plugins have done since tapmanager started."""

    def lost(self, timeout: float) -> Mapping[SandboxId, str]:
        """The attached sandboxes whose network is broken because a part of it is gone, each with the missing part."""

    def trouble(self) -> str:
        """Why no pod network can be made now (tapmanager is down, no CNI configuration), "" if one can. Answers within
        1 s."""


class VmCgroups(Protocol):
    """The cgroups of VMs, made by tapmanager. Errors: Unavailable, InvalidRequest (the kernel refuses a limit, which
    the message names), WrongState (the limit is below current use), InternalError, DeadlineExceeded."""

    def make(self, group: VmCgroup, timeout: float) -> None:
        """Makes the group with its limits, or sets the limits of an existing one. The sandbox's next VM starts in it
        and gets its network. After an error the group may exist without limits: call `remove`."""

    def start_failed(self, sandbox: SandboxId, timeout: float) -> None:
        """The VM that `make` prepared does not start: no VM may take the sandbox's network. No error if it has none."""

    def limit(self, group: VmCgroup, timeout: float) -> None:
        """Changes the limits of an existing group, all or none. Raises NotFound if it does not exist."""

    def remove(self, container: ContainerId, cgroup_parent: str, timeout: float) -> None:
        """Removes the group. Raises WrongState if a VM is in it."""

    def oom_kills(self, container: ContainerId, cgroup_parent: str) -> int:
        """How often the kernel killed a process in the group for lack of memory; 0 if that is unknown."""
