"""kubelet's hooks: ExecSync does not say that it is one. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

# kubelet's, with the handler as JSON, for a pod whose object is gone when its hook is run.
PRE_STOP_ANNOTATION: Final = "io.kubernetes.container.preStopHandler"


def pre_stop_command(annotations: Mapping[str, str]) -> tuple[str, ...]:
    """() for a container without one, or with one of another kind."""
    try:
        handler = json.loads(annotations.get(PRE_STOP_ANNOTATION, "null"))
        words = handler["exec"]["command"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ()
    return tuple(words) if isinstance(words, list) and all(isinstance(word, str) for word in words) else ()


def agent_may_take(annotations: Mapping[str, str], command: tuple[str, ...], age: float, boot: float) -> float:
    """Seconds for which a command without a time limit of its own, in a container of that age, waits for the guest's agent to
    come up: guests have `boot` seconds from their start. A preStop hook waits for none: its time is taken from the grace period.
    (One with the same command as the postStart hook cannot be told from that.)"""
    return 0.0 if command == pre_stop_command(annotations) else max(0.0, boot - max(0.0, age))
