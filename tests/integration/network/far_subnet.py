"""A namespace on a third subnet, which only a router of a pod's second network reaches; the node does not know it."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

from packets import Place

from tapmanager.links import netns

# Parts of 10.90.0.0/16, which nothing else on the machine uses: the second network, whose pods begin at 10, and the
# third.
SECOND, THIRD = "10.90.71", "10.90.72"
SECOND6, THIRD6 = "fd00:90:71:", "fd00:90:72:"
POD, POD6 = f"{SECOND}.10", f"{SECOND6}:10"


def ip(*words: str, inside: str = "") -> str:
    command = ["ip", *(["-n", inside] if inside else []), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@contextlib.contextmanager
def namespace(name: str) -> Iterator[str]:
    """The namespace with that path."""
    path = f"/run/netns/vst-{name}-{secrets.token_hex(3)}"
    netns.create(path)
    try:
        yield path
    finally:
        netns.delete(path)


@contextlib.contextmanager
def beyond(bridge: str) -> Iterator[Place]:
    """`bridge`, which is created, is the second network's."""
    with contextlib.ExitStack() as made:
        router, client = (made.enter_context(namespace(name)) for name in ("router", "far"))
        at_router, at_client = Path(router).name, Path(client).name
        ip("link", "add", bridge, "type", "bridge")
        made.callback(ip, "link", "del", bridge)
        ip("link", "set", bridge, "up")
        port = f"{bridge}r"
        ip("link", "add", port, "type", "veth", "peer", "name", "lan", "netns", at_router)
        ip("link", "set", port, "master", bridge, "up")
        ip("link", "add", "far", "netns", at_router, "type", "veth", "peer", "name", "eth0", "netns", at_client)
        ends = [
            (at_router, "lan", SECOND, SECOND6, 1),
            (at_router, "far", THIRD, THIRD6, 1),
            (at_client, "eth0", THIRD, THIRD6, 2),
        ]
        for inside, link, subnet, subnet6, last in ends:
            ip("address", "add", f"{subnet}.{last}/24", "dev", link, inside=inside)
            ip("address", "add", f"{subnet6}:{last}/64", "dev", link, "nodad", inside=inside)
            ip("link", "set", link, "up", inside=inside)
        words = ["sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"]
        subprocess.run(["ip", "netns", "exec", at_router, *words], check=True, timeout=60)
        ip("route", "add", "default", "via", f"{THIRD}.1", inside=at_client)
        ip("-6", "route", "add", "default", "via", f"{THIRD6}:1", inside=at_client)
        yield Place("beyond", client, {"2/4": f"{THIRD}.2", "2/6": f"{THIRD6}:2"})


def second_network(name: str, bridge: str, leases: Path) -> dict[str, object]:
    """The second network, with the distribution's sbr."""
    subnets = ((f"{SECOND}.0/24", POD), (f"{SECOND6}:/64", POD6))
    ranges = [[{"subnet": subnet, "rangeStart": start}] for subnet, start in subnets]
    routes = [{"dst": to} for to in ("0.0.0.0/0", "::/0", "10.0.0.0/8")]
    ipam = {"type": "host-local", "dataDir": str(leases), "ranges": ranges, "routes": routes}
    plugins = [{"type": "bridge", "bridge": bridge, "mtu": 1400, "ipam": ipam}, {"type": "sbr"}]
    return {"name": name, "type": "chain", "plugins": plugins}
