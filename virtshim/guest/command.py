"""Commands in guests: how they are made from a container's config, their results, stop signals and termination
messages. Pure."""

from __future__ import annotations

import dataclasses
import json
import posixpath
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from virtshim.devices.guest_view import guest_environment
from virtshim.model.container import Container, Exit, ExitReason, Mount, RunAs
from virtshim.model.errors import InvalidRequest
from virtshim.model.image import ImageConfig
from virtshim.streaming.ports import Output

# The termination message, which kubelet shows in the pod's status.

PATH_ANNOTATION: Final = "io.kubernetes.container.terminationMessagePath"
# kubelet reads this many bytes from the file's end.
MAX_MESSAGE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class TerminationFile:
    """`guest`: the path to which the container's command writes. `host`: kubelet's file, which exists before the
    container."""

    guest: str
    host: str


def termination_file(annotations: Mapping[str, str], mounts: Iterable[Mount]) -> TerminationFile | None:
    """kubelet names the path in an annotation, and mounts its own file there. That mount comes after the pod's volumes,
    one of which may have the same path."""
    path = annotations.get(PATH_ANNOTATION, "")
    if not posixpath.isabs(path) or not path.isprintable():
        return None
    path = posixpath.normpath(path)
    there = [mount for mount in mounts if posixpath.normpath(mount.container_path) == path]
    if not there or there[-1].readonly:
        return None
    host = there[-1].host_path
    return TerminationFile(path, host) if posixpath.isabs(host) and "\0" not in host else None


# A command in a container's guest, and its result.

# The environment of a shell without settings, because images of virtual machines do not define a PATH.
PATH: Final = (("PATH", b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),)


def exec_port(number: int) -> str:
    """The name of the virtio-serial port in the guest. `Layout.exec_socket` is its other end."""
    return f"virtshim.exec.{number}"


@dataclass(frozen=True, slots=True)
class GuestCommand:
    """`argv`: not passed to a shell. `envs`: the whole environment. `working_dir`: "" for the agent's. For a
    container's own command: `termination_path`: the file made for its termination message, "" for none; `stdin` and
    `tty`: whether it has an input, which stays open, and a terminal; `readonly_root`: whether it cannot write to the
    guest's root. `input`: the whole input of a command that somebody waits for."""

    argv: tuple[str, ...]
    envs: tuple[tuple[str, bytes], ...] = field(default=(), repr=False)
    working_dir: str = ""
    user: RunAs = RunAs()
    termination_path: str = ""
    stdin: bool = False
    tty: bool = False
    readonly_root: bool = False
    input: bytes = b""

    def __post_init__(self) -> None:
        if not self.argv or not self.argv[0]:
            raise InvalidRequest("the command is empty: name a program in cmd")
        if any("\0" in word for word in (*self.argv, self.working_dir, self.user.user)):
            raise InvalidRequest("the command (cmd), its directory or its user contains a NUL character: remove it")

    def __repr__(self) -> str:  # arguments and variables may hold passwords
        return f"GuestCommand({self.argv[0][:80]!r}, {len(self.argv) - 1} arguments)"


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Output beyond the limit is left out. `code`: 0 to 255; 128 + n for a command that signal n ended."""

    code: int
    stdout: bytes
    stderr: bytes


def entrypoint_command(container: Container) -> GuestCommand:
    """The container's entrypoint."""
    file = termination_file(container.config.annotations, container.config.mounts)
    config = container.config
    return dataclasses.replace(
        in_container(container, container.spec.command, tty=config.tty),
        termination_path=file.guest if file else "",
        stdin=config.stdin,
        tty=config.tty,
        readonly_root=config.readonly_root,
    )


def in_container(container: Container, argv: tuple[str, ...], *, tty: bool = False) -> GuestCommand:
    """The command with the container's environment (device addresses are the guest's), working directory and user. The
    image provides what the pod leaves out."""
    config, image = container.config, container.spec.image_config
    user = _user(config.user, image)
    envs = dict(PATH)
    if tty:
        envs["TERM"] = b"xterm"
    if not user.user:
        envs["HOME"] = b"/root"
    for setting in image.env:
        name, _, value = setting.partition("=")
        envs[name] = value.encode()
    envs |= dict(guest_environment(config.envs, container.granted))
    return GuestCommand(argv, tuple(envs.items()), config.working_dir or image.working_dir, user)


def _user(asked: RunAs, image: ImageConfig) -> RunAs:
    """The user of the container's commands. kubelet fills in the image's user itself; other CRI clients leave this to
    the runtime."""
    if asked.user or not image.user:
        return asked
    name, _, group = image.user.partition(":")
    return dataclasses.replace(asked, user=name, group=int(group) if group.isdecimal() else asked.group)


def too_late(timeout: float, waited: float) -> str:
    """The message about a command that did not end in time. `waited`: seconds of `timeout` that had passed when it
    started."""
    left = max(0.0, timeout - waited)
    if waited < left:
        return f"the command did not end within {timeout:g} s; it was killed"
    return (
        f"the command was killed after {left:.1f} s: {waited:.1f} of its {timeout:g} s had passed when the agent came up; "
        "give it more time, or run it when the guest has booted"
    )


# Linux capabilities, as pods name them.

ALL: Final = "all"

# capabilities(7), as of Linux 6.1.
_CAPABILITY_NAMES: Final = (
    "audit_control audit_read audit_write block_suspend bpf checkpoint_restore chown dac_override dac_read_search fowner "
    "fsetid ipc_lock ipc_owner kill lease linux_immutable mac_admin mac_override mknod net_admin net_bind_service "
    "net_broadcast net_raw perfmon setfcap setgid setpcap setuid sys_admin sys_boot sys_chroot sys_module sys_nice "
    "sys_pacct sys_ptrace sys_rawio sys_resource sys_time sys_tty_config syslog wake_alarm"
)
_KNOWN: Final = frozenset(_CAPABILITY_NAMES.split())


def capability(text: str) -> str:
    """The name that setpriv knows; `ALL` for all capabilities. Raises InvalidRequest."""
    name = text.lower().removeprefix("cap_")
    if name != ALL and name not in _KNOWN:
        raise InvalidRequest(
            f"{text[:80]!r} is not a capability; write one of capabilities(7), such as NET_ADMIN, or ALL"
        )
    return name


# kubelet's hooks. ExecSync does not say that it runs one. Pure.

# kubelet stores the handler as JSON in it, for a pod whose object is gone when its hook runs.
PRE_STOP_ANNOTATION: Final = "io.kubernetes.container.preStopHandler"


def pre_stop_command(annotations: Mapping[str, str]) -> tuple[str, ...]:
    """The command of the preStop hook; () if there is none, or one of another kind."""
    try:
        handler = json.loads(annotations.get(PRE_STOP_ANNOTATION, "null"))
        words = handler["exec"]["command"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ()
    return tuple(words) if isinstance(words, list) and all(isinstance(word, str) for word in words) else ()


def agent_may_take(annotations: Mapping[str, str], command: tuple[str, ...], age: float, boot: float) -> float:
    """How many seconds a command without a time limit, in a container of this age, waits for the guest agent to come
    up. Guests have `boot` seconds from their start. A preStop hook does not wait, because its time is part of the grace
    period. A preStop hook with the same command as the postStart hook looks the same."""
    return 0.0 if command == pre_stop_command(annotations) else max(0.0, boot - max(0.0, age))


# What a poll of a container's entrypoint finds: its output since the last poll, and its exit.


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """How far one stream has been read. The guest keeps it in numbered pieces. `over`: the end is reached."""

    piece: int = 0
    offset: int = 0
    over: bool = False


@dataclass(frozen=True, slots=True)
class OutputPosition:
    out: StreamPosition = StreamPosition()
    err: StreamPosition = StreamPosition()

    @property
    def over(self) -> bool:
        return self.out.over and self.err.over


@dataclass(frozen=True, slots=True)
class EntrypointProgress:
    """`code`: the command itself has ended with it (128 + n if signal n ended it), while others may still hold its
    streams. `failure`: why it could not start. Each answer repeats both."""

    output: tuple[Output, ...]
    read_to: OutputPosition
    code: int | None = None
    failure: str = ""

    @property
    def ended(self) -> bool:
        return self.code is not None or bool(self.failure)


def exit_of_entrypoint(progress: EntrypointProgress, at: int) -> Exit:
    """The exit of a command that has ended."""
    if progress.code is None:
        return failed_start(progress.failure, at)
    reason = ExitReason.ERROR if progress.code else ExitReason.COMPLETED
    return Exit(progress.code, reason, at)


def failed_start(why: str, at: int) -> Exit:
    """Like containerd's report of a command that could not start."""
    return Exit(128, ExitReason.START_ERROR, at, f"the container's command could not be started: {why}")


def lost(at: int) -> Exit:
    return Exit(
        255,
        ExitReason.ERROR,
        at,
        "the container's command is gone: the guest rebooted, or something in it killed the command",
    )


# Signal numbers that depend on the machine are those of x86-64, which all guests are. Real-time signals start as in
# glibc.
_FIRST_REALTIME: Final = 34
_LAST_REALTIME: Final = 64
_REALTIME: Final = {"SIGRTMIN": _FIRST_REALTIME, "SIGRTMAX": _LAST_REALTIME}

# By CRI's numbers (its enum Signal), from 1. Up to SIGXFSZ they are in alphabetical order.
_STOP_SIGNAL_NAMES: Final = (
    *("SIGABRT", "SIGALRM", "SIGBUS", "SIGCHLD", "SIGCLD", "SIGCONT", "SIGFPE", "SIGHUP", "SIGILL", "SIGINT", "SIGIO"),
    *("SIGIOT", "SIGKILL", "SIGPIPE", "SIGPOLL", "SIGPROF", "SIGPWR", "SIGQUIT", "SIGSEGV", "SIGSTKFLT", "SIGSTOP"),
    *("SIGSYS", "SIGTERM", "SIGTRAP", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGURG", "SIGUSR1", "SIGUSR2", "SIGVTALRM"),
    *("SIGWINCH", "SIGXCPU", "SIGXFSZ"),
)


def stop_signal_of(container: Container) -> int:
    """Linux's number of the signal that the container asks for, otherwise its image, otherwise SIGTERM. It is sent in
    `guest/entrypoint.py`."""
    return (
        _of_cri(container.config.stop_signal)
        or _by_name(container.spec.image_config.stop_signal)
        or int(signal.SIGTERM)
    )


def _of_cri(number: int) -> int:
    """0 for no signal, and for numbers that CRI does not define."""
    if 1 <= number <= len(_STOP_SIGNAL_NAMES):
        return int(signal.Signals[_STOP_SIGNAL_NAMES[number - 1]])
    realtime = _FIRST_REALTIME + number - len(_STOP_SIGNAL_NAMES) - 1
    return realtime if _FIRST_REALTIME <= realtime <= _LAST_REALTIME else 0


def _by_name(name: str) -> int:
    """The signal of an image's config, such as `SIGTERM`, `SIGRTMIN+3` or `SIGRTMAX-2`; 0 for none."""
    if name in signal.Signals.__members__:
        return int(signal.Signals[name])
    base, sign, distance = name.partition("+") if "+" in name else name.partition("-")
    if base not in _REALTIME or not distance.isdecimal():
        return 0
    return _REALTIME[base] + int(sign + distance)
