"""Reads facts about the machine, which is the node that the dashboard shows. Changes nothing."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path


def host_facts(proc: Path = Path("/proc")) -> Mapping[str, object]:
    """The facts by name. Facts that the machine does not provide are missing."""
    memory = _memory(proc / "meminfo")
    known: dict[str, object | None] = {
        "hostname": os.uname().nodename,
        "system": _system(),
        "kernel": os.uname().release,
        "cpus": os.cpu_count(),
        "cpuModel": _cpu_model(proc / "cpuinfo"),
        "memoryTotal": memory.get("MemTotal"),
        "memoryAvailable": memory.get("MemAvailable"),
        "swapTotal": memory.get("SwapTotal"),
        "load": _load(proc / "loadavg"),
        "uptime": _uptime(proc / "uptime"),
        "kvm": os.path.exists("/dev/kvm"),
    }
    return {name: value for name, value in known.items() if value is not None}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _memory(path: Path) -> dict[str, int]:
    """Values of /proc/meminfo in bytes."""
    found = {}
    for line in _text(path).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0]) << 10
    return found


def _cpu_model(path: Path) -> str | None:
    lines = (line.partition(":") for line in _text(path).splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "model name"), None)


def _load(path: Path) -> list[float] | None:
    words = _text(path).split()[:3]
    return [float(word) for word in words] if len(words) == 3 else None


def _uptime(path: Path) -> float | None:
    words = _text(path).split()
    return float(words[0]) if words else None


def _system() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None
