"""Findings about the sockets of virtshim's own daemons. Pure."""

from __future__ import annotations

import stat

from virtshim.preflight.access import FileStatus
from virtshim.preflight.finding import Finding, error, ok, warning


def listener(unit: str, path: str, file: FileStatus | None, silence: str) -> Finding:
    """A socket that is root's alone. `file`: None if it is not there; `silence`: why nobody answers, "" if somebody does."""
    start = f"systemctl enable --now {unit}; journalctl -u {unit}"
    if file is None:
        return warning(unit, f"{path} is not there: {unit} does not run", start)
    if not stat.S_ISSOCK(file.mode):
        return error(unit, f"{path} is no socket", f"move it away, then: systemctl restart {unit}")
    of_others = file.mode & (0o007 if file.gid == 0 else 0o077)
    if file.uid != 0 or of_others:
        text = f"{path} has mode {file.permissions} and user {file.uid}: whoever reaches it rules this node's VMs"
        return error(unit, text, f"chown root: {path} && chmod 0600 {path}; see who changed it")
    if silence:
        return warning(unit, f"{path}: {silence}", start)
    return ok(unit, f"answers on {path}")
