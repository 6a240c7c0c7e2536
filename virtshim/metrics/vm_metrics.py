"""Metrics of VMs and their host devices. Names and meanings follow KubeVirt's `kubevirt_vmi_*`.

Memory numbers that only the guest knows come from its balloon driver; they have no sample until it reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from virtshim.devices.health import DeviceStatus
from virtshim.devices.resets import DONE
from virtshim.devices.values import DeviceErrors, PciAddress
from virtshim.metrics.container_metrics import Read, blocks, cpu, network_families
from virtshim.metrics.family import SECOND, Family, Sample, counter, gauge, one
from virtshim.metrics.usage import ContainerUsage, SandboxUsage
from virtshim.model.usage import GuestMemory, VcpuUsage

_PREFIX = "virtshim_vmi"


def _vcpus(pick: Callable[[VcpuUsage], int | None]) -> Read:
    def read(use: ContainerUsage) -> Iterable[Sample]:
        for vcpu in use.domain.counters.vcpus if use.domain.counters else ():
            value = pick(vcpu)
            if value is not None:
                yield Sample(value / SECOND, (str(vcpu.number),))

    return read


def _memory(pick: Callable[[GuestMemory], int | None]) -> Read:
    def read(use: ContainerUsage) -> Iterable[Sample]:
        memory = use.domain.counters.memory if use.domain.counters else None
        return one(pick(memory) if memory else None)

    return read


def _used(memory: GuestMemory) -> int | None:
    if memory.available is None or memory.unused is None:
        return None
    return max(0, memory.available - memory.unused)


def _info(use: ContainerUsage) -> Iterable[Sample]:
    return (Sample(1, (use.container.spec.domain_uuid,)),)


def _resident(use: ContainerUsage) -> Iterable[Sample]:
    return one(use.domain.process.resident if use.domain.process else None)


def _counter(name: str, text: str, read: Read, *labels: str) -> Family[ContainerUsage]:
    return counter(f"{_PREFIX}_{name}", text, read, *labels)


def _gauge(name: str, text: str, read: Read, *labels: str) -> Family[ContainerUsage]:
    return gauge(f"{_PREFIX}_{name}", text, read, *labels)


_CPU = (
    _gauge("info", "1 for each running VM, with its UUID in libvirt.", _info, "domain"),
    _counter("cpu_usage_seconds_total", "CPU time of the VM and its QEMU.", cpu(lambda c: c.cpu)),
    _counter("cpu_user_usage_seconds_total", "CPU time in user mode, guest code included.", cpu(lambda c: c.cpu_user)),
    _counter("cpu_system_usage_seconds_total", "CPU time in the host's kernel.", cpu(lambda c: c.cpu_system)),
    _counter("vcpu_seconds_total", "CPU time of each vCPU.", _vcpus(lambda v: v.time), "vcpu"),
    _counter(
        "vcpu_wait_seconds_total", "Time that each vCPU waited for I/O or QEMU.", _vcpus(lambda v: v.wait), "vcpu"
    ),
    _counter(
        "vcpu_delay_seconds_total", "Time that each vCPU was ready but had no CPU.", _vcpus(lambda v: v.delay), "vcpu"
    ),
)

_MEMORY = (
    _gauge("memory_domain_bytes", "RAM of the VM.", _memory(lambda m: m.maximum)),
    _gauge("memory_actual_balloon_bytes", "RAM that the balloon leaves to the guest.", _memory(lambda m: m.current)),
    _gauge("memory_resident_bytes", "Resident memory of QEMU.", _resident),
    _gauge("memory_available_bytes", "RAM by the guest's own count.", _memory(lambda m: m.available)),
    _gauge("memory_unused_bytes", "RAM that the guest does not use.", _memory(lambda m: m.unused)),
    _gauge(
        "memory_usable_bytes",
        "RAM that the guest could give to programs without swapping.",
        _memory(lambda m: m.usable),
    ),
    _gauge("memory_used_bytes", "RAM that the guest uses, page cache included.", _memory(_used)),
    _gauge("memory_cached_bytes", "Page cache of the guest.", _memory(lambda m: m.disk_caches)),
    _gauge("memory_swap_in_traffic_bytes", "Bytes that the guest read from its swap.", _memory(lambda m: m.swap_in)),
    _gauge("memory_swap_out_traffic_bytes", "Bytes that the guest wrote to its swap.", _memory(lambda m: m.swap_out)),
    _counter("memory_pgmajfault_total", "Page faults of the guest that needed I/O.", _memory(lambda m: m.major_faults)),
    _counter("memory_pgminfault_total", "Page faults of the guest without I/O.", _memory(lambda m: m.minor_faults)),
)

_STORAGE = (
    _counter("storage_iops_read_total", "Reads by the guest.", blocks(lambda b: b.reads), "drive"),
    _counter("storage_iops_write_total", "Writes by the guest.", blocks(lambda b: b.writes), "drive"),
    _counter("storage_flush_requests_total", "Flushes by the guest.", blocks(lambda b: b.flushes), "drive"),
    _counter("storage_read_traffic_bytes_total", "Bytes read by the guest.", blocks(lambda b: b.read_bytes), "drive"),
    _counter(
        "storage_write_traffic_bytes_total", "Bytes written by the guest.", blocks(lambda b: b.write_bytes), "drive"
    ),
    _counter(
        "storage_read_times_seconds_total",
        "Total time of all reads.",
        blocks(lambda b: b.read_time / SECOND),
        "drive",
    ),
    _counter(
        "storage_write_times_seconds_total",
        "Total time of all writes.",
        blocks(lambda b: b.write_time / SECOND),
        "drive",
    ),
    _counter(
        "storage_flush_times_seconds_total",
        "Total time of all flushes.",
        blocks(lambda b: b.flush_time / SECOND),
        "drive",
    ),
)

CONTAINER = (*_CPU, *_MEMORY, *_STORAGE)
POD = network_families(_PREFIX)


# The conformance tests require a sample of every described metric from every running pod. /metrics has none of these.
_NO_DEVICE: Final = (Sample(0, ("",)),)
_NO_RESET: Final = (Sample(0, ("", DONE)),)
PLACEHOLDERS: Final = (*_NO_DEVICE, *_NO_RESET)


def _errors(pick: Callable[[DeviceErrors], int]) -> Callable[[ContainerUsage], Iterable[Sample]]:
    return lambda use: (
        [
            Sample(pick(device.errors), (str(address),))
            for address, device in use.devices.items()
            if device.errors is not None
        ]
        or _NO_DEVICE
    )


def _of_pod(use: SandboxUsage) -> dict[PciAddress, DeviceStatus]:
    """Each device once, even if several containers of the pod had it."""
    return {address: device for container in use.containers for address, device in container.devices.items()}


def _resets(use: SandboxUsage) -> Iterable[Sample]:
    found = [
        Sample(count, (str(address), result))
        for address, device in _of_pod(use).items()
        for result, count in device.resets.items()
    ]
    return found or _NO_RESET


def _broken(use: SandboxUsage) -> Iterable[Sample]:
    return [Sample(int(device.broken), (str(address),)) for address, device in _of_pod(use).items()] or _NO_DEVICE


DEVICES_OF_CONTAINER = (
    counter(
        "virtshim_device_fatal_errors_total",
        "Fatal PCI Express errors of a host device in the VM or behind the same root port, since the kernel found it.",
        _errors(lambda errors: errors.fatal),
        "device",
    ),
    counter(
        "virtshim_device_nonfatal_errors_total",
        "Uncorrectable, non-fatal PCI Express errors of a host device in the VM, since the kernel found it.",
        _errors(lambda errors: errors.nonfatal),
        "device",
    ),
)

DEVICES_OF_POD = (
    counter(
        "virtshim_device_resets_total",
        "Resets of a host device of the pod, since virtshim was started: done, failed, or impossible (no reset method).",
        _resets,
        "device",
        "result",
    ),
    gauge(
        "virtshim_device_broken",
        "1 for a host device of the pod whose last reset failed: no VM gets it.",
        _broken,
        "device",
    ),
)
