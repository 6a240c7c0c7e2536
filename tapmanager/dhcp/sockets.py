"""Raw packet sockets, made in a pod's namespace and bound to one of its links: answers leave by that link only, and what comes is
seen before the bridge sees it."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
from collections.abc import Sequence

RECEIVE_BUFFER = 64 * 1024

_ETH_P_ALL = 3
_SO_ATTACH_FILTER = 26
_SOL_PACKET = 263
_PACKET_QDISC_BYPASS, _PACKET_IGNORE_OUTGOING = 20, 23

# Classic BPF (linux/filter.h): code, jump if true, jump if false, operand.
Program = Sequence[tuple[int, int, int, int]]

_FROM_GUEST: Program = (
    (0x28, 0, 0, 12),  # ldh [12]
    (0x15, 0, 7, 0x0800),  # IPv4, or on to IPv6
    (0x30, 0, 0, 23),  # ldb [23]
    (0x15, 0, 14, 17),  # UDP
    (0x28, 0, 0, 20),  # ldh [20]
    (0x45, 12, 0, 0x3FFF),  # a fragment
    (0xB1, 0, 0, 14),  # ldxb 4*([14]&0xf)
    (0x48, 0, 0, 16),  # ldh [x+16]
    (0x15, 8, 9, 67),  # to the DHCP server's port
    (0x15, 0, 8, 0x86DD),  # IPv6
    (0x30, 0, 0, 20),  # ldb [20]
    (0x15, 0, 2, 17),  # UDP
    (0x28, 0, 0, 56),  # ldh [56]
    (0x15, 3, 4, 547),  # to the DHCPv6 server's port
    (0x15, 0, 3, 58),  # ICMPv6
    (0x30, 0, 0, 54),  # ldb [54]
    (0x15, 0, 1, 133),  # a router solicitation
    (0x06, 0, 0, 0xFFFF),  # take it
    (0x06, 0, 0, 0),  # drop it
)
_FROM_NETWORK: Program = (
    (0x28, 0, 0, 12),
    (0x15, 0, 5, 0x86DD),  # IPv6
    (0x30, 0, 0, 20),
    (0x15, 0, 3, 58),  # ICMPv6
    (0x30, 0, 0, 54),
    (0x15, 0, 1, 136),  # a neighbour advertisement
    (0x06, 0, 0, 0xFFFF),
    (0x06, 0, 0, 0),
)


def on_tap(tap: str) -> socket.socket:
    """Hears what a guest asks DHCP, DHCPv6 and routers. Must run in the pod's namespace. Raises OSError."""
    return _open(tap, _FROM_GUEST)


def on_link(link: str) -> socket.socket:
    """Hears neighbour advertisements of the network behind a CNI interface. As `on_tap`."""
    return _open(link, _FROM_NETWORK)


def _open(link: str, program: Program) -> socket.socket:
    # Protocol 0 receives nothing, so that nothing slips in before the filter is there. ETH_P_ALL, for a bridge takes the
    # frames of its ports before sockets of one protocol see them.
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, 0)
    try:
        code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *instruction) for instruction in program))
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(program), ctypes.addressof(code)))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        # When QEMU opens the tap, the kernel puts the tap's queue in place a moment later and drops what is sent until then:
        # the answer to a guest that asks at once. So the queue is bypassed.
        sock.setsockopt(_SOL_PACKET, _PACKET_QDISC_BYPASS, 1)
        with contextlib.suppress(
            OSError
        ):  # since Linux 4.20; else each frame that is sent would be copied to be looked at
            sock.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        sock.bind((link, _ETH_P_ALL))
    except BaseException:
        sock.close()
        raise
    return sock
