"""Runs checks side by side, each on a thread of its own with a time limit; gives the findings in the checks' order."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Iterator, Sequence

from virtshim.config import Settings
from virtshim.preflight.checks import Check
from virtshim.preflight.finding import Finding, error

# Seconds for one check: libvirt examines a QEMU in half a minute where even the node is emulated.
LIMIT = 60.0


def findings(checks: Sequence[Check], settings: Settings, limit: float = LIMIT) -> Iterator[Finding]:
    """Ends within `limit` seconds (and little more): a check that hangs is left behind on its daemon thread."""
    until = time.monotonic() + limit
    for check, answer in [(check, _started(check, settings)) for check in checks]:
        name = check.__name__
        try:
            found = answer.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            remedy = "see what hangs: run the command again with strace -f"
            found = [error(name.replace("_", " "), f"no answer within {limit:g} s", remedy)]
        yield from (dataclasses.replace(one, check=name) for one in found)


def _started(check: Check, settings: Settings) -> queue.SimpleQueue[Sequence[Finding]]:
    answer: queue.SimpleQueue[Sequence[Finding]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put(check(settings))
        except Exception as exc:  # noqa: BLE001  the edge of a thread: one broken check must not hide the others
            subject = check.__name__.replace("_", " ")
            answer.put([error(subject, f"the check itself failed: {type(exc).__name__}: {exc}", "please report this")])

    threading.Thread(target=run, name=f"check-{check.__name__}", daemon=True).start()
    return answer
