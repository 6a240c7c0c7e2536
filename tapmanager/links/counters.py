"""What the guests' NICs have carried, read off their taps: a tap's rx is what the guest sent. Taps live as long as the
attachment, so the counters do too, whatever QEMU does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tapmanager.pod import Nic

# Bytes, packets, errors and drops received by the guest, then the same four of what it sent.
Counters = tuple[int, int, int, int, int, int, int, int]


def read(nics: Sequence[Nic]) -> Mapping[str, Counters]:
    """By the NICs' interface names. Must run inside the pod's namespace (netns.run_in_each). Raises OSError."""
    # Not /proc/net: that is the namespace of the process's first thread.
    with open("/proc/thread-self/net/dev", encoding="ascii", errors="replace") as file:
        taps = parsed(file.read())
    return {nic.link: taps[nic.tap] for nic in nics if nic.tap in taps}


def parsed(text: str) -> Mapping[str, Counters]:
    """proc(5): two lines of headings, then `name: 8 numbers received, 8 sent`, of which the first four of each count."""
    found = {}
    for line in text.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        values = [int(number) for number in numbers.split()]
        rx, tx = values[0:4], values[8:12]
        found[name.strip()] = (tx[0], tx[1], tx[2], tx[3], rx[0], rx[1], rx[2], rx[3])
    return found
