"""Says once for the life of the process what was taken without effect; a line for each pod would tell nobody anything."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import structlog

log = structlog.get_logger(__name__)


class ToldOnce:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: set[str] = set()

    def tell(self, without_effect: Mapping[str, str]) -> None:
        """`without_effect`: kind -> why (see `virtshim.cri.pod_fields`)."""
        for kind, why in without_effect.items():
            with self._lock:
                if kind in self._told:
                    continue
                self._told.add(kind)
            log.info("pod.field.without_effect", field=kind, why=why)
