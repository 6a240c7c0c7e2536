"""Measures pulls by parallel connections beside pulls by one, from a real registry over emulated links with latency and
loss.

python -m tests.bench.parallel_pull [ROUNDS]     a table of all links, with each congestion control that the kernel has

The link is emulated packet by packet, because many kernels lack netem: each end is a TUN device in a network namespace of its
own, and a process carries the packets between them with a delay, random losses, a rate and a bounded queue. TCP at both ends is
the kernel's."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import json
import os
import random
import secrets
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

PROJECT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    # Runs without pytest, whose `pythonpath` in pyproject.toml says the same.
    sys.path[:0] = [str(PROJECT), str(PROJECT / "deploy"), str(PROJECT / "tests" / "bench")]

from figures import Figures  # noqa: E402  needs the path above
from imageserver import push_container_disk, registry  # noqa: E402

from tapmanager.links import netns  # noqa: E402
from virtshim.images.downloads import parallel  # noqa: E402
from virtshim.images.filestore import ImageFileStore, ImageSettings  # noqa: E402

_SERVER, _CLIENT, _PORT = "10.99.0.1", "10.99.0.2", 5000
_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001


@dataclass(frozen=True, slots=True)
class Link:
    """`delay`: one way, in seconds. `loss`: of each packet, either way. `rate`: bits a second, 0: no limit. `queue`: seconds that
    a packet waits for its turn at most; beyond, it is dropped. `control`: the server's congestion control."""

    delay: float = 0.0
    loss: float = 0.0
    rate: float = 0.0
    queue: float = 0.05
    control: str = "cubic"
    is_veth: bool = False

    def __str__(self) -> str:
        how = "veth" if self.is_veth else f"{self.delay * 2000:g} ms, {self.loss:.1%}"
        return f"{how}, {self.control}"

    @property
    def is_slow(self) -> bool:
        """To one connection: CUBIC takes each loss for a sign of congestion."""
        return self.loss > 0 and self.control == "cubic"

    @property
    def size(self) -> int:
        """MiB that are pulled. If one connection leaves less than 64 MiB after its first seconds, no more are tried."""
        return 1024 if self.is_veth else 67 if self.is_slow and self.loss >= 0.01 else 200


CLEAN = Link(is_veth=True)
LOSSY = Link(delay=0.025, loss=0.01, rate=1e8)
LINKS = (CLEAN, replace(LOSSY, delay=0.01, loss=0), replace(LOSSY, loss=0.001), LOSSY, replace(LOSSY, delay=0.05))


def parallel_pull_rounds(directory: Path, rounds: int, figures: Figures) -> None:
    stored = _published(directory, CLEAN.size, LOSSY.size)
    for key, link in (("parallel_pull_clean_gain", CLEAN), ("parallel_pull_gain", LOSSY)):
        for gain in _gains(stored, link, rounds):
            figures.add(key, gain, "ratio")


def _gains(stored: Path, link: Link, rounds: int) -> list[float]:
    """Rounds of a slow link run at once, each over a link of its own: they take minutes, and little of the machine."""
    with ThreadPoolExecutor(rounds if link.is_slow else 1) as turns:
        return list(turns.map(lambda number: _gain(stored, link, number), range(rounds)))


def _gain(stored: Path, link: Link, number: int) -> float:
    """Each pull has a link of its own: TCP remembers how the last connection to an address went."""
    took: dict[bool, float] = {}
    for alone in (True, False) if number % 2 else (False, True):
        with laid(link) as spaces, _serving(stored, spaces["server"]), tempfile.TemporaryDirectory(dir=stored) as to:
            words = (sys.executable, __file__, "pull", f"{_SERVER}:{_PORT}/disk{link.size}", to, str(int(alone)))
            found = json.loads(subprocess.run(_inside(spaces["client"], *words), check=True, stdout=-1).stdout)
        took[alone] = found["seconds"]
        how = "one connection" if alone else "several" if found["several"] else "several not tried"
        speed = link.size * 8.39 / took[alone]
        print(f"{link}: {link.size} MiB, {how}: {took[alone]:.1f} s, {speed:.1f} Mbit/s", file=sys.stderr)
    return took[True] / took[False]


def _pull(name: str, directory: str, *, alone: bool) -> None:
    """As the daemon does; `alone`: by one connection, whatever its speed."""
    store = ImageFileStore(directory, ImageSettings(insecure_registries=(f"{_SERVER}:{_PORT}",)))
    store.sweep()
    with contextlib.ExitStack() as patched, contextlib.redirect_stdout(sys.stderr):
        if alone:
            patched.enter_context(mock.patch.object(parallel.Trial, "is_waited_for", return_value=False))
        where = "virtshim.images.downloads.resumed.by_several"
        several = patched.enter_context(mock.patch(where, wraps=parallel.by_several))
        started = time.monotonic()
        store.fetch(name, None, threading.Event())
        seconds = time.monotonic() - started
    print(json.dumps({"seconds": seconds, "several": several.called}))


def _published(directory: Path, *sizes: int) -> Path:
    """Images of a disk that does not pack, one of each size, in a registry's directory."""
    stored, disk = directory / "registry", directory / "disk.img"
    stored.mkdir()
    with registry(directory=stored) as server:
        for size in sizes:
            with disk.open("wb") as file:
                for _ in range(size):
                    file.write(os.urandom(1 << 20))
                file.seek(0)
                file.write(b"\xeb\x3c")  # no text, which some random bytes begin as
            push_container_disk(server.address, f"disk{size}", disk)
            disk.unlink()
    config = json.loads((stored / "config.yml").read_text())
    config["http"]["addr"] = f"{_SERVER}:{_PORT}"
    (stored / "config.yml").write_text(json.dumps(config))
    return stored


@contextlib.contextmanager
def _serving(stored: Path, space: str) -> Iterator[None]:
    words = _inside(space, "docker-registry", "serve", str(stored / "config.yml"))
    process = subprocess.Popen(words, stdout=-3, stderr=-3, env=os.environ | {"OTEL_TRACES_EXPORTER": "none"})
    try:
        until = time.monotonic() + 20
        while True:
            try:
                netns.run_inside(f"/run/netns/{space}", lambda: socket.create_connection((_SERVER, _PORT), 1)).close()
                break
            except OSError:
                assert time.monotonic() < until, "docker-registry does not answer"
                time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def laid(link: Link) -> Iterator[Mapping[str, str]]:
    """The namespaces of server and client, by these words."""
    tag = secrets.token_hex(3)
    spaces = {one: f"vsb-{tag}-{one[0]}" for one in ("server", "client")}
    with contextlib.ExitStack() as undo:
        for space in spaces.values():
            _ip("netns", "add", space)
            undo.callback(_ip, "netns", "del", space)
        ends: tuple[int, ...] = ()
        if link.is_veth:
            _ip("-n", spaces["server"], *f"link add link0 type veth peer name link0 netns {spaces['client']}".split())
        else:
            ends = tuple(netns.run_inside(f"/run/netns/{space}", _open_tun) for space in spaces.values())
            for end in ends:
                undo.callback(os.close, end)
        for space, own, other in ((spaces["server"], _SERVER, _CLIENT), (spaces["client"], _CLIENT, _SERVER)):
            _ip("-n", space, "address", "add", own, "peer", other, "dev", "link0")
            for device in ("lo", "link0"):
                _ip("-n", space, "link", "set", device, "up")
        # By the route, because a namespace's default may only be what the machine allows everybody.
        _ip("-n", spaces["server"], *f"route replace {_CLIENT} dev link0 src {_SERVER} congctl {link.control}".split())
        if ends:
            numbers = map(str, (*ends, link.delay, link.loss, link.rate, link.queue))
            carrier = subprocess.Popen([sys.executable, __file__, "carry", *numbers], stdout=-1, pass_fds=ends)
            undo.enter_context(carrier)
            undo.callback(carrier.kill)
            assert carrier.stdout
            assert carrier.stdout.readline() == b"ready\n"
        yield spaces


def _open_tun() -> int:
    """Without a header, so without offloads: each packet is as the wire would have it."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", b"link0", _TUN_WITHOUT_HEADER))
    return fd


def carry(ends: tuple[int, int], link: Link) -> None:
    """Packets from each end to the other, until the process is killed. It goes before what else the machine does, because a
    packet that waits for the processor has another delay than the link's."""
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    targets = dict(zip(ends, reversed(ends), strict=True))
    # What is on its way, with the time of its arrival; and when the link has sent all that it was given.
    under_way: dict[int, collections.deque[tuple[float, bytes]]] = {end: collections.deque() for end in ends}
    free = dict.fromkeys(ends, 0.0)
    print("ready", flush=True)
    while True:
        now = time.monotonic()
        for end, packets in under_way.items():
            while packets and packets[0][0] <= now:
                os.write(targets[end], packets.popleft()[1])
        arrivals = [packets[0][0] for packets in under_way.values() if packets]
        ready, _, _ = select.select(ends, (), (), max(0.0, min(arrivals) - time.monotonic()) if arrivals else None)
        for end in ready:
            packet, now = os.read(end, 2048), time.monotonic()
            free[end] = max(free[end], now)
            if random.random() >= link.loss and free[end] - now <= link.queue:
                free[end] += len(packet) * 8 / link.rate if link.rate else 0.0
                under_way[end].append((free[end] + link.delay, packet))


def ceiling() -> float:
    """Megabits a second of one connection over a link without delay, loss and limit: what the emulation itself can carry."""
    with laid(Link()) as spaces, contextlib.ExitStack() as ending:
        at = {one: f"/run/netns/{space}" for one, space in spaces.items()}
        listener = ending.enter_context(netns.run_inside(at["server"], lambda: socket.create_server((_SERVER, 0))))
        address = listener.getsockname()
        taker = ending.enter_context(netns.run_inside(at["client"], lambda: socket.create_connection(address, 10)))
        giver, _ = listener.accept()
        sending = threading.Thread(target=giver.sendall, args=(bytes(128 << 20),))
        started, came = time.monotonic(), 0
        sending.start()
        while came < 128 << 20:
            came += len(taker.recv(1 << 20))
        sending.join()
        giver.close()
        return came * 8 / (time.monotonic() - started) / 1e6


def _inside(space: str, *words: str) -> list[str]:
    return ["ip", "netns", "exec", space, *words]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    controls = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    figures = Figures()
    print(f"the emulation alone: {ceiling():.0f} Mbit/s", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-links-", dir="/var/tmp") as directory:
        stored = _published(Path(directory), *{link.size for link in LINKS})
        for control in ("cubic", "bbr"):
            for link in (replace(link, control=control) for link in LINKS if control in controls):
                for gain in _gains(stored, link, rounds):
                    figures.add(str(link), gain, "ratio")
    figures.tell()


if __name__ == "__main__":
    if sys.argv[1:2] == ["carry"]:
        ours, theirs, *numbers = sys.argv[2:]
        carry((int(ours), int(theirs)), Link(*map(float, numbers)))  # type: ignore[arg-type]
    elif sys.argv[1:2] == ["pull"]:
        _pull(sys.argv[2], sys.argv[3], alone=sys.argv[4] == "1")
    else:
        main()
