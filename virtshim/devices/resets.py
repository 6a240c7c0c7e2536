"""Resets PCI functions between two VMs, and keeps a function that could not be reset from the next VM."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog

from virtshim.devices.ports import DeviceDrivers, DeviceErrorCounts
from virtshim.devices.values import DeviceCondition, GrantedDevices, PciAddress, PciFunction
from virtshim.model.container import Container
from virtshim.model.errors import NotFound, ShimError, WrongState
from virtshim.store.ports import Records, Table
from virtshim.system.clock import Clock
from virtshim.system.locks import new_lock

log = structlog.get_logger(__name__)

DONE: Final = "done"
FAILED: Final = "failed"
IMPOSSIBLE: Final = "impossible"


@dataclass(frozen=True, slots=True)
class DeviceResets:
    """`timeout`: seconds for each call to tapmanager. Thread-safe. Each device has a lock, which excludes a retry of a
    broken device while it is allocated; its claim keeps both from a device that a VM had. A device whose reset hangs
    delays no other."""

    records: Records
    table: Table[str, DeviceCondition]
    drivers: DeviceDrivers
    errors: DeviceErrorCounts
    clock: Clock
    timeout: float
    _locks: dict[str, threading.Lock] = field(default_factory=dict)
    _counting: threading.Lock = field(default_factory=new_lock)
    _counts: Counter[tuple[PciAddress, str]] = field(default_factory=Counter)

    def after(self, container: Container) -> list[str]:
        """Resets the functions that the container's VM had and that still belong to the container. Returns their
        faults, for people. The faults are on disk by then, or this raises ShimError."""
        wrong = []
        for device in container.granted.passthrough:
            if isinstance(device, PciFunction) and device.claim in container.claims:
                wrong += self._reset(device.address)
        return wrong

    def refuse_broken(self, granted: GrantedDevices) -> None:
        """Raises WrongState for a function whose last reset failed, if it fails again now."""
        wrong = []
        for device in granted.passthrough:
            if isinstance(device, PciFunction):
                with self._lock(device.claim):
                    broken = self._tried_again(device.claim)
                if broken is not None:
                    wrong.append(f"PCI function {device.address} {broken.fault}; {broken.remedy}")
        if wrong:
            raise WrongState("; ".join(wrong))

    def try_again(self) -> None:
        """Retries functions that could not be reset and that no container holds."""
        for condition in self.table.all():
            with self._lock(condition.claim):
                held = any(condition.claim in container.claims for container in self.records.containers.all())
                if not held:
                    self._tried_again(condition.claim)

    def forget(self) -> None:
        """Forgets all faults, because the node was restarted, and its devices with it."""
        for condition in self.table.all():
            self.table.delete(condition.claim)

    def counts(self, address: PciAddress) -> Mapping[str, int]:
        """How often the function was reset since virtshim started, by result."""
        with self._counting:
            return {result: self._counts[address, result] for result in (DONE, FAILED, IMPOSSIBLE)}

    def broken(self) -> Mapping[PciAddress, str]:
        """The functions that no VM gets, with the reason."""
        return {condition.address: condition.fault for condition in self.table.all() if condition.fault}

    def _tried_again(self, claim: str) -> DeviceCondition | None:
        """Resets it again; the caller holds its lock. Returns the remaining fault."""
        condition = self.table.get(claim)
        if condition is None or not condition.fault:
            return None
        if not self._reset(condition.address):
            log.info("device.healed", device=str(condition.address))
        after = self.table.get(claim)
        return after if after is not None and after.fault else None

    def _reset(self, address: PciAddress) -> list[str]:
        """Resets it. Returns its faults, for people."""
        before = self.table.get(PciFunction(address).claim) or DeviceCondition(address)
        try:
            result = DONE if self.drivers.reset(address, self.timeout) else IMPOSSIBLE
        except NotFound:  # it was unplugged; a device that appears in its place is another one
            self._note(before, DeviceCondition(address))
            return [f"device {address} is gone"]
        except ShimError as exc:
            self._count(address, FAILED)
            log.warning("device.reset_failed", device=str(address), error=str(exc))
            self._note(before, dataclasses.replace(before, reset_failed_at=self.clock.now_ns(), error=str(exc)))
            return [f"device {address} could not be reset: {exc}"]
        self._count(address, result)
        if result == IMPOSSIBLE:
            log.warning("device.no_reset", device=str(address))
        counted = self.errors.errors(address)
        self._note(before, DeviceCondition(address, fatal=counted.fatal if counted else 0))
        return []

    def _lock(self, claim: str) -> threading.Lock:
        return self._locks.setdefault(claim, threading.Lock())

    def _count(self, address: PciAddress, result: str) -> None:
        with self._counting:
            self._counts[address, result] += 1

    def _note(self, before: DeviceCondition, after: DeviceCondition) -> None:
        if before == after:
            return
        try:
            if after.is_notable:
                self.table.put(after)
            else:
                self.table.delete(after.claim)
        except ShimError as exc:  # the disk may be full
            if after.fault and not before.fault:
                raise  # only the record keeps the function from the next VM
            log.warning("device.condition_not_written", device=str(after.address), error=str(exc))
