"""Measures the network's speed of a pod's VM beside bare QEMUs, whose taps are the host's own, bridged as in a pod, or
redirected by tc.

python -m tests.bench.net [ROUNDS]     these figures alone, on a node of their own, with a table of all ways"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    # Runs without pytest, whose `pythonpath` in pyproject.toml says the same.
    sys.path[:0] = [str(PROJECT / "deploy"), *(str(PROJECT / "tests" / one) for one in ("e2e", "bench"))]

import net_ways  # noqa: E402  needs the path above
from boot import boot_in_pod  # noqa: E402
from figures import Figures  # noqa: E402
from guest import console_of  # noqa: E402
from imageserver import serve_directory  # noqa: E402
from net_ways import Way  # noqa: E402
from node import Node  # noqa: E402
from own_node import own_node  # noqa: E402
from podclient import PodClient  # noqa: E402

from tapmanager.links import netns  # noqa: E402

_WARM, _SECONDS = 0.5, 2.0
_PATIENCE = 60.0
_SEVERAL = 2
_OUT, _IN, _TRIPS = KINDS = ("out", "in", "trips")
UNITS = {_OUT: "Mbit/s", _IN: "Mbit/s", _TRIPS: "1/s"}

# The number of frames at once, fewer than a tap's queue takes, and of repetitions, of which the best counts.
_FRAMES, _TIMES = 400, 20
_TUNSETIFF, _TAP_WITH_HEADER = 0x400454CA, 0x5002
_HEADER = bytes(10)

_Speeds = Mapping[str, float]


def net_rounds(cri: PodClient, node: Node, guest: str, file: Path, rounds: int, figures: Figures) -> None:
    """`guest`: the image's name for the node; `file`: where it is."""
    one_queue(cri, node, guest, file, rounds, figures)
    several_queues(cri, node, guest, file, rounds, figures)


def one_queue(cri: PodClient, node: Node, guest: str, file: Path, rounds: int, figures: Figures) -> None:
    with contextlib.ExitStack() as ending:
        ways = [ending.enter_context(_pod(cri, node, guest, 1))]
        (pod,) = node.qemu_pids()
        for name, commands in (("tap", net_ways.TAP), ("bridge", net_ways.BRIDGE), ("redirect", net_ways.REDIRECT)):
            ways.append(ending.enter_context(net_ways.bare_guest(name, file, commands, 1, pod)))
        for number, speeds in speeds_of(ways, rounds, 1):
            for way, found in speeds.items():
                for kind, speed in found.items():
                    figures.add(f"phase_net_{way}_{kind}", speed, UNITS[kind])
            for kind, key in zip(KINDS, ("net_ratio", "net_in_ratio", "net_trips_ratio"), strict=True):
                figures.add(key, speeds["pod"][kind] / speeds["tap"][kind], "ratio")
                figures.add(f"net_redirect_{kind}_ratio", speeds["redirect"][kind] / speeds["bridge"][kind], "ratio")
            _frames(number, figures)


def several_queues(cri: PodClient, node: Node, guest: str, file: Path, rounds: int, figures: Figures) -> None:
    """A NIC with several queues: as many vCPUs and connections as queues."""
    with contextlib.ExitStack() as ending:
        ways = [ending.enter_context(_pod(cri, node, guest, _SEVERAL))]
        (pod,) = node.qemu_pids()
        ways.append(ending.enter_context(net_ways.bare_guest("tap", file, net_ways.TAP, _SEVERAL, pod)))
        for _, speeds in speeds_of(ways, rounds, _SEVERAL):
            for kind in (_OUT, _IN):
                figures.add(f"phase_net_2_queues_{kind}", speeds["pod"][kind], UNITS[kind])
                figures.add(f"net_2_queues_{kind}_ratio", speeds["pod"][kind] / speeds["tap"][kind], "ratio")


def speeds_of(ways: Sequence[Way], rounds: int, queues: int) -> Iterator[tuple[int, Mapping[str, _Speeds]]]:
    """The speed of each way, with as many connections as queues. The order alternates from round to round, and each kind
    is measured on all ways before the next."""
    for way in ways:
        _bring_program(way)
    for number in range(1, rounds + 1):
        first = number % len(ways)
        speeds: dict[str, dict[str, float]] = {way.name: {} for way in ways}
        for kind in KINDS:
            for way in (*ways[first:], *ways[:first]):
                speeds[way.name][kind] = _speed(way, kind, queues)
        yield number, speeds


@contextlib.contextmanager
def _pod(cri: PodClient, node: Node, guest: str, queues: int) -> Iterator[Way]:
    asked = {"VirtletVCPUCount": str(queues)}
    with boot_in_pod(cri, node, guest, f"net-{queues}", {}, asked) as (container, _):
        # The bridge's own address is the guest's gateway.
        gateway = f"{node.pod_cidr.rsplit('.', 1)[0]}.1"
        yield Way("pod", gateway, console_of(node, container), net_ways.listening)


def _bring_program(way: Way) -> None:
    """Copies net_io into the guest over its own connection."""
    with tempfile.TemporaryDirectory(prefix="bench-net-", dir="/var/tmp") as directory:
        program = Path(directory, "net_io")
        subprocess.run(["gcc", "-static", "-O2", "-o", program, Path(__file__).with_name("net_io.c")], check=True)
        content = program.read_bytes()
    with way.listener() as listener:
        listener.settimeout(_PATIENCE)
        # nc's input stays open: behind passt of 2023 nothing more arrives on a connection that the guest has closed for writing.
        way.console.type(f"{{ mkfifo /open; nc {way.host} {_port(listener)} <> /open > /net_io & }}")
        connection, _ = listener.accept()
        with connection:
            connection.sendall(content)
    way.console.type("wait; chmod 0755 /net_io")


def _port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def _speed(way: Way, kind: str, count: int) -> float:
    """Megabits per second over all connections, or round trips of one byte per second on one connection."""
    count = 1 if kind == _TRIPS else count
    with way.listener() as listener, contextlib.ExitStack() as ending:
        listener.settimeout(_PATIENCE)
        does = "echo" if kind == _TRIPS else kind
        way.console.type(f"{{ /net_io {way.host} {_port(listener)} {does} {count} > /dev/null 2>&1 & }}")
        made = [ending.enter_context(listener.accept()[0]) for _ in range(count)]
        for one in made:
            one.settimeout(_PATIENCE)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        work = {_OUT: _take, _IN: _send, _TRIPS: _trip}[kind]
        work(made, _WARM)
        started = time.monotonic()
        done = work(made, _SECONDS)
        speed = done / (time.monotonic() - started)
    return speed if kind == _TRIPS else speed * 8 / 1e6


def _take(made: Sequence[socket.socket], seconds: float) -> int:
    buffer, total, until = bytearray(1 << 20), 0, time.monotonic() + seconds
    while time.monotonic() < until:
        for one in select.select(made, [], [], 1.0)[0]:
            total += one.recv_into(buffer)
    return total


def _send(made: Sequence[socket.socket], seconds: float) -> int:
    data, total, until = bytes(1 << 18), 0, time.monotonic() + seconds
    for one in made:
        one.setblocking(False)
    while time.monotonic() < until:
        for one in select.select([], made, [], 1.0)[1]:
            total += one.send(data)
    return total


def _trip(made: Sequence[socket.socket], seconds: float) -> int:
    (one,), total, until = made, 0, time.monotonic() + seconds
    while time.monotonic() < until:
        one.send(b"x")
        one.recv(1)
        total += 1
    return total


def _frames(number: int, figures: Figures) -> None:
    """The kernel's time for a frame, without a guest, because emulation hides most of it."""
    ways = {"bridge": net_ways.BRIDGE, "redirect": net_ways.REDIRECT}
    with contextlib.ExitStack() as ending:
        ready = {name: ending.enter_context(_frame_work(commands)) for name, commands in ways.items()}
        taken: dict[tuple[str, str], list[float]] = {}
        for time_of in range(_TIMES):
            for name in list(ways)[:: 1 if (number + time_of) % 2 else -1]:
                for way, work in ready[name].items():
                    taken.setdefault((name, way), []).append(work())
    for (name, way), times in taken.items():
        figures.add(f"phase_net_frame_{name}_{way}_ns", statistics.median(times), "ns")
    for way in (_OUT, _IN):
        pairs = zip(taken["redirect", way], taken["bridge", way], strict=True)
        figures.add(f"net_redirect_frame_{way}_ratio", statistics.median(a / b for a, b in pairs), "ratio")


@contextlib.contextmanager
def _frame_work(commands: tuple[str, ...]) -> Iterator[Mapping[str, Callable[[], float]]]:
    """Nanoseconds per frame: for a write to the tap that ends at the host's socket, and for a send that ends in the
    tap's queue."""
    with net_ways.laid(commands) as spaces, contextlib.ExitStack() as ending:
        tap = netns.run_inside(f"/run/netns/{spaces.inner}", _open_tap)
        ending.callback(os.close, tap)
        sender = ending.enter_context(spaces.at_host(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)))
        taker = ending.enter_context(spaces.at_host(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)))
        taker.bind((net_ways.HOST, 9))
        guest = ["neighbour", "replace", net_ways.GUEST, "lladdr", "02:00:00:00:00:02", "dev", "host0"]
        subprocess.run(["ip", "-n", spaces.outer, *guest], check=True)
        mac = subprocess.run(
            ["ip", "netns", "exec", spaces.outer, "cat", "/sys/class/net/host0/address"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        frame = _HEADER + _datagram(bytes.fromhex(mac.replace(":", "")))

        def out() -> float:
            started = time.perf_counter_ns()
            for _ in range(_FRAMES):
                os.write(tap, frame)
            took = (time.perf_counter_ns() - started) / _FRAMES
            taken = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    taken += len(taker.recv(64, socket.MSG_DONTWAIT)) > 0
            assert taken, "no frame has passed"
            return took

        def into() -> float:
            started = time.perf_counter_ns()
            for _ in range(_FRAMES):
                sender.sendto(b"x" * 18, (net_ways.GUEST, 9))
            took = (time.perf_counter_ns() - started) / _FRAMES
            taken = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    taken += len(os.read(tap, 2048)) > 0
            assert taken >= _FRAMES, f"{taken} of {_FRAMES} frames have passed"
            return took

        yield {_OUT: out, _IN: into}


def _open_tap() -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", b"tap0", _TAP_WITH_HEADER))
    return fd


def _datagram(to: bytes) -> bytes:
    """A small UDP datagram of the guest, without a checksum."""
    payload = struct.pack("!HHHH", 9, 9, 26, 0) + bytes(18)
    addresses = socket.inet_aton(net_ways.GUEST) + socket.inet_aton(net_ways.HOST)
    words = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(payload), 0, 0, 64, socket.IPPROTO_UDP, 0) + addresses
    total = sum(struct.unpack("!10H", words))
    total = (total & 0xFFFF) + (total >> 16)
    checksum = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
    header = words[:10] + struct.pack("!H", checksum) + words[12:]
    return to + bytes.fromhex("020000000002") + b"\x08\x00" + header + payload


def table(figures: Figures) -> str:
    """A table of all ways: medians and spread."""
    found = figures.document()
    columns = (*((kind, "phase_net_{}_" + kind, UNITS[kind]) for kind in KINDS),
               *((f"frame {way}", "phase_net_frame_{}_" + f"{way}_ns", "ns") for way in (_OUT, _IN)))  # fmt: skip
    lines = ["".join(f"{title:>26}" for title in ("", *(f"{title} ({unit})" for title, _, unit in columns)))]
    for way in ("tap", "pod", "bridge", "redirect"):
        cells = [f"{way:>26}"]
        for _, key, _ in columns:
            figure = found.get(key.format(way))
            cells.append(
                f"{figure['median']:.0f} ({figure['min']:.0f}-{figure['max']:.0f})".rjust(26)
                if figure
                else "".rjust(26)
            )
        lines.append("".join(cells))
    return "\n".join(lines)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    figures, guest = Figures(), PROJECT / "build" / "guest.qcow2"
    with own_node() as (node, _), serve_directory(guest.parent) as url, PodClient(node.socket) as cri:
        net_rounds(cri, node, f"{url.removeprefix('http://')}/{guest.name}", guest, rounds, figures)
    figures.tell()
    print(table(figures))


if __name__ == "__main__":
    main()
