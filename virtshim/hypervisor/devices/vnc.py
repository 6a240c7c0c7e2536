"""A video card, and QEMU's VNC server that shows what is on it. Pure.

The server listens on a Unix socket alone and asks for no password: who may open the socket is what protects it.
"""

from __future__ import annotations

from collections.abc import Sequence

from lxml import etree

from virtshim.domain.hardware.options import Video
from virtshim.hypervisor.devices import root_bus
from virtshim.hypervisor.xmltext import socket_path

# Of VGA, which firmware and every guest's kernel can draw on without a driver of their own.
_VIDEO_KIB = 16 << 10


def build(socket: str, kind: Video = Video.VGA) -> Sequence[etree._Element]:
    graphics = etree.Element("graphics", type="vnc")
    etree.SubElement(graphics, "listen", type="socket", socket=socket_path(socket, "VNC socket"))
    video = etree.Element("video")
    model = etree.SubElement(video, "model", type=kind.value, heads="1", primary="yes")
    if kind is Video.VGA:
        model.set("vram", str(_VIDEO_KIB))
    video.append(root_bus.own(root_bus.Own.VIDEO))
    return graphics, video


def socket_in(definition: str) -> str:
    """The path of the VNC socket in a VM's definition; "" if it has none."""
    listen = etree.fromstring(definition.encode()).find("devices/graphics[@type='vnc']/listen[@type='socket']")
    return "" if listen is None else listen.get("socket", "")
