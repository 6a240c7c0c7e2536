"""Threads that take turns as a test says, so that concurrent events can be repeated in the same order.

One thread runs at a time. It may be interrupted at each call to the outside, at each lock of the product, when it waits,
and when it starts a thread. Waiting takes no time: when nobody can run, the clock advances.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from fakes.clock import FakeClock
from fakes.journal import WAIT_LIMIT, Crash

_REAL_LOCK, _REAL_RLOCK = threading.Lock, threading.RLock
# The external calls that wait for another program, which may hang.
_MAY_HANG = ("vms.", "resizing.", "networks.", "cgroups.", "shares.", "drivers.", "guests.", "files.fetch")
# The limit of one run. Beyond it a thread never ends.
_MOST_POINTS = 20_000


class NoThread(RuntimeError):
    """The system's error about a thread that cannot start."""

    def __init__(self) -> None:
        super().__init__("can't start new thread")


class _Over(BaseException):
    """The run is over: a thread that has not ended stops here."""


def _held() -> Any:
    lock = _REAL_LOCK()
    lock.acquire()
    return lock


@dataclass(eq=False)
class Turn:
    """A thread. `about`: the pods that its call concerns, empty if it concerns any. `until`: what it waits for;
    `deadline`: how long."""

    name: str
    about: frozenset[str]
    go: Any = field(default_factory=_held)
    at: str = "its beginning"
    until: Callable[[], bool] | None = None
    deadline: float | None = None
    waits_for: _Lock | None = None
    is_over: bool = False
    is_raw: bool = False
    result: object = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Call:
    """A call on its own thread. `pod` is "" if it concerns no pod, or all."""

    name: str
    do: Callable[[], object]
    pod: str = ""


class _Lock:
    """A lock of the product. For threads that take no turns it is an ordinary lock."""

    def __init__(self, turns: Turns, name: str, *, reentrant: bool) -> None:
        self._turns = turns
        self.name = name
        self._reentrant = reentrant
        self._inner: Any = _REAL_RLOCK() if reentrant else _REAL_LOCK()
        self._count = 0
        self.owner: Turn | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = self._turns.me()
        if me is None:
            return bool(self._inner.acquire(blocking, timeout))
        if not (self._reentrant and self.owner is me):
            self._turns.point(f"lock {self.name}")
            if self.owner is not None and not self._awaited(me, blocking and timeout != 0, timeout):
                return False
        assert self._inner.acquire(False), f"{self.name} is held by a thread that takes no turns"
        self.owner = me
        self._count += 1
        return True

    def release(self) -> None:
        if self.owner is not None:
            self._count -= 1
            if not self._count:
                self.owner = None
        self._inner.release()

    def locked(self) -> bool:
        return self._count > 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _awaited(self, me: Turn, may_wait: bool, timeout: float) -> bool:
        if not may_wait:
            return False
        me.waits_for = self
        try:
            return self._turns.wait_until(me.at, lambda: self.owner is None, None if timeout < 0 else timeout)
        finally:
            me.waits_for = None


class Turns:
    """`watch` is called at each point with its name, and returns what is wrong, "" if nothing is. `refuse`: threads that
    the system refuses."""

    def __init__(self) -> None:
        self.clock: FakeClock = _Clock(self)
        self.watch: Callable[[str], str] = lambda _: ""
        self.refusals = 0
        self._starts_before_refusal = 0
        self.trace: list[str] = []
        self._begun: list[tuple[weakref.ref[threading.Thread], Turn]] = []
        self._turns: list[Turn] = []
        self._mine = threading.local()
        self._main = _held()
        self._switches: list[tuple[int, int]] = []
        self._slow = False
        self._points = 0
        self._failure = ""
        self._given_up = False

    # --- for tests

    def refuse(self, count: int = 1, after: int = 0) -> None:
        """Refuses so many threads after so many others."""
        self.refusals, self._starts_before_refusal = count, after

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Tracks the locks that the product creates inside the block, and what threads wait for."""
        lock, rlock = self._locks(reentrant=False), self._locks(reentrant=True)
        event_wait, start, join = threading.Event.wait, threading.Thread.start, threading.Thread.join
        result = Future.result

        def wait(event: threading.Event, timeout: float | None = None) -> bool:
            if self.me() is None:
                return event_wait(event, timeout)
            return self.wait_until("an event", event.is_set, timeout)

        def outcome(future: Future[Any], timeout: float | None = None) -> Any:
            if self.me() is not None and not self.wait_until("another's result", future.done, timeout):
                raise FutureTimeout
            return result(future, timeout)

        def begin(thread: threading.Thread) -> None:
            self._begin(thread, start)

        def end(thread: threading.Thread, timeout: float | None = None) -> None:
            turn = getattr(thread, "turn", None)
            if turn is not None and self.me() is not None:
                self.wait_until(f"the end of {turn.name}", lambda: turn.is_over, timeout)
                return
            join(thread, timeout)

        with (
            patch("threading.Lock", lock),
            patch("threading.RLock", rlock),
            patch.object(threading.Event, "wait", wait),
            patch.object(threading.Thread, "start", begin),
            patch.object(threading.Thread, "join", end),
            patch.object(Future, "result", outcome),
        ):
            yield

    def run(
        self, calls: Sequence[Call], switches: Sequence[tuple[int, int]] = (), *, outside_is_slow: bool = False
    ) -> list[Turn]:
        """Returns when all calls, and all threads that they started, have ended. A call runs until it waits or ends,
        except at `switches`: (number of points, index) after which another runnable thread continues.
        `outside_is_slow`: threads that wait for something external continue only when nobody else can."""
        self._switches, self._slow = list(switches), outside_is_slow
        self._points, self._failure, self._given_up = 0, "", False
        self._main = _held()
        self.trace.clear()
        self._turns = [Turn(call.name, frozenset({call.pod} - {""})) for call in calls]
        mine = list(self._turns)
        for turn, call in zip(mine, calls, strict=True):
            self._launch(turn, threading.Thread(target=self._called, args=(turn, call.do), daemon=True))
        mine[0].go.release()
        assert self._main.acquire(timeout=WAIT_LIMIT), "a thread waits for what takes no turns:\n" + self.story()
        assert not self._failure, f"{self._failure}\n{self.story()}"
        return mine

    def remembered(self) -> list[str]:
        """Threads that are still referenced although they never ran, or have ended. Called when nothing runs."""
        self._turns = []
        gc.collect()
        return [turn.name for thread, turn in self._begun if thread() is not None and turn.is_over]

    def story(self) -> str:
        return "\n".join(self.trace[-200:])

    # --- for what takes turns

    def me(self) -> Turn | None:
        """The calling thread's turn; None if it takes no turns."""
        turn = getattr(self._mine, "turn", None)
        return None if turn is None or turn.is_raw else turn

    def point(self, name: str) -> None:
        """A point at which another thread may continue."""
        me = self.me()
        if me is None:
            return
        self._raise_if_given_up()
        me.at = name
        self._points += 1
        self.trace.append(f"{me.name}: {name}")
        if self._points > _MOST_POINTS:
            self._give_up("a thread never ends")
        if wrong := self.watch(name) or self._held_up(me):
            self._give_up(wrong)
        self._pass_on(me)

    def wait_until(self, name: str, holds: Callable[[], bool], seconds: float | None = None) -> bool:
        """Waits; returns whether the condition held in time."""
        me = self.me()
        assert me is not None
        self._raise_if_given_up()
        me.at = f"{name} (waits)"
        if holds():
            return True
        me.until = holds
        me.deadline = None if seconds is None else self.clock.monotonic() + seconds
        if me.waits_for is not None and me.waits_for.owner is not None and (wrong := self._held_up(me.waits_for.owner)):
            self._give_up(wrong)
        self._pass_on(me)
        me.until = me.deadline = None
        return holds()

    # --- inside

    def _locks(self, *, reentrant: bool) -> Callable[[], Any]:
        real = _REAL_RLOCK if reentrant else _REAL_LOCK

        def make() -> Any:
            caller = sys._getframe(1)
            module = str(caller.f_globals.get("__name__", ""))
            if not module.startswith("virtshim."):
                return real()
            return _Lock(self, f"{module.removeprefix('virtshim.')}:{caller.f_lineno}", reentrant=reentrant)

        return make

    def _begin(self, thread: threading.Thread, start: Callable[[threading.Thread], None]) -> None:
        me = self.me()
        if me is None:
            start(thread)
            return
        self.point(f"start of {thread.name}")
        turn = Turn(thread.name, frozenset())
        self._begun.append((weakref.ref(thread), turn))
        if self.refusals and self._starts_before_refusal:
            self._starts_before_refusal -= 1
        elif self.refusals:
            self.refusals -= 1
            turn.is_over = True
            raise NoThread
        self._turns.insert(0, turn)  # when the running thread ends, the threads that it started continue
        run = thread.run
        thread.run = lambda: self._called(turn, run)  # type: ignore[method-assign]
        thread.turn = turn  # type: ignore[attr-defined]
        me.is_raw = True
        try:
            start(thread)
        finally:
            me.is_raw = False

    def _launch(self, turn: Turn, thread: threading.Thread) -> None:
        thread.turn = turn  # type: ignore[attr-defined]
        thread.start()

    def _called(self, turn: Turn, do: Callable[[], object]) -> None:
        turn.go.acquire()
        self._mine.turn = turn
        try:
            if not self._given_up:
                turn.result = do()
        except (Exception, Crash, _Over) as error:  # noqa: BLE001  whoever has begun the run looks at it
            turn.error = error
        turn.is_over = True
        self.trace.append(f"{turn.name}: over" + (f" ({turn.error!r})" if turn.error else ""))
        with contextlib.suppress(_Over):
            if not self._given_up and not self._all_over():
                self._next(turn).go.release()
        if self._all_over():
            with contextlib.suppress(RuntimeError):  # two that are given up may end at once
                self._main.release()

    def _all_over(self) -> bool:
        return all(one.is_over for one in self._turns)

    def _pass_on(self, me: Turn) -> None:
        chosen = self._next(me)
        if chosen is not me:
            chosen.go.release()
            me.go.acquire()
            self._raise_if_given_up()

    def _next(self, me: Turn) -> Turn:
        while not (able := [one for one in self._turns if self._can_run(one)]):
            deadlines = [one.deadline for one in self._turns if not one.is_over and one.deadline is not None]
            if not deadlines:
                waiting = [f"{one.name} at {one.at}" for one in self._turns if not one.is_over]
                self._give_up("they wait for each other: " + ", ".join(waiting))
            self.clock.advance(max(0.0, min(deadlines) - self.clock.monotonic()))
        if self._slow and (quick := [one for one in able if not one.at.startswith(_MAY_HANG)]):
            able = quick
        others = [one for one in able if one is not me]
        if self._switches and others:
            after, which = self._switches[0]
            if after <= 0:
                self._switches.pop(0)
                return others[which % len(others)]
            self._switches[0] = (after - 1, which)
        return me if me in able else able[0]

    def _can_run(self, turn: Turn) -> bool:
        if turn.is_over:
            return False
        is_late = turn.deadline is not None and turn.deadline <= self.clock.monotonic()
        return turn.until is None or is_late or turn.until()

    def _held_up(self, holder: Turn) -> str:
        """What is held up, "" if nothing: a thread that waits for a lock of `holder`, while `holder` waits for something
        external on behalf of another pod."""
        if not holder.about or not holder.at.startswith(_MAY_HANG):
            return ""
        for one in self._turns:
            lock = one.waits_for
            if lock is not None and lock.owner is holder and one.about and not one.about & holder.about:
                return f"{one.name} waits for {lock.name}, which {holder.name} has at {holder.at}"
        return ""

    def _give_up(self, why: str) -> None:
        self._failure = self._failure or why
        self._given_up = True
        for one in self._turns:
            if one is not self.me() and not one.is_over:
                one.go.release()
        raise _Over

    def _raise_if_given_up(self) -> None:
        if self._given_up:
            raise _Over


class _Clock(FakeClock):
    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns

    def wait(self, event: threading.Event, seconds: float) -> bool:
        if self._turns.me() is None:
            return super().wait(event, seconds)
        return self._turns.wait_until("the clock", event.is_set, seconds)
