"""Resizing of the fake hypervisor's VMs."""

from __future__ import annotations

import dataclasses
import threading
import uuid
from typing import Any

from fakes.hypervisor import FakeHypervisor
from fakes.journal import WAIT_LIMIT

from virtshim.model.cgroup import CgroupLimits
from virtshim.model.errors import Aborted, NotFound, WrongState
from virtshim.model.vm import VmSpec


class FakeResizing:
    """Implements `virtshim.vm.ports.VmResizing`. `used` is what each guest says that it uses, None: it says nothing. Guests
    whose UUID is in `stubborn` give no memory back."""

    def __init__(self, hypervisor: FakeHypervisor) -> None:
        self._hypervisor = hypervisor
        self.used: int | None = 0
        self.stubborn: set[uuid.UUID] = set()
        # They give memory back eventually; `waits` is set while a caller waits for one.
        self.slow: set[uuid.UUID] = set()
        self.waits = threading.Event()

    def add_vcpus(self, domain: uuid.UUID, count: int) -> None:
        spec = self._spec(domain)
        if count > max(spec.size.vcpus, spec.size.max_vcpus):
            raise WrongState(f"VM {domain} can have {spec.size.max_vcpus} vCPUs, not {count}")
        self._resize(domain, vcpus=max(spec.size.vcpus, count), max_vcpus=max(spec.size.vcpus, spec.size.max_vcpus))

    def set_memory(self, domain: uuid.UUID, memory_bytes: int, timeout: float, cancelled: threading.Event) -> None:
        spec = self._spec(domain)
        most = max(spec.size.memory_bytes, spec.size.max_memory_bytes)
        if memory_bytes > most:
            raise WrongState(f"VM {domain} can have {most} bytes, not {memory_bytes}")
        if domain in self.stubborn and memory_bytes < spec.size.memory_bytes:
            raise WrongState(f"the guest of VM {domain} did not give memory back")
        if domain in self.slow and memory_bytes < spec.size.memory_bytes:
            self.waits.set()
            assert cancelled.wait(WAIT_LIMIT), "nobody cut it short"
            raise Aborted(f"VM {domain} is being stopped")
        self._resize(domain, memory_bytes=memory_bytes, max_memory_bytes=most)

    def memory_in_use(self, domain: uuid.UUID, cancelled: threading.Event) -> int | None:
        self._spec(domain)
        return self.used if self._hypervisor.domains[domain].state.is_on else None

    def set_limits(self, domain: uuid.UUID, limits: CgroupLimits) -> None:
        self._spec(domain)
        self._change(domain, limits=limits)

    def _spec(self, domain: uuid.UUID) -> VmSpec:
        there = self._hypervisor.domains.get(domain)
        if there is None or there.spec is None:
            raise NotFound(f"no VM {domain}")
        return there.spec

    def _resize(self, domain: uuid.UUID, **changes: int) -> None:
        self._change(domain, size=dataclasses.replace(self._spec(domain).size, **changes))

    def _change(self, domain: uuid.UUID, **changes: Any) -> None:
        self._hypervisor.domains[domain].spec = dataclasses.replace(self._spec(domain), **changes)
