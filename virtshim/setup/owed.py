"""Who has to be told when files of the node were changed: what systemctl is asked, in order. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from virtshim.config import DEFAULT_FILE
from virtshim.setup.facts import UNITS, NodeFacts

LIBVIRTD: Final = "/etc/libvirt/libvirtd.conf"
VIRTQEMUD: Final = "/etc/libvirt/virtqemud.conf"
QEMU: Final = "/etc/libvirt/qemu.conf"
APPARMOR: Final = "/etc/apparmor.d"
LOGIND: Final = "/etc/systemd/logind.conf.d"
_UNIT_FILES: Final = "/etc/systemd/system"
LOGIND_UNIT: Final = "systemd-logind.service"


def owed(changed: Collection[str], facts: NodeFacts, *, unmasked: Sequence[str] = ()) -> list[tuple[str, ...]]:
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
    if DEFAULT_FILE in changed or _below(f"{DEFAULT_FILE}.d", changed):
        found += [("try-restart", unit) for unit in UNITS if unit in facts.units]
    return found


def _below(directory: str, paths: Collection[str]) -> bool:
    return any(path.startswith(f"{directory}/") for path in paths)
