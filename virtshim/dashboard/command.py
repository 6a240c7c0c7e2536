"""`virtshim dashboard` serves the node's web page on loopback until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiohttp import web

from virtshim.dashboard.listening import ConnectionLimit, listening_sockets
from virtshim.dashboard.login import Sessions
from virtshim.dashboard.node_calls import NodeCalls
from virtshim.dashboard.pages import Pages, Place, assets_directory
from virtshim.dashboard.readings import Graphs
from virtshim.dashboard.watch import NodeWatch
from virtshim.system.logsetup import set_up_logging

# Seconds until an idle connection is closed. aiohttp's default is an hour.
_KEPT: Final = 30.0


@dataclass(frozen=True, slots=True)
class Served:
    """A running dashboard. `address` ends with a slash."""

    address: str
    sessions: Sessions
    watch: NodeWatch

    def login_url(self) -> str:
        """A new URL that works once. The earlier URL becomes void."""
        return f"{self.address}login?token={self.sessions.new_token()}"


def dashboard(cri_socket: str, port: int) -> None:
    """Serves until SIGINT or SIGTERM. Raises ShimError."""
    set_up_logging("warning", "auto")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_until_stopped(cri_socket, port))


async def _until_stopped(cri_socket: str, port: int) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    async with serving(cri_socket, port) as served:
        _say(f"dashboard: {served.login_url()}")
        _say(
            "dashboard: the URL works once; Enter prints another, Ctrl-C ends. From elsewhere: ssh -L PORT:127.0.0.1:PORT"
        )
        with _asked_for_another(served):
            await stopping.wait()


@contextlib.asynccontextmanager
async def serving(cri_socket: str, port: int, graphs: Graphs | None = None) -> AsyncIterator[Served]:
    """Serves the dashboard within the block. Its sessions end with the block. `graphs`: samples from before."""
    assets = assets_directory()
    node, sessions = NodeCalls(cri_socket), Sessions()
    watch = NodeWatch(node, host_facts, graphs=graphs)
    place = Place.of_this_run()
    runner = web.AppRunner(
        Pages(node, watch, sessions, assets, place).application(),
        access_log=None,
        shutdown_timeout=2,
        keepalive_timeout=_KEPT,
    )
    await runner.setup()
    looking = asyncio.ensure_future(watch.run())
    try:
        async with _listening(runner, port) as bound:
            yield Served(f"http://{place.host}:{bound}{place.path}/", sessions, watch)
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await runner.cleanup()
        node.close()


@contextlib.asynccontextmanager
async def _listening(runner: web.AppRunner, port: int) -> AsyncIterator[int]:
    """Listens within the block. Yields the port."""
    assert runner.server is not None, "it is set up"
    limited, loop = ConnectionLimit(runner.server), asyncio.get_running_loop()
    sockets = listening_sockets(port)
    listeners = [await loop.create_server(limited, sock=one) for one in sockets]
    try:
        yield sockets[0].getsockname()[1]
    finally:
        for listener in listeners:
            listener.close()


@contextlib.contextmanager
def _asked_for_another(served: Served) -> Iterator[None]:
    """Within the block, Enter in the terminal prints a new URL."""
    loop = asyncio.get_running_loop()

    def asked() -> None:
        if sys.stdin.readline():
            _say(f"dashboard: {served.login_url()}")
        else:
            loop.remove_reader(sys.stdin)

    if not sys.stdin.isatty():
        yield
        return
    loop.add_reader(sys.stdin, asked)
    try:
        yield
    finally:
        loop.remove_reader(sys.stdin)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


# Facts about the machine, which is the node that the dashboard shows.


def host_facts() -> Mapping[str, object]:
    """The facts by name. Facts that the machine does not provide are missing."""
    proc = Path("/proc")
    memory = _memory(proc / "meminfo")
    known: dict[str, object | None] = {
        "hostname": os.uname().nodename,
        "system": _system(),
        "kernel": os.uname().release,
        "cpus": os.cpu_count(),
        "cpuModel": _cpu_model(proc / "cpuinfo"),
        "memoryTotal": memory.get("MemTotal"),
        "memoryAvailable": memory.get("MemAvailable"),
        "swapTotal": memory.get("SwapTotal"),
        "load": _load(proc / "loadavg"),
        "uptime": _uptime(proc / "uptime"),
        "kvm": os.path.exists("/dev/kvm"),
    }
    return {name: value for name, value in known.items() if value is not None}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _memory(path: Path) -> dict[str, int]:
    """Values of /proc/meminfo in bytes."""
    found = {}
    for line in _text(path).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0]) << 10
    return found


def _cpu_model(path: Path) -> str | None:
    lines = (line.partition(":") for line in _text(path).splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "model name"), None)


def _load(path: Path) -> list[float] | None:
    words = _text(path).split()[:3]
    return [float(word) for word in words] if len(words) == 3 else None


def _uptime(path: Path) -> float | None:
    words = _text(path).split()
    return float(words[0]) if words else None


def _system() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None
