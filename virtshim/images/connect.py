"""Looks a host up and connects to it. Every wait can be cancelled, and forbidden networks are refused."""

from __future__ import annotations

import ipaddress
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from virtshim.images.pull_watch import PullWatch
from virtshim.model.errors import InvalidRequest, ShimError, Unavailable

# Networks from which images are never fetched. Without this rule, anybody who names an image could make this daemon
# send requests from the node's own network. Pure.
#
# Always forbidden: a cloud's metadata service, which has the node's credentials, and addresses that are no single host.
# Loopback is forbidden unless the operator lists the server, because daemons of the node trust every local client.
# The operator may forbid more networks.

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_ALWAYS = (
    "169.254.0.0/16",  # link-local; metadata of AWS, Azure, Google, OpenStack and others
    "fe80::/10",
    "fd00:ec2::254/128",  # metadata of AWS
    "fd20:ce::254/128",  # metadata of Google
    "100.100.100.200/32",  # metadata of Alibaba
    "192.0.0.192/32",  # metadata of Oracle
    "168.63.129.16/32",  # the Azure host
    "0.0.0.0/8",  # "this host": the kernel connects to loopback
    "::/128",
    "224.0.0.0/4",
    "ff00::/8",
    "255.255.255.255/32",
)

_LOOPBACK = tuple(map(ipaddress.ip_network, ("127.0.0.0/8", "::1/128")))

# Prefixes of IPv6 addresses that end in the IPv4 address they lead to: IPv4-compatible addresses and NAT64.
_WITH_IPV4_AT_THEIR_END = tuple(
    map(ipaddress.IPv6Network, ("::/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48"))
)
# The 32 bits before the IPv4 address in an ISATAP address, in any network.
_ISATAP = frozenset({0x00005EFE, 0x02005EFE})


class ForbiddenNetworks:
    """`networks`: more forbidden networks, in CIDR form. `here`: allowed servers on loopback, as `host[:port]` in image names;
    without a port, all ports of that host."""

    def __init__(self, networks: Sequence[str] = (), here: Sequence[str] = ()) -> None:
        self._texts = tuple(networks)
        self._networks: list[_Network] = [ipaddress.ip_network(text) for text in (*_ALWAYS, *networks)]
        self._here = frozenset(text.lower() for text in here)

    def but_not(self, url: str) -> ForbiddenNetworks:
        """The same networks, but with the server of `url` allowed on loopback, where operators often run mirrors. "" allows
        none."""
        parts = urlsplit(url)
        if not parts.hostname:
            return self
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return ForbiddenNetworks(self._texts, (*self._here, f"{_authority(parts.hostname)}:{port}"))

    def has(self, address: str, host: str = "", port: int = 0) -> bool:
        """Whether `address` is forbidden. It is what getaddrinfo returns for `host`, including IPv4 embedded in IPv6."""
        meanings = list(_meanings(ipaddress.ip_address(address.partition("%")[0])))
        if _any_in(meanings, self._networks):
            return True
        return _any_in(meanings, _LOOPBACK) and self._here.isdisjoint((_authority(host), f"{_authority(host)}:{port}"))


def _authority(host: str) -> str:
    host = host.strip("[]").rstrip(".").lower()
    return f"[{host}]" if ":" in host else host


def _any_in(addresses: Sequence[_Address], networks: Sequence[_Network]) -> bool:
    return any(one in network for one in addresses for network in networks if one.version == network.version)


def _meanings(address: _Address) -> Iterator[_Address]:
    """The address, and the IPv4 addresses to which its packets may be forwarded."""
    yield address
    if isinstance(address, ipaddress.IPv4Address):
        return
    number = int(address)
    last = ipaddress.IPv4Address(number & 0xFFFFFFFF)
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo
    inside = any(address in network for network in _WITH_IPV4_AT_THEIR_END)
    # ::1 is loopback, not an IPv4-compatible address.
    if (inside and number > 0xFFFF) or (number >> 32) & 0xFFFFFFFF in _ISATAP:
        yield last


_POLL = 0.2


def dial(
    host: str, port: int, timeout: float, watch: PullWatch, forbidden: ForbiddenNetworks | None = None
) -> socket.socket:
    """A connected socket that the watch does not guard yet. All waits check the watch. Raises OSError, what the watch raises, and
    InvalidRequest for a host that has only forbidden addresses."""
    deadline = time.monotonic() + timeout
    failure: OSError = OSError(f"no address for {host}")
    found = _addresses(host, port, deadline, watch)
    allowed = [one for one in found if forbidden is None or not forbidden.has(str(one[4][0]), host, port)]
    if found and not allowed:
        raise _refusal(host)
    for family, kind, protocol, _, address in allowed:
        connecting = socket.socket(family, kind, protocol)
        try:
            _connect(connecting, address, deadline, watch)
            connecting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connecting
        except OSError as exc:
            connecting.close()
            failure = exc
        except ShimError:
            connecting.close()
            raise
    raise failure


def refuse_forbidden(host: str, port: int, timeout: float, watch: PullWatch, forbidden: ForbiddenNetworks) -> None:
    """For a host that a proxy connects to: raises InvalidRequest if any of its addresses is forbidden. The proxy must judge names
    that the node cannot look up."""
    if "%" in host.partition("%25")[0]:
        raise InvalidRequest(f"{host[:300]!r} is not a host name")
    try:
        found = _addresses(host.rstrip("."), 0, time.monotonic() + timeout, watch)
    except OSError:
        return
    if any(forbidden.has(str(one[4][0]), host, port) for one in found):
        raise _refusal(host)


def _refusal(host: str) -> InvalidRequest:
    return InvalidRequest(
        f"{host} is at a loopback, link-local, metadata or other address from which images are not fetched on this node "
        "(images.forbidden_networks; loopback: images.insecure_registries); publish the image elsewhere"
    )


def _connect(connecting: socket.socket, address: Any, deadline: float, watch: PullWatch) -> None:
    connecting.setblocking(False)
    try:
        connecting.connect(address)
    except BlockingIOError:
        poll = select.poll()
        poll.register(connecting, select.POLLOUT)
        while not poll.poll(_POLL * 1000):
            watch.check()
            if time.monotonic() >= deadline:
                raise TimeoutError("timed out while connecting") from None
        if error := connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error)) from None


def _addresses(host: str, port: int, deadline: float, watch: PullWatch) -> list[Any]:
    """Looks up the host in a thread, because getaddrinfo cannot be interrupted. An abandoned thread ends when the resolver times
    out."""
    answer: queue.SimpleQueue[list[Any] | OSError] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            answer.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as exc:
            answer.put(exc if isinstance(exc, OSError) else OSError(f"{host} is not a host name"))

    try:
        threading.Thread(target=resolve, name="image-pull-resolve", daemon=True).start()
    except RuntimeError as exc:
        raise Unavailable(f"{host} cannot be looked up, because no thread can be started; try again later") from exc
    while True:
        watch.check()
        if time.monotonic() >= deadline:
            raise TimeoutError(f"timed out looking up {host}")
        try:
            found = answer.get(timeout=_POLL)
        except queue.Empty:
            continue
        if isinstance(found, OSError):
            raise found
        return found
