"""A network namespace as another runtime makes it for a pod: one interface with the pod's addresses, and the network
behind it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
from collections.abc import Iterator

PEER = "10.90.7.1"
PEER_IPV6 = "fd00:90::1"


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


class OthersNamespace:
    def __init__(self, name: str) -> None:
        self.name = name
        self.path = f"/run/netns/{name}"
        self.outside = f"/run/netns/{name}-out"

    @property
    def inode(self) -> int:
        return os.stat(self.path).st_ino

    def run(self, *command: str) -> str:
        return ip("netns", "exec", self.name, *command)

    def run_outside(self, *command: str) -> str:
        return ip("netns", "exec", f"{self.name}-out", *command)

    def link(self, name: str, *addresses: str) -> None:
        outside = f"{self.name}-out"
        ip("-n", self.name, "link", "add", name, "type", "veth", "peer", "name", name, "netns", outside)
        for where in (self.name, outside):
            ip("-n", where, "link", "set", name, "up")
        for address in addresses:
            ip("-n", self.name, "address", "add", address, "dev", name, *(["nodad"] if ":" in address else []))

    def reach_outside(self, *families: int) -> None:
        """Default routes through eth0 to PEER and PEER_IPV6."""
        for family, peer, length in ((4, PEER, 24), (6, PEER_IPV6, 64)):
            if family in families:
                more = ["nodad"] if family == 6 else []
                ip("-n", f"{self.name}-out", "address", "add", f"{peer}/{length}", "dev", "eth0", *more)
                ip("-n", self.name, "route", "add", "default", "via", peer, "dev", "eth0")

    def described(self) -> list[object]:
        """Everything that may change in it."""
        shown = [json.loads(ip("-n", self.name, "-j", *what) or "[]") for what in (["address"], ["route"], ["rule"])]
        return [*shown, self.run("nft", "list", "ruleset")]

    def remove(self) -> None:
        for name in (self.name, f"{self.name}-out"):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextlib.contextmanager
def others_namespace(*addresses: str) -> Iterator[OthersNamespace]:
    made = OthersNamespace(f"vst-cni-{secrets.token_hex(4)}")
    try:
        for name in (made.name, f"{made.name}-out"):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        if addresses:
            made.link("eth0", *addresses)
            made.reach_outside(*(6 if ":" in address else 4 for address in addresses))
        yield made
    finally:
        made.remove()
