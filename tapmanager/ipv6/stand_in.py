"""Link-local addresses on guests' taps that are nobody's on the network.

A router advertisement has to come from a link-local address, to which the guest then sends: it is the router. Where the
plugin's gateway has such an address, that is it. Most plugins' have a global one alone (`fd00::1`), and what link-local address
is behind it cannot be asked. So an address of ours stands for it: the bridge answers for it with a MAC that is ours too, and what
comes for that goes to the gateway's (`links.neighbours`, `links.gateway_rewrite`); the guard (`links.dhcp_guard`) keeps everybody
else from using the address. It is the same in all pods: no VM can take another's.
"""

from __future__ import annotations

from ipaddress import IPv6Address

# "virt", then which. /120: one byte is free.
_FIRST = IPv6Address("fe80::7669:7274:0:0")
PREFIX = _FIRST.packed[:15]
# The DHCPv6 server, and who advertises where there is no router; then the routers.
SERVER = 0
MOST = 255


def mac(number: int) -> bytes:
    """A router's. Locally administered."""
    return b"\x02virt" + bytes([number])


def number_of(address: IPv6Address) -> int:
    """The other way round."""
    return address.packed[15]


def address(number: int) -> IPv6Address:
    """`number`: SERVER, or a router's from 1 to MOST."""
    return _FIRST + number
