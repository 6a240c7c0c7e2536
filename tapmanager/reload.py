"""SIGHUP: the settings are read again. All of the new ones that can change come into force, or, if anything is wrong, none."""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from tapmanager import sdnotify
from tapmanager.errors import TapmanagerError
from tapmanager.log_lines import one_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

log = logging.getLogger(__name__)

S = TypeVar("S", bound="DataclassInstance")


@dataclass(slots=True)
class Reload(Generic[S]):
    """`load` reads the settings, `changeable` are those that `use` brings into force; the others wait for a restart."""

    in_force: S
    load: Callable[[], S]
    changeable: Sequence[str]
    use: Callable[[S], None]
    # Its put() may be called where a signal has interrupted it.
    _asked: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)

    def start(self) -> None:
        """In the main thread."""
        signal.signal(signal.SIGHUP, lambda *_: self._asked.put(None))
        threading.Thread(target=self._run, name="reload", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._asked.get()
            sdnotify.notify(os.environ, "RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
            try:
                self.again()
            except Exception:
                log.exception("settings.broken")  # the edge of a thread: the next signal must be heard
            sdnotify.notify(os.environ, "READY=1")

    def again(self) -> bool:
        """Whether the new settings hold."""
        try:
            new = self.load()
        except TapmanagerError as exc:
            refused = one_line(str(exc))
        else:
            self._take(new)
            return True
        log.error("settings.refused the former ones hold: %s", refused)
        return False

    def _take(self, new: S) -> None:
        changed = [
            one.name for one in dataclasses.fields(new) if getattr(new, one.name) != getattr(self.in_force, one.name)
        ]
        now = [name for name in changed if name in self.changeable]
        held = dataclasses.replace(self.in_force, **{name: getattr(new, name) for name in now})
        self.use(held)
        self.in_force = held
        log.info("settings.reloaded changed=%s", ",".join(now) or "nothing")
        if later := [name for name in changed if name not in now]:
            log.warning("settings.need_restart settings=%s", ",".join(later))
