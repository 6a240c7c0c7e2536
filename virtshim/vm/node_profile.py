"""Derives from the settings how this node uses libvirt and QEMU."""

from __future__ import annotations

from virtshim.config.settings import Settings
from virtshim.system import machine
from virtshim.vm import embed
from virtshim.vm.domain_xml import NodeProfile
from virtshim.vm.elements.disk import DiskRates
from virtshim.vm.elements.processors import Cgroups, DomainType
from virtshim.vm.kvm_probe import probe_choose


def libvirt_uri(settings: Settings) -> str:
    """Prepares the directory of the embedded driver: own qemu.conf, unprivileged QEMU user."""
    if not settings.libvirt.uri.startswith(embed.URI_OF_ROOT):
        return settings.libvirt.uri
    user = embed.qemu_user(settings.libvirt.qemu_user, settings.libvirt.qemu_group)
    return embed.prepare(settings.libvirt.uri.removeprefix(embed.URI_OF_ROOT), user)


def group_of_vms(settings: Settings) -> int | None:
    """The only group of VMs that have their own users: it must be that of /dev/kvm and tapmanager's socket, which libvirt's group
    for QEMU is not on Debian. None if VMs do not have their own users."""
    if not settings.libvirt.vm_uids:
        return None
    return embed.qemu_user(settings.libvirt.qemu_user, settings.libvirt.qemu_group).gid


def node_profile(settings: Settings, node_id: str) -> NodeProfile:
    return NodeProfile(
        node=node_id,
        domain_type=_domain_type(settings),
        vmwrapper=settings.libvirt.vmwrapper,
        qemu=settings.libvirt.emulator,
        disk_rates=DiskRates(settings.vm.disk_iops, settings.vm.disk_bandwidth),
        confine=settings.libvirt.confine,
        parts=settings.libvirt.parts,
        output_pipes=embed.output_pipes(settings.libvirt.uri),
        cgroups=Cgroups.OFF if own_groups(settings) else Cgroups.V2 if machine.has_cgroup_v2() else Cgroups.V1,
    )


def own_groups(settings: Settings) -> bool:
    """Whether tapmanager makes the VMs' cgroups. Below systemd's slices libvirt makes them through systemd; the embedded driver
    cannot."""
    return settings.libvirt.uri.startswith(embed.URI_OF_ROOT) or not systemd_cgroups(settings)


def systemd_cgroups(settings: Settings) -> bool:
    """`auto` decides as sd_booted(3) does."""
    if settings.cri.cgroup_driver == "auto":
        return machine.systemd_runs()
    return settings.cri.cgroup_driver == "systemd"


def _domain_type(settings: Settings) -> DomainType:
    """The run directory keeps the verdict, so each boot probes once."""
    verdict = probe_choose(
        settings.libvirt.domain_type, settings.libvirt.emulator, f"{settings.paths.run_dir}/kvm-probe.json"
    )
    return verdict.domain_type
