"""What an agent says about the VMs of its node. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from virtshim.cluster.reading import part, text
from virtshim.cluster.values import ARRIVED, MOVABLE, MOVED, PAUSED, UNDECIDED, PodSeen, Said
from virtshim.cri.operator_client import LastingVm

# The reasons of PAUSED.
REQUESTED = "Requested"
BY_OPERATOR = "Operator"


def conditions(pod: PodSeen, vm: LastingVm, facts: Mapping[str, Any]) -> Mapping[str, Said]:
    """Of a pod that uses the VM. `facts`: as `Operator.Inspect` gives them."""
    found = {MOVABLE: _movable(facts)}
    if pod.restore_from:
        found[ARRIVED] = _arrived(vm, facts)
    if vm.moved_to and not vm.comes_from:
        found[MOVED] = Said(True, "Moved", vm.moved_to)
    is_paused = part(part(facts, "container"), "status").get("paused") is True
    if is_paused or pod.paused is not None:
        # An agent that was killed after the pause has not said who asked for it.
        reason = REQUESTED if pod.asked_to_pause else BY_OPERATOR
        if pod.paused is not None and pod.paused.is_true:
            reason = pod.paused.reason
        found[PAUSED] = Said(is_paused, reason if is_paused else "Resumed")
    return found


def _arrived(vm: LastingVm, facts: Mapping[str, Any]) -> Said:
    if vm.undecided:
        return Said(False, UNDECIDED, f"all of it is here, and node {vm.comes_from} has not said yet that it may run")
    if vm.comes_from:
        return Said(False, "Moving", f"it comes from node {vm.comes_from}")
    if text(part(facts, "vm"), "power") in ("running", "paused"):
        return Said(True, "Arrived")
    return Said(False, "NotRunning", "its container does not run")


def _movable(facts: Mapping[str, Any]) -> Said:
    record, power = part(part(facts, "container"), "record"), text(part(facts, "vm"), "power")
    if power != "running":
        return Said(False, "NotRunning", f"it is {power or 'off'}; only a running virtual machine moves")
    if part(record, "granted").get("passthrough"):
        return Said(False, "HostDevices", "it has devices of the host, whose state stays in the device; remove them")
    if volumes := record.get("volumes"):
        first = text(volumes[0], "guest") if isinstance(volumes[0], dict) else ""
        return Said(False, "SharedVolumes", f"the shared volume {first}; use a disk image in it, or a block volume")
    if record.get("empty_disks"):
        return Said(False, "EmptyDisks", "empty disks (virtshim.io/disks), which go with the pod; use the root disk")
    return Said(True, "Movable")


def kept(vm: LastingVm) -> dict[str, float | int] | None:
    """For the VM's status; None if the node keeps nothing of it. A node that the VM has moved from keeps a record of that."""
    if vm.comes_from:
        return None
    if vm.saved is None or vm.saved.taken:
        return {}
    return {
        "savedAt": round(vm.saved.saved_at, 3),
        "savedBytes": vm.saved.bytes,
        "lapsesAt": round(vm.saved.lapses_at, 3),
    }
