"""Who gets a pod's taps: one process at a time, which virtshim has announced, and which becomes the pod's QEMU."""

from __future__ import annotations

import dataclasses
import hmac
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tapmanager.errors import TapmanagerError
from tapmanager.keyed_locks import KeyedLocks
from tapmanager.ledger import Entry, Ledger, Phase, Placement
from tapmanager.links import netns, tap
from tapmanager.links.tap import VhostNet
from tapmanager.peer import Peer, process_of
from tapmanager.pod import Nic

log = logging.getLogger(__name__)

# How long fetch waits for a tap whose last QEMU is just ending, and how often it looks, in seconds.
_BUSY_WAIT = 2.0
_BUSY_POLL = 0.02

# How long after `arm` a VM's process may ask, in seconds: libvirt starts it within a few, a machine with much to do later.
_START_TIME = 120


@dataclass(frozen=True, slots=True)
class OpenTap:
    """Descriptors that the holder owns: a queue of the NIC's tap each, and of vhost-net none or as many."""

    nic: Nic
    fds: Sequence[int]
    vhost: Sequence[int] = ()


class TapHandover:
    """Thread-safe; `locks` are those of attach and release, one a sandbox. `tap_owner`: the user that VMs have in common.
    Errors: as `Attachments`."""

    def __init__(self, ledger: Ledger, locks: KeyedLocks, tap_owner: int, vhost: VhostNet) -> None:
        self._ledger = ledger
        self._vhost = vhost
        self._locks = locks
        self._tap_owner = tap_owner
        self._vm_uids: dict[str, int] = {}

    def remember(self, entry: Entry) -> None:
        """What an earlier process armed."""
        self._vm_uids[entry.pod.sandbox] = entry.placement.uid

    def forget(self, sandbox: str) -> None:
        self._vm_uids.pop(sandbox, None)

    def fetch(
        self, sandbox: str, key: str, peer: Peer, admit: Callable[[Placement], object], until: float
    ) -> Sequence[OpenTap]:
        """The NICs' taps, open, when `peer` was admitted where `arm` said. The same refusal for an unknown sandbox and a wrong
        key: an unauthorized caller learns nothing."""
        with self._locks.holding(sandbox, until):
            entry = self._taken(self._unlocked(sandbox, key), peer)
            admit(entry.placement)
            opened = self._open_taps(entry, min(until, time.monotonic() + _BUSY_WAIT))
        taps = [OpenTap(nic, fds) for nic, fds in zip(entry.nics, opened, strict=True)]
        return self._with_vhost(taps) if entry.placement.queues else taps

    def _with_vhost(self, taps: Sequence[OpenTap]) -> Sequence[OpenTap]:
        """For all of them or for none."""
        fds = self._vhost.open(sum(len(one.fds) for one in taps))
        if not fds:
            return taps
        rest = iter(fds)
        return [dataclasses.replace(one, vhost=[next(rest) for _ in one.fds]) for one in taps]

    def arm(self, sandbox: str, placement: Placement, until: float) -> None:
        """The sandbox's VM is about to be started: its key opens the network once more, for one process, which goes to
        `placement`. TapmanagerError (not-found) for an unknown sandbox."""
        placement = dataclasses.replace(placement, open_until=_since_boot() + _START_TIME, taken_by="")
        with self._locks.holding(sandbox, until):
            entry = self._ledger.read(sandbox)
            if entry is None:
                raise TapmanagerError("not-found", f"sandbox {sandbox} has no network; delete the pod to recreate it")
            # A power cut ends the QEMU that it is for.
            self._ledger.write(dataclasses.replace(entry, placement=placement), survives_power_cuts=False)
            self._vm_uids[sandbox] = placement.uid

    def disarm(self, sandbox: str, until: float) -> None:
        """The start that it was armed for is over: its key opens nothing. No error for an unknown sandbox."""
        with self._locks.holding(sandbox, until):
            entry = self._ledger.read(sandbox)
            if entry is not None and entry.placement.open_until:
                closed = dataclasses.replace(entry.placement, open_until=0)
                self._ledger.write(dataclasses.replace(entry, placement=closed), survives_power_cuts=False)

    @property
    def vm_uids(self) -> frozenset[int]:
        """The users that VMs' QEMUs are, one each; 0 for those that have none of their own."""
        return frozenset(tuple(self._vm_uids.values()))

    def _taken(self, entry: Entry, peer: Peer) -> Entry:
        """From here on the sandbox's taps are the peer's alone, until it is armed again: a local user may have read the key."""
        placement, process = entry.placement, process_of(peer)
        if peer.uid not in (0, placement.uid or self._tap_owner):
            raise _no_network(entry.pod.sandbox)
        if placement.taken_by == process:  # its connection broke, and it asks again
            return entry
        if placement.taken_by or _since_boot() >= placement.open_until:
            why = "is not open: its key is good for one start by virtshim"
            raise TapmanagerError("permission", f"the network of sandbox {entry.pod.sandbox} {why}")
        taken = dataclasses.replace(entry, placement=dataclasses.replace(placement, taken_by=process))
        self._ledger.write(taken, survives_power_cuts=False)
        return taken

    def _unlocked(self, sandbox: str, key: str) -> Entry:
        entry = self._ledger.read(sandbox)
        if entry is None or not hmac.compare_digest(entry.fetch_key.encode(), key.encode()):
            raise _no_network(sandbox)
        if entry.phase is not Phase.ATTACHED:
            raise TapmanagerError("failed-precondition", f"the network of sandbox {sandbox} is {entry.phase.value}")
        return entry

    def _open_taps(self, entry: Entry, until: float) -> list[list[int]]:
        queues = max(entry.placement.queues, 1)
        if queues > 1 and not all(nic.multi_queue for nic in entry.nics):
            # It was attached when no more than one was foreseen: by an earlier version, or the VM was smaller then.
            log.info("tap.one_queue sandbox=%s wanted=%d: recreate the pod for more", entry.pod.sandbox, queues)
        wanted = [tap.Wanted(nic.tap, nic.multi_queue, queues) for nic in entry.nics]
        while True:
            try:
                return netns.run_inside(entry.netns, lambda: tap.open_taps(wanted))
            except TapmanagerError as exc:
                if exc.kind != "failed-precondition" or time.monotonic() >= until:
                    raise
            threading.Event().wait(_BUSY_POLL)  # the kernel does not signal when a tap is closed


def _no_network(sandbox: str) -> TapmanagerError:
    """The same for all that is wrong: whoever may not have it learns nothing."""
    return TapmanagerError("permission", f"no network of sandbox {sandbox} for this key; delete the pod to recreate it")


def _since_boot() -> int:
    """Goes on across our own restarts; a restart of the machine ends all networks."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME))
