"""Start, serve, stop. Pod networks outlive this process: a stop, clean or not, leaves them as they are."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from functools import partial

from tapmanager import log_lines, sdnotify, server, settings, verbs
from tapmanager.attachments import Attachments, AttachmentSettings
from tapmanager.cgroups.tree import VmCgroups, hierarchies
from tapmanager.cni.plugins import CniPlugins
from tapmanager.dhcp.server import DhcpServer
from tapmanager.drivers.pci import PciDrivers
from tapmanager.errors import TapmanagerError
from tapmanager.ledger import Ledger
from tapmanager.links import netns
from tapmanager.settings import QemuUser, Settings
from tapmanager.sriov.host_links import NetlinkHostLinks
from tapmanager.sriov.nic_functions import NicFunctions
from tapmanager.sriov.physical_function import PhysicalFunctions

log = logging.getLogger("tapmanager")

# Requests in work get this long at a stop, in seconds; systemd's own limit is 90.
_DRAIN = 20.0
_HEALTH_INTERVAL = 5.0


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0 after SIGTERM or SIGINT, 1 for what an operator must correct."""
    try:
        chosen = settings.load(sys.argv[1:] if argv is None else argv)
        log_lines.set_up(chosen.log_level)
        for chatty in ("pyroute2", "asyncio"):
            logging.getLogger(chatty).setLevel(logging.WARNING)  # at debug they log each netlink message
        if os.geteuid() != 0:
            raise TapmanagerError("permission", "tapmanager must run as root")  # noqa: TRY301  told like all other trouble
        os.umask(0o022)  # directories others must pass, and plugins' files, as if started from a shell
        return _run(chosen)
    except TapmanagerError as exc:
        print(f"tapmanager: {exc}", file=sys.stderr)  # noqa: T201  for the person who started it
    except OSError as exc:
        print(f"tapmanager: cannot start: {exc}", file=sys.stderr)  # noqa: T201
    return 1


def _run(chosen: Settings) -> int:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    user = settings.qemu_user(chosen.qemu_user, chosen.qemu_group)
    if user.uid is None:
        log.warning("qemu_user.missing: no user libvirt-qemu or qemu here, only root is served")
    with contextlib.ExitStack() as held:
        _lock(chosen, held)
        dhcp = DhcpServer()
        drivers, card_links = PciDrivers(), NetlinkHostLinks()
        functions = NicFunctions(drivers, card_links, PhysicalFunctions(card_links))
        attachments = _attachments(chosen, user, dhcp, functions)
        listener = sdnotify.activated_socket(os.environ, os.getpid())
        activated = listener is not None
        listener = server.check_listener(listener) if listener else server.listen(chosen.socket, user.gid)
        dhcp.start()
        attachments.recover()
        resources = verbs.HostResources(attachments, VmCgroups(hierarchies()), drivers, functions)
        serving = server.Server(
            listener, partial(verbs.perform, resources), user.uid, lambda uid: uid in attachments.vm_uids
        )
        serving.start()
        log.info("tapmanager.ready socket=%s pods=%d", chosen.socket, len(attachments.sandboxes()))
        sdnotify.notify(os.environ, "READY=1")
        healthy = _watch(stop, serving, dhcp)
        sdnotify.notify(os.environ, "STOPPING=1")
        drained = serving.stop(_DRAIN)
        dhcp.stop()
        if not activated:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(chosen.socket)
        log.info("tapmanager.stopped drained=%s", drained)
        return 0 if healthy else 1


def _lock(chosen: Settings, held: contextlib.ExitStack) -> None:
    """One process a socket, and one a state directory."""
    ledger_dir = chosen.state_dir
    os.makedirs(ledger_dir, mode=0o700, exist_ok=True)
    os.makedirs(os.path.dirname(chosen.socket), mode=0o755, exist_ok=True)
    for path in (f"{chosen.socket}.lock", os.path.join(ledger_dir, "lock")):
        held.callback(os.close, server.lock_file(path))


def _attachments(chosen: Settings, user: QemuUser, dhcp: DhcpServer, functions: NicFunctions) -> Attachments:
    ledger = Ledger(chosen.state_dir)
    ledger.prepare()
    netns.prepare_dir(chosen.netns_dir)
    cni = CniPlugins(chosen.cni_conf_dir, chosen.cni_bin_dir, chosen.cni_timeout)
    limits = AttachmentSettings(chosen.netns_dir, chosen.cni_bin_dir, user.uid or 0, chosen.undo_timeout)
    return Attachments(ledger, cni, dhcp, limits, functions)


def _watch(stop: threading.Event, serving: server.Server, dhcp: DhcpServer) -> bool:
    """Until a signal comes; False if one of the threads everything hangs on died, so that systemd starts us again."""
    every = sdnotify.watchdog_seconds(os.environ, os.getpid())
    while not stop.wait(every or _HEALTH_INTERVAL):
        if not (serving.is_alive() and dhcp.is_alive()):
            log.error("tapmanager.broken accept=%s dhcp=%s", serving.is_alive(), dhcp.is_alive())
            return False
        if every is not None:
            sdnotify.notify(os.environ, "WATCHDOG=1")
    return True


if __name__ == "__main__":
    sys.exit(main())
