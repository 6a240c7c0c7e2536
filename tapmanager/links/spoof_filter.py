"""What a guest may send by its tap: its own MAC and addresses, and nothing that makes others take it for a router. Pure.

In a container who drops NET_RAW cannot forge anybody's packets. In a VM the guest's kernel is the guest's, so its tap does it.
The rules for a NIC, in nft's language; "mac" has the first two, "mac+ip" all:

    table bridge virtshim-filter {
      chain from-guests { type filter hook prerouting priority -300; policy accept;
        iifname "tap0" ether saddr != MAC drop
        iifname "tap0" ether type arp arp saddr ether != MAC drop
        iifname "tap0" ether type arp arp saddr ip != { ADDRESSES, 0.0.0.0 } drop             # 0.0.0.0 only asks
        iifname "tap0" ether type ip ip saddr 0.0.0.0 udp dport 67 accept                     # ends at the DHCP guard
        iifname "tap0" ether type ip ip saddr != { ADDRESSES } drop
        iifname "tap0" ether type ip6 ip6 saddr != { ADDRESSES, ::, fe80::/10 } drop
        iifname "tap0" ether type ip6 ip6 saddr :: l4proto != icmpv6 drop
        iifname "tap0" ether type ip6 icmpv6 type { router advertisement, redirect } drop
        iifname "tap0" ether type ip6 icmpv6 type neighbour advertisement target != { ADDRESSES, fe80::/10 } drop
        iifname "tap0" ether type ip6 ip6 saddr GATEWAY drop                                  # one that is link-local
        iifname "tap0" ether type ip6 icmpv6 type neighbour advertisement target GATEWAY drop
        iifname "tap0" ether type != { ip, ip6, arp } drop                                    # a VLAN's tag, too
      }
    }

A guest chooses its link-local address itself, so of these only the gateways' are kept from it. Servers of ours on the tap hear
what is dropped here: they listen before the bridge does."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator, Sequence

from tapmanager.links import nft
from tapmanager.pod import OFF, WITH_IP, Nic

_CHAIN = nft.Chain("virtshim-filter", "from-guests", nft.PREROUTING, -300)
_ETHER_TYPE = 12
_IPV4, _ARP, _IPV6 = b"\x08\x00", b"\x08\x06", b"\x86\xdd"
_NOBODY, _NOBODY_6 = bytes(4), bytes(16)
_LINK_LOCAL = bytes.fromhex("fe80").ljust(16, b"\0")
_LINK_LOCAL_MASK = bytes.fromhex("ffc0").ljust(16, b"\0")
_ROUTER_ADVERTISEMENT, _NEIGHBOUR_ADVERTISEMENT, _REDIRECT = b"\x86", b"\x88", b"\x89"
_DHCP_SERVER = struct.pack("!H", 67)


def rules(nics: Sequence[Nic]) -> Sequence[bytes]:
    """Messages for `nft.batch`; none if no NIC is filtered."""
    filtered = [nic for nic in nics if nic.filter != OFF]
    made = [nft.rule(_CHAIN, nft.came_by(nic.tap) + test) for nic in filtered for test in _tests(nic)]
    return [*nft.table_of(_CHAIN), *made] if made else []


def _tests(nic: Nic) -> Iterator[bytes]:
    mac = bytes.fromhex(nic.mac.replace(":", ""))
    yield nft.is_none_of(nft.LINK, 6, [mac]) + _DROP
    yield _is(_ARP) + nft.is_none_of(nft.NETWORK, 8, [mac]) + _DROP
    if nic.filter == WITH_IP:
        addresses = [ipaddress.ip_interface(address).ip for address in nic.addresses]
        yield from _tests_of_ipv4([one.packed for one in addresses if one.version == 4])
        yield from _tests_of_ipv6([one.packed for one in addresses if one.version == 6], _gateways(nic))
        yield nft.is_none_of(nft.LINK, _ETHER_TYPE, [_IPV4, _IPV6, _ARP]) + _DROP


def _tests_of_ipv4(own: Sequence[bytes]) -> Iterator[bytes]:
    yield _is(_ARP) + nft.is_none_of(nft.NETWORK, 14, [*own, _NOBODY]) + _DROP
    asks_for_address = nft.is_at(nft.NETWORK, 12, _NOBODY) + nft.has_protocol(socket.IPPROTO_UDP)
    yield _is(_IPV4) + asks_for_address + nft.is_at(nft.TRANSPORT, 2, _DHCP_SERVER) + nft.verdict(nft.ACCEPT)
    # Without an address of its own nothing is its.
    yield _is(_IPV4) + (nft.is_none_of(nft.NETWORK, 12, own) if own else b"") + _DROP


def _tests_of_ipv6(own: Sequence[bytes], gateways: Sequence[bytes]) -> Iterator[bytes]:
    yield _is(_IPV6) + nft.is_none_of(nft.NETWORK, 8, [*own, _NOBODY_6], _LINK_LOCAL_MASK, _LINK_LOCAL) + _DROP
    is_without_address = nft.is_at(nft.NETWORK, 8, _NOBODY_6)
    yield _is(_IPV6) + is_without_address + nft.lacks_protocol(socket.IPPROTO_ICMPV6) + _DROP
    for kind in (_ROUTER_ADVERTISEMENT, _REDIRECT):
        yield _is_icmp(kind) + _DROP
    told = _is_icmp(_NEIGHBOUR_ADVERTISEMENT)
    yield told + nft.is_none_of(nft.TRANSPORT, 8, own or [_NOBODY_6], _LINK_LOCAL_MASK, _LINK_LOCAL) + _DROP
    for gateway in gateways:
        yield _is(_IPV6) + nft.is_at(nft.NETWORK, 8, gateway) + _DROP
        yield told + nft.is_at(nft.TRANSPORT, 8, gateway) + _DROP


def _gateways(nic: Nic) -> Sequence[bytes]:
    """The link-local ones; others are none of its addresses anyway."""
    named = [*(route.gateway for route in nic.routes), *(neighbour.address for neighbour in nic.neighbours)]
    found = {ipaddress.ip_address(one) for one in named if one}
    return sorted(one.packed for one in found if one.version == 6 and one.is_link_local)


def _is(ether_type: bytes) -> bytes:
    return nft.is_at(nft.LINK, _ETHER_TYPE, ether_type)


def _is_icmp(kind: bytes) -> bytes:
    return _is(_IPV6) + nft.has_protocol(socket.IPPROTO_ICMPV6) + nft.is_at(nft.TRANSPORT, 0, kind)


_DROP = nft.verdict(nft.DROP)
