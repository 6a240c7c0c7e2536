"""What a network's plugins say of themselves (CNI 1.1's STATUS), asked in the background: who reads it waits for no plugin."""

from __future__ import annotations

import logging
import threading

from tapmanager.cni.conf import NetworkConf
from tapmanager.cni.plugins import CniPlugins
from tapmanager.errors import TapmanagerError
from tapmanager.ledger import Entry
from tapmanager.links import netns

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


# Which attached pod has which address: none has another's.


class PodAddresses:
    """Thread-safe; in memory, of what the ledger says."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: dict[str, Entry] = {}

    def remember(self, entry: Entry) -> None:
        """It has them, whoever else may."""
        with self._lock:
            self._owners |= dict.fromkeys(entry.ips, entry)

    def take(self, entry: Entry) -> None:
        """From now on they are that pod's. Raises TapmanagerError (already-exists) if one is another's, whose namespace is
        there."""
        with self._lock:
            for ip in entry.ips:
                owner = self._owners.get(ip)
                if owner is not None and owner.pod.sandbox != entry.pod.sandbox and netns.exists(owner.netns):
                    pod = owner.pod
                    raise TapmanagerError(
                        "already-exists",
                        f'CNI network "{entry.conf.name}" gave the pod {ip}, which pod {pod.namespace}/{pod.name} '
                        f"(sandbox {pod.sandbox[:20]}) has: its leases were lost, or two networks share a range; correct that, "
                        "or remove the other pod",
                    )
            self._owners |= dict.fromkeys(entry.ips, entry)

    def forget(self, sandbox: str) -> None:
        with self._lock:
            self._owners = {ip: owner for ip, owner in self._owners.items() if owner.pod.sandbox != sandbox}
