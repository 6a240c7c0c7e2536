"""The signal that a container's own command gets when the container is stopped. Pure."""

from __future__ import annotations

import signal
from typing import Final

from virtshim.domain.container import Container

# Those with numbers that depend on the machine are x86-64's, as all guests are; real-time ones begin where glibc's do.
_FIRST_REALTIME: Final = 34
_LAST_REALTIME: Final = 64
_REALTIME: Final = {"SIGRTMIN": _FIRST_REALTIME, "SIGRTMAX": _LAST_REALTIME}

# By CRI's numbers (its enum Signal), from 1. Up to SIGXFSZ they are in the order of their names.
_NAMES: Final = (
    *("SIGABRT", "SIGALRM", "SIGBUS", "SIGCHLD", "SIGCLD", "SIGCONT", "SIGFPE", "SIGHUP", "SIGILL", "SIGINT", "SIGIO"),
    *("SIGIOT", "SIGKILL", "SIGPIPE", "SIGPOLL", "SIGPROF", "SIGPWR", "SIGQUIT", "SIGSEGV", "SIGSTKFLT", "SIGSTOP"),
    *("SIGSYS", "SIGTERM", "SIGTRAP", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGURG", "SIGUSR1", "SIGUSR2", "SIGVTALRM"),
    *("SIGWINCH", "SIGXCPU", "SIGXFSZ"),
)


def stop_signal_of(container: Container) -> int:
    """Linux's number of what the container asks for, else its image, else SIGTERM."""
    return (
        _of_cri(container.config.stop_signal)
        or _by_name(container.spec.image_config.stop_signal)
        or int(signal.SIGTERM)
    )


def _of_cri(number: int) -> int:
    """0 for none, and for numbers that CRI does not have."""
    if 1 <= number <= len(_NAMES):
        return int(signal.Signals[_NAMES[number - 1]])
    realtime = _FIRST_REALTIME + number - len(_NAMES) - 1
    return realtime if _FIRST_REALTIME <= realtime <= _LAST_REALTIME else 0


def _by_name(name: str) -> int:
    """Of an image's config, as `SIGTERM`, `SIGRTMIN+3` or `SIGRTMAX-2`; 0 for none."""
    if name in signal.Signals.__members__:
        return int(signal.Signals[name])
    base, sign, distance = name.partition("+") if "+" in name else name.partition("-")
    if base not in _REALTIME or not distance.isdecimal():
        return 0
    return _REALTIME[base] + int(sign + distance)
