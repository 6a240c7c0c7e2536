"""`virtshim down` removes everything that `up --dir DIR` made."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time

from rich.console import Console

from virtshim.app import assembly
from virtshim.cli import containerd
from virtshim.cli.daemons import need_root, shares_daemon, tapmanager_daemon
from virtshim.cli.node_dir import (
    NodeDir,
    drop_path_variables,
    make_directory,
    refuse_drop_ins,
    remove_parts,
    remove_unstarted,
)
from virtshim.cli.own_path import refuse_strangers
from virtshim.cli.up import take_lock
from virtshim.config.settings import load_settings
from virtshim.model.deadline import Deadline
from virtshim.model.errors import InvalidRequest, ShimError, WrongState
from virtshim.system.clock import SystemClock
from virtshim.system.files import lock_holder
from virtshim.system.logsetup import set_up_logging
from virtshim.system.process import run

_POD_LIMIT = 120.0


def down_command(directory: str, *, everything: bool, stop_limit: float = 60.0) -> None:
    """Raises ShimError, which names what could not be removed; the call can be repeated. `stop_limit`: seconds that a
    running `up` has to end."""
    need_root()
    console = Console(stderr=True, highlight=False)
    node = NodeDir.at(directory)
    refuse_strangers(directory)
    refuse_drop_ins(node)
    drop_path_variables()
    if not os.path.exists(node.config_file):
        unstarted = remove_unstarted(node)
        if os.path.isdir(node.path) and everything and not os.listdir(node.path):
            os.rmdir(node.path)
            return
        if unstarted:
            return
        raise InvalidRequest(f"--dir {node.path}: no node was ever started in this directory (config.toml is missing)")
    make_directory(node.run)
    _stop_node(node, console, stop_limit)
    lock = take_lock(node)
    try:
        _remove_pods(node, console)
        for pod in containerd.remove_pods(node):
            console.print(f"down: removed pod {pod} from containerd")
        _remove_bridge(node)
    finally:
        os.close(lock)
    remove_parts(node, everything=everything)
    console.print("down: nothing is left" + ("" if everything else f" except images and settings in {node.path}"))


def _stop_node(node: NodeDir, console: Console, limit: float) -> None:
    """Stops the `up` process that holds the lock, and no other."""
    until = time.monotonic() + limit
    signalled, clock, never = False, SystemClock(), threading.Event()
    while True:
        try:
            os.close(take_lock(node))
            return
        except WrongState:
            signalled = signalled or _tell_to_stop(node, console)
            if time.monotonic() > until:
                raise
            clock.wait(never, 0.1)


def _tell_to_stop(node: NodeDir, console: Console) -> bool:
    """Signals the lock's holder; returns whether there was one. A pid in the lock file alone proves nothing."""
    pid = lock_holder(node.lock)
    try:
        process = os.pidfd_open(pid) if pid > 1 else None
    except ProcessLookupError:
        return False
    if process is None:
        return False
    try:
        if lock_holder(node.lock) != pid:  # another process may have got this pid before it was opened
            return False
        console.print(f"down: stopping the node (pid {pid})")
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGTERM)
        return True
    finally:
        os.close(process)


def _remove_pods(node: NodeDir, console: Console) -> None:
    settings = load_settings(node.config_file)
    set_up_logging("warning", "text")
    helpers = (tapmanager_daemon(node.config_file), shares_daemon(node.config_file))
    try:
        for helper in helpers:
            helper.start()
        with assembly.open_app(settings) as app:
            app.recover()
            clock = SystemClock()
            failures: list[str] = []
            for sandbox in app.adapters.records.sandboxes.all():
                try:
                    app.services.remove_sandbox.remove(sandbox, Deadline.after(clock.monotonic(), _POD_LIMIT))
                    console.print(f"down: removed pod {sandbox.key.namespace}/{sandbox.key.name}")
                except ShimError as exc:
                    failures.append(f"pod {sandbox.key}: {exc}")
            left = app.adapters.network.pods.attached(_POD_LIMIT)
            failures.extend(f"network of sandbox {sandbox}" for sandbox in left)
            if failures:
                raise WrongState("could not remove " + "; ".join(failures) + ". Repeat `virtshim down`")
    finally:
        for helper in helpers:
            helper.stop()


def _remove_bridge(node: NodeDir) -> None:
    """The CNI bridge plugin never removes its bridge. No other node uses this name."""
    # Not by /sys/class/net, which may show another network namespace than this process's.
    if any(name == node.bridge for _, name in socket.if_nameindex()):
        run(["ip", "link", "delete", node.bridge], timeout=10)
