"""A guest without a virtual machine that is a whole system: a network namespace whose NICs exchange frames with a pod's
taps. It does so as QEMU would, with large frames and unfinished checksums, too. It is configured as guests are: by the
document for cloud-init, or by DHCP."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import select
import struct
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self

from tapmanager.links import netns

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_PI, _VNET_HDR = 0x0002, 0x1000, 0x4000
_CSUM_AND_TSO = 0x01 | 0x02 | 0x04
_LARGEST = 70_000
_NO_GATEWAY = ("0.0.0.0", "::")

# udhcpc runs this script when it has a lease. Routes are "NETWORK ROUTER" pairs; on-link routes have no router.
_DHCP_SCRIPT = """#!/bin/sh -e
[ "$1" = bound ] || exit 0
ip link set "$interface" mtu "$mtu"
ip address add "$ip/$mask" dev "$interface"
set -- $staticroutes
while [ $# -gt 0 ]; do
  if [ "$2" = 0.0.0.0 ]; then ip route add "$1" dev "$interface"; else ip route add "$1" via "$2" dev "$interface"; fi
  shift 2
done
"""


class KernelGuest:
    """Owns `fds`, the taps of the NICs that tapmanager handed out (`nics`). Use as a context manager."""

    def __init__(self, nics: Sequence[Mapping[str, Any]], fds: Sequence[int]) -> None:
        self.path = f"/run/netns/vst-guest-{secrets.token_hex(4)}"
        self._fds = list(fds)
        self._macs = [nic["mac"] for nic in nics]
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        netns.create(self.path)
        self._inner = [netns.run_inside(self.path, lambda at=at: _tap(f"nic{at}")) for at in range(len(self._fds))]
        for fd in self._fds:
            fcntl.ioctl(fd, _TUNSETOFFLOAD, _CSUM_AND_TSO)
        self._thread.start()
        self.ip(*(f"link set nic{at} address {mac}" for at, mac in enumerate(self._macs)))
        # Addresses are usable at once, and only assigned ones exist.
        self.run("sysctl", "-qw", *(f"net.ipv6.conf.{name}.{what}=0" for name in ("all", "default", *self._names())
                                    for what in ("accept_dad", "accept_ra")))  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._stop_write, b".")
        self._thread.join()
        for fd in (*self._fds, *self._inner, self._stop_read, self._stop_write):
            os.close(fd)
        netns.delete(self.path)

    def _names(self) -> list[str]:
        return [f"nic{at}" for at in range(len(self._macs))]

    def run(self, *words: str) -> str:
        command = ["ip", "netns", "exec", os.path.basename(self.path), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def ip(self, *commands: str) -> None:
        words = ["ip", "-n", os.path.basename(self.path), "-batch", "-"]
        text = "\n".join(commands)
        done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, (text, done.stderr)

    # -- what its system does ------------------------------------------------------------------------------------------

    def configure(self, document: Mapping[str, Any], families: Sequence[int] = (4, 6)) -> None:
        """Configures the guest as cloud-init does, from version 1 of its documents: `families` only."""
        for link in document["config"]:
            name = f"nic{self._macs.index(link['mac_address'])}"
            self.ip(f"link set {name} mtu {link['mtu']} up")
            for subnet in link.get("subnets", ()):
                if (6 if ":" in subnet["address"] else 4) in families:
                    self.ip(f"address add {subnet['address']} dev {name}", *_routes(subnet, name))

    def ask_by_dhcp(self, number: int = 0) -> None:
        """Configures the NIC of that number by a real DHCP client."""
        name, script = f"nic{number}", f"{self.path}.dhcp".replace("/run/netns", "/tmp")
        with contextlib.ExitStack() as made:
            with open(script, "w", opener=lambda path, flags: os.open(path, flags | os.O_EXCL, 0o755)) as file:
                made.callback(os.unlink, script)
                file.write(_DHCP_SCRIPT)
            self.ip(f"link set {name} up")
            options = ("staticroutes", "mtu", "subnet")
            wanted = [word for option in options for word in ("-O", option)]
            self.run("busybox", "udhcpc", "-i", name, "-nqf", "-t", "20", "-T", "1", *wanted, "-s", script)

    def passing(self, data: bytes, *, to_guest: bool) -> None:
        """The frames of its cards, after ten bytes of virtio header, for inspection."""

    # -- what its cards do ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        other = dict(zip((*self._fds, *self._inner), (*self._inner, *self._fds), strict=True))
        with select.epoll() as poll:
            for fd in (*other, self._stop_read):
                poll.register(fd, select.EPOLLIN)
            while True:
                for fd, _ in poll.poll():
                    if fd == self._stop_read:
                        return
                    try:
                        data = os.read(fd, _LARGEST)
                        self.passing(data, to_guest=fd in self._fds)
                        os.write(other[fd], data)
                    except OSError as exc:  # a NIC that is down, or that was taken away
                        if exc.errno == errno.EBADFD:
                            poll.unregister(fd)
                        elif exc.errno not in (errno.EIO, errno.ENETDOWN):
                            raise


def _routes(subnet: Mapping[str, Any], name: str) -> Sequence[str]:
    found = [
        f"route add {route['network']} dev {name}"
        if route["gateway"] in _NO_GATEWAY
        else f"route add {route['network']} via {route['gateway']} dev {name}"
        for route in subnet.get("routes", ())
    ]
    if "gateway" in subnet:
        everything = "::/0" if ":" in subnet["gateway"] else "0.0.0.0/0"
        found.append(f"route add {everything} via {subnet['gateway']} dev {name}")
    return found


def _tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_PI | _VNET_HDR))
        fcntl.ioctl(fd, _TUNSETOFFLOAD, _CSUM_AND_TSO)
    except BaseException:
        os.close(fd)
        raise
    return fd
