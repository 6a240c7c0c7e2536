"""The nftables rules in a pod's namespace: four tables of the bridge family. Pure.

1. The filter of a guest's frames: a guest may send only from its own MAC and addresses, and must not pose as a router. A
container without NET_RAW cannot forge packets. In a VM the guest controls its kernel, so the filter is at its tap. The rules
for a NIC, in nft's language; "mac" has the first two, "mac+ip" all:

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

A guest chooses its link-local address itself, so only the gateways' link-local addresses are forbidden. tapmanager's servers
on the tap also receive the dropped frames, because they listen before the bridge.

2. The DHCP guard. It separates tapmanager's DHCP, DHCPv6 and router advertisements to the guest from those of the network:

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

tapmanager's own server uses the tap directly, so its frames are not forwarded.

3. The gateway rewrite. It sends frames for a stand-in router to the gateway behind it (`ipv6.frame`). One table for each
router of each NIC:

    table bridge virtshim-tap0-1 {
      chain to-gateway { type filter hook prerouting priority -200; policy accept;
        iifname "tap0" ether daddr STAND-IN ether daddr set GATEWAY
      }
    }

4. The filter of reflections. A bridge in hairpin mode (Flannel's, Weave's) sends frames back to their sender, so that a pod can
reach itself through a Service. It also sends back multicast: a guest that checks its IPv6 address (duplicate address detection)
receives its own question, and gives up the address. Linux marks its questions since 4.10, other systems do not. For
containers the CNI plugin turns the check off, which is impossible in a guest. Only the guest sends from its MAC, so its own
multicast is dropped; unicast passes:

    table bridge virtshim-reflections {
      chain from-outside { type filter hook prerouting priority -300; policy accept;
        iifname "eth0" ether saddr MAC @ll,0,8 & 1 != 0 drop
      }
    }"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator, Sequence

from tapmanager.ipv6.frame import STAND_IN_PREFIX
from tapmanager.links import nft
from tapmanager.network_values import OFF, WITH_IP, mac_bytes
from tapmanager.pod import Nic

# Offsets in the Ethernet header, and types there.
_TARGET, _SENDER, _ETHER_TYPE = 0, 6, 12
_IPV4, _ARP, _IPV6 = b"\x08\x00", b"\x08\x06", b"\x86\xdd"
# Offsets in the UDP header, and ports there.
_SOURCE_PORT, _TARGET_PORT = 0, 2
_DHCP_SERVER = struct.pack("!H", 67)
_IPV6_PORTS = [struct.pack("!H", port) for port in (546, 547)]
# Types of ICMPv6.
_ROUTER_SOLICITATION, _ROUTER_ADVERTISEMENT, _NEIGHBOUR_ADVERTISEMENT, _REDIRECT = b"\x85", b"\x86", b"\x88", b"\x89"
_NOBODY, _NOBODY_6 = bytes(4), bytes(16)
_LINK_LOCAL = bytes.fromhex("fe80").ljust(16, b"\0")
_LINK_LOCAL_MASK = bytes.fromhex("ffc0").ljust(16, b"\0")
_DROP = nft.verdict(nft.DROP)
_DHCP_GUARD = nft.Chain("virtshim-dhcp", "forward", nft.FORWARD)
_REFLECTIONS = nft.Chain("virtshim-reflections", "from-outside", nft.PREROUTING, -300)
_SPOOF_FILTER = nft.Chain("virtshim-filter", "from-guests", nft.PREROUTING, -300)


def _is(ether_type: bytes) -> bytes:
    return nft.is_at(nft.LINK, _ETHER_TYPE, ether_type)


def _is_icmp(kind: bytes) -> bytes:
    return _is(_IPV6) + nft.has_protocol(socket.IPPROTO_ICMPV6) + nft.is_at(nft.TRANSPORT, 0, kind)


def dhcp_guard() -> Sequence[bytes]:
    """Messages for `nft.batch`, which replace the guard of an earlier version. Add `dhcp_guard_exceptions` afterwards."""
    is_udp = _is(_IPV4) + nft.is_at(nft.NETWORK, 9, bytes([socket.IPPROTO_UDP]))
    is_udp_6 = _is(_IPV6) + nft.has_protocol(socket.IPPROTO_UDP)
    tests = [
        *(is_udp + nft.is_at(nft.TRANSPORT, at, _DHCP_SERVER) for at in (_TARGET_PORT, _SOURCE_PORT)),
        *(is_udp_6 + nft.is_at(nft.TRANSPORT, _TARGET_PORT, port) for port in _IPV6_PORTS),
        *(_is_icmp(kind) for kind in (_ROUTER_SOLICITATION, _ROUTER_ADVERTISEMENT)),
        _is(_IPV6) + nft.is_at(nft.NETWORK, 8, STAND_IN_PREFIX),
        _is_icmp(_NEIGHBOUR_ADVERTISEMENT) + nft.is_at(nft.TRANSPORT, 8, STAND_IN_PREFIX),
    ]
    rules = (nft.rule(_DHCP_GUARD, test + _DROP) for test in tests)
    return [*nft.table_of(_DHCP_GUARD), nft.emptied(_DHCP_GUARD), *rules]


def dhcp_guard_exceptions(unguarded: Sequence[str]) -> Sequence[bytes]:
    """Messages for `nft.batch`, after `dhcp_guard`. `unguarded`: bridge ports between which DHCP passes."""
    return [nft.rule(_DHCP_GUARD, nft.came_by(name) + nft.verdict(nft.ACCEPT), first=True) for name in unguarded]


def gateway_rewrite_rules(tap: str, number: int, mac: bytes, gateway: bytes) -> Sequence[bytes]:
    """Messages for `nft.batch`, which replace the rule. The chain stays, so no frame passes without a rule meanwhile."""
    chain = nft.Chain(f"virtshim-{tap}-{number}", "to-gateway", nft.PREROUTING, -200)
    rewrite = nft.came_by(tap) + nft.is_at(nft.LINK, 0, mac) + nft.put_at(nft.LINK, 0, gateway)
    return [*nft.table_of(chain), nft.emptied(chain), nft.rule(chain, rewrite)]


def reflections_rules(nics: Sequence[Nic]) -> Sequence[bytes]:
    """Messages for `nft.batch`."""
    made = [nft.rule(_REFLECTIONS, nft.came_by(nic.link) + _is_reflected(nic)) for nic in nics]
    return [*nft.table_of(_REFLECTIONS), *made] if made else []


def _is_reflected(nic: Nic) -> bytes:
    own = nft.is_at(nft.LINK, _SENDER, mac_bytes(nic.mac))
    return own + nft.has_bits(nft.LINK, _TARGET, b"\x01") + _DROP  # multicast


def spoof_filter_rules(nics: Sequence[Nic]) -> Sequence[bytes]:
    """Messages for `nft.batch`; none if no NIC is filtered."""
    filtered = [nic for nic in nics if nic.filter != OFF]
    made = [nft.rule(_SPOOF_FILTER, nft.came_by(nic.tap) + test) for nic in filtered for test in _tests(nic)]
    return [*nft.table_of(_SPOOF_FILTER), *made] if made else []


def _tests(nic: Nic) -> Iterator[bytes]:
    mac = mac_bytes(nic.mac)
    yield nft.is_none_of(nft.LINK, _SENDER, [mac]) + _DROP
    yield _is(_ARP) + nft.is_none_of(nft.NETWORK, 8, [mac]) + _DROP
    if nic.filter == WITH_IP:
        addresses = [ipaddress.ip_interface(address).ip for address in nic.addresses]
        yield from _tests_of_ipv4([one.packed for one in addresses if one.version == 4])
        yield from _tests_of_ipv6([one.packed for one in addresses if one.version == 6], _gateways(nic))
        yield nft.is_none_of(nft.LINK, _ETHER_TYPE, [_IPV4, _IPV6, _ARP]) + _DROP


def _tests_of_ipv4(own: Sequence[bytes]) -> Iterator[bytes]:
    yield _is(_ARP) + nft.is_none_of(nft.NETWORK, 14, [*own, _NOBODY]) + _DROP
    asks_for_address = nft.is_at(nft.NETWORK, 12, _NOBODY) + nft.has_protocol(socket.IPPROTO_UDP)
    yield _is(_IPV4) + asks_for_address + nft.is_at(nft.TRANSPORT, _TARGET_PORT, _DHCP_SERVER) + nft.verdict(nft.ACCEPT)
    # Without an address of its own, the guest may send from none.
    yield _is(_IPV4) + (nft.is_none_of(nft.NETWORK, 12, own) if own else b"") + _DROP


def _tests_of_ipv6(own: Sequence[bytes], gateways: Sequence[bytes]) -> Iterator[bytes]:
    yield _is(_IPV6) + nft.is_none_of(nft.NETWORK, 8, [*own, _NOBODY_6], _LINK_LOCAL_MASK, _LINK_LOCAL) + _DROP
    is_without_address = nft.is_at(nft.NETWORK, 8, _NOBODY_6)
    yield _is(_IPV6) + is_without_address + nft.lacks_protocol(socket.IPPROTO_ICMPV6) + _DROP
    for kind in (_ROUTER_ADVERTISEMENT, _REDIRECT):
        yield _is_icmp(kind) + _DROP
    advertisement = _is_icmp(_NEIGHBOUR_ADVERTISEMENT)
    yield advertisement + nft.is_none_of(nft.TRANSPORT, 8, own or [_NOBODY_6], _LINK_LOCAL_MASK, _LINK_LOCAL) + _DROP
    for gateway in gateways:
        yield _is(_IPV6) + nft.is_at(nft.NETWORK, 8, gateway) + _DROP
        yield advertisement + nft.is_at(nft.TRANSPORT, 8, gateway) + _DROP


def _gateways(nic: Nic) -> Sequence[bytes]:
    """The link-local gateways. Other gateways are excluded anyway, because they are not the guest's addresses."""
    named = [*(route.gateway for route in nic.routes), *(neighbour.address for neighbour in nic.neighbours)]
    found = {ipaddress.ip_address(one) for one in named if one}
    return sorted(one.packed for one in found if one.version == 6 and one.is_link_local)
