"""CRI logs of containers' entrypoints, and consoles' output during boot. Implements
`virtshim.logs.ports.EntrypointLogs` and `virtshim.logs.ports.BootOutput`."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from pydantic import TypeAdapter, ValidationError

from virtshim.guest.command import OutputPosition
from virtshim.logs.files import LogFile, user_error
from virtshim.logs.lines import last_line, lines_of, own_line, timestamp
from virtshim.model.errors import InternalError, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout
from virtshim.streaming.ports import Output
from virtshim.system.clock import Clock
from virtshim.system.files import replace_bytes
from virtshim.system.locks import new_lock

# Output of containers' entrypoints -> CRI logs, with the position up to which it was read in the guest.

_OUTPUT_POSITION: TypeAdapter[tuple[OutputPosition]] = TypeAdapter(tuple[OutputPosition])


@dataclass(slots=True)
class _Log:
    """`file`: None if the output is discarded."""

    file: LogFile | None
    last_line: bytes = b""
    lock: threading.Lock = field(default_factory=new_lock)


class EntrypointLogFiles:
    """Implements `virtshim.logs.ports.EntrypointLogs`. Saves the position after the lines. If the process is killed
    between the two, the next process writes the piece again, so nothing is lost."""

    def __init__(self, layout: Layout, clock: Clock) -> None:
        self._layout = layout
        self._clock = clock
        self._lock = threading.Lock()
        self._logs: dict[ContainerId, _Log] = {}

    def open(self, container: ContainerId, log_file: str, log_directory: str = "") -> None:
        with self._lock:
            if container not in self._logs:
                self._logs[container] = _Log(LogFile.open(log_file, log_directory) if log_file else None)

    def reopen(self, container: ContainerId) -> None:
        log = self._open_log(container)
        with log.lock:
            if log.file is not None:
                old, log.file = log.file, log.file.reopened()
                old.close()

    def note(self, container: ContainerId, line: str) -> None:
        log = self._open_log(container)
        with log.lock:
            if log.file is None:
                return
            text = own_line(line, timestamp(self._clock.now_ns()), after=log.last_line)
            try:
                before = log.file.status().st_size
                try:
                    log.file.append(text)
                except OSError:
                    log.file.truncate_to(before)
                    raise
            except OSError as error:
                raise user_error(f"the log of container {container} cannot be written", error) from error
            log.last_line = last_line(text)

    def finish(self, container: ContainerId) -> None:
        with self._lock:
            log = self._logs.pop(container, None)
        if log is not None:
            with log.lock:
                file, log.file = log.file, None
                if file is not None:
                    file.close()

    def close(self) -> None:
        for container in tuple(self._logs):
            self.finish(container)

    def read_to(self, container: ContainerId) -> OutputPosition:
        path = self._position(container)
        try:
            with open(path, "rb") as file:
                return _OUTPUT_POSITION.validate_json(file.read())[0]
        except FileNotFoundError:
            return OutputPosition()
        except (OSError, ValidationError) as exc:
            raise InternalError(f"the read position of the command's output cannot be read from {path}: {exc}") from exc

    def write(self, container: ContainerId, output: Sequence[Output], read_to: OutputPosition) -> int:
        log = self._open_log(container)
        stamp = timestamp(self._clock.now_ns())
        text = b"".join(lines_of(piece.stream.value, piece.data, stamp) for piece in output)
        with log.lock:
            try:
                before = log.file.status().st_size if log.file is not None else 0
                try:
                    if log.file is not None:
                        log.file.append(text)
                    replace_bytes(self._position(container), _OUTPUT_POSITION.dump_json((read_to,)), synced=False)
                    log.last_line = last_line(text) or log.last_line
                except OSError:
                    if log.file is not None:
                        log.file.truncate_to(before)
                    raise
            except OSError as error:
                raise user_error("the log of the container's command cannot be written", error) from error
        return len(text)

    def _open_log(self, container: ContainerId) -> _Log:
        with self._lock:
            log = self._logs.get(container)
        if log is None:
            raise WrongState(f"the log of container {container} is not open: its command has ended")
        return log

    def _position(self, container: ContainerId) -> str:
        return f"{self._layout.container_dir(container)}/command.pos"


# Firmware and boot loaders write a few KiB at most. After more output than this, something else runs.
_LONGEST: Final = 64 << 10

# A kernel's first words, with or without a time: Linux's own and its EFI stub's, the BSDs'. The guest writes what is searched:
# no part may repeat without a bound.
_KERNEL: Final = re.compile(
    rb"Linux version |^\[ *\d+\.\d{6}\]|EFI stub|Copyright \(c\) \d{4}-\d{4} The [^\n]{0,100}?BSD", re.MULTILINE
)


class RawBootOutput:
    """Reads QEMU's own file, which exists from the VM's start."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def shows_kernel(self, container: ContainerId) -> bool:
        try:
            with open(self._layout.console_log(container), "rb") as file:
                beginning = file.read(_LONGEST)
        except OSError:
            return True
        return len(beginning) == _LONGEST or _KERNEL.search(beginning) is not None

    def piece(self, container: ContainerId, start: int, most: int) -> bytes:
        try:
            with open(self._layout.console_log(container), "rb") as file:
                file.seek(start)
                return file.read(most)
        except OSError:
            return b""
