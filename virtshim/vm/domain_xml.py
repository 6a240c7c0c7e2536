"""Builds libvirt's domain XML from a VmSpec. Pure: equal specs and nodes give equal bytes.

The machine is a q35 with SeaBIOS or UEFI; elements/root_bus.py says where its devices are on PCI. vmwrapper adds the
NICs (`bus=pcie.0,addr=0x10+N`), and libvirt does not know them.
"""

from __future__ import annotations

from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, indent

from virtshim.devices.values import UsbDevice, VdpaDevice
from virtshim.model.errors import InvalidRequest
from virtshim.model.hardware import Firmware, NicModel, Topology
from virtshim.model.image import DiskFormat
from virtshim.model.sizing import topology_of
from virtshim.model.vm import Disk, DiskBus, VmSpec
from virtshim.seed.sources import IGNITION_FIRMWARE_NAMES
from virtshim.vm import cpu_query, ownership
from virtshim.vm.elements import disk, hostdev, processors
from virtshim.vm.elements.processors import Cgroups, DomainType, numa_cells, with_memory_nodes, with_vcpu_pins
from virtshim.vm.elements.small_devices import (
    AGENT_ALIAS,
    AGENT_PORT,
    add_kernel,
    add_uefi,
    entropy_device,
    exec_port_elements,
    guest_agent_port,
    hyperv_features,
    memory_balloon,
    new_os_element,
    no_usb_controller,
    panic_device,
    serial_console,
    tablet_device,
    tpm_device,
    virtio_serial_controller,
    virtiofs_device,
    vnc_devices,
    watchdog_device,
)
from virtshim.vm.elements.text import absolute_path, domain_name, printable, vm_security_label
from virtshim.vm.file_owner import QemuIds
from virtshim.vm.xml_text import qemu_tag, text_of

# Variables of vmwrapper's environment whose values must not leave the node.
SECRETS = frozenset({"VIRTSHIM_FETCH_KEY"})

# SeaBIOS does not start with less.
_SMALLEST_MEMORY = 4 << 20

# QEMU's cache of translated code without KVM. Booting a small guest fills some 75 MiB; code that does not fit is
# translated again.
_LEAST_TCG_CACHE, _MOST_TCG_CACHE = 64 << 20, 1 << 30

# A thread for each vCPU (255 at most), and some 64 for the disks' I/O.
_MOST_THREADS = 1024


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """What all VMs of a node share. `node`: the id in the owner mark. `vmwrapper`: the emulator for libvirt. `qemu`:
    the binary that vmwrapper runs."""

    node: str
    domain_type: DomainType
    vmwrapper: str
    qemu: str
    cgroups: Cgroups
    disk_rates: disk.DiskRates = disk.DiskRates()
    # How vmwrapper confines QEMU (its VIRTSHIM_CONFINE), and what QEMU may additionally read and run.
    confine: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    # Where vmwrapper finds the pipe for QEMU's output; "" leaves the output to libvirt.
    output_pipes: str = ""

    def __post_init__(self) -> None:
        if not self.node:
            raise InvalidRequest("the node id is empty: VMs of this node could not be distinguished from others")
        printable(self.node, "node id")


def build(spec: VmSpec, profile: NodeProfile, runs_as: QemuIds | None = None, *, short_cpu_query: bool = False) -> str:
    """The definition as text. `runs_as`: None leaves it to libvirt. `short_cpu_query`: whether libvirt accepts it (see
    `cpu_query`). Raises InvalidRequest, naming the field, for a value that libvirt cannot represent."""
    domain = Element("domain", type=profile.domain_type.value)
    _text(domain, "name", domain_name(spec.name))
    _text(domain, "uuid", str(spec.uuid))
    if spec.generation_id:
        SubElement(domain, "genid")  # libvirt makes one up
    if spec.title:
        _text(domain, "title", printable(spec.title, "title"))
    owner = ownership.OwnerMark(profile.node, spec.container_id, spec.sandbox_id)
    domain.append(ownership.metadata_element(owner))
    _memory(domain, spec)
    _limits(domain, spec, profile.cgroups)
    _system(domain, spec, profile.domain_type)
    topology = spec.hardware.topology or topology_of(spec.cells) or Topology(1, _max_vcpus(spec), 1)
    model = processors.cpu_model(spec.cpu_model, spec.cpu_details, profile.domain_type, topology)
    if spec.cells:
        model.append(numa_cells(spec.cells, shared=_is_shared(spec)))
    domain.append(model)
    domain.append(processors.guest_clock(spec.hardware.clock, hyperv=_is_enlightened(spec, profile.domain_type)))
    _text(domain, "on_poweroff", "destroy")
    _text(domain, "on_reboot", "restart")
    _text(domain, "on_crash", "preserve")  # see power.py
    domain.append(_devices(spec, profile, runs_as))
    if runs_as is not None and runs_as.is_its_own:
        domain.append(vm_security_label(runs_as))
    if profile.domain_type is not DomainType.TEST:
        _for_qemu(domain, spec, profile, runs_as)
        if short_cpu_query and cpu_query.may_be_shortened(model):
            domain.append(cpu_query.shortened())
    indent(domain)
    return f"{text_of(domain)}\n"


def _text(parent: Element, tag: str, value: str) -> None:
    SubElement(parent, tag).text = value


def _memory(domain: Element, spec: VmSpec) -> None:
    """The most memory that it can ever have; the balloon holds back what it does not have yet."""
    wanted = spec.size.memory_bytes
    if wanted < _SMALLEST_MEMORY:
        raise InvalidRequest(
            f"{wanted} bytes of memory are too few for a VM: set a limit of at least 4Mi; a real guest needs about 128Mi"
        )
    SubElement(domain, "memory", unit="KiB").text = str(_max_memory(spec) >> 10)
    if _max_memory(spec) > wanted:
        SubElement(domain, "currentMemory", unit="KiB").text = str(wanted >> 10)
    backing = Element("memoryBacking")
    SubElement(backing, "nosharepages")  # shared equal pages would reveal another guest's memory
    if spec.size.page_bytes:
        pages = SubElement(backing, "hugepages")
        SubElement(pages, "page", size=str(spec.size.page_bytes >> 10), unit="KiB")
    if _is_shared(spec):
        SubElement(backing, "source", type="memfd")
        SubElement(backing, "access", mode="shared")
    domain.append(backing)


def _is_shared(spec: VmSpec) -> bool:
    """Whether memory must be shared: a vDPA device may be a program (VDUSE), and the daemon that serves volumes is one.
    The kernel lets a program only reach memory with a file behind it."""
    return spec.shares_socket != "" or any(isinstance(device, VdpaDevice) for device in spec.granted.passthrough)


def _max_memory(spec: VmSpec) -> int:
    return max(spec.size.memory_bytes, spec.size.max_memory_bytes)


def _max_vcpus(spec: VmSpec) -> int:
    return max(spec.size.vcpus, spec.size.max_vcpus)


def _limits(domain: Element, spec: VmSpec, cgroups: processors.Cgroups) -> None:
    """vCPUs, and the limits that libvirt sets on the VM's cgroup."""
    limits = spec.limits
    domain.append(processors.vcpus(spec.size.vcpus, _max_vcpus(spec), limits.cpuset_cpus, cgroups))
    for element in (
        processors.memory_tuning(limits, cgroups),
        with_vcpu_pins(processors.cpu_tuning(limits, cgroups), spec.cells),
        with_memory_nodes(processors.numa_tuning(limits, cgroups), spec.cells),
        processors.cgroup_partition(spec.cgroup_parent, cgroups),
    ):
        if element is not None:
            domain.append(element)


def _system(domain: Element, spec: VmSpec, domain_type: DomainType) -> None:
    os_element = new_os_element(spec.hardware.firmware, spec.firmware_files)
    SubElement(os_element, "type", arch="x86_64", machine=printable(spec.machine, "machine type") or "q35").text = "hvm"
    add_uefi(os_element, spec.hardware.firmware, spec.firmware_files, spec.nvram)
    add_kernel(os_element, spec.kernel_file, spec.initrd_file, spec.hardware.kernel_args)
    if spec.smbios_uuid:
        sysinfo = SubElement(domain, "sysinfo", type="smbios")
        entry = SubElement(SubElement(sysinfo, "system"), "entry", name="uuid")
        entry.text = str(spec.uuid)
        SubElement(os_element, "smbios", mode="sysinfo")
    if spec.ignition_file:
        shown = SubElement(domain, "sysinfo", type="fwcfg")
        for name in IGNITION_FIRMWARE_NAMES:
            SubElement(shown, "entry", name=name, file=absolute_path(spec.ignition_file, "Ignition's file"))
    domain.append(os_element)
    features = SubElement(domain, "features")
    SubElement(features, "acpi")
    SubElement(features, "apic")
    if spec.hardware.firmware is Firmware.SECURE:  # the guest's kernel cannot reach the variables
        SubElement(features, "smm", state="on")
    if _is_enlightened(spec, domain_type):
        features.append(hyperv_features())
    if domain_type is DomainType.QEMU:
        translated = SubElement(SubElement(features, "tcg"), "tb-cache", unit="MiB")
        translated.text = str(_tcg_cache(spec) >> 20)


def _is_enlightened(spec: VmSpec, domain_type: DomainType) -> bool:
    """Whether it gets Hyper-V's enlightenments, which QEMU's translator lacks."""
    return spec.hardware.hyperv and domain_type is DomainType.KVM


def files_beside_disks(spec: VmSpec) -> list[Disk]:
    """Further files of the container's directory that QEMU reads."""
    return [
        Disk(path, DiskFormat.RAW, "", readonly=True)
        for path in (spec.ignition_file, spec.sysprep_iso, spec.kernel_file, spec.initrd_file)
        if path
    ]


def _tcg_cache(spec: VmSpec) -> int:
    """Half of QEMU's own share of the VM's cgroup. QEMU's default of up to 1 GiB may be more than the whole share."""
    guest = 0 if spec.size.page_bytes else spec.size.memory_bytes  # huge pages are not charged as memory
    room = (spec.limits.memory or guest) - guest
    return min(max(room // 2, _LEAST_TCG_CACHE), _MOST_TCG_CACHE)


def _devices(spec: VmSpec, profile: NodeProfile, runs_as: QemuIds | None) -> Element:
    devices = Element("devices")
    granted = spec.granted
    has_usb = spec.hardware.tablet or any(isinstance(device, UsbDevice) for device in granted.passthrough)
    _text(devices, "emulator", absolute_path(profile.vmwrapper, "emulator"))
    gets_images = runs_as is not None and runs_as.gets_images
    numbers = spec.numbers
    devices.extend(
        disk.build(
            spec.disks,
            spec.disk_bus,
            profile.disk_rates,
            numbers.disks,
            spec.hardware,
            gets_images=gets_images,
            owner=runs_as,
        )
    )
    first = len(spec.disks) if spec.disk_bus is DiskBus.VIRTIO else 0
    blocks = numbers.blocks or range(first, first + len(granted.data_volumes))
    devices.extend(hostdev.disks(granted.data_volumes, blocks, runs_as))
    if spec.sysprep_iso:
        devices.append(disk.sata_cdrom(spec.sysprep_iso, "sysprep", spec.disk_bus, len(spec.disks)))
    if spec.shares_socket:
        devices.append(virtiofs_device(spec.shares_socket))
    devices.extend(hostdev.root_ports(granted.passthrough))
    on_virtio = numbers.disks if spec.disk_bus is DiskBus.VIRTIO else ()
    if on_virtio or numbers.blocks:
        devices.extend(hostdev.fillers([*on_virtio, *blocks], granted.passthrough))
    devices.append(virtio_serial_controller())
    devices.append(hostdev.usb_controller() if has_usb else no_usb_controller())
    devices.extend(hostdev.build(granted.passthrough))
    devices.append(serial_console(spec.console_socket, spec.console_log))
    devices.append(guest_agent_port(spec.agent_socket))
    devices.extend(exec_port_elements(spec.exec_sockets))
    if spec.vnc_socket:
        devices.extend(vnc_devices(spec.vnc_socket, spec.hardware.video))
    if spec.hardware.tablet:
        devices.append(tablet_device())
    if spec.hardware.watchdog:
        devices.append(watchdog_device())
    if spec.hardware.tpm:
        devices.append(tpm_device(keeps=spec.keeps_tpm))
    devices.append(memory_balloon(holds_back=_max_memory(spec) > spec.size.memory_bytes, pinned=granted.pins_memory))
    devices.append(entropy_device())
    devices.append(panic_device())
    return devices


def _for_qemu(domain: Element, spec: VmSpec, profile: NodeProfile, runs_as: QemuIds | None) -> None:
    """vmwrapper's environment, with the port name that only the guest may see (see elements/small_devices.py)."""
    environment = {
        "VIRTSHIM_EMULATOR": absolute_path(profile.qemu, "QEMU binary"),
        "VIRTSHIM_SANDBOX": spec.sandbox_id.value,
        "VIRTSHIM_CONFINE": ",".join(profile.confine),
    }
    if profile.parts:
        environment["VIRTSHIM_PARTS"] = ":".join(absolute_path(part, "libvirt.parts") for part in profile.parts)
    if runs_as is not None and runs_as.is_its_own:
        environment["VIRTSHIM_THREADS"] = str(_MOST_THREADS)
    if profile.output_pipes:
        environment["VIRTSHIM_OUTPUT"] = absolute_path(f"{profile.output_pipes}/{spec.name}", "output pipe")
    if spec.fetch_key:
        environment["VIRTSHIM_FETCH_KEY"] = printable(spec.fetch_key, "fetch key")
        environment["VIRTSHIM_TAPMANAGER"] = absolute_path(spec.tapmanager_socket, "tapmanager socket")
        if spec.hardware.nic_model is not NicModel.VIRTIO:
            environment["VIRTSHIM_NIC_MODEL"] = spec.hardware.nic_model.value
        if spec.numbers.nics:
            environment["VIRTSHIM_NICS"] = ",".join(map(str, spec.numbers.nics))
    commandline = SubElement(domain, qemu_tag("commandline"))
    for name, value in environment.items():
        SubElement(commandline, qemu_tag("env"), name=name, value=value)
    device = SubElement(SubElement(domain, qemu_tag("override")), qemu_tag("device"), alias=AGENT_ALIAS)
    frontend = SubElement(device, qemu_tag("frontend"))
    SubElement(frontend, qemu_tag("property"), name="name", type="string", value=AGENT_PORT)
