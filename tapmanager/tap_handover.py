"""Hands out a pod's taps, or a connection to its passt, to one process at a time. virtshim announces that process, and it becomes
the pod's QEMU."""

from __future__ import annotations

import dataclasses
import hmac
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass

from tapmanager import protocol
from tapmanager.errors import TapmanagerError, invalid, unavailable, wrong_state
from tapmanager.keyed_locks import KeyedLocks
from tapmanager.ledger import Entry, Ledger, Phase, Placement
from tapmanager.links import netns, stream, tap
from tapmanager.links.tap import VhostNet
from tapmanager.peer import Peer, process_of
from tapmanager.pod import Nic, SharedNic

log = logging.getLogger(__name__)

# Seconds that fetch waits for a tap whose previous QEMU is just ending, and seconds between two attempts.
_BUSY_WAIT = 2.0
_BUSY_POLL = 0.02

# Seconds after `arm` within which a VM's process may fetch. libvirt starts it within a few seconds, a busy machine takes longer.
_START_TIME = 120


@dataclass(frozen=True, slots=True)
class OpenTap:
    """Descriptors that the holder owns: one for each queue of the NIC's tap, and as many of vhost-net, or none. For a shared NIC:
    one connection to passt."""

    nic: Nic | SharedNic
    fds: Sequence[int]
    vhost: Sequence[int] = ()


class TapHandover:
    """Thread-safe. `locks`: the locks of sandboxes, shared with attach and release. `tap_owner`: the common user of VMs.
    Raises the same errors as `Attachments`."""

    def __init__(self, ledger: Ledger, locks: KeyedLocks, tap_owner: int, vhost: VhostNet) -> None:
        self._ledger = ledger
        self._vhost = vhost
        self._locks = locks
        self._tap_owner = tap_owner
        self._vm_uids: dict[str, int] = {}

    def remember(self, entry: Entry) -> None:
        """Restores what an earlier process armed."""
        self._vm_uids[entry.pod.sandbox] = entry.placement.uid

    def forget(self, sandbox: str) -> None:
        self._vm_uids.pop(sandbox, None)

    def fetch(
        self, sandbox: str, key: str, peer: Peer, admit: Callable[[Placement], object], until: float
    ) -> Sequence[OpenTap]:
        """Opens the NICs' taps. Meanwhile `admit` moves `peer` into the cgroup that `arm` named, because the kernel
        takes 5 ms and more for the move. The peer gets the taps when both are done. An unknown sandbox and a wrong key
        get the same refusal, so that an unauthorized caller learns nothing."""
        with self._locks.holding(sandbox, until):
            entry = self._taken(self._unlocked(sandbox, key), peer)
            with ThreadPoolExecutor(1, "cgroup-move") as beside:
                moved = _begun(beside, lambda: admit(entry.placement))
                opened = self._opened(entry, min(until, time.monotonic() + _BUSY_WAIT))
            try:
                moved.result()
            except BaseException:
                protocol.close_all([fd for one in opened for fd in (*one.fds, *one.vhost)])
                raise
        return opened

    def _opened(self, entry: Entry, until: float) -> Sequence[OpenTap]:
        if entry.shared is not None:
            return [OpenTap(entry.shared, [stream.connect(entry.placement.stream, entry.shared.mac, until)])]
        taps = [OpenTap(nic, fds) for nic, fds in zip(entry.nics, self._open_taps(entry, until), strict=True)]
        return self._with_vhost(taps) if entry.placement.queues else taps

    def _with_vhost(self, taps: Sequence[OpenTap]) -> Sequence[OpenTap]:
        """Adds vhost-net to all taps or to none."""
        fds = self._vhost.open(sum(len(one.fds) for one in taps))
        if not fds:
            return taps
        rest = iter(fds)
        return [dataclasses.replace(one, vhost=[next(rest) for _ in one.fds]) for one in taps]

    def arm(self, sandbox: str, placement: Placement, until: float) -> None:
        """Prepares the start of the sandbox's VM: the key opens the network once, for one process, which goes to `placement`.
        Raises TapmanagerError (not-found) for an unknown sandbox."""
        placement = dataclasses.replace(placement, open_until=_since_boot() + _START_TIME, taken_by="")
        with self._locks.holding(sandbox, until):
            entry = self._ledger.read(sandbox)
            if entry is None:
                raise TapmanagerError("not-found", f"sandbox {sandbox} has no network; delete the pod to recreate it")
            if bool(placement.stream) != (entry.shared is not None):
                raise invalid(
                    f"args.stream: sandbox {sandbox} has {'a network' if entry.shared is None else 'no network'} of its own"
                )
            self._ledger.place(sandbox, placement)
            self._vm_uids[sandbox] = placement.uid

    def disarm(self, sandbox: str, until: float) -> None:
        """Ends the start: the key opens nothing any more. No error for an unknown sandbox."""
        with self._locks.holding(sandbox, until):
            entry = self._ledger.read(sandbox)
            if entry is not None and entry.placement.open_until:
                self._ledger.place(sandbox, dataclasses.replace(entry.placement, open_until=0))

    @property
    def vm_uids(self) -> frozenset[int]:
        """The users of the VMs' QEMUs; 0 for a QEMU without its own user."""
        return frozenset(tuple(self._vm_uids.values()))

    def _taken(self, entry: Entry, peer: Peer) -> Entry:
        """Reserves the sandbox's taps for the peer until the sandbox is armed again, because a local user may have read the
        key."""
        placement, process = entry.placement, process_of(peer)
        if peer.uid not in (0, placement.uid or self._tap_owner):
            raise _no_network(entry.pod.sandbox)
        if placement.taken_by == process:  # the same process asks again after a broken connection
            return entry
        if placement.taken_by or _since_boot() >= placement.open_until:
            why = "is not open: its key works for one start by virtshim"
            raise TapmanagerError("permission", f"the network of sandbox {entry.pod.sandbox} {why}")
        taken = dataclasses.replace(placement, taken_by=process)
        self._ledger.place(entry.pod.sandbox, taken)
        return dataclasses.replace(entry, placement=taken)

    def _unlocked(self, sandbox: str, key: str) -> Entry:
        entry = self._ledger.read(sandbox)
        if entry is None or not hmac.compare_digest(entry.fetch_key.encode(), key.encode()):
            raise _no_network(sandbox)
        if entry.phase is not Phase.ATTACHED:
            raise wrong_state(f"the network of sandbox {sandbox} is {entry.phase.value}")
        return entry

    def _open_taps(self, entry: Entry, until: float) -> list[list[int]]:
        queues = max(entry.placement.queues, 1)
        if queues > 1 and not all(nic.multi_queue for nic in entry.nics):
            # The tap was made with one queue: by an earlier version, or when the VM was smaller.
            log.info("tap.one_queue sandbox=%s wanted=%d: recreate the pod for more", entry.pod.sandbox, queues)
        wanted = [tap.Wanted(nic.tap, nic.multi_queue, queues) for nic in entry.nics]
        while True:
            try:
                return netns.run_inside(entry.netns, lambda: tap.open_taps(wanted))
            except TapmanagerError as exc:
                if exc.kind != "failed-precondition" or time.monotonic() >= until:
                    raise
            threading.Event().wait(_BUSY_POLL)  # the kernel gives no signal when a tap is closed


def _begun(beside: Executor, work: Callable[[], object]) -> Future[object]:
    try:
        return beside.submit(work)
    except RuntimeError as exc:
        raise unavailable(f"cannot start a thread: {exc}; the node or the service has too many threads") from exc


def _no_network(sandbox: str) -> TapmanagerError:
    """The same refusal for every cause, so that an unauthorized caller learns nothing."""
    return TapmanagerError("permission", f"no network of sandbox {sandbox} for this key; delete the pod to recreate it")


def _since_boot() -> int:
    """Seconds since boot: this clock continues when tapmanager restarts, and a reboot ends all networks anyway."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME))
