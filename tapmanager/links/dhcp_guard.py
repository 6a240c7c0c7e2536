"""The guard between the guest's DHCP, DHCPv6 and routers' advertisements, which are ours, and the network's. Pure.

The rules, in nft's language:

    table bridge virtshim-dhcp {
      chain forward { type filter hook forward priority 0; policy accept;
        iifname "tap1" accept                                  # both ends of a NIC that has no address of ours to tell
        ether type ip ip protocol udp udp dport 67 drop        # requests stay on the tap
        ether type ip ip protocol udp udp sport 67 drop        # only our offers reach the guest
        ether type ip6 l4proto udp udp dport 547 drop          # likewise; a DHCPv6 server may send from any port
        ether type ip6 l4proto udp udp dport 546 drop
        ether type ip6 icmpv6 type { router solicitation, router advertisement } drop
        ether type ip6 ip6 saddr STAND-INS drop                # addresses that are nobody's on the network: `ipv6.stand_in`
        ether type ip6 icmpv6 type neighbour advertisement target STAND-INS drop
      }
    }

Our own server talks on the tap directly, and is not forwarded.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

from tapmanager.ipv6 import stand_in
from tapmanager.links import nft

_CHAIN = nft.Chain("virtshim-dhcp", "forward", nft.FORWARD)
_IPV4, _IPV6 = b"\x08\x00", b"\x86\xdd"
_SERVER = struct.pack("!H", 67)
_IPV6_PORTS = [struct.pack("!H", port) for port in (546, 547)]
_SOURCE_PORT, _TARGET_PORT = 0, 2
_ROUTER_SOLICITATION, _ROUTER_ADVERTISEMENT, _NEIGHBOUR_ADVERTISEMENT = b"\x85", b"\x86", b"\x88"


def dhcp_guard() -> Sequence[bytes]:
    """Messages for `nft.batch`, which put this in the place of what an earlier version made, without `exceptions`."""
    tests = [_is_udp(nft.is_at(nft.TRANSPORT, port, _SERVER)) for port in (_TARGET_PORT, _SOURCE_PORT)]
    tests += [_is_ipv6(socket.IPPROTO_UDP, nft.is_at(nft.TRANSPORT, _TARGET_PORT, port)) for port in _IPV6_PORTS]
    tests += [
        _is_ipv6(socket.IPPROTO_ICMPV6, nft.is_at(nft.TRANSPORT, 0, kind))
        for kind in (_ROUTER_SOLICITATION, _ROUTER_ADVERTISEMENT)
    ]
    told = nft.is_at(nft.TRANSPORT, 0, _NEIGHBOUR_ADVERTISEMENT) + nft.is_at(nft.TRANSPORT, 8, stand_in.PREFIX)
    tests += [
        nft.is_at(nft.LINK, 12, _IPV6) + nft.is_at(nft.NETWORK, 8, stand_in.PREFIX),
        _is_ipv6(socket.IPPROTO_ICMPV6, told),
    ]
    return [
        *nft.table_of(_CHAIN),
        nft.emptied(_CHAIN),
        *(nft.rule(_CHAIN, test + nft.verdict(nft.DROP)) for test in tests),
    ]


def exceptions(unguarded: Sequence[str]) -> Sequence[bytes]:
    """As `dhcp_guard`, once that is there: ports of bridges between which DHCP passes."""
    return [nft.rule(_CHAIN, nft.came_by(name) + nft.verdict(nft.ACCEPT), first=True) for name in unguarded]


def _is_udp(then: bytes) -> bytes:
    return nft.is_at(nft.LINK, 12, _IPV4) + nft.is_at(nft.NETWORK, 9, bytes([socket.IPPROTO_UDP])) + then


def _is_ipv6(protocol: int, then: bytes) -> bytes:
    return nft.is_at(nft.LINK, 12, _IPV6) + nft.has_protocol(protocol) + then
