"""The meaning of exit codes, taken from sysexits(3) where it has a fitting code. docs/commands.md has the same table."""

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
    1: "done, but something needs attention: `check` found an error, `setup` kept a file, or nobody read the output",
    2: "the command line is wrong",
    66: "the pod, container or image does not exist",
    69: "virtshim, libvirt, tapmanager or a registry cannot be reached",
    70: "something failed, and repeating the command will not help; or this version does not support it",
    71: "disk space, memory, addresses or slots have run out",
    73: "something else already has the name",
    75: "not now: the state is wrong, another call is in the way, or time ran out; fix what the message names and try again",
    77: "not allowed: you are not root, credentials were refused, or an image lacks a required signature",
    78: "a setting, an argument or a file is wrong",
    INTERRUPTED: "Ctrl-C",
}

EPILOG: Final = (
    "Exit codes: "
    + "; ".join(f"{code} {meaning.partition(':')[0].partition(';')[0]}" for code, meaning in MEANINGS.items())
    + ". `exec`, `ssh` and `run` exit with the code of their command."
)
