"""Announces its routers to one guest: answers solicitations, repeats the advertisements, and finds the MACs of gateways that
have a stand-in address. Not thread-safe: one thread uses it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from ipaddress import IPv6Address

from tapmanager.ipv6 import discovery, frame, routers
from tapmanager.ipv6.routers import Announcement, Router

# Seconds between two repetitions of advertisements, and of the search for gateways.
_EVERY = 600.0
# A gateway that does not answer is asked again after 1, 2, 4 ... seconds. During that time it is not reported missing,
# because the gateway or tapmanager may have just started.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_PATIENCE = 3.5


@dataclass(frozen=True, slots=True)
class Ends:
    """`to_guest` and `to_network` send a frame through the tap and through the CNI interface. `stand_in` makes an address
    stand for a gateway with a MAC. The announcer's thread later calls the given function, with False if that failed."""

    to_guest: Callable[[bytes], None]
    to_network: Callable[[bytes], None]
    stand_in: Callable[[IPv6Address, bytes, Callable[[bool], None]], None]


class Announcer:
    """`known`: stand-in addresses that an earlier process made."""

    def __init__(self, announced: Announcement, ends: Ends, known: Collection[IPv6Address], now: float) -> None:
        self._announced, self._ends = announced, ends
        # The MACs of gateways with a stand-in, b"" if an earlier process made it; the MACs that were last heard; and the gateways
        # whose stand-in is being made.
        self._macs: dict[Router, bytes] = dict.fromkeys((one for one in announced.routers if one.address in known), b"")
        self._heard: dict[Router, bytes] = {}
        self._making: set[Router] = set()
        self._patient_until = now + _PATIENCE
        self._asked = False
        self._pause = _FIRST_PAUSE
        self._look_at, self._announce_at = now, now
        self._looked_at = now - _FIRST_PAUSE

    def tick(self, now: float) -> float:
        """Does the work that is due. Returns the time of the next call."""
        if now >= self._look_at:
            self._look(now)
        if now >= self._announce_at:
            self._announce(frame.ALL_NODES, frame.group_mac(frame.ALL_NODES))
            self._announce_at = now + _EVERY
        if self._asked and now >= self._patient_until:
            self._announce(frame.ALL_NODES, frame.group_mac(frame.ALL_NODES), whole=True)
            self._asked = False
        return min(self._look_at, self._announce_at, *([self._patient_until] if self._asked else []))

    def _look(self, now: float) -> None:
        """Looks for unknown gateways, and from time to time for the others, whose MAC may have changed."""
        all_again = not self._missing()
        for router in self._announced.routers:
            if router.gateway is not None and (all_again or router not in self._macs):
                if router.mac is None:
                    self._ends.to_network(
                        discovery.solicitation(router.gateway, self._announced.own, self._announced.mac)
                    )
                else:
                    self._stand_in(router, router.mac)
        self._looked_at = now
        self._look_at = now + (_EVERY if all_again else self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def from_guest(self, data: bytes, now: float) -> None:
        """Handles a frame from the tap. Answers only the guest's own router solicitations."""
        packet = discovery.parse(data)
        if packet is None or packet.source_mac != self._announced.mac or not discovery.is_router_solicitation(packet):
            return
        if self._missing() and now - self._looked_at >= _FIRST_PAUSE:
            self._look(now)
        if self._missing() and now < self._patient_until:
            self._asked = True
        elif packet.source == frame.NOBODY:
            self._announce(frame.ALL_NODES, frame.group_mac(frame.ALL_NODES), whole=True)
        else:
            self._announce(packet.source, packet.source_mac, whole=True)

    def from_network(self, data: bytes) -> None:
        """Handles a frame from the CNI interface, which may be a gateway's answer."""
        packet = discovery.parse(data)
        found = None if packet is None else discovery.advertised(packet)
        if found is None:
            return
        for router in self._announced.routers:
            if router.gateway == found[0] and router.mac is None:
                self._stand_in(router, found[1])

    def _stand_in(self, router: Router, mac: bytes) -> None:
        """Makes a stand-in, one at a time for each router. A MAC that is heard meanwhile is handled afterwards."""
        self._heard[router] = mac
        if router not in self._making and self._macs.get(router) != mac:
            self._making.add(router)
            self._ends.stand_in(router.address, mac, functools.partial(self._stands, router, mac))

    def _stands(self, router: Router, mac: bytes, done: bool) -> None:
        self._making.discard(router)
        is_new = done and router not in self._macs
        if done:
            self._macs[router] = mac
        if is_new:  # the guest does not see a change of the gateway's MAC
            self._announce(frame.ALL_NODES, frame.group_mac(frame.ALL_NODES))
            self._asked = self._asked and bool(self._missing())
        if self._heard[router] != mac:
            self._stand_in(router, self._heard[router])

    def _missing(self) -> list[Router]:
        """Routers that need a stand-in, but whose MAC is unknown."""
        return [one for one in self._announced.routers if one.gateway is not None and one not in self._macs]

    def _announce(self, target: IPv6Address, target_mac: bytes, *, whole: bool = False) -> None:
        """Sends the advertisements. Sends none without a router, unless `whole`: then the guest gets its addresses now, and the
        routers when they are found."""
        missing = self._missing()
        there = [router for router in self._announced.routers if router not in missing]
        if not there and self._announced.routers and not whole:
            return
        frames = [data for router in there for data in routers.frames(self._announced, router, target, target_mac)]
        for data in frames or routers.frames(self._announced, None, target, target_mac):
            self._ends.to_guest(data)
