"""A video card, and QEMU's VNC server that shows what is on it. Pure.

The server listens on a Unix socket alone and asks for no password: who may open the socket is what protects it.
"""

from __future__ import annotations

from collections.abc import Sequence

from lxml import etree

from virtshim.annotations.options import MAX_EXEC_PORTS
from virtshim.guest.command import exec_port
from virtshim.model.hardware import Firmware, FirmwareFiles, Video
from virtshim.vm.elements import root_bus
from virtshim.vm.elements.text import absolute_path, printable, socket_path
from virtshim.volumes.shares import TAG

# UEFI and the TPM. Pure.
#
# libvirt chooses the firmware's files by what their packages say of them (QEMU's firmware descriptors), unless the
# variables are older than the VM, and makes a VM's file of variables from the one that belongs to them. It runs
# swtpm, one a VM, as its own user for that, which is no VM's.


def new_os_element(kind: Firmware, files: FirmwareFiles | None) -> etree._Element:
    """`<os>`, empty."""
    return etree.Element("os", firmware="efi") if kind.is_uefi and files is None else etree.Element("os")


def add_uefi(os_element: etree._Element, kind: Firmware, files: FirmwareFiles | None, nvram: str) -> None:
    """Which UEFI, and where its variables are; nothing of a BIOS."""
    if not kind.is_uefi:
        return
    secure = "yes" if kind is Firmware.SECURE else "no"
    if files is not None:
        loader = etree.SubElement(os_element, "loader", readonly="yes", secure=secure, type="pflash")
        loader.text = absolute_path(files.code, "firmware")
        variables = etree.SubElement(
            os_element, "nvram", template=absolute_path(files.variables, "firmware's variables")
        )
        variables.text = absolute_path(nvram, "file of UEFI's variables")
        return
    features = etree.SubElement(os_element, "firmware")
    etree.SubElement(features, "feature", name="enrolled-keys", enabled=secure)
    etree.SubElement(features, "feature", name="secure-boot", enabled=secure)
    etree.SubElement(os_element, "nvram").text = absolute_path(nvram, "file of UEFI's variables")


def add_kernel(os_element: etree._Element, kernel: str, initrd: str, arguments: str) -> None:
    """In place of a boot loader; nothing for ""."""
    if not kernel:
        return
    etree.SubElement(os_element, "kernel").text = absolute_path(kernel, "file of the kernel")
    if initrd:
        etree.SubElement(os_element, "initrd").text = absolute_path(initrd, "file of the kernel's RAM disk")
    if arguments:
        etree.SubElement(os_element, "cmdline").text = printable(arguments, "command line of the kernel")


def tpm_device(*, keeps: bool) -> etree._Element:
    """`keeps`: what it remembers stays when the definition goes."""
    element = etree.Element("tpm", model="tpm-crb")
    backend = etree.SubElement(element, "backend", type="emulator", version="2.0")
    if keeps:
        backend.set("persistent_state", "yes")
    return element


# What some guests want beside the rest: a watchdog, a pointer for screens, Hyper-V's enlightenments. Pure.

# As Microsoft recommends it for guests of other hypervisors; the times of a spin before it tells the host.
_ENLIGHTENMENTS = ("relaxed", "vapic", "vpindex", "runtime", "synic", "stimer", "frequencies")
_SPINS = 8191


def watchdog_device() -> etree._Element:
    element = etree.Element("watchdog", model="i6300esb", action="reset")
    element.append(root_bus.own(root_bus.Own.WATCHDOG))
    return element


def tablet_device() -> etree._Element:
    """Needs a USB controller."""
    return etree.Element("input", type="tablet", bus="usb")


def hyperv_features() -> etree._Element:
    element = etree.Element("hyperv", mode="custom")
    for name in _ENLIGHTENMENTS:
        etree.SubElement(element, name, state="on")
    etree.SubElement(element, "spinlocks", state="on", retries=str(_SPINS))
    return element


# The small devices every VM gets. Pure.

BALLOON_STATS_SECONDS = 10


def entropy_device() -> etree._Element:
    """virtio-rng fed from /dev/urandom: first boots do not wait for entropy."""
    element = etree.Element("rng", model="virtio")
    etree.SubElement(element, "backend", model="random").text = "/dev/urandom"
    element.append(root_bus.own(root_bus.Own.ENTROPY))
    return element


def memory_balloon(*, holds_back: bool, pinned: bool) -> etree._Element:
    """Gives memory readings, and hands pages the guest has freed back to the host. One that `holds_back` memory for later
    must not let go of it by itself: the VM's cgroup has no room for it. Of `pinned` memory nothing can be handed back: a
    device still writes to what it was told of."""
    deflates = "off" if holds_back or pinned else "on"
    reports = "off" if pinned else "on"
    element = etree.Element("memballoon", model="virtio", autodeflate=deflates, freePageReporting=reports)
    etree.SubElement(element, "stats", period=str(BALLOON_STATS_SECONDS))
    element.append(root_bus.own(root_bus.Own.BALLOON))
    return element


def panic_device() -> etree._Element:
    """pvpanic: a guest kernel tells of its panic instead of spinning or booting again."""
    return etree.Element("panic", model="isa")


def no_usb_controller() -> etree._Element:
    """q35 gets a USB controller unless told otherwise; nothing here is on USB."""
    return etree.Element("controller", type="usb", index="0", model="none")


def virtio_serial_controller() -> etree._Element:
    """With room for what is plugged in later: libvirt cannot plug in another of these. Port 0 stays free, as a console's by
    convention, and one is the guest agent's."""
    element = etree.Element("controller", type="virtio-serial", index="0", ports=str(MAX_EXEC_PORTS + 2))
    element.append(root_bus.own(root_bus.Own.SERIAL))
    return element


# The serial console, the guest-agent channel and the ports for commands in the guest. Pure.
#
# libvirt binds both sockets itself and hands QEMU the descriptors (the same for the log), so the directories need not
# be open to the QEMU user.
#
# libvirt treats a channel *it* knows as `org.qemu.guest_agent.0` as its own: it connects to the socket as soon as the
# guest opens the port, and QEMU serves one client. So libvirt knows ours by another name, and only the guest sees the
# agent's.

AGENT_ALIAS = "ua-agent"
AGENT_PORT = "org.qemu.guest_agent.0"
_HOST_NAME = "virtshim.agent"
# Of the controller's ports; 0 is a console's by convention.
_AGENT_NUMBER = 1


def serial_console(socket: str, log: str) -> etree._Element:
    """QEMU listens on `socket` and appends every byte to `log`, whether or not anyone is connected."""
    element = etree.Element("serial", type="unix")
    etree.SubElement(element, "source", mode="bind", path=socket_path(socket, "console socket"))
    etree.SubElement(element, "log", file=absolute_path(log, "console log"), append="on")
    etree.SubElement(element, "target", type="isa-serial", port="0")
    return element


def guest_agent_port(socket: str) -> etree._Element:
    element = etree.Element("channel", type="unix")
    etree.SubElement(element, "source", mode="bind", path=socket_path(socket, "guest agent socket"))
    etree.SubElement(element, "target", type="virtio", name=_HOST_NAME)
    element.append(_address(_AGENT_NUMBER))
    etree.SubElement(element, "alias", name=AGENT_ALIAS)
    return element


def exec_port_elements(sockets: Sequence[str]) -> Sequence[etree._Element]:
    """One virtio-serial port for each socket, named by its number."""
    return [exec_port_element(number, socket) for number, socket in enumerate(sockets)]


def exec_port_element(number: int, socket: str) -> etree._Element:
    element = etree.Element("channel", type="unix")
    etree.SubElement(element, "source", mode="bind", path=socket_path(socket, "exec socket"))
    etree.SubElement(element, "target", type="virtio", name=exec_port(number))
    element.append(_address(_AGENT_NUMBER + 1 + number))
    return element


def _address(port: int) -> etree._Element:
    """Fixed, for the scripts in the guest: without udev they find a port by its number, which is in its device's name."""
    return etree.Element("address", type="virtio-serial", controller="0", bus="0", port=str(port))


# The device by which a guest has its pod's volumes. Pure.


def virtiofs_device(socket: str) -> etree._Element:
    """All volumes on one: libvirt is told where who serves them listens, and starts nobody itself."""
    element = etree.Element("filesystem", type="mount")
    etree.SubElement(element, "driver", type="virtiofs")
    etree.SubElement(element, "source", socket=absolute_path(socket, "socket of the volumes"))
    etree.SubElement(element, "target", dir=TAG)
    element.append(root_bus.own(root_bus.Own.VOLUMES))
    return element


# Of VGA, which firmware and every guest's kernel can draw on without a driver of their own.
_VIDEO_KIB = 16 << 10


def vnc_devices(socket: str, kind: Video = Video.VGA) -> Sequence[etree._Element]:
    graphics = etree.Element("graphics", type="vnc")
    etree.SubElement(graphics, "listen", type="socket", socket=socket_path(socket, "VNC socket"))
    video = etree.Element("video")
    model = etree.SubElement(video, "model", type=kind.value, heads="1", primary="yes")
    if kind is Video.VGA:
        model.set("vram", str(_VIDEO_KIB))
    video.append(root_bus.own(root_bus.Own.VIDEO))
    return graphics, video


def vnc_socket_in(definition: str) -> str:
    """The path of the VNC socket in a VM's definition; "" if it has none."""
    listen = etree.fromstring(definition.encode()).find("devices/graphics[@type='vnc']/listen[@type='socket']")
    return "" if listen is None else listen.get("socket", "")
