"""systemd's units of the node, by systemctl: of the system that runs, or, without it, by the links of a tree."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Sequence
from typing import Final

from virtshim.config.settings import CONFIG_DEFAULT_FILE
from virtshim.model.errors import InternalError, ShimError
from virtshim.setup.facts import UNITS, NodeFacts
from virtshim.system import machine, process

# Who has to be told when files of the node were changed: what systemctl is asked, in order. Pure.

LIBVIRTD: Final = "/etc/libvirt/libvirtd.conf"
VIRTQEMUD: Final = "/etc/libvirt/virtqemud.conf"
QEMU: Final = "/etc/libvirt/qemu.conf"
APPARMOR: Final = "/etc/apparmor.d"
LOGIND: Final = "/etc/systemd/logind.conf.d"
_UNIT_FILES: Final = "/etc/systemd/system"
LOGIND_UNIT: Final = "systemd-logind.service"


def pending(changed: Collection[str], facts: NodeFacts, *, unmasked: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """systemctl's words. `changed`: paths; `unmasked`: sockets of libvirt's. kubelet is left to the operator: its pods are."""
    found: list[tuple[str, ...]] = []
    if _below(_UNIT_FILES, changed):
        found.append(("daemon-reload",))
    if _below(LOGIND, changed):
        found.append(("kill", "--signal=HUP", LOGIND_UNIT))
    if _below(APPARMOR, changed):
        found.append(("try-reload-or-restart", "apparmor.service"))
    # A socket of its that is open again is opened when it starts.
    if facts.libvirt and (unmasked or {LIBVIRTD, VIRTQEMUD, QEMU} & {*changed}):
        found.append(("try-restart", f"{facts.libvirt}.service"))
    if CONFIG_DEFAULT_FILE in changed or _below(f"{CONFIG_DEFAULT_FILE}.d", changed):
        found += [("try-restart", unit) for unit in UNITS if unit in facts.units]
    return found


def _below(directory: str, paths: Collection[str]) -> bool:
    return any(path.startswith(f"{directory}/") for path in paths)


# It is stopped by shutting all VMs of the machine down: set-up never does.
GUESTS_UNIT = "libvirt-guests.service"

# virtshim says that it is ready when it has looked at each pod: its unit may take 300 s for it.
_LIMIT = 330.0
_QUICK = 10.0


class Systemctl:
    """`root`: "/" is the system that runs; of any other tree only what starts with it can be changed."""

    def __init__(self, root: str = "/") -> None:
        self._root = root
        self.runs = root == "/" and machine.systemd_runs()

    @property
    def can_change(self) -> bool:
        return (self.runs or self._root != "/") and shutil.which("systemctl") is not None

    def state(self, unit: str) -> str:
        """As `is-enabled` says it: enabled, disabled, masked, static ..."""
        done = process.run(self._argv("is-enabled", unit), timeout=_LIMIT)
        return done.stdout.decode(errors="replace").strip().splitlines()[0] if done.stdout.strip() else "not-found"

    def program_output(self, *argv: str) -> str:
        """What a program of this machine says, "" if it cannot be run, or the tree is another machine's."""
        if self._root != "/":
            return ""
        try:
            return process.run(argv, timeout=_QUICK).stdout.decode(errors="replace").strip()
        except ShimError:
            return ""

    def is_active(self, unit: str) -> bool:
        return process.run(self._argv("is-active", "--quiet", unit), timeout=_LIMIT).returncode == 0

    def is_idle(self, unit: str) -> bool:
        """It does not run, and is neither starting, stopping, nor about to be started again."""
        said = process.run(self._argv("is-active", unit), timeout=_LIMIT).stdout.decode(errors="replace").strip()
        return said in ("inactive", "failed", "unknown", "")

    def enable(self, units: Sequence[str]) -> None:
        """And starts them, where systemd runs. Raises InternalError."""
        if units:
            self._run("enable", *self._now(), *units)

    def disable(self, units: Sequence[str]) -> None:
        """They run on."""
        if units:
            self._run("disable", *units)

    def stop(self, units: Sequence[str]) -> None:
        if units:
            self._run("stop", *units)

    def mask(self, units: Sequence[str]) -> None:
        if units:
            self._run("mask", *self._now(), *units)

    def unmask(self, units: Sequence[str]) -> None:
        if units:
            self._run("unmask", *units)

    def tell(self, *words: str) -> None:
        """A command for a unit, `words`' last, or for systemd itself. Nothing where that does not run."""
        if self.runs and (len(words) == 1 or not self.is_idle(words[-1])):
            self._run(*words)

    def _now(self) -> list[str]:
        return ["--now"] if self.runs else []

    def _argv(self, *words: str) -> list[str]:
        root = [] if self._root == "/" else [f"--root={os.path.realpath(self._root)}"]
        return ["systemctl", "--no-ask-password", *root, *words]

    def _run(self, *words: str) -> None:
        done = process.run(self._argv(*words), timeout=_LIMIT)
        if done.returncode:
            raise InternalError(f"systemctl {' '.join(words)}: {done.summary()}")
