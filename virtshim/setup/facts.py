"""What set-up sees of the node. Reads only, below a root that tests choose; judges nothing."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tapmanager.shares.plan import PROGRAMS
from virtshim.devices.host_files import HostFiles
from virtshim.devices.pci import PciBus
from virtshim.model.errors import InvalidRequest
from virtshim.neighbours import kubelet, runtimes
from virtshim.neighbours.kubelet import KubeletSetup
from virtshim.neighbours.runtimes import RuntimeSetup
from virtshim.preflight.network import first_configuration

# The cluster's networks, as far as this node's files tell them: from these hosts who names an image should have
# nothing.

_MANIFESTS: Final = "/etc/kubernetes/manifests"
# Flags of the API server and the controller manager, on a node that runs them; services' networks first.
_FLAG: Final = re.compile(r"--(?:service-cluster-ip-range|cluster-cidr)=([0-9a-fA-F:./,]+)")
_SUBNET: Final = re.compile(r'"(?:subnet|podCIDR|Network|cidr)"\s*:\s*"([0-9a-fA-F:./]+)"')
_LONGEST: Final = 1 << 16
# Fields of /proc/net/route.
_DESTINATION, _GATEWAY, _MASK = 1, 2, 7
# Of /proc/net/ipv6_route, whose numbers are hexadecimal.
_DESTINATION6, _LENGTH6, _GATEWAY6 = 0, 1, 4


def networks(files: HostFiles, kubelet: KubeletSetup, cni_configuration: str) -> tuple[str, ...]:
    """As CIDR texts: of services and pods, and those that this node is in. What lies in another one of them is left out."""
    said = list(_said(files, kubelet.fields, cni_configuration))
    found = {network for text in said if (network := _network(text))}
    wide = [one for one in found if not any(one != other and _is_in(one, other) for other in found)]
    return tuple(map(str, sorted(wide, key=lambda one: (one.version, one))))


def networks_services_beyond(found: Sequence[str], kubelet: KubeletSetup) -> str:
    """The address of the cluster's resolver, which is a service, if it is in none of these networks; else ""."""
    said = kubelet.given("cluster-dns", "clusterDNS")
    texts = said.value if said is not None else ()
    for text in texts if isinstance(texts, list) else str(texts).split(",") if texts else ():
        service = _network(str(text))
        if service is not None and service.prefixlen == service.max_prefixlen:
            return "" if any(_is_in(service, ipaddress.ip_network(one)) for one in found) else str(service[0])
    return ""


def _said(files: HostFiles, fields: Mapping[str, Any], cni_configuration: str) -> Iterator[str]:
    for name in files.names(_MANIFESTS):
        for flag in _FLAG.findall(files.text(f"{_MANIFESTS}/{name}")[:_LONGEST]):
            yield from flag.split(",")
    if "podCIDR" in fields:
        yield from str(fields["podCIDR"].value).split(",")
    if cni_configuration:
        yield from _SUBNET.findall(files.text(cni_configuration)[:_LONGEST])
    for line in files.text("/proc/net/route").splitlines()[1:]:
        words = line.split()
        if len(words) > _MASK and words[_GATEWAY] == "0" * 8:
            yield f"{_address(words[_DESTINATION])}/{_address(words[_MASK])}"
    for line in files.text("/proc/net/ipv6_route").splitlines():
        words = line.split()
        if len(words) > _GATEWAY6 and words[_GATEWAY6] == "0" * 32:
            yield _network6(words[_DESTINATION6], words[_LENGTH6])


def _address(word: str) -> str:
    """The kernel shows it as this machine has it in memory."""
    try:
        return str(ipaddress.IPv4Address(bytes.fromhex(word)[::-1]))
    except ValueError:
        return ""


def _network6(address: str, length: str) -> str:
    """ "" for the address of this node alone, which is in a network of its own, or is nobody else's."""
    try:
        bits = int(length, 16)
        return f"{ipaddress.IPv6Address(bytes.fromhex(address))}/{bits}" if bits < ipaddress.IPV6LENGTH else ""
    except ValueError:
        return ""


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        found = ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None
    is_own = found.is_loopback or found.is_link_local or found.is_multicast or not found.prefixlen
    return None if is_own else found


def _is_in(
    one: ipaddress.IPv4Network | ipaddress.IPv6Network, other: ipaddress.IPv4Network | ipaddress.IPv6Network
) -> bool:
    return one.version == other.version and one.network_address in other and one.broadcast_address in other


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
    found = networks(files, own, f"{conf_dir}/{network}" if network else "")
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
        unknown_service=networks_services_beyond(found, own),
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
