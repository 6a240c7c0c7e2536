"""What is answered on the taps of one pod, opened and ready for the server."""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import time
from collections.abc import Callable, Sequence
from ipaddress import IPv6Address

from tapmanager.dhcp import lease_plan, sockets
from tapmanager.dhcp.beside import Beside
from tapmanager.dhcp.guest_nic import GuestNic, send_or_lose
from tapmanager.errors import TapmanagerError
from tapmanager.ipv6 import lease as ipv6_lease
from tapmanager.ipv6 import routers
from tapmanager.ipv6.announcer import Announcer, Ends
from tapmanager.ledger import Entry
from tapmanager.links import netns, pod_links
from tapmanager.pod import Nic

log = logging.getLogger(__name__)


def open_nics(entry: Entry, beside: Beside) -> Sequence[GuestNic]:
    """Those of its NICs that have an address to tell. `beside` is that of the server that is to serve them. Must run in the pod's
    namespace. Raises OSError; then none is open."""
    with contextlib.ExitStack() as undo:
        opened = [found for nic in entry.nics if (found := _open(entry, nic, beside, undo))]
        undo.pop_all()
    return opened


def _open(entry: Entry, nic: Nic, beside: Beside, undo: contextlib.ExitStack) -> GuestNic | None:
    lease = lease_plan.lease_for(nic, entry.dns, entry.pod.hostname or entry.pod.name)
    ipv6, told = ipv6_lease.lease_for(nic, entry.dns), routers.told(nic, entry.dns)
    if lease is None and ipv6 is None:
        return None
    tap = undo.enter_context(sockets.on_tap(nic.tap))
    link = undo.enter_context(sockets.on_link(nic.link)) if told is not None and told.looks_for_gateways else None
    if told is None:
        return GuestNic(tap, lease)
    for what in told.left_out:
        log.warning("ipv6.route_not_told sandbox=%s interface=%s route=%s", entry.pod.sandbox, nic.link, what)
    known = {IPv6Address(address) for address in pod_links.answered_for(nic) if ":" in address}
    announcer = Announcer(told, _ends(entry, nic, tap, link, beside), known, time.monotonic())
    return GuestNic(tap, lease, ipv6, announcer, link)


def _ends(entry: Entry, nic: Nic, tap: socket.socket, link: socket.socket | None, beside: Beside) -> Ends:
    def to_network(data: bytes) -> None:
        if link is not None:
            send_or_lose(link, data)

    def make(address: IPv6Address, mac: bytes) -> bool:
        if tap.fileno() < 0:
            return False  # the pod was released meanwhile
        try:
            netns.run_inside(entry.netns, functools.partial(pod_links.stand_in_for, nic, address, mac))
        except (TapmanagerError, OSError) as exc:
            log.warning("ipv6.router_not_answered sandbox=%s interface=%s error=%s", entry.pod.sandbox, nic.link, exc)
            return False
        return True

    def stand_in(address: IPv6Address, mac: bytes, then: Callable[[bool], None]) -> None:
        beside.begin(functools.partial(make, address, mac), then)

    return Ends(functools.partial(send_or_lose, tap), to_network, stand_in)
