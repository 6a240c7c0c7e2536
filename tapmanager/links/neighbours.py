"""Neighbours that a plugin wrote down in the pod's namespace, and that nobody answers for on the wire: AWS's VPC CNI and Azure's
have the gateway's MAC there. The guest asks for it, so its bridge answers: the kernel's, which needs nobody to run.

Functions must run inside the pod's namespace; pyroute2 has no types, so its `Any` is theirs.
"""

from __future__ import annotations

import socket
from typing import Any

from tapmanager.pod import Neighbour, Nic

_NUD_PERMANENT = 0x80
_NUD_NOARP = 0x40
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_LINK_LAYER_MULTICAST = 1


def read(ipr: Any) -> dict[int, tuple[Neighbour, ...]]:
    """By the link's index."""
    found: dict[int, tuple[Neighbour, ...]] = {}
    for message in ipr.get_neighbours():
        address, mac = message.get_attr("NDA_DST"), message.get_attr("NDA_LLADDR")
        if message["state"] & _NUD_PERMANENT and message["family"] in _FAMILIES and address and _is_unicast(mac):
            index = message["ifindex"]
            found[index] = (*found.get(index, ()), Neighbour(address, mac))
    return found


def _is_unicast(mac: object) -> bool:
    return isinstance(mac, str) and len(mac) == 17 and not int(mac[:2], 16) & _LINK_LAYER_MULTICAST


def answer_for(ipr: Any, nic: Nic) -> None:
    """A bridge answers for what it knows both as its own neighbour and as somebody behind a port."""
    bridge, guest, outside = (socket.if_nametoindex(name) for name in (nic.bridge, nic.tap, nic.link))
    ipr.brport("set", index=guest, proxyarp=1)
    if any_ipv6(nic):
        ipr.brport("set", index=outside, neigh_suppress=1)
    for neighbour in nic.neighbours:
        ipr.neigh("replace", dst=neighbour.address, lladdr=neighbour.mac, ifindex=bridge, state=_NUD_PERMANENT)
        ipr.fdb("replace", ifindex=outside, lladdr=neighbour.mac, state=_NUD_NOARP)


def any_ipv6(nic: Nic) -> bool:
    return any(":" in neighbour.address for neighbour in nic.neighbours)


def put_back(ipr: Any, nic: Nic, link: int) -> None:
    for neighbour in nic.neighbours:
        ipr.neigh("replace", dst=neighbour.address, lladdr=neighbour.mac, ifindex=link, state=_NUD_PERMANENT)
