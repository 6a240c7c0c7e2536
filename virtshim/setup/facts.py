"""What set-up sees of the node. Reads only, below a root that tests choose; judges nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tapmanager.shares.plan import PROGRAMS
from virtshim.devices.host_files import HostFiles
from virtshim.devices.pci import PciBus
from virtshim.domain.errors import InvalidRequest
from virtshim.neighbours import kubelet, runtimes
from virtshim.neighbours.kubelet import KubeletSetup
from virtshim.neighbours.runtimes import RuntimeSetup
from virtshim.preflight.network import first_configuration
from virtshim.setup import networks

UNITS: Final = (
    "tapmanager.service",
    "virtshim-shares.service",
    "virtshim.service",
    "virtshim-proxy.service",
    "virtshim-device-plugin.service",
)
UNIT_DIRECTORIES: Final = ("/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
_EMULATORS: Final = ("/usr/bin/qemu-system-x86_64", "/usr/libexec/qemu-kvm", "/usr/bin/qemu-kvm")
_WRAPPERS: Final = (
    "/usr/libexec/virtshim/vmwrapper",
    "/usr/lib/virtshim/vmwrapper",
    "/usr/local/libexec/virtshim/vmwrapper",
)
_LIBVIRT: Final = {"/usr/sbin/libvirtd": "libvirtd", "/usr/sbin/virtqemud": "virtqemud"}
_SYSTEMD: Final = ("/usr/lib/systemd/systemd", "/lib/systemd/systemd")
_NETWORKS: Final = "/etc/cni/net.d"
# How texts of others are decoded and encoded.
AS_BYTES: Final = "surrogateescape"
_MOST: Final = 1 << 20
_HUGE: Final = "/sys/kernel/mm/hugepages"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """ "" for what is not there. `systemd_runs`: or will, of an image; `libvirt`: its daemon; `units`: those of `UNITS` and of
    its neighbours that are installed; `huge_pages`: number by size in KiB; `texts`: of files that may be added to, only those
    that are there; `vms_only`: no container runtime was looked for."""

    kubelet: KubeletSetup = KubeletSetup()
    runtimes: tuple[RuntimeSetup, ...] = ()
    systemd_runs: bool = True
    cni_conf_dir: str = _NETWORKS
    cni_configuration: str = ""
    emulator: str = ""
    vmwrapper: str = ""
    virtiofsd: str = ""
    libvirt: str = ""
    has_kvm: bool = False
    has_swap: bool = False
    iommu_groups: int = 0
    huge_pages: Mapping[int, int] = field(default_factory=dict)
    units: frozenset[str] = frozenset()
    texts: Mapping[str, str] = field(default_factory=dict)
    kubelet_version: tuple[int, int] | None = None
    """None if it is not known."""
    vms_only: bool = False
    networks: tuple[str, ...] = ()
    """Of the cluster's services, pods and nodes, as far as the node's files tell them."""
    unknown_service: str = ""
    """The address of a service of the cluster's that is in none of these."""

    @property
    def runtime(self) -> RuntimeSetup | None:
        """The one that runs containers beside the VMs: one that runs before one that does not."""
        able = [one for one in self.runtimes if one.serves_cri]
        return next((one for one in able if one.is_running), able[0] if able else None)


def look(
    files: HostFiles, texts: Sequence[str], cni_conf_dir: str = "", *, vms_only: bool = False, is_image: bool = False
) -> NodeFacts:
    """`texts`: paths of the files whose text is wanted; `cni_conf_dir`: where the operator's settings say, "" if they do not;
    `vms_only`: a container runtime is no business of ours; `is_image`: nothing of it runs yet. Raises InvalidRequest for a text
    that cannot be added to."""
    beside = () if vms_only else tuple(runtimes.read(files))
    own = kubelet.read(files, running=False)
    conf_dir = cni_conf_dir or next((one.cni_conf_dir.rstrip("/") for one in beside if one.serves_cri), _NETWORKS)
    network = first_configuration(files.names(conf_dir))
    found = networks.networks(files, own, f"{conf_dir}/{network}" if network else "")
    return NodeFacts(
        kubelet=own,
        runtimes=beside,
        systemd_runs=files.exists("/run/systemd/system") or (is_image and bool(_first(files, _SYSTEMD))),
        cni_conf_dir=conf_dir,
        cni_configuration=network,
        emulator=_first(files, _EMULATORS),
        vmwrapper=_first(files, _WRAPPERS),
        virtiofsd=_first(files, PROGRAMS),
        libvirt=next((name for path, name in _LIBVIRT.items() if files.exists(path)), ""),
        has_kvm=files.exists("/dev/kvm"),
        has_swap=len(files.text("/proc/swaps").splitlines()) > 1,
        iommu_groups=PciBus(files).groups(),
        huge_pages=_huge_pages(files),
        units=_units(files),
        texts={path: _text(files, path) for path in texts if files.exists(path)},
        vms_only=vms_only,
        networks=found,
        unknown_service=networks.services_beyond(found, own),
    )


def _text(files: HostFiles, path: str) -> str:
    """All of it, so that it can be written again; bytes that are not UTF-8 come back by the same rule."""
    try:
        return files.content(path, _MOST).decode(errors=AS_BYTES).replace("\r\n", "\n").rstrip()
    except InvalidRequest as exc:
        raise InvalidRequest(f"{path}: {exc}; set-up would add to it: correct it first") from exc


def kubelet_version(said: str) -> tuple[int, int] | None:
    """Of what `kubelet --version` prints."""
    found = re.search(r"v(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else None


def _first(files: HostFiles, paths: Sequence[str]) -> str:
    return next((path for path in paths if files.exists(path)), "")


def _huge_pages(files: HostFiles) -> dict[int, int]:
    found = {}
    for name in files.names(_HUGE):
        size = re.fullmatch(r"hugepages-(\d+)kB", name)
        count = files.text(f"{_HUGE}/{name}/nr_hugepages")
        if size and count.isdecimal() and int(count):
            found[int(size[1])] = int(count)
    return found


def _units(files: HostFiles) -> frozenset[str]:
    wanted = (*UNITS, "libvirt-guests.service", "kubelet.service", "containerd.service", "crio.service", "libvirtd-ro.socket",
              "virtqemud-ro.socket")  # fmt: skip
    return frozenset(
        name for name in wanted if any(files.exists(f"{directory}/{name}") for directory in UNIT_DIRECTORIES)
    )
