"""Rows of pods and their VMs, and plain columns. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from virtshim.cri.client import PodSummary, VmSummary
from virtshim.domain.printable import printable_text

HEAD = ("POD", "POD ID", "POD STATE", "IP", "VM", "VM ID", "VM STATE", "AGE", "IMAGE")
_SHORT = 12
_UNITS = (("d", 86400), ("h", 3600), ("m", 60))


def rows(
    pods: Sequence[PodSummary], vms: Sequence[VmSummary], addresses: Mapping[str, Sequence[str]], now: float
) -> Iterator[tuple[str, ...]]:
    """A pod without a VM has a line, too. `now`: seconds since 1970. Ages are those of the VMs, else of the pods."""
    for pod in pods:
        state = "ready" if pod.is_ready else "not ready"
        left = (f"{pod.namespace}/{pod.name}", pod.id[:_SHORT], state, ",".join(addresses[pod.id]) or "-")
        own = [vm for vm in vms if vm.pod == pod.id]
        for vm in own:
            yield (*left, vm.name, vm.id[:_SHORT], vm.state, age(now - vm.created), vm.image)
        if not own:
            yield (*left, "-", "-", "-", age(now - pod.created), "-")


def age(seconds: float) -> str:
    """The largest unit that fits twice, so that the error is less than a third: 119s, 2m, 47h, 2d."""
    for unit, size in _UNITS:
        if seconds >= 2 * size:
            return f"{seconds // size:.0f}{unit}"
    return f"{max(0, seconds):.0f}s"


def columns(lines: Sequence[Sequence[str]]) -> list[str]:
    """What the node got from others is shown without control characters: a terminal would obey them."""
    shown = [[printable_text(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in shown]
