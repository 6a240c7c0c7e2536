"""Start-up's recovery and the reconciler: the same survey, the same repairs, one runner for both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from virtshim.ports.recovery import RecordCopies, VmInventory
from virtshim.primitives.live import Live
from virtshim.primitives.pod_locks import PodLocks
from virtshim.recovery.image_gc import ImageGc
from virtshim.recovery.rebuild import Rebuild
from virtshim.recovery.reconcile import Reconcile
from virtshim.recovery.recover import Recover, Survey
from virtshim.recovery.repairs import RepairRunner, Repairs

# One repair, and all that are stuck together in one round, in seconds. What is not done by then is left to the reconciler.
_LIMIT: Final = 15.0
_BUDGET: Final = 45.0


@dataclass(frozen=True, slots=True)
class Recovery:
    recover: Recover
    reconcile: Reconcile


def repair_runner() -> RepairRunner:
    return RepairRunner(_LIMIT, _BUDGET)


def recovery(
    repairs: Repairs,
    runner: RepairRunner,
    inventory: VmInventory,
    copies: RecordCopies,
    image_gc: ImageGc,
    locks: PodLocks,
    interval: Live[float],
) -> Recovery:
    """`interval`: seconds between two looks of the reconciler."""
    survey = Survey(repairs.records, inventory, repairs.networks, repairs.disks, repairs.timeout, repairs.shares)
    images = image_gc.images
    devices = repairs.remove_container.devices
    rebuild = Rebuild(repairs.records, inventory, copies, repairs.networks, repairs.timeout)
    return Recovery(
        Recover(survey, rebuild, repairs, runner, images, devices.resets, devices.releases),
        Reconcile(
            repairs.records, survey, repairs, runner, images, image_gc, locks, repairs.clock, interval, devices.resets
        ),
    )
