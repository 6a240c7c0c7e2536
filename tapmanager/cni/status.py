"""What a network's plugins say of themselves (CNI 1.1's STATUS), asked in the background: who reads it waits for no plugin."""

from __future__ import annotations

import logging
import threading

from tapmanager.cni.conf import NetworkConf
from tapmanager.cni.plugins import CniPlugins
from tapmanager.errors import TapmanagerError

log = logging.getLogger(__name__)

_INTERVAL = 30.0  # seconds between two answers to one question


class PluginStatus:
    """Thread-safe. `start` once; `stop` waits for no plugin."""

    def __init__(self, cni: CniPlugins, interval: float = _INTERVAL) -> None:
        self._cni = cni
        self._interval = interval
        self._asking: NetworkConf | None = None
        self._asked: NetworkConf | None = None
        self._trouble = ""
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="cni-status", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    def trouble(self) -> str:
        """The last answer of the plugins of today's configuration; "" if all is well, or they have not answered yet."""
        try:
            conf = self._cni.load()
        except TapmanagerError as exc:
            return str(exc)
        if not conf.has_status:
            return ""
        if conf != self._asking:
            self._wake.set()
        return self._trouble if conf == self._asked else ""

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._ask()
            except Exception:  # the edge of a thread: the next answer must come
                log.exception("cni.status_broken")
            self._wake.wait(self._interval)

    def _ask(self) -> None:
        try:
            conf = self._asking = self._cni.load()
        except TapmanagerError as exc:  # which `CniPlugins.trouble` tells
            log.debug("cni.status.not_asked error=%s", exc)
            return
        finally:
            self._wake.clear()  # what woke us until here is about to be asked
        trouble = self._cni.status(conf) if conf.has_status else ""
        if trouble != self._trouble:
            log.warning("cni.status network=%s trouble=%s", conf.name, trouble or "none any more")
        self._asked, self._trouble = conf, trouble
