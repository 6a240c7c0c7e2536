"""Kills a daemon with SIGKILL at a chosen step. A step is a call to something outside. The code itself decides which
steps there are, so new steps are covered automatically.

The test writes "<number> <before|after>" to a file: the daemon dies at that step, counted from then on; 0 only counts.
If a program name follows, this node's processes of that program die, except some: "<number> <before|after> <program>
<spared> ...". The names of the steps go to a second file beside it, and the killed processes to a third."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

R = TypeVar("R")


class Steps:
    """The daemon's side. `die`: kills something else than this process."""

    def __init__(self, order: str, die: Callable[[], object] | None = None) -> None:
        self._order = Path(order)
        self._die = die or _die
        self._lock = threading.Lock()
        self._known: object = None
        self._at, self._when, self._count = 0, "", 0
        self._victims = ""
        self._spared: list[int] = []

    def take(self, name: str, do: Callable[[], R]) -> R:
        dies, order = self._next(name)
        if dies == "before":
            self._strike(order)
        result = do()
        if dies == "after":
            self._strike(order)
        return result

    def _strike(self, order: object) -> None:
        if not self._claim(order):
            return
        try:
            if self._victims:
                self._kill_victims()
            else:
                self._die()
        finally:
            _claimed(self._order).unlink()

    def _kill_victims(self) -> None:
        for pid in pids_of(self._victims, os.path.dirname(self._order)):
            if pid not in self._spared:
                with contextlib.suppress(ProcessLookupError):  # it went with another one of them
                    os.kill(pid, signal.SIGKILL)
                with open(f"{self._order}.killed", "a") as killed:
                    killed.write(f"{pid}\n")

    def _claim(self, order: object) -> bool:
        """Claims the order; False if it was withdrawn meanwhile, because the step may belong to a thread whose call
        returned long ago. The test waits for a claimed order."""
        with self._lock:
            try:
                if self._read() != order:
                    return False
                self._order.rename(_claimed(self._order))
            except FileNotFoundError:
                return False
            return True

    def _next(self, name: str) -> tuple[str, object]:
        """Whether anything dies before or after this step, and by which order."""
        with self._lock:
            try:
                order = self._read()
            except FileNotFoundError:
                return "", None
            if order != self._known:
                self._known = order
                number, self._when, *rest = order[1].split()
                self._at, self._count = int(number), 0
                self._victims, self._spared = "".join(rest[:1]), [int(pid) for pid in rest[1:]]
            self._count += 1
            with open(f"{self._order}.steps", "a") as steps:
                steps.write(f"{name}\n")
            return self._when if self._count == self._at else "", order

    def _read(self) -> tuple[int, str]:
        return self._order.stat().st_mtime_ns, self._order.read_text()


def _claimed(order: Path) -> Path:
    return Path(f"{order}.claimed")


def pids_of(program: str, path: str = "") -> set[int]:
    """The processes of this machine that run the program, by a part of its name, or those with `path` in their command
    line."""
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
            if program.encode() in command.split(b"\0")[0] and path.encode() in command:
                found.add(int(entry))
    return found


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # the signal is on its way


class Stepping:
    """Wraps `target`; its methods are steps, except `silent` ones."""

    def __init__(self, name: str, target: object, steps: Steps, silent: Collection[str] = ()) -> None:
        self._name = name
        self._target = target
        self._steps = steps
        self._silent = frozenset(silent)

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self._target, attribute)
        if attribute in self._silent or attribute.startswith("_") or isinstance(value, type) or not callable(value):
            return value
        return functools.partial(self._call, attribute, value)

    def _call(self, attribute: str, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return self._steps.take(f"{self._name}.{attribute}", lambda: method(*args, **options))


class Killer:
    """The test's side for one daemon."""

    def __init__(self, order: str) -> None:
        self.order = order

    def arm(self, number: int = 0, when: str = "before", victims: str = "", spared: Collection[int] = ()) -> None:
        _claimed(Path(self.order)).unlink(missing_ok=True)  # by a daemon that died of it
        for file in ("steps", "killed"):
            Path(f"{self.order}.{file}").write_text("")
        Path(f"{self.order}.new").write_text(" ".join(map(str, (number, when, victims, *spared))))
        os.replace(f"{self.order}.new", self.order)

    def disarm(self) -> None:
        Path(self.order).unlink(missing_ok=True)

    def is_striking(self) -> bool:
        """Whether a kill may still happen. Once the killer is disarmed and this is false or the daemon has died, nothing
        dies any more."""
        return _claimed(Path(self.order)).exists()

    def steps(self) -> list[str]:
        return Path(f"{self.order}.steps").read_text().split()

    def killed(self) -> list[int]:
        """The ids of the killed processes."""
        return [int(pid) for pid in Path(f"{self.order}.killed").read_text().split()]
