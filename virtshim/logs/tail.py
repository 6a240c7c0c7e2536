"""Copies one console to its CRI log. Thread-safe. Each call does a bounded amount of work.

virtshim cannot slow QEMU down. If a guest writes faster than its log may grow, the middle of its output is lost. This
bounds the raw log, the growth of the CRI log between two rotations, and the work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from dataclasses import dataclass
from typing import Final, Self

import structlog

from virtshim.logs.files import LogFile, PositionFile, RawLog, user_error
from virtshim.logs.lines import LineCutter, Position, last_line, own_line, timestamp
from virtshim.model.errors import WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout
from virtshim.system.clock import Clock
from virtshim.system.rate_limits import LOG_BURST, LOG_RATE, TokenBucket

log = structlog.get_logger(__name__)

# Bytes between two records of the position. Each empty line of the guest becomes some 45 bytes in memory.
_PIECE: Final = 64 * 1024
# The part at a console's end that is copied in any case.
_FINAL_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Pace:
    """`turn_bytes`: bytes that are read from one console, or added to its log, before the other consoles get their
    turn. `gap`: the least seconds between two rounds, so that floods leave processor time to others. `log_rate`: bytes
    per second that one console may add to its log; a line of one byte takes 46 bytes in the log. `log_burst`: the
    largest allowance that a console can save up. `backlog`: bytes of a raw log that may wait for the allowance; if more
    wait, the older half is lost, and the log says so. `flush_after`: seconds that an unfinished line waits for its end.
    `retry_after`: seconds until a failed write is repeated. `sweep_every`: seconds between two checks of the consoles
    for which the kernel reported nothing. `sweep_unwatched_every`: the same while the kernel cannot watch some
    console."""

    turn_bytes: int = 256 * 1024
    gap: float = 0.01
    log_rate: float = LOG_RATE
    log_burst: int = LOG_BURST
    backlog: int = 64 * 1024 * 1024
    flush_after: float = 0.5
    retry_after: float = 2.0
    sweep_every: float = 5.0
    sweep_unwatched_every: float = 0.25


@dataclass(frozen=True, slots=True)
class Turn:
    """`more`: there is more to read. `due`: the time of the monotonic clock at which the console needs a turn even
    without new output."""

    more: bool = False
    due: float | None = None


class Tail:
    """Reads the raw log, writes the CRI log, and saves the position after each batch. The position does not cover bytes
    that are in no log line yet, so the next process reads them again."""

    def __init__(
        self, container: ContainerId, raw: RawLog, log: LogFile, position: PositionFile, clock: Clock, pace: Pace
    ) -> None:
        self._container = container
        self._raw = raw
        self._log = log
        self._position = position
        self._clock = clock
        self._pace = pace
        self._lock = threading.Lock()
        self._cutter = LineCutter()
        self._allowance = TokenBucket(pace.log_rate, pace.log_burst, clock.monotonic())
        self._lost = 0
        self._done = self._reconciled()
        self._read_to = self._done.offset
        self._flush_at: float | None = None
        self._retry_at: float | None = None
        self._log_failing = False
        self._position_failing = False
        self._closed = False
        self._last_line = b""

    @classmethod
    def open(cls, container: ContainerId, log: LogFile, layout: Layout, clock: Clock, pace: Pace) -> Self:
        """Continues where an earlier process stopped; owns `log` from now on. InvalidRequest, ResourceExhausted or
        InternalError if a file cannot be opened."""
        with contextlib.ExitStack() as undo:
            undo.callback(log.close)
            try:
                position = PositionFile.open(layout.console_position(container))
                undo.callback(position.close)
                tail = cls(container, RawLog(layout.console_log(container)), log, position, clock, pace)
            except OSError as error:
                raise user_error(f"the console of container {container} cannot be followed", error) from error
            undo.pop_all()
        return tail

    @property
    def raw_path(self) -> str:
        return self._raw.path

    @property
    def is_closed(self) -> bool:
        return self._closed

    def turn(self) -> Turn:
        """Copies the available output, up to `turn_bytes`."""
        with self._lock:
            now = self._clock.monotonic()
            if self._closed:
                return Turn()
            try:
                self._drop_backlog(self._pace.backlog, self._pace.backlog // 2)
                if self._retry_at is not None and now < self._retry_at:
                    return Turn(due=self._retry_at)
                if wait := self._allowance.wait(now):
                    return Turn(due=now + wait)
                self._rewind_after_failure()
                more = self._copy(self._pace.turn_bytes)
                if not more and self._flush_at is not None and now >= self._flush_at:
                    self._commit(self._cutter.flush(self._stamp()))
                    self._flush_at = None
            except OSError as error:
                return Turn(due=self._failed(error))
            self._log_failing = False
            return Turn(more, self._flush_at)

    def reopen(self) -> None:
        """Continues in a new file of the same name. Raises the errors of `LogFile.open`, and WrongState if the tail is
        closed; output then goes to the old file."""
        with self._lock:
            if self._closed:
                raise WrongState(f"the console of container {self._container} has ended; its log is complete")
            new = self._log.reopened()
            try:
                self._rewind_after_failure()
            except OSError as error:  # the bytes that the failed write left would come twice
                log.warning("console.log.failed", container=self._container.short, error=str(error))
            old, self._log = self._log, new
            old.close()
            status = new.status()
            self._record(
                dataclasses.replace(
                    self._done, log_device=status.st_dev, log_inode=status.st_ino, log_size=status.st_size
                )
            )

    def note(self, line: str) -> None:
        """The line counts towards the bytes that this console may add to its log."""
        with self._lock:
            if self._closed:
                raise WrongState(f"the console of container {self._container} has ended; its log is complete")
            try:
                self._rewind_after_failure()
                self._commit(own_line(line, self._stamp(), after=self._last_line))
            except OSError as error:
                self._failed(error)
                raise user_error(f"the log of container {self._container} cannot be written", error) from error

    def finish(self) -> None:
        """Copies the remaining output, including an unfinished line, and closes the tail. If very much remains, copies
        only the last part, and the log says how much is lost. Output that cannot be written now is left to a later
        `open`."""
        with self._lock:
            if self._closed:
                return
            try:
                self._rewind_after_failure()
                self._drop_backlog(self._pace.backlog, self._pace.backlog)
                self._allowance = TokenBucket(self._pace.log_rate, self._pace.log_burst, self._clock.monotonic())
                while self._copy(self._pace.turn_bytes):
                    if self._allowance.wait(self._clock.monotonic()):
                        self._drop_backlog(_FINAL_BYTES, _FINAL_BYTES)
                self._commit(self._cutter.end(self._stamp()))
            except OSError as error:
                log.error(  # noqa: TRY400  the error says all
                    "console.log.incomplete", container=self._container.short, error=str(error)
                )
            self._close()

    def close(self) -> None:
        """Stops at once. A later `open` continues."""
        with self._lock:
            self._close()

    # --- below: with the lock held --------------------------------------------------------------------------------------

    def _close(self) -> None:
        self._closed = True
        for file in (self._raw, self._log, self._position):
            file.close()

    def _stamp(self) -> bytes:
        return timestamp(self._clock.now_ns())

    def _reconciled(self) -> Position:
        """The recorded position, corrected for the log that exists now. If the log is another file than the recorded
        one, it was rotated or removed meanwhile, and the new file continues at its end."""
        saved = self._position.load()
        status = self._log.status()
        if saved and (saved.log_device, saved.log_inode) == (status.st_dev, status.st_ino):
            self._log.truncate_to(saved.log_size)
        agreed = dataclasses.replace(
            saved or Position(),
            log_device=status.st_dev,
            log_inode=status.st_ino,
            log_size=self._log.status().st_size,
        )
        self._position.save(agreed)
        return agreed

    def _copy(self, budget: int) -> bool:
        """Copies up to `budget` bytes. Returns whether output is left."""
        if not self._raw.open(self._done.raw_inode):
            return False
        self._start_again_if_replaced()
        self._skip_hole()
        self._log_lost_bytes()
        while budget > 0:
            data = self._raw.read(self._read_to, min(_PIECE, budget))
            if not data:
                if not self._goes_on():
                    return False
                continue
            budget -= max(len(data), self._take(data))
        return True

    def _take(self, data: bytes) -> int:
        """Copies `data`. Returns the number of bytes that it added to the log."""
        self._read_to += len(data)
        text = self._cutter.feed(data, self._stamp())
        self._commit(text)
        if not self._cutter.can_flush:
            self._flush_at = None
        elif text or self._flush_at is None:
            self._flush_at = self._clock.monotonic() + self._pace.flush_after
        return len(text)

    def _commit(self, text: bytes) -> None:
        """Writes the log before the position. So a kill between the two leaves more in the log than the position says,
        never less."""
        if not text:
            return
        self._log.append(text)
        self._last_line = last_line(text)
        self._allowance.spend(len(text), self._clock.monotonic())
        self._record(
            dataclasses.replace(
                self._done, offset=self._read_to - self._cutter.held, log_size=self._log.status().st_size
            )
        )

    def _record(self, position: Position) -> None:
        """Saves the position. A failure does no harm, because the older position stays valid."""
        self._done = position
        try:
            self._position.save(position)
            self._position_failing = False
            if self._raw.is_open:
                self._raw.free_before(position.offset)
        except OSError as error:
            if not self._position_failing:
                log.warning("console.position.failed", container=self._container.short, error=str(error))
            self._position_failing = True

    def _drop_backlog(self, most: int, kept: int) -> None:
        """If more than `most` bytes wait, keeps only the last `kept` bytes. Frees the space of the others at once, even
        while the log cannot be written. (If the process is killed before it has noted the loss in the log, the log
        never mentions it.)"""
        if not self._raw.open(self._done.raw_inode):
            return
        size = self._raw.status().st_size
        if size - self._read_to <= most:
            return
        self._lost += size - kept - self._read_to
        self._read_to = size - kept
        self._record(dataclasses.replace(self._done, offset=self._read_to))

    def _log_lost_bytes(self) -> None:
        if not self._lost:
            return
        log.warning("console.lost", container=self._container.short, bytes=self._lost)
        line = b"virtshim: %d bytes of this console were dropped: it writes faster than its log may grow\n" % self._lost
        self._commit(self._cutter.feed((b"\n" if self._cutter.held else b"") + line, self._stamp()))
        self._lost = 0

    def _start_again_if_replaced(self) -> None:
        """Starts at the beginning if the raw log is not the recorded file, or became shorter: everything in it is new
        then."""
        status = self._raw.status()
        if self._done.raw_inode not in (0, status.st_ino) or status.st_size < self._read_to:
            log.warning("console.raw.replaced", container=self._container.short, offset=self._read_to)
            self._start_again()
        self._done = dataclasses.replace(self._done, raw_inode=status.st_ino)

    def _skip_hole(self) -> None:
        """Needed only after a power cut: the hole in the raw log may be on disk while the record that was written
        before it is lost."""
        data_from = self._raw.data_from(self._read_to)
        if data_from > self._read_to and not self._cutter.held:
            self._read_to = data_from

    def _goes_on(self) -> bool:
        """Continues with the next raw log after this one has been read to its end. Returns whether there is more to
        read."""
        if not self._raw.has_next():
            self._close_if_removed()
            return False
        if self._raw.read(self._read_to, 1):  # said before it was renamed
            return True
        self._commit(self._cutter.flush(self._stamp()))  # the next file may begin with the newline of a carriage return
        if not self._raw.go_on():
            return False
        self._read_to = 0
        self._record(dataclasses.replace(self._done, offset=0, raw_inode=self._raw.status().st_ino))
        self._skip_hole()
        return True

    def _close_if_removed(self) -> None:
        if self._raw.status().st_nlink == 0:
            self._raw.close()
            self._start_again()

    def _start_again(self) -> None:
        self._commit(self._cutter.end(self._stamp()))
        self._read_to = 0
        self._record(dataclasses.replace(self._done, offset=0, raw_inode=0))

    def _failed(self, error: OSError) -> float:
        """Prepares another attempt, and returns its time. Logs repeated failures only once."""
        if not self._log_failing:
            log.warning("console.log.failed", container=self._container.short, error=str(error))
        self._log_failing = True
        with contextlib.suppress(OSError):
            self._log.truncate_to(self._done.log_size)
        self._cutter = LineCutter()
        self._read_to = self._done.offset
        self._flush_at = None
        self._retry_at = self._clock.monotonic() + self._pace.retry_after
        return self._retry_at

    def _rewind_after_failure(self) -> None:
        """After a failure, cuts the log to the end of the last complete batch."""
        if self._retry_at is None:
            return
        self._log.truncate_to(self._done.log_size)
        self._retry_at = None
