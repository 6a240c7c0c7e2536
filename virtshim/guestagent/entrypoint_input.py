"""The input of containers' entrypoints, and the size of their terminals. Implements `virtshim.ports.guests.EntrypointInputs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from virtshim.domain.errors import InternalError
from virtshim.domain.guest.command import GuestCommand
from virtshim.domain.guest.streaming import Streams
from virtshim.domain.ids import ContainerId
from virtshim.guestagent import entrypoint_scripts
from virtshim.guestagent.guest_exec import GuestVm
from virtshim.guestagent.wait import CancellableDeadline
from virtshim.ports.streaming import StreamSession

_PATH: Final = (("PATH", b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),)


class _Opener(Protocol):
    async def __call__(self, container: ContainerId, command: GuestCommand, streams: Streams) -> StreamSession: ...


class EntrypointInput:
    """What is typed goes over serial ports, as a command's input does, to a program in the guest that writes it into the pipe
    that the container's command reads."""

    def __init__(self, opened: _Opener, vm: Callable[[ContainerId], GuestVm]) -> None:
        self._opened = opened
        self._vm = vm

    async def open(self, container: ContainerId) -> StreamSession:
        argv = ("/bin/sh", "-c", entrypoint_scripts.RELAY, "virtshim-input", entrypoint_scripts.directory(container))
        return await self._opened(container, GuestCommand(argv, _PATH), Streams(stdin=True, stdout=True))

    def end(self, container: ContainerId, timeout: float) -> None:
        self._script(container, entrypoint_scripts.END_INPUT, (), timeout)

    def resize(self, container: ContainerId, columns: int, rows: int, timeout: float) -> None:
        self._script(container, entrypoint_scripts.RESIZE, (str(rows), str(columns)), timeout)

    def _script(self, container: ContainerId, script: str, words: tuple[str, ...], timeout: float) -> None:
        arguments = (entrypoint_scripts.directory(container), *words)
        code = self._vm(container).run_script(script, arguments, CancellableDeadline.of(timeout))
        if code:
            raise InternalError(f"the guest could not change the command's input or terminal (exit code {code})")
