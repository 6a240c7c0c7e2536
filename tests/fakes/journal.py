"""Records the services' external calls one by one and injects failures.

A fake is a plain in-memory class. `watched` wraps it: it records each call and, if the test says so, fails it, delays
it, or lets the whole process die at it.
"""

from __future__ import annotations

import enum
import functools
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TypeVar, cast

R = TypeVar("R")
T = TypeVar("T")

# Seconds of real time after which a test that waits for another thread gives up. Never reached by a test that passes.
WAIT_LIMIT = 30.0


class Crash(BaseException):
    """The process dies here. Nobody catches this, and code that still runs reaches nothing outside any more."""


_tell = threading.excepthook


def _tell_unless_dead(end: threading.ExceptHookArgs) -> None:
    """Threads of a dead process end silently."""
    if not issubclass(end.exc_type, Crash):
        _tell(end)


threading.excepthook = _tell_unless_dead


class When(enum.Enum):
    """Where in a call the process dies: before its effect, half-way, or after its effect with the answer lost."""

    BEFORE = "before"
    HALF = "half"
    AFTER = "after"


@dataclass
class Gate:
    """Blocks a call. `reached` is set when the call arrives; it continues after `open`."""

    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        assert self.reached.wait(WAIT_LIMIT), "nobody made the call that was to be held up"

    def open(self) -> None:
        self.opened.set()


@dataclass
class _Trouble:
    error: Exception
    times: int
    after: bool


class Journal:
    """One journal for a whole world, so that its calls are in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.divisible: list[int] = []
        """Which of the calls, counted from 1, can be left half-done."""
        self.on_call: Callable[[str], object] = lambda _: None
        """Hears of each call before it is made."""
        self._lock = threading.Lock()
        self._troubles: dict[str, list[_Trouble]] = {}
        self._gates: dict[str, Gate] = {}
        self._crash_at = 0
        self._crash_when = When.BEFORE
        self._dead = False

    def fail(self, name: str, error: Exception, *, times: int = 1, after: bool = False) -> None:
        """The next `times` calls of that name raise; with `after` only after their effect."""
        self._troubles.setdefault(name, []).append(_Trouble(error, times, after))

    def forget(self) -> None:
        """Forgets the calls so far."""
        self.calls.clear()
        self.divisible.clear()

    def heal(self) -> None:
        self._troubles.clear()

    def hold(self, name: str) -> Gate:
        """The next call of that name waits at the gate."""
        gate = self._gates[name] = Gate()
        return gate

    def crash(self, at: int, when: When = When.BEFORE) -> None:
        """The process dies at the `at`-th call from now."""
        self._crash_at, self._crash_when = len(self.calls) + at, when

    def revive(self) -> None:
        """Starts a new process without failures or recorded calls."""
        with self._lock:
            self.forget()
            self._crash_at, self._dead = 0, False
            self._troubles.clear()
            self._gates.clear()

    @property
    def is_dead(self) -> bool:
        """Whether the process has died."""
        return self._dead

    def count(self, name: str) -> int:
        return self.calls.count(name)

    def call(self, name: str, do: Callable[[], R], half: Callable[[], object] | None = None) -> R:
        self.on_call(name)
        with self._lock:
            if self._dead:
                raise Crash(name)
            self.calls.append(name)
            if half is not None:
                self.divisible.append(len(self.calls))
            dies = len(self.calls) == self._crash_at
            self._dead = dies
            trouble = None if dies else self._next_trouble(name)
            gate = self._gates.pop(name, None)
        if gate is not None:
            gate.reached.set()
            assert gate.opened.wait(WAIT_LIMIT), f"the gate at {name} was never opened"
        if dies:
            self._die(name, do, half)
        if trouble is not None and not trouble.after:
            raise trouble.error
        result = do()
        if trouble is not None:
            raise trouble.error
        return result

    def _die(self, name: str, do: Callable[[], object], half: Callable[[], object] | None) -> None:
        if self._crash_when is When.AFTER:
            do()
        elif self._crash_when is When.HALF and half is not None:
            half()
        raise Crash(name)

    def _next_trouble(self, name: str) -> _Trouble | None:
        for trouble in self._troubles.get(name, ()):
            if trouble.times > 0:
                trouble.times -= 1
                return trouble
        return None


def watched(name: str, target: T, journal: Journal, silent: Collection[str] = ()) -> T:
    """`target`, with its calls recorded as `name.method`. `silent` methods do not count: they read memory, or only
    register something. A fake's `half_method` leaves the state of a `method` in which the process died."""
    return cast("T", _Watched(name, target, journal, silent))  # it has all that its target has


class _Watched:
    def __init__(self, name: str, target: object, journal: Journal, silent: Collection[str]) -> None:
        self._name = name
        self._target = target
        self._journal = journal
        self._silent = frozenset(silent)

    def __getattr__(self, attribute: str) -> object:
        value: object = getattr(self._target, attribute)
        if attribute in self._silent or not callable(value):
            return value
        return functools.partial(self._call, attribute, value)

    def _call(self, attribute: str, method: Callable[..., object], *args: object, **options: object) -> object:
        half = getattr(self._target, f"half_{attribute}", None)
        return self._journal.call(
            f"{self._name}.{attribute}",
            functools.partial(method, *args, **options),
            None if half is None else functools.partial(half, *args, **options),
        )
