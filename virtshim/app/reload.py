"""SIGHUP: the settings are read again. All of the new ones that can change come into force, or, if anything is wrong, none."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Collection
from functools import partial

import structlog

from virtshim import config, sdnotify
from virtshim.config import BadConfiguration, Settings
from virtshim.logsetup import set_log_level
from virtshim.primitives.threads import lasting
from virtshim.settings.changes import changed, with_reloaded

log = structlog.get_logger(__name__)


class Reload:
    """`file` as for `config.load`; `use` brings into force what its program can change, and must not fail; `own`: tables and
    settings that the program reads at all."""

    def __init__(
        self,
        file: str | None,
        in_force: Settings,
        use: Callable[[Settings], None],
        own: Collection[str],
    ) -> None:
        self._file = file
        self.in_force = in_force
        self._use = use
        self._own = own

    def start(self, asked: queue.SimpleQueue[None]) -> None:
        """From now on each entry of `asked` is a reload, on a thread of its own."""
        lasting(partial(self._run, asked), "reload")

    def _run(self, asked: queue.SimpleQueue[None]) -> None:
        while True:
            asked.get()
            self.serve()

    def serve(self) -> None:
        """Of one signal: systemd is told. Never raises."""
        sdnotify.notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        status = "serving"
        try:
            if not self.again():
                status = "serving with the former settings: the new ones are refused, see the log"
        except Exception:
            log.exception("settings.broken")  # the edge of a thread: the next signal must be heard
        sdnotify.notify("READY=1", f"STATUS={status}")

    def again(self) -> bool:
        """Whether the new settings hold."""
        try:
            new = config.load(self._file)
        except BadConfiguration as exc:
            refused = exc.faults
        else:
            self._take(new)
            return True
        log.error(
            "settings.refused", faults=list(refused), remedy="the former ones hold; correct all, and reload again"
        )
        return False

    def _take(self, new: Settings) -> None:
        found = [(name, now) for name, now in changed(self.in_force, new) if self._is_mine(name)]
        held = with_reloaded(self.in_force, new)
        set_log_level(held.log.level)
        self._use(held)
        self.in_force = held
        log.info("settings.reloaded", changed=[name for name, now in found if now])
        if later := [name for name, now in found if not now]:
            log.warning("settings.need_restart", settings=later)

    def _is_mine(self, name: str) -> bool:
        return name in self._own or name.partition(".")[0] in self._own
