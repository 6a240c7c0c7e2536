"""systemd's units of the node, by systemctl: of the system that runs, or, without it, by the links of a tree."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from virtshim import machine, process
from virtshim.domain.errors import InternalError, ShimError

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
