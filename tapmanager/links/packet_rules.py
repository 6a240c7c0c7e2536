"""Finds packet rules that plugins made in a pod's namespace, e.g. redirections of a service mesh, or filters. A VM's packets pass
the namespace as frames, which such rules do not see. Also reads the counters of NICs. Runs inside the namespace. Raises OSError.

Numbers are from linux/netfilter/nf_tables.h and linux/netfilter_ipv4/ip_tables.h, which ip6_tables.h repeats.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence

from tapmanager.links import netlink
from tapmanager.pod import Nic

_NETLINK_NETFILTER = 12
_GETRULE = 10 << 8 | 7  # of NFNL_SUBSYS_NFTABLES
_TABLE, _CHAIN = 1, 2
# The families whose rules see packets. Rules of bridges and devices see frames.
_FAMILIES = {1: "inet", 2: "ip", 10: "ip6"}
_OF_THE_OLD_KIND = (
    ("ip_tables", socket.AF_INET, socket.IPPROTO_IP),
    ("ip6_tables", socket.AF_INET6, socket.IPPROTO_IPV6),
)
# The kernel may list tables whose rules cannot be asked for: without IPv6 (`ipv6.disable=1`) there is no socket, or no answer.
_NOT_IN_THIS_KERNEL = frozenset({errno.EAFNOSUPPORT, errno.ENOPROTOOPT})
_GET_INFO = 64  # IPT_SO_GET_INFO
# struct ipt_getinfo: name, valid_hooks, hook_entry, underflow, num_entries, size.
_INFO = struct.Struct("=32sI5I5III")
_VALID_HOOKS, _ENTRIES = 1, 12


def first() -> str:
    """The first rule found, as nft's name of its chain, "ip nat OUTPUT", or as the table of the old iptables, "ip_tables nat"; ""
    if there is none."""
    return _of_nftables() or of_the_old_kind()


def _of_nftables() -> str:
    told = netlink.dump(_GETRULE, struct.pack("!BBH", socket.AF_UNSPEC, 0, 0), _NETLINK_NETFILTER)
    for data in told:
        if data[0] in _FAMILIES:
            of = netlink.attributes(data, 4)
            words = (of.get(kind, b"").rstrip(b"\0").decode(errors="replace") for kind in (_TABLE, _CHAIN))
            return " ".join((_FAMILIES[data[0]], *words))
    return ""


def with_rules(tables: Sequence[str], family: int, level: int) -> str:
    """The first table with rules; "" if none has any."""
    with socket.socket(family, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_RAW) as sock:
        return next((table for table in tables if _has_rules(sock, level, table)), "")


def table_names(kind: str) -> Sequence[str]:
    try:
        with open(f"/proc/thread-self/net/{kind}_names", encoding="ascii") as file:
            return file.read().split()
    except FileNotFoundError:
        return ()


def of_the_old_kind(
    names: Callable[[str], Sequence[str]] = table_names, find: Callable[[Sequence[str], int, int], str] = with_rules
) -> str:
    """Checks for rules, because kernels before 5.15 have the tables in each namespace as soon as the node uses them."""
    for kind, family, level in _OF_THE_OLD_KIND:
        try:
            if (tables := names(kind)) and (found := find(tables, family, level)):
                return f"{kind} {found}"
        except OSError as exc:
            if exc.errno not in _NOT_IN_THIS_KERNEL:
                raise
    return ""


def _has_rules(sock: socket.socket, level: int, table: str) -> bool:
    """An empty table has a policy for each hook, and one entry that marks its end."""
    # Python's getsockopt takes no input, and the table's name is one.
    info = ctypes.create_string_buffer(table.encode(), _INFO.size)
    size = ctypes.c_uint32(_INFO.size)
    if ctypes.CDLL(None, use_errno=True).getsockopt(sock.fileno(), level, _GET_INFO, info, ctypes.byref(size)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    found = _INFO.unpack(info.raw)
    return bool(found[_ENTRIES] > found[_VALID_HOOKS].bit_count() + 1)


# Traffic counters of the guests' NICs, read from their taps, whose rx is what the guest sent. A tap lives as long as the
# attachment, so the counters do not depend on QEMU.

# Bytes, packets, errors and drops that the guest received, then the same four for what it sent.
Counters = tuple[int, int, int, int, int, int, int, int]


def read_counters(nics: Sequence[Nic]) -> Mapping[str, Counters]:
    """The counters by the NICs' interface names. Must run inside the pod's namespace (netns.run_in_each). Raises OSError."""
    # Not /proc/net, which shows the namespace of the process's first thread.
    with open("/proc/thread-self/net/dev", encoding="ascii", errors="replace") as file:
        taps = counters_parsed(file.read())
    return {nic.link: taps[nic.tap] for nic in nics if nic.tap in taps}


def counters_parsed(text: str) -> Mapping[str, Counters]:
    """proc(5): two lines of headings, then `name: 8 numbers received, 8 sent`, of which the first four of each count."""
    found = {}
    for line in text.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        values = [int(number) for number in numbers.split()]
        rx, tx = values[0:4], values[8:12]
        found[name.strip()] = (tx[0], tx[1], tx[2], tx[3], rx[0], rx[1], rx[2], rx[3])
    return found
