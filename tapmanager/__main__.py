"""The tapmanager program: starts, serves, stops. Pod networks outlive this process; any kind of stop leaves them unchanged."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import partial

from tapmanager import heap, log_lines, server, settings, thread_dump, verbs
from tapmanager.attachments import Attachments, AttachmentSettings
from tapmanager.cgroups.tree import VmCgroups, hierarchies
from tapmanager.cni.plugins import CniPlugins
from tapmanager.cni.status import PluginStatus
from tapmanager.daemon import (
    Reload,
    activated_socket,
    give_up_capabilities,
    notify_systemd,
    stop_event,
    watchdog_seconds,
)
from tapmanager.dhcp.server import DhcpServer
from tapmanager.drivers import PciDrivers
from tapmanager.errors import TapmanagerError
from tapmanager.ledger import Ledger
from tapmanager.links import netns
from tapmanager.links.tap import VhostNet
from tapmanager.settings import Settings
from tapmanager.sriov.host_links import NetlinkHostLinks
from tapmanager.sriov.nic_functions import NicFunctions
from tapmanager.sriov.physical_function import PhysicalFunctions

log = logging.getLogger("tapmanager")

# Seconds that running requests have to end at a stop. systemd's limit is 90.
_DRAIN = 20.0
_HEALTH_INTERVAL = 5.0


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 after SIGTERM or SIGINT, 1 for a fault that the operator must correct."""
    heap.share_one_heap()
    try:
        given = sys.argv[1:] if argv is None else argv
        chosen = settings.load(given)
        log_lines.set_up(chosen.log_level)
        for chatty in ("pyroute2", "asyncio"):
            logging.getLogger(chatty).setLevel(logging.WARNING)  # at level debug they log every netlink message
        if os.geteuid() != 0:
            raise TapmanagerError("permission", "tapmanager must run as root")  # noqa: TRY301  reported like all other errors
        give_up_capabilities()
        os.umask(0o022)  # others must be able to enter directories; plugins' files get the modes as from a shell
        return _run(chosen, partial(settings.load, given))
    except TapmanagerError as exc:
        print(f"tapmanager: {exc}", file=sys.stderr)  # noqa: T201  for the person who started it
    except OSError as exc:
        print(f"tapmanager: cannot start: {exc}", file=sys.stderr)  # noqa: T201
    return 1


def _run(chosen: Settings, again: Callable[[], Settings]) -> int:
    stop = stop_event()
    user = settings.qemu_user(chosen.qemu_user, chosen.qemu_group)
    if user.uid is None:
        log.warning("qemu_user.missing: this machine has no user libvirt-qemu or qemu; serving only root")
    with contextlib.ExitStack() as held:
        _lock(chosen, held)
        thread_dump.write_when_asked(chosen.socket)
        dhcp = DhcpServer()
        drivers, card_links = PciDrivers(), NetlinkHostLinks()
        functions = NicFunctions(drivers, card_links, PhysicalFunctions(card_links))
        cni = CniPlugins(chosen.cni_conf_dir, chosen.cni_bin_dir, chosen.cni_timeout)
        limits = AttachmentSettings(
            netns_dir=chosen.netns_dir,
            bin_dirs=chosen.cni_bin_dir,
            tap_owner=user.uid or 0,
            undo_timeout=chosen.undo_timeout,
            filter=chosen.filter,
            filter_by_pod=chosen.filter_by_pod,
        )
        status, vhost = PluginStatus(cni), VhostNet(wanted=chosen.vhost_net)
        ledger = Ledger(chosen.state_dir, os.path.join(os.path.dirname(chosen.socket), "placements"))
        ledger.prepare()
        netns.prepare_dir(chosen.netns_dir)
        attachments = Attachments(ledger, cni, dhcp, limits, functions, status, vhost)
        listener = activated_socket(os.environ, os.getpid())
        activated = listener is not None
        listener = (
            server.adopt(listener, chosen.socket, user.gid) if listener else server.listen(chosen.socket, user.gid)
        )
        dhcp.start()
        attachments.recover()
        if chosen.cni_gc:
            _collect(cni, attachments)
        status.start()
        resources = verbs.HostResources(attachments, VmCgroups(hierarchies()), drivers, functions)
        serving = server.Server(
            listener, partial(verbs.perform, resources), user.uid, lambda uid: uid in attachments.taps.vm_uids
        )
        serving.start()
        heap.return_freed_memory()
        Reload(chosen, again, settings.RELOADED, partial(_use, cni, limits, vhost)).start()
        log.info("tapmanager.ready socket=%s pods=%d", chosen.socket, len(attachments.sandboxes()))
        notify_systemd("READY=1")
        healthy = _watch(stop, serving, dhcp)
        notify_systemd("STOPPING=1")
        drained = serving.stop(_DRAIN)
        status.stop()
        dhcp.stop()
        if not activated:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(chosen.socket)
        log.info("tapmanager.stopped drained=%s", drained)
        return 0 if healthy else 1


def _lock(chosen: Settings, held: contextlib.ExitStack) -> None:
    """Locks the socket and the state directory, so that each has only one process."""
    ledger_dir = chosen.state_dir
    os.makedirs(ledger_dir, mode=0o700, exist_ok=True)
    os.makedirs(os.path.dirname(chosen.socket), mode=0o755, exist_ok=True)
    for path in (f"{chosen.socket}.lock", os.path.join(ledger_dir, "lock")):
        held.callback(os.close, server.lock_file(path))


def _use(cni: CniPlugins, limits: AttachmentSettings, vhost: VhostNet, new: Settings) -> None:
    """Applies the settings that a reload may change: `settings.RELOADED`."""
    cni.limit(new.cni_timeout)
    limits.undo_timeout = new.undo_timeout
    limits.filter, limits.filter_by_pod = new.filter, new.filter_by_pod
    vhost.wanted = new.vhost_net
    logging.getLogger().setLevel(new.log_level.upper())


_COLLECT_SECONDS = 300


def _collect(cni: CniPlugins, attachments: Attachments) -> None:
    """Runs CNI's GC. Must happen before requests are served, because GC would free resources of a pod that is being attached."""
    try:
        conf = cni.load()
        if conf.has_status and conf.without_gc:
            log.info("cni.not_collected network=%s: it has disableGC", conf.name)
        elif conf.has_status:
            # A plugin may use its whole time limit, which is longer than systemd's limit for a start.
            notify_systemd(f"EXTEND_TIMEOUT_USEC={_COLLECT_SECONDS * 1_000_000}")
            cni.collect(conf, attachments.sandboxes())
            log.info("cni.collected network=%s pods=%d", conf.name, len(attachments.sandboxes()))
    except TapmanagerError as exc:
        log.warning("cni.not_collected error=%s", exc)


def _watch(stop: threading.Event, serving: server.Server, dhcp: DhcpServer) -> bool:
    """Waits for a signal. Returns False if an essential thread died, so that systemd restarts tapmanager."""
    every = watchdog_seconds()
    while not stop.wait(every or _HEALTH_INTERVAL):
        if not (serving.is_alive() and dhcp.is_alive()):
            log.error("tapmanager.broken accept=%s dhcp=%s", serving.is_alive(), dhcp.is_alive())
            return False
        if every is not None:
            notify_systemd("WATCHDOG=1")
    return True


if __name__ == "__main__":
    sys.exit(main())
