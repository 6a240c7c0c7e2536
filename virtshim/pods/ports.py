"""The VMs' cgroups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from virtshim.model.cgroup import VmCgroup
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.network import Bandwidth, Dns, PluginRuns, PodNetwork
from virtshim.model.sandbox import PodKey, PortMapping
from virtshim.model.usage import InterfaceUsage

# Pods' networks.


@dataclass(frozen=True, slots=True)
class AttachRequest:
    sandbox: SandboxId
    pod: PodKey
    dns: Dns
    port_mappings: tuple[PortMapping, ...] = ()
    hostname: str = ""
    # What of forged senders the guest cannot send: off, mac or mac+ip; "" for the node's.
    filter: str = ""
    bandwidth: Bandwidth = Bandwidth()
    # Its VMs may want several queues a NIC.
    multi_queue: bool = False


class PodNetworks(Protocol):
    """Pod networks, by way of tapmanager. Errors: Unavailable (tapmanager is not there), InternalError (a CNI plugin
    failed; the message carries its words), DeadlineExceeded."""

    def attach(self, request: AttachRequest, timeout: float) -> PodNetwork:
        """Network namespace, CNI ADD, bridge and tap, DHCP. On error nothing is left, or `release` must still be called
        (it always may). A second attach of an attached sandbox returns the same network."""

    def release(self, sandbox: SandboxId, timeout: float) -> None:
        """CNI DEL and everything gone. No error if there was nothing."""

    def attached(self, timeout: float) -> frozenset[SandboxId]:
        """The sandboxes for which anything exists, half-made ones included."""

    def counters(self, timeout: float) -> Mapping[SandboxId, Sequence[InterfaceUsage]]:
        """The guest NICs of all attached sandboxes, counted since the attach; those that cannot be read are left out."""

    def plugin_runs(self, timeout: float) -> Sequence[PluginRuns]:
        """What CNI plugins have done since tapmanager was started."""

    def lost(self, timeout: float) -> Mapping[SandboxId, str]:
        """Of the attached sandboxes those whose network does not work any more because a part of it is gone, and which."""

    def trouble(self) -> str:
        """Why no pod network can be made now (tapmanager gone, no CNI config); "" if one can. Answers within 1 s."""


class VmCgroups(Protocol):
    """The cgroups of VMs, by way of tapmanager. Errors: Unavailable, InvalidRequest (a limit that the kernel refuses, by
    name), WrongState (less than is in use), InternalError, DeadlineExceeded."""

    def make(self, group: VmCgroup, timeout: float) -> None:
        """The group with its limits; the sandbox's next VM starts in it, and gets its network. One that is there gets these
        limits. After an error it may be there without them: `remove` it."""

    def start_failed(self, sandbox: SandboxId, timeout: float) -> None:
        """The VM that `make` was for does not start: no VM gets the sandbox's network by it. No error if there is no network."""

    def limit(self, group: VmCgroup, timeout: float) -> None:
        """Changes the limits of an existing cgroup; all or nothing. NotFound if it does not exist."""

    def remove(self, container: ContainerId, cgroup_parent: str, timeout: float) -> None:
        """WrongState if a VM is in it."""

    def oom_kills(self, container: ContainerId, cgroup_parent: str) -> int:
        """How often the kernel has killed in it for lack of memory; 0 if that cannot be known (any more)."""
