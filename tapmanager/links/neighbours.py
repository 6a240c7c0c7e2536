"""Neighbours that a plugin wrote down in the pod's namespace, and that nobody answers for on the wire: AWS's VPC CNI and Azure's
have the gateway's MAC there. The guest asks for it, so its bridge answers: the kernel's, which needs nobody to run.

Functions must run inside the pod's namespace; pyroute2 has no types, so its `Any` is theirs.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from tapmanager.pod import Neighbour, Nic

_NUD_PERMANENT = 0x80
_NUD_NOARP = 0x40
_NTF_ROUTER = 0x80


def answer_for(ipr: Any, nic: Nic, neighbours: Sequence[Neighbour]) -> None:
    """A bridge answers for what it knows both as its own neighbour and as somebody behind a port."""
    bridge, guest, outside = (socket.if_nametoindex(name) for name in (nic.bridge, nic.tap, nic.link))
    if any(":" not in neighbour.address for neighbour in neighbours):
        ipr.brport("set", index=guest, proxyarp=1)
    if any_ipv6(neighbours):
        ipr.brport("set", index=outside, neigh_suppress=1)
    for neighbour in neighbours:
        # A guest forgets the router of whom it is told that he is none.
        flags = _NTF_ROUTER if ":" in neighbour.address else 0
        ipr.neigh(
            "replace", dst=neighbour.address, lladdr=neighbour.mac, ifindex=bridge, state=_NUD_PERMANENT, flags=flags
        )
        ipr.fdb("replace", ifindex=outside, lladdr=neighbour.mac, state=_NUD_NOARP)


def stand_in(ipr: Any, nic: Nic, neighbour: Neighbour, port: str) -> None:
    """As `answer_for`, for one that is behind `port`, another than the network's: a port with neigh_suppress is sent nothing of
    what the guest advertises unasked."""
    bridge, nowhere = socket.if_nametoindex(nic.bridge), socket.if_nametoindex(port)
    ipr.link("set", index=nowhere, mtu=nic.mtu, master=bridge)
    # Frames of the other two ports, which the bridge sends to all, are not copied for it.
    ipr.brport("set", index=nowhere, neigh_suppress=1, unicast_flood=0, mcast_flood=0, bcast_flood=0)
    ipr.link("set", index=nowhere, state="up")
    ipr.fdb("replace", ifindex=nowhere, lladdr=neighbour.mac, state=_NUD_NOARP)
    ipr.neigh(
        "replace",
        dst=neighbour.address,
        lladdr=neighbour.mac,
        ifindex=bridge,
        state=_NUD_PERMANENT,
        flags=_NTF_ROUTER,
    )


def any_ipv6(neighbours: Sequence[Neighbour]) -> bool:
    return any(":" in neighbour.address for neighbour in neighbours)


def put_back(ipr: Any, nic: Nic, link: int) -> None:
    for neighbour in nic.neighbours:
        ipr.neigh("replace", dst=neighbour.address, lladdr=neighbour.mac, ifindex=link, state=_NUD_PERMANENT)
