"""What a command's exit code says: sysexits(3), where that has a word for it. docs/operator.md has the same table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from virtshim.model.errors import Kind

OF_KIND: Final[Mapping[Kind, int]] = {
    Kind.NOT_FOUND: 66,
    Kind.UNAVAILABLE: 69,
    Kind.REGISTRY: 69,
    Kind.INTERNAL: 70,
    Kind.UNIMPLEMENTED: 70,
    Kind.EXHAUSTED: 71,
    Kind.ALREADY_EXISTS: 73,
    Kind.FAILED_PRECONDITION: 75,
    Kind.DEADLINE: 75,
    Kind.ABORTED: 75,
    Kind.PERMISSION: 77,
    Kind.SIGNATURE: 77,
    Kind.INVALID: 78,
}

UNREAD: Final = 1
INTERRUPTED: Final = 130

MEANINGS: Final[Mapping[int, str]] = {
    0: "done",
    1: "done, but something is left to be seen to: an error of `check`, a file that `setup` kept, output that nobody read",
    2: "the command line is wrong",
    66: "there is no such pod, container or image",
    69: "virtshim, libvirt, tapmanager or a registry cannot be reached",
    70: "something failed that a repetition does not mend; also what this version does not do",
    71: "no disk, memory, address or place is left",
    73: "the name is taken by something else",
    75: "not now: another call, another state or more time is needed; try again when what the message names is so",
    77: "not allowed: not root, credentials that were refused, an image without the signature that it needs",
    78: "a setting, an argument or a file is wrong",
    INTERRUPTED: "Ctrl-C",
}

EPILOG: Final = (
    "Exit codes: "
    + "; ".join(f"{code} {meaning.partition(':')[0].partition(';')[0]}" for code, meaning in MEANINGS.items())
    + ". `exec`, `ssh` and `run` end with that of their command."
)
