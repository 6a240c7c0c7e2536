"""Logs once for the life of the process which fields were accepted without effect; a line for each pod would help nobody."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import structlog

log = structlog.get_logger(__name__)


class LogOnce:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: set[str] = set()

    def without_effect(self, fields: Mapping[str, str]) -> None:
        """`fields`: kind -> why (see `virtshim.cri.pod_fields`)."""
        for kind, why in fields.items():
            with self._lock:
                if kind in self._logged:
                    continue
                self._logged.add(kind)
            log.info("pod.field.without_effect", field=kind, why=why)
