"""`virtshim up`: a whole node in the foreground."""

from __future__ import annotations

import json
import os
import threading
import time

from rich.console import Console

from virtshim.cli import containerd
from virtshim.cli.daemons import (
    Daemon,
    need_root,
    proxy_daemon,
    shares_daemon,
    tapmanager_daemon,
    virtshim_daemon,
)
from virtshim.cli.node_dir import NodeDir, NodeOptions, drop_path_variables, make_directory, refuse_routed, write_node
from virtshim.cli.orphans import Orphans
from virtshim.cli.own_path import refuse_strangers
from virtshim.domain.errors import InvalidRequest, NotFound, ShimError, WrongState
from virtshim.files import FileLocked, lock_file
from virtshim.process import run
from virtshim.stop_signals import stop_event
from vmwrapper import bundle

__all__ = ["NodeOptions", "up_command"]

_POLL_INTERVAL = 0.5
_RESTARTS, _WITHIN = 5, 900.0  # seconds


def up_command(options: NodeOptions) -> int:
    """Returns the exit code. Raises ShimError for what keeps a node from starting."""
    need_root()
    console = Console(stderr=True, highlight=False)
    node = NodeDir.of(options.directory)
    refuse_strangers(options.directory)
    for name in drop_path_variables():
        console.print(f"up: {name} is ignored: a node's paths are below its directory; --config can set them")
    make_directory(node.run)
    lock = take_lock(node)
    try:
        settings = write_node(node, options)
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
                daemon.start(stopping)
            if not stopping.is_set():
                serving = settings.proxy_socket if options.with_containerd else settings.cri_socket
                console.print(f"up: ready; CRI socket unix://{serving}")
                console.print("up: Ctrl-C stops the daemons and leaves the VMs running")
            return _watch(daemons, stopping, console)
        finally:
            for daemon in reversed(daemons):
                daemon.stop()
            console.print("up: stopped")
    finally:
        os.close(lock)


def _daemons(node: NodeDir, options: NodeOptions, orphans: Orphans) -> tuple[Daemon, ...]:
    """In the order of their start."""
    file = node.config_file
    own = (tapmanager_daemon(file, orphans), shares_daemon(file, orphans), virtshim_daemon(file, orphans))
    if options.with_containerd:
        return (*own, containerd.daemon(node, orphans), proxy_daemon(file, orphans))
    return own


def _routes() -> list[tuple[str, str]]:
    """(destination, interface) of both families, ip-route(8)."""
    found: list[tuple[str, str]] = []
    for family in ("-4", "-6"):
        finished = run(["ip", "-json", family, "route", "show"], timeout=10)
        if finished.returncode == 0:
            found += [(route["dst"], route.get("dev", "")) for route in json.loads(finished.stdout or "[]")]
    return found


def _watch(daemons: tuple[Daemon, ...], stopping: threading.Event, console: Console) -> int:
    """Restarts what dies, until told to stop; gives up on one that keeps dying."""
    restarts: list[float] = []
    while not stopping.wait(_POLL_INTERVAL):
        for daemon in daemons:
            if daemon.is_running or stopping.is_set():
                continue
            now = time.monotonic()
            restarts = [one for one in restarts if now - one < _WITHIN] + [now]
            if len(restarts) > _RESTARTS:
                console.print(f"up: {daemon.name} keeps exiting; giving up. The VMs keep running")
                return 1
            console.print(f"up: {daemon.name} exited; restarting it")
            try:
                daemon.start(stopping)
            except ShimError as exc:
                console.print(f"up: {exc}")
    return 0


def take_lock(node: NodeDir) -> int:
    """A descriptor that holds the directory. Raises WrongState naming the holder, NotFound if the directory has gone,
    InvalidRequest for what cannot be our lock."""
    try:
        return lock_file(node.lock)
    except FileNotFoundError as exc:
        raise NotFound(f"the node in {node.path} has meanwhile been removed by another `virtshim down`") from exc
    except FileLocked as exc:
        raise WrongState(
            f"a node is already running in {node.path} (pid {exc.holder or 'unknown'}); stop it with Ctrl-C or SIGTERM"
        ) from exc
    except OSError as exc:
        raise InvalidRequest(f"--dir: {node.lock} cannot be used as lock: {exc.strerror}; remove it") from exc
