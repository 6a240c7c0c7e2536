"""A guest without a virtual machine: speaks Ethernet on a tap descriptor, as QEMU would for a real one.

Answers ARP and ping for its address, and runs a DHCP client. Everything it received is kept in `frames`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import struct
import threading
import time
from ipaddress import IPv4Address, IPv6Address
from typing import Self

from tapmanager.dhcp import packet
from tapmanager.dhcp.packet import BROADCAST_IP, BROADCAST_MAC, Datagram, Message, build_frame, parse_frame

_VNET_HDR = bytes(10)
_NEEDS_CSUM = 1


class ToyGuest:
    """Owns `fd`. `mac` is the NIC's MAC. Use as a context manager."""

    def __init__(self, fd: int, mac: str) -> None:
        self.fd = fd
        self.mac = bytes.fromhex(mac.replace(":", ""))
        self.address: IPv4Address | None = None
        self.frames: list[bytes] = []
        self._changed = threading.Condition()
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.power_off()

    def power_off(self) -> None:
        """Closes the tap as QEMU's end does. Twice is no error."""
        if self.fd < 0:
            return
        os.write(self._stop_write, b".")
        self._thread.join()
        for fd in (self.fd, self._stop_read, self._stop_write):
            os.close(fd)
        self.fd = -1

    def send(self, data: bytes) -> None:
        os.write(self.fd, _VNET_HDR + data)

    def ask(self, data: bytes, wanted, header: bytes = _VNET_HDR) -> bytes:
        """Sends the frame each second, as guests do because a link that just came up loses frames, until `wanted(frame)`
        holds."""
        for _ in range(5):
            os.write(self.fd, header + data)
            with contextlib.suppress(AssertionError):
                return self.wait_for(wanted, 1.0)
        os.write(self.fd, header + data)
        return self.wait_for(wanted, 1.0)

    def wait_for(self, wanted, seconds: float = 5.0) -> bytes:
        """The first frame, received or yet to come, for which `wanted(frame)` holds."""
        until = time.monotonic() + seconds
        with self._changed:
            while True:
                for data in self.frames:
                    if wanted(data):
                        return data
                left = until - time.monotonic()
                if left <= 0:
                    raise AssertionError(f"no such frame within {seconds} s; {len(self.frames)} others came")
                self._changed.wait(left)

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self.fd, self._stop_read], [], [])
            if self._stop_read in ready:
                return
            try:
                raw = os.read(self.fd, 70000)
            except OSError as exc:
                assert exc.errno == errno.EBADFD  # the tap was taken away
                return
            data = raw[len(_VNET_HDR) :]
            with self._changed:
                self.frames.append(data)
                self._changed.notify_all()
            self._react(data)

    def _react(self, data: bytes) -> None:
        if self.address is None or data[:6] not in (self.mac, b"\xff" * 6):
            return
        kind = data[12:14]
        if kind == b"\x08\x06" and data[20:22] == b"\0\1" and data[38:42] == self.address.packed:
            body = data[14:20] + b"\0\2" + self.mac + self.address.packed + data[22:32]
            self.send(data[6:12] + self.mac + b"\x08\x06" + body)
        elif kind == b"\x08\x00" and data[23] == 1 and data[30:34] == self.address.packed and data[34] == 8:
            icmp = bytearray(data[34 : 14 + struct.unpack_from("!H", data, 16)[0]])
            icmp[0] = 0
            icmp[2:4] = b"\0\0"
            icmp[2:4] = struct.pack("!H", checksum(bytes(icmp)))
            self.send(data[6:12] + self.mac + data[12:26] + data[30:34] + data[26:30] + bytes(icmp))

    # -- what a guest does on its own ----------------------------------------------------------------------------------

    def dhcp(
        self, kind: int, source: IPv4Address = packet.ANY, offload: bool = False, **more
    ) -> tuple[Datagram, Message]:
        """Sends one DHCP message, and waits for the answer to it. `offload`: leave UDP's checksum to the host."""
        xid = int.from_bytes(os.urandom(4), "big")
        options = {packet.OPT_TYPE: bytes([kind]), **more.pop("options", {})}
        message = Message(packet.BOOTREQUEST, xid, self.mac, options=options, **more)
        data = build_frame(Datagram(self.mac, BROADCAST_MAC, source, BROADCAST_IP, 68, 67, packet.build(message)))
        header = struct.pack("=BBHHHH", _NEEDS_CSUM, 0, 0, 0, 34, 6) if offload else _VNET_HDR
        found = self.ask(data, lambda answer: is_answer(answer, xid), header)
        datagram = parse_frame(found)
        return datagram, packet.parse(datagram.payload)

    def boot(self) -> Message:
        """Boots by DISCOVER and REQUEST, then uses the address. Returns the ACK."""
        _, offer = self.dhcp(packet.DISCOVER)
        server = offer.options[packet.OPT_SERVER_ID]
        asked = {packet.OPT_SERVER_ID: server, packet.OPT_REQUESTED_IP: offer.yiaddr.packed}
        _, ack = self.dhcp(packet.REQUEST, options=asked)
        assert ack.kind == packet.ACK
        self.address = ack.yiaddr
        return ack

    def ping(self, mac: bytes, target: IPv4Address) -> None:
        """Sends one echo request and returns the reply. Raises AssertionError if none comes."""
        assert self.address is not None
        number = os.urandom(4)
        icmp = b"\x08\0\0\0" + number + b"hello"
        icmp = icmp[:2] + struct.pack("!H", checksum(icmp)) + icmp[4:]
        head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(icmp), 1, 0, 64, 1, 0) + self.address.packed + target.packed
        head = head[:10] + struct.pack("!H", checksum(head)) + head[12:]
        self.ask(
            mac + self.mac + b"\x08\0" + head + icmp,
            lambda data: data[12:14] == b"\x08\0" and data[34:35] == b"\0" and data[38:42] == number,
        )

    def resolve(self, target: IPv4Address) -> bytes:
        """The MAC that answers for `target`."""
        assert self.address is not None
        body = b"\0\1\x08\0\6\4\0\1" + self.mac + self.address.packed + bytes(6) + target.packed
        found = self.ask(
            b"\xff" * 6 + self.mac + b"\x08\x06" + body,
            lambda data: data[12:14] == b"\x08\x06" and data[20:22] == b"\0\2" and data[28:32] == target.packed,
        )
        return found[22:28]

    def resolve_6(self, target: IPv6Address, own: IPv6Address) -> bytes:
        """The MAC that answers a neighbour solicitation for `target`."""
        group = IPv6Address(b"\xff\2" + bytes(9) + b"\1\xff" + target.packed[13:])
        body = b"\x87\0\0\0" + bytes(4) + target.packed + b"\1\1" + self.mac
        pseudo = own.packed + group.packed + len(body).to_bytes(4, "big") + b"\0\0\0\x3a"
        body = body[:2] + checksum(pseudo + body).to_bytes(2, "big") + body[4:]
        header = b"\x60\0\0\0" + len(body).to_bytes(2, "big") + b"\x3a\xff" + own.packed + group.packed
        found = self.ask(
            b"\x33\x33" + group.packed[12:] + self.mac + b"\x86\xdd" + header + body,
            lambda data: data[12:14] == b"\x86\xdd" and data[54:55] == b"\x88" and data[62:78] == target.packed,
        )
        return found[80:86]


def is_answer(data: bytes, xid: int) -> bool:
    try:
        datagram = parse_frame(data)
        return datagram.target_port == 68 and packet.parse(datagram.payload).xid == xid
    except packet.BadPacket:
        return False


def checksum(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
