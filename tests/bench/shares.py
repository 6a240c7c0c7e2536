"""Measures what volumes cost: a share's start and memory, its speed beside the same virtiofsd run by hand, and the boot
with shared memory.

python -m tests.bench.shares [ROUNDS]     these figures alone, on a node of their own"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    # Runs without pytest, whose `pythonpath` in pyproject.toml says the same.
    sys.path[:0] = [str(PROJECT / "deploy"), *(str(PROJECT / "tests" / one) for one in ("e2e", "bench"))]

from boot import boot_in_pod  # noqa: E402  needs the path above
from console import SerialConsole  # noqa: E402
from figures import Figures, timed  # noqa: E402
from imageserver import serve_directory  # noqa: E402
from node import Node  # noqa: E402
from own_node import own_node  # noqa: E402
from podclient import PodClient, wait_until  # noqa: E402

from tapmanager import protocol  # noqa: E402
from tapmanager.shares import plan  # noqa: E402

_STARTS = 5  # of a share, in a round
_PATIENCE = 120.0
_AT = "/mnt/share"  # in guests
_RUN = f"{_AT}/share_io {_AT}/data > {_AT}/saying; mv {_AT}/saying {_AT}/said"


def share_rounds(cri: PodClient, node: Node, guest: str, file: Path, rounds: int, figures: Figures) -> None:
    """`guest`: the image's name for the node; `file`: where it is."""
    with tempfile.TemporaryDirectory(prefix="bench-shares-", dir="/var/tmp") as directory:
        program = Path(directory, "share_io")
        source = Path(__file__).with_name("share_io.c")
        subprocess.run(["gcc", "-static", "-O2", "-o", program, source], check=True)
        for number in range(1, rounds + 1):
            _starts(node, directory, figures)
            _boots(cri, node, guest, directory, number, figures)
            _speed(cri, node, guest, file, directory, number, figures)


def _starts(node: Node, volume: str, figures: Figures) -> None:
    """Milliseconds from the call until QEMU may connect."""
    path = f"{node.directory}/run/shares.sock"
    for _ in range(_STARTS):
        container = secrets.token_hex(32)
        with tempfile.TemporaryDirectory(prefix="bench-share-", dir="/var/tmp") as directory:
            mounts = [{"host_path": volume, "readonly": False, "follows": False}]
            args = {"directory": directory, "container": container, "uid": 0, "parent": "/virtshim", "mounts": mounts}
            figures.add("share_start_ms", timed(lambda args=args: protocol.call(path, "share", args, 60)), "ms")
            protocol.call(path, "unshare", {"directory": directory, "name": container[:20]}, 60)


def _boots(cri: PodClient, node: Node, guest: str, volume: str, number: int, figures: Figures) -> None:
    """Boots with a volume, and so with shared memory, and without one; the order alternates from round to round."""
    took = {}
    for at in (volume, "") if number % 2 else ("", volume):
        with boot_in_pod(cri, node, guest, f"shares-{number}-{bool(at)}", {_AT: at} if at else {}) as (_, took[at]):
            if at:
                figures.add("share_rss_mib", sum(map(_rss, _daemons(f"{node.directory}/run/shares"))) / 1024, "MiB")
    figures.add("share_boot_ratio", took[volume] / took[""], "ratio")


def _speed(cri: PodClient, node: Node, guest: str, file: Path, directory: str, number: int, figures: Figures) -> None:
    """The speed of each, measured alone."""

    def in_a_pod() -> tuple[float, float]:
        with boot_in_pod(cri, node, guest, f"io-{number}", {_AT: directory}) as (container, _):
            wait_until(
                lambda: cri.exec_sync(container, "ls", f"{_AT}/share_io").exit_code == 0, _PATIENCE, "the volume"
            )
            # The test does not wait for its end in the guest, which would take the guest's time.
            cri.exec_sync(container, "sh", "-c", f"({_RUN}) >/dev/null 2>&1 &")
            return _told(directory)

    def by_hand() -> tuple[float, float]:
        with _guest_by_hand(file, directory) as console:
            console.type(f"mkdir -p {_AT}; mount -t virtiofs {plan.ROOT} {_AT}; {{ ({_RUN}) & }}")
            return _told(directory)

    if number % 2:
        ours, bare = in_a_pod(), by_hand()
    else:
        bare, ours = by_hand(), in_a_pod()
    figures.add("share_io_ratio", ours[0] / bare[0], "ratio")
    figures.add("share_io_random_ratio", ours[1] / bare[1], "ratio")
    figures.add("phase_share_io_ms", ours[0] / 1000, "ms")
    figures.add("phase_share_io_random_ms", ours[1] / 1000, "ms")


def _told(directory: str) -> tuple[float, float]:
    """Microseconds: of all by the MiB, of the places."""
    said = Path(directory, "said")
    wait_until(said.exists, _PATIENCE, "it has been through")
    whole, random = said.read_text().split()
    said.unlink()
    return float(whole), float(random)


@contextlib.contextmanager
def _guest_by_hand(image: Path, volume: str) -> Iterator[SerialConsole]:
    """QEMU with virtiofsd, set up as its documentation shows."""
    with contextlib.ExitStack() as ending:
        directory = ending.enter_context(tempfile.TemporaryDirectory(prefix="bare-share-", dir="/var/tmp"))
        disk, console, called = (f"{directory}/{name}" for name in ("disk", "console", "fs.sock"))
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", image, "-F", "qcow2", disk], check=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(called)
            listener.listen(1)
            program = next(one for one in plan.PROGRAMS if os.access(one, os.X_OK))
            told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
            words = plan.command_line(program, listener.fileno(), volume, rust=plan.is_rust(told))
            _started(ending, [*words], listener.fileno())
        _started(ending, [
            "qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-m", "128", "-display", "none", "-nodefaults",
            "-machine", "q35,memory-backend=mem", "-object", "memory-backend-memfd,id=mem,size=128M,share=on",
            "-no-user-config", "-drive", f"file={disk},format=qcow2,if=virtio",
            "-chardev", f"socket,id=fs,path={called}", "-device", f"vhost-user-fs-pci,chardev=fs,tag={plan.ROOT}",
            "-serial", f"unix:{console},server,nowait",
        ])  # fmt: skip
        wait_until(lambda: os.path.exists(console), _PATIENCE, "QEMU runs")
        yield SerialConsole(console)


def _started(ending: contextlib.ExitStack, words: list[str], *keep: int) -> None:
    process = subprocess.Popen(words, pass_fds=keep, stderr=subprocess.DEVNULL)
    ending.callback(process.wait)
    ending.callback(process.kill)


def _daemons(directory: str) -> list[int]:
    """The processes that serve volumes below that directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes()
            if b"virtiofsd" in command and directory.encode() in command:
                found.append(int(path.parent.name))
    return found


def _rss(pid: int) -> int:
    """KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    figures, guest = Figures(), PROJECT / "build" / "guest.qcow2"
    with own_node() as (node, _), serve_directory(guest.parent) as url, PodClient(node.socket) as cri:
        share_rounds(cri, node, f"{url.removeprefix('http://')}/{guest.name}", guest, rounds, figures)
    print(json.dumps(figures.document(), indent=2))


if __name__ == "__main__":
    main()
