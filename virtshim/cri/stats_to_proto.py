"""What containers and pods use -> CRI messages. Pure. A number that is not known stays unset: unset is not 0.

kubelet does not survive stats without attributes, their metadata, `linux`, or a network without its default interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cri.to_proto import container_metadata, sandbox_metadata
from virtshim.domain.usage import CpuUsage, DiskUsage, InterfaceUsage, MemoryUsage, Pressure
from virtshim.metrics.usage import ContainerUsage, SandboxUsage


def container_stats(use: ContainerUsage) -> pb.ContainerStats:
    container, cgroup = use.container, use.domain.cgroup
    pressure = cgroup.pressure if cgroup else {}
    return pb.ContainerStats(
        attributes=pb.ContainerAttributes(
            id=container.id.value,
            metadata=container_metadata(container),
            labels=container.config.labels,
            annotations=container.config.annotations,
        ),
        cpu=_cpu(use.cpu, pressure) if use.cpu else None,
        memory=_memory(use.memory, use.taken_at, pressure) if use.memory else None,
        writable_layer=_disk(use.disk) if use.disk else None,
        swap=_swap(use.memory, use.taken_at) if use.memory else None,
        io=pb.IoUsage(timestamp=use.taken_at, psi=_psi(pressure["io"])) if "io" in pressure else None,
    )


def sandbox_stats(use: SandboxUsage) -> pb.PodSandboxStats:
    sandbox = use.sandbox
    return pb.PodSandboxStats(
        attributes=pb.PodSandboxAttributes(
            id=sandbox.id.value,
            metadata=sandbox_metadata(sandbox),
            labels=sandbox.config.labels,
            annotations=sandbox.config.annotations,
        ),
        linux=pb.LinuxPodSandboxStats(
            cpu=_cpu(use.cpu, {}) if use.cpu else None,
            memory=_memory(use.memory, use.taken_at, {}) if use.memory else None,
            network=_network(use.interfaces, use.taken_at) if use.interfaces else None,
            process=pb.ProcessUsage(timestamp=use.taken_at, process_count=pb.UInt64Value(value=use.processes)),
            containers=[container_stats(container) for container in use.containers],
        ),
    )


def _number(value: int | None) -> pb.UInt64Value | None:
    return None if value is None else pb.UInt64Value(value=value)


def _cpu(use: CpuUsage, pressure: Mapping[str, Pressure]) -> pb.CpuUsage:
    return pb.CpuUsage(
        timestamp=use.taken_at,
        usage_core_nano_seconds=_number(use.total),
        usage_nano_cores=_number(use.nano_cores),
        psi=_psi(pressure["cpu"]) if "cpu" in pressure else None,
    )


def _memory(use: MemoryUsage, taken_at: int, pressure: Mapping[str, Pressure]) -> pb.MemoryUsage:
    return pb.MemoryUsage(
        timestamp=taken_at,
        working_set_bytes=_number(use.working_set),
        available_bytes=_number(use.available),
        usage_bytes=_number(use.usage),
        rss_bytes=_number(use.rss),
        page_faults=_number(use.page_faults),
        major_page_faults=_number(use.major_page_faults),
        psi=_psi(pressure["memory"]) if "memory" in pressure else None,
    )


def _swap(use: MemoryUsage, taken_at: int) -> pb.SwapUsage | None:
    """What is available is not known: no limit on swap is kept."""
    return None if use.swap is None else pb.SwapUsage(timestamp=taken_at, swap_usage_bytes=_number(use.swap))


def _disk(use: DiskUsage) -> pb.FilesystemUsage:
    return pb.FilesystemUsage(
        timestamp=use.taken_at,
        fs_id=pb.FilesystemIdentifier(mountpoint=use.directory),
        used_bytes=_number(use.used_bytes),
        inodes_used=_number(use.inodes_used),
    )


def _network(interfaces: Sequence[InterfaceUsage], taken_at: int) -> pb.NetworkUsage:
    first, *others = [
        pb.NetworkInterfaceUsage(
            name=interface.name,
            rx_bytes=_number(interface.rx_bytes),
            rx_errors=_number(interface.rx_errors),
            tx_bytes=_number(interface.tx_bytes),
            tx_errors=_number(interface.tx_errors),
        )
        for interface in interfaces
    ]
    return pb.NetworkUsage(timestamp=taken_at, default_interface=first, interfaces=others)


def _psi(pressure: Pressure) -> pb.PsiStats:
    return pb.PsiStats(
        Some=_psi_data(pressure.some_total, pressure.some_averages),
        Full=_psi_data(pressure.full_total, pressure.full_averages),
    )


def _psi_data(total: int, averages: tuple[float, float, float]) -> pb.PsiData:
    return pb.PsiData(Total=total, Avg10=averages[0], Avg60=averages[1], Avg300=averages[2])
