"""`virtshim up`: a whole node in the foreground."""

from __future__ import annotations

import json
import os
import threading

from rich.console import Console

from virtshim.cli import containerd
from virtshim.cli.daemons import (
    Daemon,
    LastLines,
    Orphans,
    last_words,
    need_root,
    proxy_daemon,
    shares_daemon,
    tapmanager_daemon,
    virtshim_daemon,
)
from virtshim.cli.keep_running import keep
from virtshim.cli.node_dir import NodeDir, NodeOptions, drop_path_variables, make_directory, refuse_routed, write_node
from virtshim.cli.own_path import refuse_strangers
from virtshim.config.settings import Settings
from virtshim.model.errors import InvalidRequest, NotFound, Unavailable, WrongState
from virtshim.preflight.checks import BEFORE_UP, findings
from virtshim.preflight.finding import Level
from virtshim.system.clock import SystemClock
from virtshim.system.daemon import stop_event
from virtshim.system.files import FileLocked, lock_file
from virtshim.system.process import run
from vmwrapper import bundle

__all__ = ["NodeOptions", "up_command"]


def up_command(options: NodeOptions) -> int:
    """Returns the exit code. Raises ShimError if the node cannot start."""
    need_root()
    console = Console(stderr=True, highlight=False)
    node = NodeDir.at(options.directory)
    refuse_strangers(options.directory)
    for name in drop_path_variables():
        console.print(f"up: ignoring {name}, because a node's paths are below its directory; --config can set them")
    make_directory(node.run)
    lock = take_lock(node)
    try:
        settings = write_node(node, options)
        refuse_unfit_machine(settings)
        if options.cni_conf_dir is None:
            refuse_routed(node, options.pod_cidr, _routes())
        if options.with_containerd:
            containerd.set_up(node, settings)
        bundle.write(node.vmwrapper)
        stopping = stop_event()
        orphans = Orphans()
        daemons = _daemons(node, options, orphans)
        orphans.adopt()
        try:
            for daemon in daemons:
                console.print(f"up: starting {daemon.name}")
                _start(daemon, stopping)
            if not stopping.is_set():
                serving = settings.proxy_socket if options.with_containerd else settings.cri_socket
                console.print(f"up: ready; CRI socket unix://{serving}")
                console.print("up: Ctrl-C stops the daemons and leaves the VMs running")
            keep(daemons, stopping, SystemClock(), lambda text: console.print(f"up: {text}"))
            return 0
        finally:
            for daemon in reversed(daemons):
                daemon.stop()
            console.print("up: stopped")
    finally:
        os.close(lock)


def refuse_unfit_machine(settings: Settings) -> None:
    """Raises WrongState, with each reason and remedy, if no VM could start here."""
    found = [one for one in findings(BEFORE_UP, settings) if one.level is Level.ERROR]
    if found:
        reasons = "".join(f"\n  {one.subject}: {one.text}; {one.remedy}" for one in found)
        raise WrongState(f"no virtual machine can start on this machine:{reasons}")


def _daemons(node: NodeDir, options: NodeOptions, orphans: Orphans) -> tuple[Daemon, ...]:
    """The node's daemons, in the order of their start."""
    file = node.config_file
    own = (tapmanager_daemon(file, orphans), shares_daemon(file, orphans), virtshim_daemon(file, orphans))
    proxies = (proxy_daemon(file, orphans),) if options.with_containerd else ()
    for daemon in (*own, *proxies):
        # Not for containerd: its shims outlive this process, and a closed output pipe would kill them.
        daemon.said = LastLines()
    return (*own, containerd.daemon(node, orphans), *proxies) if options.with_containerd else own


def _start(daemon: Daemon, stopping: threading.Event) -> None:
    """The daemon's first start. An error shows the daemon's last lines, because a person is watching."""
    try:
        daemon.start(stopping)
    except Unavailable as exc:
        raise Unavailable(f"{exc}; correct the fault that it reports{last_words(daemon)}") from exc


def _routes() -> list[tuple[str, str]]:
    """(destination, interface) of the IPv4 and IPv6 routes, from ip-route(8)."""
    found: list[tuple[str, str]] = []
    for family in ("-4", "-6"):
        finished = run(["ip", "-json", family, "route", "show"], timeout=10)
        if finished.returncode == 0:
            found += [(route["dst"], route.get("dev", "")) for route in json.loads(finished.stdout or "[]")]
    return found


def take_lock(node: NodeDir) -> int:
    """Returns the descriptor that locks the directory. Raises WrongState naming the holder, NotFound if the directory has
    gone, InvalidRequest if the lock file cannot be used."""
    try:
        return lock_file(node.lock)
    except FileNotFoundError as exc:
        raise NotFound(f"another `virtshim down` has just removed the node in {node.path}") from exc
    except FileLocked as exc:
        raise WrongState(
            f"a node is already running in {node.path} (pid {exc.holder or 'unknown'}); stop it with Ctrl-C or SIGTERM"
        ) from exc
    except OSError as exc:
        raise InvalidRequest(f"--dir: {node.lock} cannot be used as a lock: {exc.strerror}; remove it") from exc
