"""Makes paths from a guest's tap to a socket of the host by iproute2, in namespaces of their own, with a guest at the
end."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from console import SerialConsole
from podclient import wait_until

from tapmanager.cgroups.plan import Hierarchy
from tapmanager.cgroups.tree import hierarchies
from tapmanager.links import netns

HOST, GUEST, PREFIX = "10.99.0.1", "10.99.0.2", 24
_MAC = "52:54:00:99:00:02"
_PATIENCE = 180.0
_READY = b"virtshim-guest: ready"

# The tap itself has the host's address; nothing lies between it and the socket.
TAP = ()
# As in a pod: a bridge from the tap to a veth, whose other end has the address.
_PAIR = ("link add veth0 type veth peer name host0 netns {host}", "link set veth0 up")
BRIDGE = (
    *_PAIR,
    "link add br0 type bridge stp_state 0 forward_delay 0 ageing_time 0 mcast_snooping 0",
    "link set br0 up", "link set veth0 master br0", "link set tap0 master br0",
)  # fmt: skip
# The same without a bridge: frames that enter one leave by the other.
REDIRECT = _PAIR
_FILTERS = (("veth0", "tap0"), ("tap0", "veth0"))


@dataclass(frozen=True, slots=True)
class Way:
    """`listener` creates a socket at the host's end, which the guest reaches as `host`."""

    name: str
    host: str
    console: SerialConsole
    listener: Callable[[], socket.socket]


@dataclass(frozen=True, slots=True)
class Namespaces:
    """The namespace of the tap, and the namespace of the host's end."""

    inner: str
    outer: str

    def at_host(self, make: Callable[[], socket.socket]) -> socket.socket:
        return netns.run_inside(f"/run/netns/{self.outer}", make)


@contextlib.contextmanager
def laid(commands: tuple[str, ...], queues: int = 1) -> Iterator[Namespaces]:
    """A tap that is opened once per queue, and its path to the host's end."""
    tag = secrets.token_hex(3)
    inner = f"vsb-{tag}-i"
    outer = f"vsb-{tag}-o" if commands else inner
    with contextlib.ExitStack() as undo:
        for name in dict.fromkeys((inner, outer)):
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "del", name)
            # As in any pod: no neighbour discovery of the host is counted.
            subprocess.run(
                ["ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv6.conf.default.disable_ipv6=1"], check=True
            )
        many = ("multi_queue",) if queues > 1 else ()
        _ip("-n", inner, "tuntap", "add", "tap0", "mode", "tap", "vnet_hdr", *many)
        _ip("-n", inner, "link", "set", "tap0", "up")
        for command in commands:
            _ip("-n", inner, *command.format(host=outer).split())
        if commands is REDIRECT:
            for come, go in _FILTERS:
                _tc(inner, "qdisc", "add", "dev", come, "ingress")
                all_of_it = f"filter add dev {come} parent ffff: protocol all u32 match u32 0 0"
                _tc(inner, *f"{all_of_it} action mirred egress redirect dev {go}".split())
        end = "host0" if commands else "tap0"
        _ip("-n", outer, "address", "add", f"{HOST}/{PREFIX}", "dev", end)
        _ip("-n", outer, "link", "set", end, "up")
        yield Namespaces(inner, outer)


@contextlib.contextmanager
def bare_guest(name: str, image: Path, commands: tuple[str, ...], queues: int, neighbour: int) -> Iterator[Way]:
    """QEMU started by hand on such a path, with as many vCPUs as queues. Machine, CPU model, memory and NIC are those of
    a pod, and so is its share of the processors: `neighbour` is the process of a pod's VM."""
    with (
        laid(commands, queues) as spaces,
        tempfile.TemporaryDirectory(prefix="bare-net-", dir="/var/tmp") as directory,
        _cgroups_beside(neighbour) as groups,
    ):
        disk, console, log = (f"{directory}/{part}" for part in ("disk", "console", "log"))
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", image, "-F", "qcow2", disk], check=True)
        several = f",queues={queues}" if queues > 1 else ""
        vectors = f",mq=on,vectors={2 * queues + 2}" if queues > 1 else ""
        process = subprocess.Popen(
            [
                "ip", "netns", "exec", spaces.inner,
                "qemu-system-x86_64", "-accel", "tcg", "-machine", "q35", "-cpu", "max", "-m", "128", "-smp", str(queues),
                "-display", "none", "-nodefaults", "-no-user-config", "-drive", f"file={disk},format=qcow2,if=virtio",
                "-netdev", f"tap,id=net,ifname=tap0,script=no,downscript=no,vhost=off{several}",
                "-device", f"virtio-net-pci,netdev=net,mac={_MAC},host_mtu=1500{vectors},romfile=",
                "-chardev", f"socket,id=console,path={console},server=on,wait=off,logfile={log}", "-serial", "chardev:console",
            ]
        )  # fmt: skip
        try:
            for group in groups:
                (group / "cgroup.procs").write_text(str(process.pid))
            wait_until(lambda: os.path.exists(log) and _READY in Path(log).read_bytes(), _PATIENCE, f"the guest {name}")
            serial = SerialConsole(console)
            # Nobody answers DHCP here.
            serial.type(f"killall udhcpc; ip address add {GUEST}/{PREFIX} dev eth0; ip link set eth0 up")
            yield Way(name, HOST, serial, lambda: spaces.at_host(listening))
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _cgroups_beside(process: int) -> Iterator[list[Path]]:
    """Cgroups beside the neighbour's in the CPU controller, where each pod has its own."""
    lines = (line.split(":", 2) for line in Path(f"/proc/{process}/cgroup").read_text().splitlines())
    paths = {controllers: path for _, controllers, path in lines}
    with contextlib.ExitStack() as undo:
        made = []
        for one in hierarchies():
            path = next((path for names, path in paths.items() if _is_of(one, names)), "")
            if "cpu" in one.controllers and path not in ("", "/"):
                made.append(Path(f"{one.root}{path}").parent / f"bench-{secrets.token_hex(4)}")
                made[-1].mkdir()
                undo.callback(_gone, made[-1])
        yield made


def _is_of(one: Hierarchy, names: str) -> bool:
    return not names if one.is_v2 else "cpu" in names.split(",")


def _gone(group: Path) -> None:
    """Waits until the group is empty: a process leaves its group a moment after its end."""
    wait_until(lambda: not (group / "cgroup.procs").read_text(), 10, f"{group} is empty")
    group.rmdir()


def listening() -> socket.socket:
    return socket.create_server(("", 0))


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _tc(space: str, *words: str) -> None:
    subprocess.run(["tc", "-n", space, *words], check=True)
