"""Why a VM could not be started, where libvirt's code does not say: it has one code for every exit of QEMU during its start, and
passes on what QEMU wrote before. So only this module matches message text. Unknown text changes nothing."""

from __future__ import annotations

import re
from typing import Final

import libvirt

from virtshim.domain.errors import ResourceExhausted, ShimError, Unavailable
from virtshim.hypervisor.errors import code_of, message_of, translated

# qemuProcessReportLogError and qemuMonitorIO; then QEMU's own words, if it said any.
_ENDED: Final = re.compile(
    r"(?:closed the monitor|exited while connecting to monitor)(?::\s*(?P<said>.*))?\s*$", re.DOTALL
)
_NO_MEMORY: Final = re.compile(r"cannot set up guest memory|Cannot allocate memory|unable to map backing store")
_SIGNALLED: Final = re.compile(r"terminating on signal \d+")


def start_failed(name: str, exc: libvirt.libvirtError, words: str) -> ShimError:
    """The error to raise for `exc`, which `virDomain.create` raised. `words`: what QEMU said that libvirt has not read."""
    what = f"start VM {name}"
    found = _ENDED.search(message_of(exc)) if code_of(exc) == libvirt.VIR_ERR_INTERNAL_ERROR else None
    if found is None:
        return _with(words, translated(what, exc))
    said = "\n".join(part for part in ((found["said"] or "").strip(), words) if part)
    if _NO_MEMORY.search(said):
        return ResourceExhausted(
            f"{what}: not enough memory on this machine; lower the container's memory limit, or free some. QEMU said: {said}"
        )
    if not said or _SIGNALLED.search(said):
        return Unavailable(
            f"{what}: QEMU was killed during its start, by a signal or by the OOM killer (see the kernel's log). "
            f"A retry may succeed. {said}".rstrip()
        )
    return _with(words, translated(what, exc))


def _with(words: str, error: ShimError) -> ShimError:
    return type(error)(f"{error}: {words}") if words else error
