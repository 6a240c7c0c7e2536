"""Findings about the machine's clock. Pure."""

from __future__ import annotations

from virtshim.preflight.finding import Finding, ok, warning

# What the kernel reads without leaving the processor; guests get their time from it.
_QUICK = frozenset({"tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "xen", "arch_sys_counter"})


def synchronised(answer: bool | None, trouble: str) -> Finding:
    """`answer`: whether the kernel says so; None if it could not be asked, and `trouble` why."""
    if answer is None:
        return warning("clock", f"whether it is synchronised cannot be asked: {trouble}", "look at `timedatectl`")
    if answer:
        return ok("clock", "synchronised")
    remedy = "apt-get install systemd-timesyncd (or chrony), and run: timedatectl set-ntp true"
    text = "not synchronised: certificates are judged by it, and guests start with its time"
    return warning("clock", text, remedy)


def source(name: str) -> Finding:
    """`name`: the kernel's clock source, "" if it cannot be read."""
    if not name:
        return warning("clock source", "cannot be read from sysfs", "mount -t sysfs sysfs /sys")
    if name in _QUICK:
        return ok("clock source", name)
    text = f"{name}: each look at the clock leaves the processor, on the node and for its guests"
    return warning(
        "clock source", text, "see `dmesg | grep -i tsc` for why the kernel gave tsc up; update the firmware"
    )
