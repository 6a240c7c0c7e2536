"""The use cases: attach a pod, release it, hand out its taps. One lock a sandbox: a slow pod never blocks another.

attach     ledger ATTACHING -> namespace -> CNI ADD -> ledger with result and plan -> bridge, tap, guard, DHCP -> ATTACHED
release    ledger RELEASING -> DHCP, tap, bridge away, CNI interface as it was -> CNI DEL -> namespace -> ledger deleted

After a kill at any point the ledger says what may exist, and release leaves none of it. All points in time are of
time.monotonic().
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tapmanager.cni import conf as cni_conf
from tapmanager.cni import delegate_records
from tapmanager.cni.plugins import CniPlugins
from tapmanager.cni.result import parse_result
from tapmanager.dhcp import server as dhcp_server
from tapmanager.dhcp.lease_plan import Lease, lease_for
from tapmanager.errors import TapmanagerError, internal
from tapmanager.fields import BadField
from tapmanager.keyed_locks import KeyedLocks
from tapmanager.ledger import Entry, Ledger, Phase, Placement
from tapmanager.links import counters, netns, network_plan, nic_plan, pod_links, tap
from tapmanager.links.counters import Counters
from tapmanager.peer import Peer, process_of
from tapmanager.pod import Nic, Pod
from tapmanager.sriov.nic_functions import NicFunctions, give_all_back

log = logging.getLogger(__name__)

# How long fetch waits for a tap whose last QEMU is just ending, and how often it looks, in seconds.
_BUSY_WAIT = 2.0
_BUSY_POLL = 0.02

# How long after `arm` a VM's process may ask, in seconds: libvirt starts it within a few, a machine with much to do later.
_START_TIME = 120

# Sandboxes in one answer: a few NICs each fit into a frame.
_COUNTERS_PAGE = 256

# bridge and ptp remove their masquerading rules only for the addresses they read off the pod's interface at DEL; once the
# namespace is gone those rules would stay for ever. They merely delete the interface, and the others do not look at it, so a
# stand-in of the same name and addresses serves; other plugins might move it to the host, and get an empty namespace name.
DEL_READS_ADDRESSES = frozenset({"bridge", "ptp", "portmap", "firewall", "bandwidth"})


@dataclass(frozen=True, slots=True)
class AttachmentSettings:
    """`tap_owner` is the uid of QEMU; `undo_timeout`, in seconds, is what clean-up after a failed attach may take: it has a
    limit of its own, for the caller's may be what ran out."""

    netns_dir: str
    bin_dirs: tuple[str, ...]
    tap_owner: int
    undo_timeout: float


class Attachments:
    """Thread-safe. Errors: TapmanagerError; OSError where the kernel refuses what it should not."""

    def __init__(
        self,
        ledger: Ledger,
        cni: CniPlugins,
        dhcp: dhcp_server.DhcpServer,
        limits: AttachmentSettings,
        functions: NicFunctions,
    ) -> None:
        self._ledger = ledger
        self._cni = cni
        self._dhcp = dhcp
        self._limits = limits
        self._functions = functions
        self._vm_uids: dict[str, int] = {}
        self._locks = KeyedLocks()

    def recover(self) -> None:
        """Serves DHCP again for what an earlier process attached. Called once, before the first request. Never raises for
        one pod: the others must come up."""
        for sandbox in self._ledger.sandboxes():
            try:
                entry = self._ledger.read(sandbox)
                if entry is not None and entry.phase is Phase.ATTACHED:
                    self._vm_uids[sandbox] = entry.placement.uid
                    self._start_dhcp(entry)
            except (TapmanagerError, OSError) as exc:
                log.warning("pod.not_recovered sandbox=%s error=%s", sandbox, exc)

    @property
    def trouble(self) -> str:
        """Why no pod could be attached now; "" if one could."""
        return self._cni.trouble()

    def sandboxes(self) -> Sequence[str]:
        return self._ledger.sandboxes()

    def pod(self, sandbox: str) -> Pod:
        """Whose network it is. TapmanagerError: not-found also for one that is not whole."""
        entry = self._ledger.read(sandbox)
        if entry is None or entry.phase is not Phase.ATTACHED or not netns.exists(entry.netns):
            raise TapmanagerError("not-found", f"sandbox {sandbox} has no network")
        return entry.pod

    def counters(self, after: str) -> tuple[Mapping[str, Mapping[str, Counters]], str]:
        """The guest NICs of attached sandboxes whose ids are greater than `after`, by sandbox and interface name; and the
        last id that was looked at, "" if there are no more. No sandbox's lock is taken: a slow pod delays nobody."""
        rest = [sandbox for sandbox in self._ledger.sandboxes() if sandbox > after]
        page = rest[:_COUNTERS_PAGE]
        entries = [entry for entry in map(self._attached, page) if entry is not None]
        found = netns.run_in_each({entry.netns: functools.partial(counters.read, entry.nics) for entry in entries})
        by_sandbox = {entry.pod.sandbox: found[entry.netns] for entry in entries if entry.netns in found}
        return by_sandbox, page[-1] if len(rest) > len(page) else ""

    def _attached(self, sandbox: str) -> Entry | None:
        try:
            entry = self._ledger.read(sandbox)
        except TapmanagerError as exc:
            log.debug("counters.no_record sandbox=%s error=%s", sandbox, exc)
            return None
        return entry if entry is not None and entry.phase is Phase.ATTACHED else None

    def lost(self, until: float) -> Mapping[str, str]:
        """Attached sandboxes of which a part was removed by somebody else, and what. One that a call is busy with may just
        be going; it is left out."""
        found = {}
        for sandbox in self._ledger.sandboxes():
            if self._missing_part(sandbox):
                with (
                    contextlib.suppress(TapmanagerError),
                    self._locks.holding(sandbox, min(until, time.monotonic() + _BUSY_POLL)),
                ):
                    if gone := self._missing_part(sandbox):
                        found[sandbox] = gone
        return found

    def _missing_part(self, sandbox: str) -> str:
        try:
            entry = self._ledger.read(sandbox)
            if entry is None or entry.phase is not Phase.ATTACHED:
                return ""
            if not netns.exists(entry.netns):
                return f"the network namespace {entry.netns}"
            there = netns.run_inside(entry.netns, lambda: {name for _, name in socket.if_nameindex()})
        except (TapmanagerError, OSError) as exc:  # unreadable is not gone
            log.warning("pod.not_looked_at sandbox=%s error=%s", sandbox, exc)
            return ""
        gone = [nic.tap for nic in entry.nics if nic.tap not in there]
        return f"the tap {', '.join(gone)} in {entry.netns}" if gone else ""

    # -- attach --------------------------------------------------------------------------------------------------------

    def attach(self, pod: Pod, until: float) -> Entry:
        """What is attached already is returned as it is; what an earlier call or a reboot left behind is cleared first."""
        with self._locks.holding(pod.sandbox, until):
            found = self._ledger.read(pod.sandbox)
            if found is not None and found.phase is Phase.ATTACHED and netns.exists(found.netns):
                if pod.sandbox not in self._dhcp.owners():
                    self._start_dhcp(found)  # it failed at our start
                return found
            if found is not None:
                self._tear_down(found, self._undo_until())
            return self._attach_new(pod, until)

    def _attach_new(self, pod: Pod, until: float) -> Entry:
        entry = Entry(
            phase=Phase.ATTACHING,
            pod=pod,
            netns=netns.path_of(self._limits.netns_dir, pod.sandbox),
            conf=self._cni.load(),
            bin_dirs=self._limits.bin_dirs,
            fetch_key=secrets.token_hex(32),
        )
        self._cni.require_plugins(entry.conf, entry.bin_dirs)
        self._refuse_id_collision(entry)
        self._ledger.write(entry)
        try:
            netns.delete(entry.netns)  # a stray of that name has no record: nothing else can own it
            netns.create(entry.netns)
            result = self._cni.add(entry.conf, self._at(entry, entry.netns), until)
            entry = dataclasses.replace(entry, result=result)
            entry = self._planned(entry)
            # What follows is gone with a power cut, and what CNI has made is released without its result, too.
            self._ledger.write(entry, survives_power_cuts=False)
            for function in entry.functions:
                self._functions.take(function)
            netns.run_inside(entry.netns, lambda: pod_links.build(entry.nics, self._limits.tap_owner))
            self._start_dhcp(entry)
            attached = dataclasses.replace(entry, phase=Phase.ATTACHED)
            self._ledger.write(attached)
        except BaseException:
            self._undo(entry)
            raise
        log.info("pod.attached sandbox=%s ips=%s nics=%d", pod.sandbox, ",".join(attached.ips), len(attached.nics))
        return attached

    def _refuse_id_collision(self, entry: Entry) -> None:
        """Names are made of 80 bits of the id; two ids that share them would share a namespace."""
        short = entry.pod.sandbox[:20]
        for other in self._ledger.sandboxes():
            if other.startswith(short) and other != entry.pod.sandbox:
                raise TapmanagerError("already-exists", f"sandbox {other} has the same first 20 digits; use another id")

    def _planned(self, entry: Entry) -> Entry:
        try:
            result = parse_result(entry.result or {})
        except BadField as exc:
            raise internal(f'CNI network "{entry.conf.name}" gave a result that cannot be used: {exc}') from exc
        there = netns.run_inside(entry.netns, pod_links.read)
        networks = network_plan.networks_of(result, there, delegate_records.read(entry.conf, entry.pod.sandbox))
        functions = self._functions.planned(networks, there)
        nics = network_plan.nics_of(networks, there, pod_links.random_mac, {function.link for function in functions})
        nics, functions = network_plan.with_one_default(networks, nics, functions)
        for what in network_plan.not_given(networks, (*nics, *functions)):
            log.warning("interface.not_given sandbox=%s %s", entry.pod.sandbox, what)
        return dataclasses.replace(
            entry,
            nics=nics,
            functions=functions,
            ips=nic_plan.ips_of(result),
            dns=nic_plan.dns_of(entry.pod.dns, result),
        )

    def _start_dhcp(self, entry: Entry) -> None:
        leases = [(nic, lease_for(nic, entry.dns, entry.pod.hostname or entry.pod.name)) for nic in entry.nics]

        def open_all() -> list[tuple[socket.socket, Lease]]:
            with contextlib.ExitStack() as undo:
                opened = [
                    (undo.enter_context(dhcp_server.open_socket(nic.tap)), lease) for nic, lease in leases if lease
                ]
                undo.pop_all()
                return opened

        for sock, lease in netns.run_inside(entry.netns, open_all):
            self._dhcp.serve(entry.pod.sandbox, sock, lease)

    def _undo(self, entry: Entry) -> None:
        """The first error is the one to report; what cannot be undone stays in the ledger, and release repeats it."""
        try:
            self._tear_down(entry, self._undo_until())
        except (TapmanagerError, OSError) as exc:
            log.warning("pod.not_undone sandbox=%s error=%s", entry.pod.sandbox, exc)

    def _undo_until(self) -> float:
        return time.monotonic() + self._limits.undo_timeout

    # -- release -------------------------------------------------------------------------------------------------------

    def release(self, sandbox: str, until: float, forget: Callable[[str], object] | None = None) -> None:
        """Makes sure that nothing of the sandbox is left. `forget` is told the cgroup that its last VM was in. `sandbox` is a
        checked id."""
        with self._locks.holding(sandbox, until):
            entry = self._ledger.read(sandbox)
            if entry is not None:
                if forget:
                    forget(entry.placement.group)
                self._tear_down(entry, until)
                log.info("pod.released sandbox=%s", sandbox)
                return
            self._dhcp.forget(sandbox)
            netns.delete(netns.path_of(self._limits.netns_dir, sandbox))

    def _tear_down(self, entry: Entry, until: float) -> None:
        sandbox = entry.pod.sandbox
        if entry.phase is not Phase.RELEASING:
            self._record_releasing(entry)
        self._dhcp.forget(sandbox)
        alive = self._restore_links(entry)
        functions = give_all_back(self._functions, entry.functions, entry.netns if alive else "")
        if functions != entry.functions:
            self._record_releasing(entry := dataclasses.replace(entry, functions=functions))
        # CNI specification, DEL: a namespace that is gone is given as an empty name, and plugins free what is outside it.
        try:
            self._cni.delete(entry.conf, self._at(entry, entry.netns if alive else ""), entry.result, until)
        except TapmanagerError as exc:
            # sriov's DEL does not know that it found the function at VFIO, and looks for a nonexistent link. Its addresses are
            # free by then, and the sandbox must be.
            if all(function.driver for function in entry.functions):
                raise
            log.warning("pod.del_failed sandbox=%s error=%s; its functions were bound to VFIO before", sandbox, exc)
        netns.delete(entry.netns)
        self._ledger.delete(sandbox)
        self._vm_uids.pop(sandbox, None)

    def _restore_links(self, entry: Entry) -> bool:
        """Undoes what `build` did, so that plugins find at DEL what they made at ADD; False if there is no namespace."""
        alive = netns.exists(entry.netns)
        work = pod_links.restore
        made = entry.nics or entry.functions
        if not alive and made and delegate_records.kinds(entry.conf, entry.pod.sandbox) <= DEL_READS_ADDRESSES:
            log.warning("pod.namespace_gone sandbox=%s; a stand-in serves the plugins", entry.pod.sandbox)
            netns.delete(entry.netns)
            netns.create(entry.netns)
            alive, work = True, pod_links.make_substitutes
        if alive and entry.nics:
            for trouble in netns.run_inside(entry.netns, lambda: work(entry.nics)):
                log.warning("pod.link_not_restored sandbox=%s error=%s", entry.pod.sandbox, trouble)
        return alive

    def _record_releasing(self, entry: Entry) -> None:
        """A full disk must not prevent resources from being given back; the older record leads to the same release."""
        try:
            self._ledger.write(dataclasses.replace(entry, phase=Phase.RELEASING))
        except TapmanagerError as exc:
            log.warning("ledger.not_written sandbox=%s error=%s", entry.pod.sandbox, exc)

    def _at(self, entry: Entry, path: str) -> cni_conf.CniAttachment:
        """Today's plugin directories, then those at the time of attach: plugins may have moved, or the config."""
        dirs = tuple(dict.fromkeys((*self._limits.bin_dirs, *entry.bin_dirs)))
        return cni_conf.CniAttachment(entry.pod, path, dirs)

    # -- fetch ---------------------------------------------------------------------------------------------------------

    def fetch(
        self, sandbox: str, key: str, peer: Peer, admit: Callable[[Placement], object], until: float
    ) -> tuple[Sequence[Nic], list[int]]:
        """The NICs and one open tap descriptor for each, owned by the caller, when `peer` was admitted where `arm` said. The
        same refusal for an unknown sandbox and a wrong key: an unauthorized caller learns nothing."""
        with self._locks.holding(sandbox, until):
            entry = self._taken(self._unlocked(sandbox, key), peer)
            admit(entry.placement)
            return entry.nics, self._open_taps(entry, min(until, time.monotonic() + _BUSY_WAIT))

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
        if peer.uid not in (0, placement.uid or self._limits.tap_owner):
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

    def _open_taps(self, entry: Entry, until: float) -> list[int]:
        while True:
            try:
                return netns.run_inside(entry.netns, lambda: tap.open_taps(nic.tap for nic in entry.nics))
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
