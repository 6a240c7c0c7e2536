"""A guest that configures IPv6 from the network, by the kernel's router discovery and ISC's DHCPv6 client. It keeps its
frames."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_guest import KernelGuest
from tap_node import until

NIC = "nic0"
_PCAP = struct.pack("=IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 1)
_SCRIPT = """#!/bin/sh
case $reason in
BOUND6 | RENEW6 | REBIND6) ip -6 addr replace $new_ip6_address/$new_ip6_prefixlen dev $interface ;;
RELEASE6 | STOP6 | EXPIRE6 | DEPREF6) ip -6 addr del $old_ip6_address/$old_ip6_prefixlen dev $interface ;;
esac
env > {folder}/part && mv {folder}/part {folder}/$reason
"""


class Ipv6Guest(KernelGuest):
    """A guest with one NIC. `frames`: received, `sent`: sent."""

    def __init__(self, nics: Sequence[Mapping[str, Any]], fds: Sequence[int]) -> None:
        super().__init__(nics, fds)
        self.mac = bytes.fromhex(nics[0]["mac"].replace(":", ""))
        self.frames: list[bytes] = []
        self.sent: list[bytes] = []
        self._clients: list[subprocess.Popen[bytes]] = []

    def __exit__(self, *exc: object) -> None:
        while self._clients:
            self.end_client()
        super().__exit__(*exc)

    def passing(self, data: bytes, *, to_guest: bool) -> None:
        (self.frames if to_guest else self.sent).append(data[10:])

    def emit(self, data: bytes) -> None:
        """Sends a frame as if from the guest's kernel."""
        os.write(self._fds[0], bytes(10) + data)

    def up(self) -> None:
        # As networkd and NetworkManager do; the kernel by itself accepts only the default route.
        wanted = ("accept_ra=1", "accept_ra_rt_info_max_plen=128", "router_solicitation_delay=0")
        self.run("sysctl", "-qw", *(f"net.ipv6.conf.{NIC}.{one}" for one in wanted))
        self.ip("link set lo up", f"link set {NIC} up")

    def dhclient(self, folder: Path, *how: str) -> Path:
        """Starts a client that keeps running, with its lease in `folder`. For each of its reasons it writes the received
        values into a file there."""
        script = folder / "script"
        script.write_text(_SCRIPT.format(folder=folder))
        script.chmod(0o755)
        # A copy: AppArmor's profile of the package's own allows it neither this script nor these files.
        program = shutil.copy(shutil.which("dhclient") or "/usr/sbin/dhclient", folder)
        files = ("-lf", str(folder / "leases"), "-pf", str(folder / "pid"), "-sf", str(script))
        command = ["ip", "netns", "exec", Path(self.path).name, program, "-6", "-d", *how, *files, NIC]
        self._clients.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        return folder

    def has_kept_lease(self, folder: Path) -> bool:
        """Whether the client has written a whole lease to its file; it may run its script before that."""
        text = (folder / "leases").read_text()
        return "iaaddr" in text and text.rstrip().endswith("}")

    def end_client(self) -> None:
        client = self._clients.pop()
        client.kill()
        client.wait()

    def pings(self, address: str) -> bool:
        """Pings for as long as neighbour discovery may take."""
        command = ["ip", "netns", "exec", Path(self.path).name, "ping", "-c1", "-W2", address]
        return any(subprocess.run(command, capture_output=True, check=False).returncode == 0 for _ in range(10))

    # -- what can be seen ----------------------------------------------------------------------------------------------

    def show(self, *what: str) -> list[dict[str, Any]]:
        return json.loads(self.run("ip", "-j", "-d", *what) or "[]")

    def addresses(self) -> set[str]:
        """The usable global IPv6 addresses."""
        found = self.show("-6", "addr", "show", "dev", NIC, "scope", "global")
        every = [one for link in found for one in link.get("addr_info", [])]
        return {one["local"] for one in every if "local" in one and not one.get("tentative")}

    def routes(self) -> dict[str, str]:
        """Gateways by destination; "" for those on the link."""
        return {one["dst"]: one.get("gateway", "") for one in self.show("-6", "route")}

    def wait_for_router(self) -> str:
        until(lambda: "default" in self.routes(), 60, "a default route")
        return self.routes()["default"]


def decoded(frames: list[bytes], folder: Path, which: str) -> str:
    """tcpdump's description of the frames that match its filter."""
    path = folder / "frames.pcap"
    path.write_bytes(_PCAP + b"".join(struct.pack("=IIII", 0, 0, len(one), len(one)) + one for one in frames))
    command = ["tcpdump", "-nvvv", "-r", str(path), which]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
