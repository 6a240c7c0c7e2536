"""Attempts of a QEMU that its guest has taken over. "own" attempts must succeed, so that the failure of the others
means something."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def attempts(
    node: Any, libvirt: Any, attacker: Any, victim: Any, port: int, open_to_all: str, abstract: str
) -> Iterator[str]:
    yield "fill 64"  # first, because earlier output is lost if a log is rotated
    yield from own_files(node, attacker)
    yield from others_files(node, libvirt, victim)
    yield from others_sockets(node, libvirt, victim)
    yield f"connect {open_to_all}"
    yield from others_taps(node, attacker, victim)
    yield from processes(node, victim)
    yield from network(port, abstract)
    yield from kernel()
    yield "core "
    yield "threads 20000"
    yield "end "
    # QEMU's own filter may end it for these.
    yield "unshare "
    yield "exec echo TRIED exec : got >&2"


def own_files(node: Any, vm: Any) -> Iterator[str]:
    """Its own files, by the paths of its command line."""
    yield f"read {node.directory}/state/containers/{vm.container}/root.qcow2"
    yield f"write {node.directory}/state/containers/{vm.container}/root.qcow2"


def others_files(node: Any, libvirt: Any, vm: Any) -> Iterator[str]:
    top, mine = node.directory, f"{node.directory}/state/containers/{vm.container}"
    paths = [f"{mine}/{name}" for name in ("root.qcow2", "seed.iso", "console.log", "console.pos")]
    paths += [
        f"{top}/state/state.db",
        f"{top}/state/node.id",
        f"{top}/state/tapmanager/{vm.sandbox}.json",
        f"{top}/config.toml",
        f"{Path(top).parent}/volume/file",  # which it reaches only through virtiofsd
    ]
    paths += [str(image) for image in Path(top, "state/images/sha256").iterdir()]
    paths += [path for path in libvirt.paths() if vm.container[:12] in path]
    paths += [
        "/etc/passwd",
        "/etc/shadow",
        "/etc/hostname",
        "/dev/net/tun",
        "/dev/vda",
        "/dev/mem",
        "/dev/fuse",
        "/dev/ptmx",
    ]
    for path in paths:
        if not os.path.isdir(path) and os.path.exists(path):
            yield f"read {path}"
            yield f"write {path}"
            yield f"chmod {path}"
    for path in (
        "/",
        "/etc",
        "/home",
        "/proc",
        "/var",
        "/tmp",
        f"{top}/state/containers",
        f"{top}/state/images",
        mine,
        "/dev",
    ):
        yield f"list {path}"
    for path in ("/tmp", "/var/tmp", "/dev/shm", "/run", "/dev", mine, f"{top}/run/vnc/{vm.short}"):
        yield f"create {path}/hostile"


def others_sockets(node: Any, libvirt: Any, vm: Any) -> Iterator[str]:
    top = node.directory
    found = [one for one in Path(top).rglob("*") if one.is_socket() and f"/{vm.short}/" in str(one)]
    assert len(found) >= 3, found  # console, agent, screen
    sockets = [path for path in libvirt.paths() if libvirt.seen(path).is_socket()]
    assert any(path.endswith("/monitor.sock") and vm.container[:11] in path for path in sockets), sockets
    for path in (*found, *sockets, f"{top}/run/virtshim.sock", f"{top}/run/tapmanager.sock", *_of_the_host()):
        yield f"connect {path}"


def _of_the_host() -> list[str]:
    known = ("/run/dbus/system_bus_socket", "/run/systemd/journal/dev-log", "/dev/log")
    return [path for path in known if os.path.exists(path)]


def others_taps(node: Any, attacker: Any, victim: Any) -> Iterator[str]:
    """Tries the victim's own key, which it should not know."""
    for vm in (attacker, victim):
        entry = json.loads(Path(node.directory, f"state/tapmanager/{vm.sandbox}.json").read_text())
        args = {"sandbox": vm.sandbox, "key": entry["fetch_key"]}
        frame = {"id": 1, "verb": "fetch", "args": args, "timeout": 5.0}
        yield f"fetch {node.directory}/run/tapmanager.sock {json.dumps(frame)}"


def processes(node: Any, vm: Any) -> Iterator[str]:
    daemons = node.daemons()
    for pid in (vm.pid, *daemons.values(), os.getpid(), 1):
        yield f"signal {pid}"
        yield f"pidfd {pid}"
        yield f"ptrace {pid}"
        for name in ("environ", "mem", "maps", "cmdline", "auxv", "io", "stack"):
            yield f"read /proc/{pid}/{name}"
        for name in ("fd", "task", "root", "cwd"):
            yield f"list /proc/{pid}/{name}"
    for name in (
        "mountinfo",
        "net/tcp",
        "net/unix",
        "net/route",
        "cgroup",
        "task/1/stat",
    ):  # of the node, or its other programs
        yield f"read /proc/self/{name}"
    address = Path(f"/proc/{vm.pid}/maps").read_text().split("-")[0]
    yield f"memory {vm.pid} {address}"


def network(port: int, abstract: str) -> Iterator[str]:
    for host in ("127.0.0.1", "169.254.169.254", "192.0.2.1"):
        yield f"tcp {host} {port}"
        yield f"udp {host} {port}"
    for family in (
        socket.AF_INET,
        socket.AF_INET6,
        socket.AF_NETLINK,
        socket.AF_PACKET,
        socket.AF_VSOCK,
        socket.AF_ALG,
    ):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
            yield f"family {int(family)} {int(kind)}"
    yield f"abstract {abstract}"


def kernel() -> Iterator[str]:
    yield "keyring "
    yield "io_uring "
