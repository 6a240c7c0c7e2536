"""Which attached pod has which address: none has another's."""

from __future__ import annotations

import threading

from tapmanager.errors import TapmanagerError
from tapmanager.ledger import Entry
from tapmanager.links import netns


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
