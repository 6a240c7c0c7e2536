"""What virtshim reports about the node: version, conditions, handlers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from virtshim.annotations.parse import parse_vm_options
from virtshim.devices.health import FunctionInspection
from virtshim.devices.values import PciAddress
from virtshim.model.container import Container
from virtshim.model.errors import InvalidRequest
from virtshim.model.layout import Layout, root_disk_of
from virtshim.model.sandbox import Sandbox
from virtshim.model.sizing import sized_by
from virtshim.pods.ports import PodNetworks
from virtshim.store.ports import StateRecords
from virtshim.vm.ports import Hypervisor

_BESIDE: Final = (
    "beside the pod's own cgroup, which has no room for QEMU, as the pod has no RuntimeClass overhead; "
    "vm.overhead is added to the guest's memory instead"
)


@dataclass(frozen=True, slots=True)
class Condition:
    """`trouble`: for people, "" if all is well. `reason`: one CamelCase word for programs."""

    name: str
    trouble: str
    reason: str


@dataclass(frozen=True, slots=True)
class NodeStatus:
    version: str
    node_id: str
    handlers: Sequence[str]
    systemd_cgroups: bool
    hypervisor: Hypervisor
    networks: PodNetworks
    records: StateRecords
    unfinished: Callable[[], Mapping[str, str]]
    layout: Layout
    functions: FunctionInspection
    broken_devices: Callable[[], Mapping[PciAddress, str]]
    templates: Callable[[], Mapping[str, object]]

    def conditions(self) -> Sequence[Condition]:
        """The two conditions that kubelet expects. Never waits for libvirt."""
        database, hypervisor = self.records.trouble(), self.hypervisor.trouble()
        network = self.networks.trouble()
        reason = "StateDatabaseUnusable" if database else "HypervisorUnavailable" if hypervisor else ""
        return (
            Condition("RuntimeReady", database or hypervisor, reason),
            Condition("NetworkReady", network, "NetworkPluginNotReady" if network else ""),
        )

    def facts(self) -> Mapping[str, object]:
        """`unreadable`: records that cannot be read. `unfinished`: repairs that have not succeeded yet.
        `brokenDevices`: PCI functions that no VM gets. Each maps names to reasons. `templates`: see `Templates.facts`."""
        return {
            "version": self.version,
            "nodeId": self.node_id,
            "stateDir": self.layout.state_dir,
            "unreadable": dict(self.records.unreadable()),
            "unfinished": dict(self.unfinished()),
            "brokenDevices": {str(address): why for address, why in self.broken_devices().items()},
            "templates": self.templates(),
        }

    def sandbox_facts(self, sandbox: Sandbox) -> Mapping[str, object]:
        return {
            "phase": sandbox.phase.value,
            "reason": sandbox.reason,
            "netns": sandbox.network.netns if sandbox.network else "",
            "interfaces": self.functions.of_sandbox(sandbox),
            "vmCgroupParent": sandbox.vm_cgroup_parent,
            "vmCgroupNote": _BESIDE if sandbox.config.vms_lie_beside else "",
        }

    def container_facts(self, container: Container) -> Mapping[str, object]:
        return {
            "sandboxID": container.sandbox_id.value,
            "domainName": container.domain_name,
            "domainUUID": container.spec.domain_uuid,
            "phase": container.phase.value,
            "cgroupParent": container.spec.cgroup_parent,
            "trouble": container.status.trouble,
            "rootDisk": "" if container.exit and not _stays(container) else root_disk_of(self.layout, container),
            "consoleLog": self.layout.console_log(container.id),
            "consoleSocket": self.layout.console_socket(container.id),
            "agentSocket": self.layout.agent_socket(container.id),
            "devices": self.functions.of_container(container),
            "sizedBy": self._sized_by(container),
            "fromTemplate": container.status.warm_started,
        }

    def _sized_by(self, container: Container) -> Mapping[str, str]:
        sandbox = self.records.sandboxes.get(container.sandbox_id)
        try:
            options = parse_vm_options(sandbox.vm_annotations if sandbox else {})
        except InvalidRequest:  # an earlier version accepted these annotations
            return {}
        vcpus, memory = sized_by(options, container.resources)
        return {"vcpus": vcpus, "memory": memory}


def _stays(container: Container) -> bool:
    """Whether its root disk stays after it has ended."""
    return container.spec.pod_disk != "" or container.granted.root_volume is not None
