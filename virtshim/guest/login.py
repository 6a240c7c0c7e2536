"""Logging in to a guest: names of its users, and SSH public keys as in an authorized_keys file. No I/O."""

from __future__ import annotations

import base64
import binascii
import itertools
import re
from typing import Final

from virtshim.model.errors import InvalidRequest

# The names that useradd(8) accepts, and dots, which directory services allow.
_USER_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")

_KEY_TYPE = re.compile(
    r"ssh-(?:rsa|dss|ed25519|ed448)(?:-cert-v01@openssh\.com)?"
    r"|ecdsa-sha2-nistp(?:256|384|521)(?:-cert-v01@openssh\.com)?"
    r"|sk-(?:ssh-ed25519|ecdsa-sha2-nistp256)(?:-cert-v01)?@openssh\.com"
)


def check_user(name: str) -> None:
    """Raises InvalidRequest."""
    if not _USER_NAME.fullmatch(name):
        raise InvalidRequest(f"{name[:80]!r} is not a user name; use letters, digits, '_', '.' and '-'")


def parse_keys(text: str) -> tuple[str, ...]:
    """The lines that are keys; empty lines and comments are left out. Raises InvalidRequest for any other line."""
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), start=1)]
    return tuple(_key(number, line) for number, line in lines if line and not line.startswith("#"))


def _key(number: int, line: str) -> str:
    """The line as it is; options before the key type, as in an authorized_keys file, are allowed."""
    if not line.isprintable():
        raise InvalidRequest(f"line {number} has control characters; write one public key a line")
    words = line.split(" ")
    for kind, blob in itertools.pairwise(words):
        if _KEY_TYPE.fullmatch(kind) and _is_base64(blob):
            return line
    raise InvalidRequest(
        f"line {number} is not an SSH public key; write one key a line, such as `ssh-ed25519 AAAA... name`"
    )


def _is_base64(text: str) -> bool:
    try:
        return bool(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        return False
