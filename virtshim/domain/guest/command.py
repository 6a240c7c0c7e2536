"""A command to run inside a container's guest, and its result. No I/O."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from virtshim.domain.container import Container, RunAs
from virtshim.domain.devices import guest_view
from virtshim.domain.errors import InvalidRequest
from virtshim.domain.guest.termination_message import termination_file
from virtshim.domain.image import ImageConfig

# What a shell without any setting would search; images of virtual machines do not say.
_PATH = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def exec_port(number: int) -> str:
    """The name of the virtio-serial port in the guest; `Layout.exec_socket` is its other end."""
    return f"virtshim.exec.{number}"


@dataclass(frozen=True, slots=True)
class GuestCommand:
    """`argv` is not given to a shell. `envs` is the whole environment. `working_dir` "": the agent's own. For a container's own
    command: `termination_path` is a file made for its termination message ("" for none); `stdin` and `tty` say
    whether it has an input, which stays open, and a terminal; `readonly_root`, that it cannot write the guest's root.
    `input`: all that a command reads that is only waited for."""

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
    """Output beyond the limit is left out. `code` is 0 to 255; 128 + n for a command that signal n ended."""

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
    """The command with the container's configured environment (with the devices' addresses in the guest), working directory and
    user; what the pod leaves out is as its image says."""
    config, image = container.config, container.spec.image_config
    user = _user(config.user, image)
    envs = {"PATH": _PATH}
    if tty:
        envs["TERM"] = b"xterm"
    if not user.user:
        envs["HOME"] = b"/root"
    for setting in image.env:
        name, _, value = setting.partition("=")
        envs[name] = value.encode()
    envs |= dict(guest_view.environment(config.envs, container.granted))
    return GuestCommand(argv, tuple(envs.items()), config.working_dir or image.working_dir, user)


def _user(asked: RunAs, image: ImageConfig) -> RunAs:
    """kubelet tells the image's user as the pod's own; others leave it to the runtime."""
    if asked.user or not image.user:
        return asked
    name, _, group = image.user.partition(":")
    return dataclasses.replace(asked, user=name, group=int(group) if group.isdecimal() else asked.group)


def too_late(timeout: float, waited: float) -> str:
    """What is said of a command that did not end in time. `waited`: seconds of `timeout` that were over when it began."""
    left = max(0.0, timeout - waited)
    if waited < left:
        return f"the command did not end within {timeout:g} s; it was killed"
    return (
        f"the command was killed after {left:.1f} s: {waited:.1f} of its {timeout:g} s went by until the agent was there; "
        "give it more time, or run it when the guest has booted"
    )
