"""Everything that virtshim knows about a pod and its VM, for debugging: records, libvirt's state, network, devices,
disks, and the phases of its start."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from virtshim.metrics.start_ups import StartUp, StartUps
from virtshim.model.container import Container
from virtshim.model.errors import ShimError
from virtshim.model.sandbox import Sandbox
from virtshim.pods.node_status import NodeStatus
from virtshim.store.ports import Records
from virtshim.vm.ports import Hypervisor

# Shown instead of the network's fetch key and of the values of environment variables, which may be passwords.
_HIDDEN: Final = "(hidden)"
_SECRETS: Final = frozenset({"fetch_key"})


@dataclass(frozen=True, slots=True)
class Inspection:
    records: Records
    hypervisor: Hypervisor
    node: NodeStatus
    start_ups: StartUps

    def facts(self, sandbox: Sandbox, container: Container | None, now: float) -> Mapping[str, object]:
        """Existing keys keep their names across versions; new ones may be added. `container`: None if the pod has no
        VM. `now`: a time of the monotonic clock."""
        return {
            "pod": {
                "id": sandbox.id.value,
                "namespace": sandbox.key.namespace,
                "name": sandbox.key.name,
                "uid": sandbox.key.uid,
                "record": plain(sandbox),
                **self.node.sandbox_facts(sandbox),
            },
            "addresses": list(sandbox.network.ips) if sandbox.network else [],
            "container": self._container(container),
            "vm": self._vm(container),
            "phases": [*phases(self.start_ups.start_up(sandbox.id), now)],
        }

    def _container(self, container: Container | None) -> Mapping[str, object] | None:
        if container is None:
            return None
        return {
            "id": container.id.value,
            "name": container.name.name,
            "attempt": container.name.attempt,
            "record": plain(container.spec),
            "status": plain(container.status),
            **self.node.container_facts(container),
        }

    def _vm(self, container: Container | None) -> Mapping[str, object] | None:
        """What libvirt reports now."""
        if container is None:
            return None
        try:
            state = self.hypervisor.power(container.domain_uuid)
        except ShimError as exc:
            return {"domain": container.domain_name, "error": str(exc)}
        return {
            "domain": container.domain_name,
            "uuid": container.spec.domain_uuid,
            "power": state.power.value,
            "pauseReason": state.pause.value if state.power.value == "paused" else "",
            "offReason": "" if state.is_on else state.reason.value,
        }


def phases(start_up: StartUp, now: float) -> list[Mapping[str, object]]:
    return [
        {
            "name": phase.name,
            "containerId": phase.container.value if phase.container else "",
            "beganAt": phase.began_at,
            "seconds": round(phase.lasted(now), 6),
            "isOver": phase.seconds is not None,
            "error": phase.error,
        }
        for phase in start_up.phases
    ]


def plain(found: Any) -> Any:
    """A record as JSON values."""
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        return {field.name: _field(field.name, getattr(found, field.name)) for field in dataclasses.fields(found)}
    if isinstance(found, Mapping):
        return {str(key): plain(value) for key, value in found.items()}
    if isinstance(found, tuple | list | frozenset):
        return [plain(one) for one in found]
    if isinstance(found, enum.Enum):
        return found.value
    if isinstance(found, bytes):
        return found.decode(errors="replace")
    return found if found is None or isinstance(found, str | int | float | bool) else str(found)


def _field(name: str, value: Any) -> Any:
    if name in _SECRETS:
        return _HIDDEN if value else ""
    if name == "envs":
        return {key: _HIDDEN for key, _ in value}
    return plain(value)
