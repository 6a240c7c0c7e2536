"""Runs CNI 1.1's STATUS of a network's plugins in the background, so that readers need not wait for plugins. Also checks that
no two pods get the same address."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from tapmanager.cni.conf import NetworkConf
from tapmanager.cni.plugins import CniPlugins
from tapmanager.errors import TapmanagerError
from tapmanager.ledger import Entry
from tapmanager.links import netns

log = logging.getLogger(__name__)

_INTERVAL = 30.0  # seconds between two runs of STATUS


class PluginStatus:
    """Thread-safe. Call `start` once. `stop` does not wait for plugins."""

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
        """The last problem that plugins of the current configuration reported; "" if there is none, or no answer yet."""
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
        except TapmanagerError as exc:  # `CniPlugins.trouble` reports this
            log.debug("cni.status.not_asked error=%s", exc)
            return
        finally:
            self._wake.clear()  # wake-ups before this point are covered by the run that follows
        trouble = self._cni.status(conf) if conf.has_status else ""
        if trouble != self._trouble:
            log.warning("cni.status network=%s trouble=%s", conf.name, trouble or "resolved")
        self._asked, self._trouble = conf, trouble


# The addresses of attached pods. No two pods may have the same address.


@dataclass(frozen=True, slots=True)
class _Owner:
    """The pod that has an address. Not its whole ledger entry, which takes many times the memory. `pod`: namespace/name."""

    sandbox: str
    netns: str
    pod: str


def _owner(entry: Entry) -> _Owner:
    return _Owner(entry.pod.sandbox, entry.netns, f"{entry.pod.namespace}/{entry.pod.name}")


class PodAddresses:
    """Thread-safe. Kept in memory, from the ledger's content."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: dict[str, _Owner] = {}

    def remember(self, entry: Entry) -> None:
        """Adds the pod's addresses without a check."""
        with self._lock:
            self._owners |= dict.fromkeys(entry.ips, _owner(entry))

    def take(self, entry: Entry) -> None:
        """Reserves the pod's addresses. Raises TapmanagerError (already-exists) if another pod has one, and its namespace
        exists."""
        with self._lock:
            for ip in entry.ips:
                owner = self._owners.get(ip)
                if owner is not None and owner.sandbox != entry.pod.sandbox and netns.exists(owner.netns):
                    raise TapmanagerError(
                        "already-exists",
                        f'CNI network "{entry.conf.name}" gave the pod {ip}, which pod {owner.pod} '
                        f"(sandbox {owner.sandbox[:20]}) already has: leases were lost, or two networks share a range; "
                        "correct that, or remove the other pod",
                    )
            self._owners |= dict.fromkeys(entry.ips, _owner(entry))

    def forget(self, sandbox: str) -> None:
        with self._lock:
            self._owners = {ip: owner for ip, owner in self._owners.items() if owner.sandbox != sandbox}
