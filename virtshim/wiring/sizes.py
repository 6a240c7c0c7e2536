"""Settings -> how large this node's VMs may be."""

from __future__ import annotations

from virtshim.config import Settings
from virtshim.domain.sizing import Sizes


def sizes_of(settings: Settings) -> Sizes:
    vm = settings.vm
    return Sizes(vm.default_memory, vm.min_memory, vm.max_vcpus, vm.room_vcpus, vm.room_memory, vm.overhead)
