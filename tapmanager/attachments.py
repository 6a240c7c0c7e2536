"""The use cases: attach a pod and release it. `tap_handover` hands out the taps. Each sandbox has its own lock, so a slow pod
never blocks another.

attach     write ATTACHING to the ledger and create the namespace; run CNI ADD, and meanwhile create bridge, tap and guard; write
           the result and the plan to the ledger -> bridge the CNI interface to the tap, start DHCP -> write ATTACHED
release    write RELEASING -> stop DHCP, restore the CNI interface -> CNI DEL -> remove the namespace -> delete the record

After a kill at any point the ledger says what may exist, and release removes all of it. All points in time are of
time.monotonic().

A pod whose namespace another runtime made only gets a record: no plugin runs, and nothing in the namespace changes, neither at
attach nor at release.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tapmanager import kernel_files
from tapmanager.cni import conf as cni_conf
from tapmanager.cni import delegate_records
from tapmanager.cni.conf import NO_CNI
from tapmanager.cni.plugins import CniPlugins, PluginRuns
from tapmanager.cni.result import parse_result
from tapmanager.cni.status import PluginStatus, PodAddresses
from tapmanager.dhcp.opened import GuestNic, open_nics
from tapmanager.dhcp.server import DhcpServer
from tapmanager.errors import TapmanagerError, internal, invalid, wrong_state
from tapmanager.fields import BadField
from tapmanager.keyed_locks import KeyedLocks
from tapmanager.ledger import Entry, Ledger, Phase
from tapmanager.links import existing, netns, network_plan, nic_plan, packet_rules, pod_links
from tapmanager.links.packet_rules import Counters, read_counters
from tapmanager.links.tap import VhostNet
from tapmanager.network_values import FILTERS, OFF, WITH_IP, Existing
from tapmanager.pod import Bandwidth, Pod
from tapmanager.sriov.nic_functions import NicFunctions, give_all_back
from tapmanager.tap_handover import TapHandover

log = logging.getLogger(__name__)

# Seconds that a check of a sandbox waits for a running call of the same sandbox.
_GOING = 0.02

# Sandboxes in one answer: with a few NICs each, they fit into one frame.
_COUNTERS_PAGE = 256

# The key of the lock under which a namespace of another runtime gets its owner.
_OTHERS = "another runtime's namespaces"

# At DEL, bridge and ptp read the addresses from the pod's interface and remove the masquerading rules for them. If the namespace
# is gone, the rules would stay for ever. So these plugins get a substitute interface with the same name and addresses: they only
# delete it, and the others listed here ignore it. All other plugins might move it to the host, so they get an empty name.
DEL_READS_ADDRESSES = frozenset({"bridge", "ptp", "portmap", "firewall", "bandwidth"})


@dataclass(slots=True)
class AttachmentSettings:
    """`tap_owner`: the uid of QEMU. `undo_timeout`: seconds for the clean-up after a failed attach; it does not use the caller's
    time limit, because the attach may have failed by exceeding it. `filter`: one of FILTERS. `filter_by_pod`: whether pods may
    ask for a weaker filter."""

    netns_dir: str
    bin_dirs: tuple[str, ...]
    tap_owner: int
    undo_timeout: float
    filter: str = WITH_IP
    filter_by_pod: bool = False


class Attachments:
    """Thread-safe. Raises TapmanagerError; OSError if the kernel refuses unexpectedly."""

    def __init__(
        self,
        ledger: Ledger,
        cni: CniPlugins,
        dhcp: DhcpServer,
        limits: AttachmentSettings,
        functions: NicFunctions,
        status: PluginStatus | None = None,
        vhost: VhostNet | None = None,
    ) -> None:
        self._status = status or PluginStatus(cni)
        self._addresses = PodAddresses()
        self._ledger = ledger
        self._cni = cni
        self._dhcp = dhcp
        self._limits = limits
        self._functions = functions
        self._not_served: dict[str, str] = {}  # since the start: sandbox -> reason
        self._boot = kernel_files.boot_id()
        self._locks = KeyedLocks()
        self.taps = TapHandover(ledger, self._locks, limits.tap_owner, vhost or VhostNet())

    def recover(self) -> None:
        """Resumes serving the pods that an earlier process attached. Call it once, before the first request. A fault of one pod
        does not affect the others."""
        for sandbox in self._ledger.sandboxes():
            self._take_up(sandbox)

    def _take_up(self, sandbox: str) -> str:
        """Resumes one pod. Returns why its guest cannot be served, if the fault is the pod's own; else ""."""
        before, entry = self._not_served.pop(sandbox, ""), None
        try:
            entry = self._ledger.read(sandbox)
            if entry is not None and entry.phase is Phase.ATTACHED:
                self.taps.remember(entry)
                self._addresses.remember(entry)
                if entry.shared is None:
                    self._start_dhcp(entry)
        except Exception as exc:
            why = f"{type(exc).__name__}: {exc}"
            if why != before:
                unforeseen = not isinstance(exc, TapmanagerError | OSError)
                log.warning("pod.not_recovered sandbox=%s error=%s", sandbox, why, exc_info=unforeseen)
            self._not_served[sandbox] = why
            is_the_nodes = isinstance(exc, OSError | MemoryError) or getattr(exc, "kind", "") == "unavailable"
            return f"its guest cannot be served: {why}" if entry and not is_the_nodes else ""
        return ""

    @property
    def trouble(self) -> str:
        """Why no pod can be attached now; "" if pods can be attached."""
        return self._cni.trouble() or self._status.trouble()

    @property
    def plugin_runs(self) -> PluginRuns:
        return self._cni.runs

    def sandboxes(self) -> Sequence[str]:
        return self._ledger.sandboxes()

    def pod(self, sandbox: str) -> Pod:
        """The pod of the sandbox. Raises TapmanagerError (not-found), also for a sandbox that is not fully attached."""
        entry = self._ledger.read(sandbox)
        if entry is None or entry.phase is not Phase.ATTACHED or not netns.exists(entry.netns):
            raise TapmanagerError("not-found", f"sandbox {sandbox} has no network")
        return entry.pod

    def counters(self, after: str) -> tuple[Mapping[str, Mapping[str, Counters]], str]:
        """The counters of guest NICs of attached sandboxes whose ids are greater than `after`, by sandbox and interface name; and
        the last id that was read, "" if there are no more. Takes no lock of a sandbox, so a slow pod does not delay the
        answer."""
        rest = [sandbox for sandbox in self._ledger.sandboxes() if sandbox > after]
        page = rest[:_COUNTERS_PAGE]
        entries = [entry for entry in map(self._attached, page) if entry is not None]
        found = netns.run_in_each({entry.netns: functools.partial(read_counters, entry.nics) for entry in entries})
        by_sandbox = {entry.pod.sandbox: found[entry.netns] for entry in entries if entry.netns in found}
        return by_sandbox, page[-1] if len(rest) > len(page) else ""

    def _attached(self, sandbox: str) -> Entry | None:
        try:
            entry = self._ledger.read(sandbox)
        except TapmanagerError as exc:
            log.debug("counters.no_record sandbox=%s error=%s", sandbox, exc)
            return None
        return entry if entry is not None and entry.phase is Phase.ATTACHED and entry.shared is None else None

    def lost(self, until: float) -> Mapping[str, str]:
        """Attached sandboxes that somebody else removed a part of, and the part. Also sandboxes that could not be served at the
        start and still cannot. Omits a sandbox with a running call, because it may be in release."""
        found = {}
        for sandbox in self._ledger.sandboxes():
            if sandbox in self._not_served or self._missing_part(sandbox):
                with (
                    contextlib.suppress(TapmanagerError),
                    self._locks.holding(sandbox, min(until, time.monotonic() + _GOING)),
                ):
                    tried = self._take_up(sandbox) if sandbox in self._not_served else ""
                    if gone := self._missing_part(sandbox) or tried:
                        found[sandbox] = gone
        return found

    def _missing_part(self, sandbox: str) -> str:
        try:
            entry = self._ledger.read(sandbox)
            if entry is None or entry.phase is not Phase.ATTACHED:
                return ""
            if entry.shared is not None:
                return "" if self._is_attached(entry) else f"the network namespace {entry.netns}"
            if not netns.exists(entry.netns):
                return f"the network namespace {entry.netns}"
            there = netns.run_inside(entry.netns, lambda: {name for _, name in socket.if_nameindex()})
        except (TapmanagerError, OSError) as exc:  # unreadable does not mean gone; and it could not be released either
            log.warning("pod.not_looked_at sandbox=%s error=%s", sandbox, exc)
            return ""
        gone = [nic.tap for nic in entry.nics if nic.tap not in there]
        return f"the tap {', '.join(gone)} in {entry.netns}" if gone else ""

    # -- attach --------------------------------------------------------------------------------------------------------

    def attach(self, pod: Pod, until: float) -> Entry:
        """Attaches the pod. Returns the record unchanged if it is already attached. Removes leftovers of an earlier call or a
        reboot first."""
        with self._locks.holding(pod.sandbox, until):
            found = self._ledger.read(pod.sandbox)
            if pod.existing is not None:
                return self._attach_existing(pod, pod.existing, found, until)
            if found is not None and found.phase is Phase.ATTACHED and netns.exists(found.netns):
                if pod.sandbox not in self._dhcp.owners():
                    self._start_dhcp(found)  # it failed when tapmanager started
                    self._not_served.pop(pod.sandbox, None)
                return found
            if found is not None:
                self._tear_down(found, self._undo_until())
            return self._attach_new(pod, until)

    def _attach_existing(self, pod: Pod, wanted: Existing, found: Entry | None, until: float) -> Entry:
        if found is not None:
            if found.netns != wanted.path or not self._is_attached(found):
                raise wrong_state(
                    f"{wanted.path} is not the network namespace that sandbox {pod.sandbox} was attached to ({found.netns}); "
                    "the pod needs a new sandbox"
                )
            return found
        with self._locks.holding(_OTHERS, until), existing.opened(wanted.path) as descriptor:
            self._refuse_others(wanted.path, os.fstat(descriptor).st_ino)
            nic = existing.nic_in(wanted, descriptor, pod.macs)
            entry = Entry(
                phase=Phase.ATTACHED,
                pod=pod,
                netns=wanted.path,
                conf=NO_CNI,
                bin_dirs=(),
                fetch_key=secrets.token_hex(32),
                ips=tuple(one.partition("/")[0] for one in nic.addresses),
                dns=pod.dns,
                boot=self._boot,
                shared=nic,
            )
            self._ledger.write(entry)
        self._addresses.remember(entry)
        log.info("pod.attached sandbox=%s ips=%s netns=%s", pod.sandbox, ",".join(entry.ips), entry.netns)
        return entry

    def _is_attached(self, entry: Entry) -> bool:
        """Whether the namespace that another runtime made is still the one that was recorded. An inode means nothing after a
        reboot."""
        return (
            entry.shared is not None
            and entry.boot == self._boot
            and existing.inode_at(entry.netns) == entry.shared.inode
        )

    def _refuse_others(self, path: str, inode: int) -> None:
        for sandbox in self._ledger.sandboxes():
            other = None
            with contextlib.suppress(TapmanagerError):  # an unreadable record only affects its own pod
                other = self._ledger.read(sandbox)
            if other is not None and existing.inode_at(other.netns) == inode:
                whose = f"pod {other.pod.namespace}/{other.pod.name} (sandbox {sandbox[:20]})"
                raise invalid(f"{path} is the network namespace of {whose}; two pods cannot share it")

    def _attach_new(self, pod: Pod, until: float) -> Entry:
        self._refuse_weaker_filter(pod)
        entry = Entry(
            phase=Phase.ATTACHING,
            pod=pod,
            netns=netns.path_of(self._limits.netns_dir, pod.sandbox),
            conf=self._cni.load(),
            bin_dirs=self._limits.bin_dirs,
            fetch_key=secrets.token_hex(32),
            boot=self._boot,
        )
        self._cni.require_plugins(entry.conf, entry.bin_dirs)
        self._refuse_id_collision(entry)
        if pod.bandwidth != Bandwidth() and not entry.conf.can("bandwidth"):
            log.warning(
                "pod.bandwidth_unlimited sandbox=%s network=%s: no plugin bandwidth", pod.sandbox, entry.conf.name
            )
        with netns.Worker() as inside:
            attached = self._make(entry, inside, until)
        log.info("pod.attached sandbox=%s ips=%s nics=%d", pod.sandbox, ",".join(attached.ips), len(attached.nics))
        return attached

    def _make(self, entry: Entry, inside: netns.Worker, until: float) -> Entry:
        """Creates the network. While CNI ADD runs, `inside` creates the parts that do not depend on its result."""
        netns.delete(entry.netns)  # a leftover of this name has no record, so nothing else owns it
        created = inside.begin(netns.create_and_enter, entry.netns)

        def prepare() -> None:
            # Raises if `create` failed: this thread would then still be in tapmanager's namespace.
            created.result()
            pod_links.prepare(self._limits.tap_owner, multi_queue=entry.pod.multi_queue)

        prepared = inside.begin(prepare)
        try:
            self._ledger.write(entry)
        except BaseException:
            inside.close()
            netns.delete(entry.netns)  # nothing else exists yet
            raise
        try:
            created.result()
            entry = self._added(entry, until)
            prepared.result()
            entry = self._planned(entry, inside)
            self._addresses.take(entry)
            self._ledger.write(entry, survives_power_cuts=False)
            for function in entry.functions:
                self._functions.take(function)
            built = inside.begin(pod_links.build, entry.nics, self._limits.tap_owner)
            self._ledger.sync()  # plugins need ADD's result at DEL, also after a power cut
            built.result()
            self._serve_dhcp(entry, inside.do(open_nics, entry, self._dhcp.beside))
            return self._ledger.mark(entry, Phase.ATTACHED)
        except BaseException:
            inside.close()  # otherwise the namespace would stay alive
            self._undo(entry)
            raise

    def _added(self, entry: Entry, until: float) -> Entry:
        """Runs ADD. If the plugins refuse the addresses that the pod wants, the pod gets others."""
        try:
            return dataclasses.replace(entry, result=self._cni.add(entry.conf, self._at(entry, entry.netns), until))
        except TapmanagerError as exc:
            if exc.kind == "deadline" or not entry.pod.addresses or not entry.conf.can("ips"):
                raise
            log.warning("pod.other_addresses sandbox=%s why=%s", entry.pod.sandbox, exc)
        self._cni.delete(entry.conf, self._at(entry, entry.netns), None, until)
        entry = dataclasses.replace(entry, pod=dataclasses.replace(entry.pod, addresses={}))
        self._ledger.write(entry)
        return dataclasses.replace(entry, result=self._cni.add(entry.conf, self._at(entry, entry.netns), until))

    def _refuse_weaker_filter(self, pod: Pod) -> None:
        nodes = self._limits.filter
        if pod.filter and FILTERS.index(pod.filter) < FILTERS.index(nodes) and not self._limits.filter_by_pod:
            raise TapmanagerError(
                "permission",
                f"the pod asks for the network filter {pod.filter}, but the node requires {nodes}; remove the annotation, or ask "
                "the node's operator to set tapmanager.filter_by_pod",
            )

    def _refuse_id_collision(self, entry: Entry) -> None:
        """Refuses an id with the same first 80 bits as another one: names use these bits, so both would share a namespace."""
        short = entry.pod.sandbox[:20]
        for other in self._ledger.sandboxes():
            if other.startswith(short) and other != entry.pod.sandbox:
                raise TapmanagerError("already-exists", f"sandbox {other} has the same first 20 digits; use another id")

    def _planned(self, entry: Entry, inside: netns.Worker) -> Entry:
        try:
            result = parse_result(entry.result or {})
        except BadField as exc:
            raise internal(f'CNI network "{entry.conf.name}" gave a result that cannot be used: {exc}') from exc
        rule, there = inside.do(lambda: (packet_rules.first(), pod_links.read()))
        network_plan.refuse_packet_rules(entry.conf.name, rule)
        networks = network_plan.networks_of(result, there, delegate_records.read(entry.conf, entry.pod.sandbox))
        functions = self._functions.planned(networks, there)
        given = {function.link for function in functions}
        nics = network_plan.nics_of(networks, there, pod_links.random_mac, given, entry.pod.macs)
        nics, functions = network_plan.with_one_default(networks, nics, functions)
        if not entry.pod.policy_routes:
            network_plan.refuse_policies((*nics, *functions))
        wanted = entry.pod.filter or self._limits.filter
        many = entry.pod.multi_queue
        nics = tuple(
            dataclasses.replace(nic, filter=wanted if nic.addresses else OFF, multi_queue=many) for nic in nics
        )
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
        def open_guarded() -> Sequence[GuestNic]:
            pod_links.renew_guard(entry.nics)
            return open_nics(entry, self._dhcp.beside)

        self._serve_dhcp(entry, netns.run_inside(entry.netns, open_guarded))

    def _serve_dhcp(self, entry: Entry, opened: Sequence[GuestNic]) -> None:
        for nic in opened:
            self._dhcp.serve(entry.pod.sandbox, nic)

    def _undo(self, entry: Entry) -> None:
        """Undoes a failed attach. Raises nothing, because the first error is the one to report. The ledger keeps what could
        not be undone, and release tries again."""
        try:
            self._tear_down(entry, self._undo_until())
        except (TapmanagerError, OSError) as exc:
            log.warning("pod.not_undone sandbox=%s error=%s", entry.pod.sandbox, exc)

    def _undo_until(self) -> float:
        return time.monotonic() + self._limits.undo_timeout

    # -- release -------------------------------------------------------------------------------------------------------

    def release(self, sandbox: str, until: float, forget: Callable[[str], object] | None = None) -> None:
        """Removes everything of the sandbox. `forget` gets the cgroup of its last VM. `sandbox` is a checked id."""
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
        if entry.shared is not None:
            self._forget(sandbox)
            return
        if entry.phase is not Phase.RELEASING:
            # If attach failed after its plugins ran, the file does not have their result, which DEL needs.
            self._record_as_releasing(entry, changed=entry.phase is Phase.ATTACHING)
        self._dhcp.forget(sandbox)
        self._addresses.forget(sandbox)  # DEL frees them, and another pod may get them before DEL ends
        alive = self._restore_links(entry)
        functions = give_all_back(self._functions, entry.functions, entry.netns if alive else "")
        if functions != entry.functions:
            entry = dataclasses.replace(entry, functions=functions)
            self._record_as_releasing(entry, changed=True)
        # CNI specification, DEL: an empty name means that the namespace is gone; plugins then free what is outside of it.
        try:
            self._cni.delete(entry.conf, self._at(entry, entry.netns if alive else ""), entry.result, until)
        except TapmanagerError as exc:
            # At DEL, sriov does not know that ADD found the function at VFIO, and looks for a link that does not exist. The
            # addresses are free by then, and the sandbox must become free too.
            if all(function.driver for function in entry.functions):
                raise
            log.warning("pod.del_failed sandbox=%s error=%s; its functions were bound to VFIO before", sandbox, exc)
        netns.delete(entry.netns)
        self._forget(sandbox)

    def _forget(self, sandbox: str) -> None:
        self._addresses.forget(sandbox)
        self._ledger.delete(sandbox)
        self.taps.forget(sandbox)
        self._not_served.pop(sandbox, None)

    def _restore_links(self, entry: Entry) -> bool:
        """Undoes `build`, so that plugins find at DEL what they made at ADD. Returns False if the namespace is gone."""
        alive = netns.exists(entry.netns)
        work = pod_links.restore
        # After a reboot the rules are gone too, and with the new iptables, bridge and ptp fail on a missing rule.
        made = (entry.nics or entry.functions) and entry.boot in ("", self._boot)
        if not alive and made and delegate_records.kinds(entry.conf, entry.pod.sandbox) <= DEL_READS_ADDRESSES:
            log.warning("pod.namespace_gone sandbox=%s; a stand-in serves the plugins", entry.pod.sandbox)
            netns.delete(entry.netns)
            netns.create(entry.netns)
            alive, work = True, pod_links.make_substitutes
        if alive and entry.nics:
            for trouble in netns.run_inside(entry.netns, lambda: work(entry.nics)):
                log.warning("pod.link_not_restored sandbox=%s error=%s", entry.pod.sandbox, trouble)
        return alive

    def _record_as_releasing(self, entry: Entry, *, changed: bool) -> None:
        """Writes RELEASING. Only logs an error, because a full disk must not prevent a release; the older record leads to the
        same release."""
        try:
            if changed:
                self._ledger.write(dataclasses.replace(entry, phase=Phase.RELEASING))
            else:
                self._ledger.mark(entry, Phase.RELEASING)
        except TapmanagerError as exc:
            log.warning("ledger.not_written sandbox=%s error=%s", entry.pod.sandbox, exc)

    def _at(self, entry: Entry, path: str) -> cni_conf.CniAttachment:
        """With the current plugin directories, then those at the time of attach: plugins or the configuration may have moved."""
        dirs = tuple(dict.fromkeys((*self._limits.bin_dirs, *entry.bin_dirs)))
        return cni_conf.CniAttachment(entry.pod, path, dirs)
