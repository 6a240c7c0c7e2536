"""Small devices: console, agent and exec ports, TPM, watchdog, balloon, virtiofs, screen; UEFI and the kernel. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement

from virtshim.annotations.options import MAX_EXEC_PORTS
from virtshim.guest.command import exec_port
from virtshim.model.hardware import Firmware, FirmwareFiles, Video
from virtshim.vm.elements import root_bus
from virtshim.vm.elements.text import absolute_path, printable, socket_path
from virtshim.vm.xml_text import parsed
from virtshim.volumes.shares import TAG

# UEFI and the TPM.
#
# libvirt chooses the firmware's files by QEMU's firmware descriptors, unless the variables are older than the VM. It
# makes the VM's file of variables from the firmware's template. It runs one swtpm per VM, as a user that no VM has.


def new_os_element(kind: Firmware, files: FirmwareFiles | None) -> Element:
    """An `<os>` without children."""
    return Element("os", firmware="efi") if kind.is_uefi and files is None else Element("os")


def add_uefi(os_element: Element, kind: Firmware, files: FirmwareFiles | None, nvram: str) -> None:
    """Adds the UEFI and the path of its variables; nothing for a BIOS."""
    if not kind.is_uefi:
        return
    secure = "yes" if kind is Firmware.SECURE else "no"
    if files is not None:
        loader = SubElement(os_element, "loader", readonly="yes", secure=secure, type="pflash")
        loader.text = absolute_path(files.code, "firmware")
        variables = SubElement(os_element, "nvram", template=absolute_path(files.variables, "firmware's variables"))
        variables.text = absolute_path(nvram, "file of UEFI's variables")
        return
    features = SubElement(os_element, "firmware")
    SubElement(features, "feature", name="enrolled-keys", enabled=secure)
    SubElement(features, "feature", name="secure-boot", enabled=secure)
    SubElement(os_element, "nvram").text = absolute_path(nvram, "file of UEFI's variables")


def add_kernel(os_element: Element, kernel: str, initrd: str, arguments: str) -> None:
    """Adds the kernel that boots instead of a boot loader; nothing for ""."""
    if not kernel:
        return
    SubElement(os_element, "kernel").text = absolute_path(kernel, "file of the kernel")
    if initrd:
        SubElement(os_element, "initrd").text = absolute_path(initrd, "file of the kernel's RAM disk")
    if arguments:
        SubElement(os_element, "cmdline").text = printable(arguments, "command line of the kernel")


def tpm_device(*, keeps: bool) -> Element:
    """`keeps`: its state stays when the VM is undefined."""
    element = Element("tpm", model="tpm-crb")
    backend = SubElement(element, "backend", type="emulator", version="2.0")
    if keeps:
        backend.set("persistent_state", "yes")
    return element


# Options of some guests: a watchdog, a tablet for screens, Hyper-V's enlightenments.

# The enlightenments and the spinlock retries are those that Microsoft recommends to other hypervisors.
_ENLIGHTENMENTS = ("relaxed", "vapic", "vpindex", "runtime", "synic", "stimer", "frequencies")
_SPINS = 8191


def watchdog_device() -> Element:
    element = Element("watchdog", model="i6300esb", action="reset")
    element.append(root_bus.own(root_bus.Own.WATCHDOG))
    return element


def tablet_device() -> Element:
    """Needs a USB controller."""
    return Element("input", type="tablet", bus="usb")


def hyperv_features() -> Element:
    element = Element("hyperv", mode="custom")
    for name in _ENLIGHTENMENTS:
        SubElement(element, name, state="on")
    SubElement(element, "spinlocks", state="on", retries=str(_SPINS))
    return element


# Devices of every VM.

BALLOON_STATS_SECONDS = 10


def entropy_device() -> Element:
    """virtio-rng, fed from /dev/urandom, so that first boots do not wait for entropy."""
    element = Element("rng", model="virtio")
    SubElement(element, "backend", model="random").text = "/dev/urandom"
    element.append(root_bus.own(root_bus.Own.ENTROPY))
    return element


def memory_balloon(*, holds_back: bool, pinned: bool) -> Element:
    """Reads the guest's memory use, and returns freed pages to the host. A balloon that `holds_back` memory for a later resize
    must not deflate by itself, because the VM's cgroup has no room. `pinned` memory cannot be returned, because a device may
    still write to it."""
    deflates = "off" if holds_back or pinned else "on"
    reports = "off" if pinned else "on"
    element = Element("memballoon", model="virtio", autodeflate=deflates, freePageReporting=reports)
    SubElement(element, "stats", period=str(BALLOON_STATS_SECONDS))
    element.append(root_bus.own(root_bus.Own.BALLOON))
    return element


def panic_device() -> Element:
    """pvpanic: a guest's kernel reports its panic."""
    return Element("panic", model="isa")


def no_usb_controller() -> Element:
    """Without this element libvirt adds a USB controller to q35."""
    return Element("controller", type="usb", index="0", model="none")


def virtio_serial_controller() -> Element:
    """Has room for ports that are plugged in later, because libvirt cannot plug in a second controller. Port 0 stays free: by
    convention it is a console's. Port 1 is the guest agent's."""
    element = Element("controller", type="virtio-serial", index="0", ports=str(MAX_EXEC_PORTS + 2))
    element.append(root_bus.own(root_bus.Own.SERIAL))
    return element


# The serial console, the guest agent's port and the ports for commands in the guest.
#
# libvirt binds the sockets and opens the log itself, and passes QEMU the descriptors. So QEMU's user needs no access to
# the directories.
#
# If a channel has the name `org.qemu.guest_agent.0`, libvirt connects to its socket as soon as the guest opens the port,
# and QEMU serves only one client. So the definition has another name, and only the guest sees the agent's.

AGENT_ALIAS = "ua-agent"
AGENT_PORT = "org.qemu.guest_agent.0"
_HOST_NAME = "virtshim.agent"
# The agent's port on the controller.
_AGENT_NUMBER = 1


def serial_console(socket: str, log: str) -> Element:
    """QEMU listens on `socket`, and appends every byte to `log` even if nobody is connected."""
    element = Element("serial", type="unix")
    SubElement(element, "source", mode="bind", path=socket_path(socket, "console socket"))
    SubElement(element, "log", file=absolute_path(log, "console log"), append="on")
    SubElement(element, "target", type="isa-serial", port="0")
    return element


def guest_agent_port(socket: str) -> Element:
    element = Element("channel", type="unix")
    SubElement(element, "source", mode="bind", path=socket_path(socket, "guest agent socket"))
    SubElement(element, "target", type="virtio", name=_HOST_NAME)
    element.append(_address(_AGENT_NUMBER))
    SubElement(element, "alias", name=AGENT_ALIAS)
    return element


def exec_port_elements(sockets: Sequence[str]) -> Sequence[Element]:
    return [exec_port_element(number, socket) for number, socket in enumerate(sockets)]


def exec_port_element(number: int, socket: str) -> Element:
    element = Element("channel", type="unix")
    SubElement(element, "source", mode="bind", path=socket_path(socket, "exec socket"))
    SubElement(element, "target", type="virtio", name=exec_port(number))
    element.append(_address(_AGENT_NUMBER + 1 + number))
    return element


def _address(port: int) -> Element:
    """A fixed number: without udev, scripts in the guest find a port by the number in its device's name."""
    return Element("address", type="virtio-serial", controller="0", bus="0", port=str(port))


# The pod's volumes.


def virtiofs_device(socket: str) -> Element:
    """One device for all volumes. libvirt gets the socket of a running virtiofsd, and starts none itself."""
    element = Element("filesystem", type="mount")
    SubElement(element, "driver", type="virtiofs")
    SubElement(element, "source", socket=absolute_path(socket, "socket of the volumes"))
    SubElement(element, "target", dir=TAG)
    element.append(root_bus.own(root_bus.Own.VOLUMES))
    return element


# The screen. The VNC server listens only on a Unix socket and asks for no password: access to the socket protects it.

# For VGA, which firmware and every guest's kernel can use without a special driver.
_VIDEO_KIB = 16 << 10


def vnc_devices(socket: str, kind: Video = Video.VGA) -> Sequence[Element]:
    graphics = Element("graphics", type="vnc")
    SubElement(graphics, "listen", type="socket", socket=socket_path(socket, "VNC socket"))
    video = Element("video")
    model = SubElement(video, "model", type=kind.value, heads="1", primary="yes")
    if kind is Video.VGA:
        model.set("vram", str(_VIDEO_KIB))
    video.append(root_bus.own(root_bus.Own.VIDEO))
    return graphics, video


def vnc_socket_in(definition: str) -> str:
    """The path of the VNC socket in a VM's definition; "" if it has none."""
    listen = parsed(definition).find("devices/graphics[@type='vnc']/listen[@type='socket']")
    return "" if listen is None else listen.get("socket", "")
