"""systemd's units of the node: which systemctl commands a change of files requires, and the calls of systemctl, for the running
system or for a file tree."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Sequence
from typing import Final

from virtshim.config.settings import DEFAULT_FILE
from virtshim.model.errors import InternalError, ShimError
from virtshim.neighbours.runtimes import CONTAINERD_FILE
from virtshim.setup.facts import UNITS, NodeFacts
from virtshim.system import machine, process

# Which systemctl commands must run after files of the node have changed, in order. Pure.

LIBVIRTD: Final = "/etc/libvirt/libvirtd.conf"
VIRTQEMUD: Final = "/etc/libvirt/virtqemud.conf"
QEMU: Final = "/etc/libvirt/qemu.conf"
APPARMOR: Final = "/etc/apparmor.d"
LOGIND: Final = "/etc/systemd/logind.conf.d"
_UNIT_FILES: Final = "/etc/systemd/system"
LOGIND_UNIT: Final = "systemd-logind.service"


def pending(changed: Collection[str], facts: NodeFacts, *, unmasked: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """The arguments of each systemctl command. `changed`: paths of changed files. `unmasked`: sockets of libvirt. The operator
    restarts kubelet, because that affects its pods."""
    found: list[tuple[str, ...]] = []
    if _below(_UNIT_FILES, changed):
        found.append(("daemon-reload",))
    if _below(LOGIND, changed):
        found.append(("kill", "--signal=HUP", LOGIND_UNIT))
    if _below(APPARMOR, changed):
        found.append(("try-reload-or-restart", "apparmor.service"))
    # An unmasked socket of libvirt opens when libvirt starts.
    if facts.libvirt and (unmasked or {LIBVIRTD, VIRTQEMUD, QEMU} & {*changed}):
        found.append(("try-restart", f"{facts.libvirt}.service"))
    # Containers run on meanwhile.
    if CONTAINERD_FILE in changed and "containerd.service" in facts.units:
        found.append(("try-restart", "containerd.service"))
    if DEFAULT_FILE in changed or _below(f"{DEFAULT_FILE}.d", changed):
        found += [("try-restart", unit) for unit in UNITS if unit in facts.units]
    return found


def _below(directory: str, paths: Collection[str]) -> bool:
    return any(path.startswith(f"{directory}/") for path in paths)


# Stopping this unit shuts down all VMs of the machine, so setup never stops it.
GUESTS_UNIT = "libvirt-guests.service"

# virtshim is ready when it has checked each pod, which may take the 300 s that its unit allows.
_LIMIT = 330.0
_QUICK = 10.0


class Systemctl:
    """`root`: "/" for the running system. In any other tree, units can only be enabled, disabled and masked."""

    def __init__(self, root: str = "/") -> None:
        self._root = root
        self.runs = root == "/" and machine.systemd_runs()

    @property
    def can_change(self) -> bool:
        return (self.runs or self._root != "/") and shutil.which("systemctl") is not None

    def state(self, unit: str) -> str:
        """The unit's state from `systemctl is-enabled`: enabled, disabled, masked, static and so on."""
        done = process.run(self._argv("is-enabled", unit), timeout=_LIMIT)
        return done.stdout.decode(errors="replace").strip().splitlines()[0] if done.stdout.strip() else "not-found"

    def program_output(self, *argv: str) -> str:
        """The output of a program of this machine; "" if it cannot be run, or if the tree belongs to another machine."""
        if self._root != "/":
            return ""
        try:
            return process.run(argv, timeout=_QUICK).stdout.decode(errors="replace").strip()
        except ShimError:
            return ""

    def is_active(self, unit: str) -> bool:
        return process.run(self._argv("is-active", "--quiet", unit), timeout=_LIMIT).returncode == 0

    def is_idle(self, unit: str) -> bool:
        """Whether the unit does not run, and is not starting, stopping or about to restart."""
        said = process.run(self._argv("is-active", unit), timeout=_LIMIT).stdout.decode(errors="replace").strip()
        return said in ("inactive", "failed", "unknown", "")

    def change(self, verb: str, unit: str) -> None:
        """`verb`: enable, disable, stop, mask or unmask. If systemd runs, enable also starts the unit, and mask stops it. Raises
        InternalError."""
        now = ["--now"] if self.runs and verb in ("enable", "mask") else []
        self._run(verb, *now, unit)

    def tell(self, *words: str) -> None:
        """Runs a systemctl command. Does nothing if systemd does not run."""
        if self.runs and (len(words) == 1 or not self.is_idle(words[-1])):
            self._run(*words)

    def _argv(self, *words: str) -> list[str]:
        root = [] if self._root == "/" else [f"--root={os.path.realpath(self._root)}"]
        return ["systemctl", "--no-ask-password", *root, *words]

    def _run(self, *words: str) -> None:
        done = process.run(self._argv(*words), timeout=_LIMIT)
        if done.returncode:
            raise InternalError(f"systemctl {' '.join(words)}: {done.summary()}")
