"""Collects the facts about the node that setup needs. Reads files below a root that tests can choose. Changes nothing and does
not judge."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from virtshim.devices.host_files import HostFiles
from virtshim.devices.pci import PciBus
from virtshim.model.errors import InvalidRequest
from virtshim.neighbours import kubelet, runtimes
from virtshim.neighbours.kubelet import KubeletSetup
from virtshim.neighbours.runtimes import RuntimeSetup
from virtshim.preflight.network import first_configuration

# The cluster's networks, as far as this node's files name them. Images should not be fetched from hosts in them.

_MANIFESTS: Final = "/etc/kubernetes/manifests"
# Flags of the API server and the controller manager, on a node that runs them. The networks of services come first.
_FLAG: Final = re.compile(r"--(?:service-cluster-ip-range|cluster-cidr)=([0-9a-fA-F:./,]+)")
_SUBNET: Final = re.compile(r'"(?:subnet|podCIDR|Network|cidr)"\s*:\s*"([0-9a-fA-F:./]+)"')
_LONGEST: Final = 1 << 16
# Fields of /proc/net/route.
_DESTINATION, _GATEWAY, _MASK = 1, 2, 7
# Fields of /proc/net/ipv6_route, whose numbers are hexadecimal.
_DESTINATION6, _LENGTH6, _GATEWAY6 = 0, 1, 4


def networks(files: HostFiles, kubelet: KubeletSetup, cni_configuration: str) -> tuple[str, ...]:
    """The networks of services and pods, and the networks that this node is in, in CIDR notation. Networks within another one
    are omitted."""
    said = list(_said(files, kubelet.fields, cni_configuration))
    found = {network for text in said if (network := _network(text))}
    wide = [one for one in found if not any(one != other and _is_in(one, other) for other in found)]
    return tuple(map(str, sorted(wide, key=lambda one: (one.version, one))))


def service_beyond(found: Sequence[str], kubelet: KubeletSetup) -> str:
    """The address of the cluster's DNS service if it is in none of these networks; else ""."""
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
    """Parses an IPv4 address from hexadecimal digits in the machine's byte order."""
    try:
        return str(ipaddress.IPv4Address(bytes.fromhex(word)[::-1]))
    except ValueError:
        return ""


def _network6(address: str, length: str) -> str:
    """The network in CIDR notation; "" for a route to a single address, such as the node's own."""
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
    "virtshim-agent.service",
    "virtshim-guests.service",
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
# Error handler for decoding and encoding files of other programs without loss.
AS_BYTES: Final = "surrogateescape"
_MOST: Final = 1 << 20
_HUGE: Final = "/sys/kernel/mm/hugepages"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The facts; "" means missing. `systemd_runs`: systemd runs, or will run in a machine image. `libvirt`: the name of its
    daemon. `units`: the installed units out of `UNITS` and those of related programs. `huge_pages`: number by size in KiB.
    `texts`: the texts of existing files that setup may extend. `vms_only`: container runtimes were not looked for."""

    kubelet: KubeletSetup = KubeletSetup()
    runtimes: tuple[RuntimeSetup, ...] = ()
    systemd_runs: bool = True
    cni_conf_dir: str = _NETWORKS
    cni_configuration: str = ""
    emulator: str = ""
    vmwrapper: str = ""
    libvirt: str = ""
    has_kvm: bool = False
    iommu_groups: int = 0
    huge_pages: Mapping[int, int] = field(default_factory=dict)
    units: frozenset[str] = frozenset()
    texts: Mapping[str, str] = field(default_factory=dict)
    kubelet_version: tuple[int, int] | None = None
    """None if the version is unknown."""
    vms_only: bool = False
    networks: tuple[str, ...] = ()
    """The networks of the cluster's services, pods and nodes, as far as the node's files name them."""
    unknown_service: str = ""
    """The address of a cluster service that is in none of the networks; "" if there is none."""

    @property
    def runtime(self) -> RuntimeSetup | None:
        """The runtime for containers beside VMs. A running one is preferred."""
        able = [one for one in self.runtimes if one.serves_cri]
        return next((one for one in able if one.is_running), able[0] if able else None)


def look(
    files: HostFiles, texts: Sequence[str], cni_conf_dir: str = "", *, vms_only: bool = False, is_image: bool = False
) -> NodeFacts:
    """`texts`: paths of the files to read. `cni_conf_dir`: from the operator's settings, "" if not set there. `vms_only`: ignore
    container runtimes. `is_image`: the tree is a machine image, of which nothing runs yet. Raises InvalidRequest if a text
    cannot be extended."""
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
        libvirt=next((name for path, name in _LIBVIRT.items() if files.exists(path)), ""),
        has_kvm=files.exists("/dev/kvm"),
        iommu_groups=PciBus(files).groups(),
        huge_pages=_huge_pages(files),
        units=_units(files),
        texts={path: _text(files, path) for path in texts if files.exists(path)},
        vms_only=vms_only,
        networks=found,
        unknown_service=service_beyond(found, own),
    )


def _text(files: HostFiles, path: str) -> str:
    """The whole text, so that it can be written again. Bytes that are not UTF-8 survive decoding and encoding."""
    try:
        return files.content(path, _MOST).decode(errors=AS_BYTES).replace("\r\n", "\n").rstrip()
    except InvalidRequest as exc:
        raise InvalidRequest(f"{path}: {exc}; setup has to extend this file, so correct it first") from exc


def kubelet_version(said: str) -> tuple[int, int] | None:
    """Parses the output of `kubelet --version`."""
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
