"""Collects data of the daemons: threads, logs, answers to CRI calls, and `virtshim check`."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

from tapmanager import thread_dump
from virtshim.cli.diag.gather import File, Node
from virtshim.cli.diag.programs import file_text, said
from virtshim.model.errors import InternalError
from virtshim.system.files import lock_holder
from virtshim.system.process import run

_PATIENCE: Final = 5.0
_UNITS: Final = (
    "virtshim",
    "tapmanager",
    "virtshim-shares",
    "virtshim-proxy",
    "virtshim-device-plugin",
    "virtshim-agent",
    "virtshim-guests",
)
_OTHER_UNITS: Final = ("libvirtd", "virtqemud", "virtlogd", "containerd", "crio", "kubelet")
# Not `systemctl status`: it lists the command lines of all processes in a unit's cgroup, e.g. other people's VMs in libvirtd's.
_OF_A_UNIT: Final = (
    "Id,LoadState,ActiveState,SubState,Result,UnitFileState,FragmentPath,DropInPaths,MainPID,NRestarts,ExecMainStatus,"
    "ActiveEnterTimestamp,MemoryCurrent,TasksCurrent"
)
_LINES: Final = "20000"


def sockets(node: Node) -> dict[str, str]:
    """The socket of each daemon. The daemon is the process that holds the lock beside its socket."""
    mine = node.settings
    return {
        "virtshim": mine.cri_socket,
        "tapmanager": mine.tapmanager.socket,
        "virtshim-shares": mine.shares.socket,
        "virtshim-proxy": mine.proxy_socket,
    }


def threads(node: Node) -> Iterator[File]:
    """The stack of each thread of the daemons: in Python, which the daemon itself reports, and in the kernel."""
    for name, socket in sockets(node).items():
        pid = lock_holder(f"{socket}.lock")
        if pid <= 1:
            yield f"{name}.txt", f"{name} does not run: no process holds {socket}.lock\n"
            continue
        yield f"{name}.txt", f"process {pid}\n\n{python_threads(pid, socket)}"
        yield f"{name}-kernel.txt", _kernel_threads(pid)
        yield f"{name}-files.txt", _descriptors(pid)


def python_threads(pid: int, socket: str, patience: float = _PATIENCE) -> str:
    """The stacks that the daemon reports on a signal. Sends it only to a process that has a handler, because it would kill
    any other."""
    path = thread_dump.path_of(socket)
    try:
        process = os.pidfd_open(pid)
    except OSError as exc:
        return f"the daemon has just ended: {exc.strerror}\n"
    try:
        if not catches(pid, thread_dump.SIGNAL) or lock_holder(f"{socket}.lock") != pid:
            return "the daemon's version does not report its threads, or the daemon is just starting\n"
        before = _identity(path)
        signal.pidfd_send_signal(process, thread_dump.SIGNAL)
        until, never = time.monotonic() + patience, threading.Event()
        while _identity(path) == before:
            if time.monotonic() > until:
                return f"no answer within {patience:g} s: the main thread hangs outside of Python\n"
            never.wait(0.02)
        return file_text(path)
    finally:
        os.close(process)


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal."""
    status = dict(line.split(":\t", 1) for line in file_text(f"/proc/{pid}/status").splitlines() if ":\t" in line)
    return bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


def _identity(path: str) -> tuple[int, int] | None:
    """The file's identity, which changes with each dump."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _kernel_threads(pid: int) -> str:
    parts = []
    for task in sorted(os.listdir(f"/proc/{pid}/task"), key=int):
        place, lines = f"/proc/{pid}/task/{task}", [f"thread {task}"]
        for name in ("comm", "wchan", "syscall", "stack"):
            with contextlib.suppress(OSError):
                lines.append(f"  {name}: {file_text(f'{place}/{name}', 4096).strip()}")
        with contextlib.suppress(OSError):
            lines += [
                f"  {line}"
                for line in file_text(f"{place}/status").splitlines()
                if line.startswith(("State", "volun", "nonvol"))
            ]
        parts.append("\n".join(lines))
    return "\n".join(parts) + "\n"


def _descriptors(pid: int) -> str:
    lines = []
    for name in sorted(os.listdir(f"/proc/{pid}/fd"), key=int):
        with contextlib.suppress(OSError):
            lines.append(f"{name} -> {os.readlink(f'/proc/{pid}/fd/{name}')}")
    return f"{len(lines)} open\n" + file_text(f"/proc/{pid}/limits") + "\n".join(lines) + "\n"


def logs(node: Node) -> Iterator[File]:
    """Logs of the daemons, from the journal or the files of `up`, and of the kernel. Never a guest's console or a container's
    log, because what guests print is private."""
    yield "kernel.txt", said("dmesg", "--ctime")
    if node.directory:
        for path in sorted(glob.glob(f"{glob.escape(node.directory)}/log/*")):
            yield os.path.basename(path), file_text(path, 4 << 20)
        return
    for unit in (*_UNITS, *_OTHER_UNITS):
        lines = _LINES if unit in _UNITS else "2000"
        yield (
            f"{unit}.txt",
            said("journalctl", "--no-pager", "--output=short-iso-precise", "--lines", lines, "--unit", unit),
        )
    yield (
        "units.txt",
        said("systemctl", "show", "--no-pager", f"--property={_OF_A_UNIT}", *_UNITS, *_OTHER_UNITS),
    )


def check(node: Node) -> Iterator[File]:
    """Output of `virtshim check`, run as a child process, which can be killed if it hangs."""
    command = [sys.executable, "-m", "virtshim", "check", "--json"]
    command += ["--config", node.config_file] if os.path.exists(node.config_file) else []
    for name, more in (("findings", []), ("devices", ["--devices"])):
        finished = run([*command, *more], timeout=40, name="virtshim check")
        try:
            yield f"{name}.json", json.dumps(json.loads(finished.stdout), indent=2) + "\n"
        except ValueError as exc:
            raise InternalError(f"virtshim check: {finished.summary()}") from exc


def cri(node: Node) -> Iterator[File]:
    """The node's answers to kubelet: version, conditions, unfinished work, pods, containers and images."""
    import grpc
    from google.protobuf.json_format import MessageToDict
    from google.protobuf.message import Message

    from criproto.runtime_v1 import api_pb2 as pb
    from criproto.runtime_v1 import api_pb2_grpc
    from virtshim.cri.channel import SHOW_ADOPTED

    with grpc.insecure_channel(f"unix:{node.settings.cri_socket}") as channel:
        runtime, images = api_pb2_grpc.RuntimeServiceStub(channel), api_pb2_grpc.ImageServiceStub(channel)
        calls: dict[str, tuple[Any, Message]] = {
            "version": (runtime.Version, pb.VersionRequest()),
            "status": (runtime.Status, pb.StatusRequest(verbose=True)),
            "pods": (runtime.ListPodSandbox, pb.ListPodSandboxRequest()),
            "containers": (runtime.ListContainers, pb.ListContainersRequest()),
            "images": (images.ListImages, pb.ListImagesRequest()),
        }
        for name, (call, request) in calls.items():
            try:
                answer = node.secrets.answer(MessageToDict(call(request, timeout=10, metadata=SHOW_ADOPTED)))
            except grpc.RpcError as exc:
                yield f"{name}.txt", f"{exc}\n"
            else:
                yield f"{name}.json", json.dumps(answer, indent=2) + "\n"
