"""The machine's network card with virtual functions (QEMU's igb, an Intel 82576), as an operator sets it up, and the other end
of its wire. Runs in the machine."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hardware
from podclient import wait_until

from tapmanager.sriov.host_links import NetlinkHostLinks
from tapmanager.sriov.physical_function import PhysicalFunctions, VfLocation

# The places on QEMU's command line (outer.py). The wire leads to a card of the same machine.
CARD, WIRE = "0000:03:00.0", "0000:00:06.0"
FUNCTIONS = ("0000:03:10.0", "0000:03:10.2", "0000:03:10.4")
ANSWER = "heard you"

_DEVICES = Path("/sys/bus/pci/devices")
_ETHERTYPE = 0x88B5  # IEEE 802: for local experiments; machine/nic.c sends such frames
_SOL_PACKET, _ADD_MEMBERSHIP, _AUXDATA, _PROMISCUOUS = 263, 1, 8, 1  # linux/if_packet.h
_TAG_VALID = 0x10


def there() -> bool:
    return (_DEVICES / CARD).exists()


def make_functions() -> None:
    """Creates the functions, each with its interface on the host."""
    subprocess.run(["modprobe", "igbvf"], check=True)
    wait_until(lambda: interface(CARD) != "", 60, "the card has its driver")
    (_DEVICES / CARD / "sriov_numvfs").write_text(str(len(FUNCTIONS)))
    wait_until(lambda: all(map(interface, FUNCTIONS)), 60, "the functions have their driver")
    ip("link", "set", interface(CARD), "up")
    ip("link", "set", interface(WIRE), "up")
    wait_until(lambda: link(interface(CARD))["operstate"] == "UP", 60, "the card has a carrier")


def remove_functions() -> None:
    (_DEVICES / CARD / "sriov_numvfs").write_text("0")


def interface(address: str) -> str:
    """The host's name of the network interface of that PCI function, "" if it has none."""
    return next((found.name for found in (_DEVICES / address).glob("**/net/*")), "")


def link(name: str) -> dict[str, Any]:
    (found,) = json.loads(ip("-json", "-details", "link", "show", "dev", name))
    return dict(found)


def attributes(number: int) -> dict[str, Any]:
    """The settings of the virtual function on the card's side."""
    return dict(link(interface(CARD))["vfinfo_list"][number])


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


@dataclass
class Wire:
    """The other end of the wire: it answers and records all frames."""

    frames: list[dict[str, Any]] = field(default_factory=list)

    def hear(self, sock: socket.socket) -> None:
        while True:
            frame, ancillary, _, sender = sock.recvmsg(2048, 256)
            kind = struct.unpack("!H", frame[12:14])[0]
            if not frame or sender[2] == socket.PACKET_OUTGOING or kind != _ETHERTYPE:
                continue
            tag = next((_tag(data) for level, _, data in ancillary if level == _SOL_PACKET), 0)
            words = frame[14:].rstrip(b"\0").decode(errors="replace")
            self.frames.append({"source": frame[6:12].hex(":"), "tag": tag, "words": words})
            tagged = struct.pack("!HH", 0x8100, tag) if tag else b""
            answer = frame[6:12] + sock.getsockname()[4] + tagged + struct.pack("!H", _ETHERTYPE) + ANSWER.encode()
            sock.send(answer.ljust(64, b"\0"))


def _tag(auxdata: bytes) -> int:
    """The VLAN that the kernel removed from the frame, 0 for none (struct tpacket_auxdata)."""
    status, _, _, _, _, control, _ = struct.unpack("=IIIHHHH", auxdata)
    return int(control & 0xFFF) if status & _TAG_VALID else 0


@contextmanager
def wire() -> Iterator[Wire]:
    other = Wire()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as sock:  # ETH_P_ALL
        sock.bind((interface(WIRE), 3))
        index = socket.if_nametoindex(interface(WIRE))
        sock.setsockopt(_SOL_PACKET, _ADD_MEMBERSHIP, struct.pack("iHH8s", index, _PROMISCUOUS, 0, b""))
        sock.setsockopt(_SOL_PACKET, _AUXDATA, 1)
        threading.Thread(target=other.hear, args=[sock], daemon=True).start()
        yield other


def state(number: int) -> dict[str, Any]:
    """Everything that a pod changes in a function and must restore."""
    address = FUNCTIONS[number]
    name = interface(address)
    shown = link(name) if name else {}
    return {
        "driver": hardware.driver(address),
        "link": {key: shown.get(key) for key in ("ifname", "address", "mtu")},
        "attributes": attributes(number),
        "settings": settings(number),
    }


def settings(number: int) -> dict[str, Any]:
    """The same settings as tapmanager reads them."""
    found = PhysicalFunctions(NetlinkHostLinks()).settings(VfLocation(interface(CARD), number))
    return {} if found is None else dict(found.to_json())
