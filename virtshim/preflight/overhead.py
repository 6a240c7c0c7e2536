"""Findings about QEMU's own memory, besides the guest's: how much pods declare, and how much QEMU uses. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from virtshim.model.sizing import LEAST_OVERHEAD
from virtshim.model.text import escaped
from virtshim.preflight.finding import Finding, error, ok, warning

_SUBJECT = "overhead"
_MIB = 1 << 20
# `virtshim setup` writes this file.
RUNTIME_CLASS: Final = "/etc/virtshim/runtimeclass.yaml"
_APPLY: Final = f"kubectl apply -f {RUNTIME_CLASS}, and give pods its runtimeClassName"
_SUFFIXES = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "k": 10**3, "M": 10**6, "G": 10**9, "": 1}


@dataclass(frozen=True, slots=True)
class QemuMemory:
    """`declared`: the pod's overhead, 0 for none. `taken`: QEMU's memory besides the guest's; None if it cannot be read."""

    pod: str
    declared: int
    taken: int | None


@dataclass(frozen=True, slots=True)
class RuntimeClass:
    """`overhead` in bytes, 0 for none. `trouble`: why it could not be read."""

    source: str
    handler: str = ""
    overhead: int = 0
    trouble: str = ""


def runtime_class(source: str, document: Any) -> RuntimeClass:
    """Parses a RuntimeClass from YAML or JSON, as `kubectl get -o yaml` prints it."""
    if not isinstance(document, dict) or document.get("kind") != "RuntimeClass":
        return RuntimeClass(source, trouble="not a RuntimeClass")
    fixed = document.get("overhead")
    fixed = fixed.get("podFixed") if isinstance(fixed, dict) else None
    text = str(fixed.get("memory", "0")) if isinstance(fixed, dict) else "0"
    number = text.rstrip("KMGik")
    if not number.isdecimal() or text[len(number) :] not in _SUFFIXES:
        return RuntimeClass(source, trouble=f"overhead.podFixed.memory is {text!r}, which is not an amount of memory")
    return RuntimeClass(source, str(document.get("handler", "")), int(number) * _SUFFIXES[text[len(number) :]])


def name_of(document: Any) -> str:
    """The name of a RuntimeClass, for display."""
    metadata = document.get("metadata") if isinstance(document, dict) else None
    return escaped(str(metadata.get("name", "")), 80) if isinstance(metadata, dict) else "a document without a name"


def running(found: Sequence[QemuMemory], trouble: str = "", unread: str = "", remedy: str = "") -> Finding:
    """The finding about running VMs. `trouble`: why the records could not be read. `unread`: which records could not be read;
    `remedy`: what to do about that."""
    if trouble:
        return warning(
            _SUBJECT,
            f"the memory of VMs cannot be compared: {trouble}",
            "run this command as root, while virtshim runs",
        )
    finding = _of_known(found)
    if not unread:
        return finding
    text = f"{finding.text}; {unread}, so their VMs are not counted"
    return warning(_SUBJECT, text, "; ".join(filter(None, (finding.remedy, remedy))))


def _of_known(found: Sequence[QemuMemory]) -> Finding:
    if not found:
        return ok(_SUBJECT, "no VM runs, so there is nothing to measure")
    known = [one for one in found if one.taken is not None]
    if not known:
        return warning(
            _SUBJECT, f"the memory of {len(found)} QEMUs cannot be read from /proc", "run this command as root"
        )
    bare = [one for one in found if not one.declared]
    if bare:
        text = (
            f"{_few(bare)}: no RuntimeClass overhead, so the scheduler does not count the {_span(known)} that QEMU uses"
        )
        return warning(_SUBJECT, text, _APPLY)
    over = [one for one in known if (one.taken or 0) > one.declared]
    if over:
        worst = max(over, key=lambda one: (one.taken or 0) - one.declared)
        text = f"{_few(over)}: QEMU uses more than the declared overhead ({_mib(worst.taken or 0)} of {_mib(worst.declared)})"
        return warning(
            _SUBJECT, text, f"raise overhead.podFixed.memory of the RuntimeClass to {_mib(worst.taken or 0)}"
        )
    least = min(one.declared for one in found)
    return ok(_SUBJECT, f"{_mib(least)} declared, QEMU uses {_span(known)} besides the guest's memory")


def declared(
    found: RuntimeClass, handlers: Sequence[str], measured: Sequence[QemuMemory], pod_handlers: Collection[str] = ()
) -> Finding:
    """`pod_handlers`: this node's handlers of pods with containers beside their VM. `handlers`: its other handlers. A cluster may
    have one RuntimeClass for each size of guests, so a VM is compared only with the RuntimeClass that has the same overhead."""
    subject = "RuntimeClass"
    if found.trouble:
        return warning(
            subject, f"{found.source}: {found.trouble}", "correct it, or run virtshim setup to write it again"
        )
    if found.handler in pod_handlers and not found.overhead:
        text = f"{found.source}: no overhead, so virtshim refuses pods with the handler {found.handler}"
        return error(subject, text, "set overhead.podFixed.memory: 320Mi")
    if found.handler not in (*handlers, *pod_handlers):
        text = f"{found.source}: handler {found.handler!r} is not one of this node's ({', '.join(handlers)})"
        return error(subject, text, "correct its handler, or add it to cri.runtime_handlers")
    if not found.overhead:
        text = f"{found.source}: no overhead, so the scheduler does not count QEMU's memory"
        return warning(subject, text, "set overhead.podFixed.memory: 256Mi")
    if found.overhead < LEAST_OVERHEAD:
        text = f"{found.source}: overhead {_mib(found.overhead)} is too little to start a VM in its pod's cgroup"
        return warning(subject, text, f"raise overhead.podFixed.memory to at least {_mib(LEAST_OVERHEAD)}")
    most = max((one.taken or 0 for one in measured if one.declared in (0, found.overhead)), default=0)
    if most > found.overhead:
        text = f"{found.source}: overhead {_mib(found.overhead)}, but a QEMU of this node uses {_mib(most)}"
        return warning(subject, text, f"raise overhead.podFixed.memory to at least {_mib(most)}")
    return ok(subject, f"{found.source}: handler {found.handler}, overhead {_mib(found.overhead)}")


def taken(smaps: str, guest: int) -> int | None:
    """A QEMU's memory besides the guest's, from /proc/PID/smaps, with shared pages counted in part. The guest's memory is the
    mapping whose size is nearest to `guest`. None if it cannot be determined."""
    sizes, shares = (_amounts(smaps, name) for name in ("Size", "Pss"))
    if not shares or len(sizes) != len(shares):
        return None
    off, at = min((abs(size - guest), at) for at, size in enumerate(sizes))
    return sum(shares) - shares[at] if off * 10 <= guest else None


def _amounts(smaps: str, name: str) -> list[int]:
    return [int(line.split()[1]) << 10 for line in smaps.splitlines() if line.startswith(f"{name}:")]


def _few(found: Sequence[QemuMemory]) -> str:
    named = ", ".join(one.pod for one in found[:3])
    return f"{named} and {len(found) - 3} more" if len(found) > 3 else named


def _span(known: Sequence[QemuMemory]) -> str:
    least, most = (pick(one.taken or 0 for one in known) for pick in (min, max))
    return _mib(most) if least // _MIB == most // _MIB else f"{least // _MIB} to {_mib(most)}"


def _mib(count: int) -> str:
    return f"{-(-count // _MIB)} MiB"
