"""Checks, shortens and parses untrusted texts, paths, addresses and quantities. No I/O."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final, Self

from virtshim.model.errors import InvalidRequest

# Untrusted text (of a guest, a program or a pod) for messages and terminals, which must not interpret control characters in it.


def printable_text(text: str) -> str:
    """Replaces each control character and line break by a question mark."""
    return "".join(char if char.isprintable() else "?" for char in text)


def escaped(text: str, longest: int) -> str:
    """At most the first `longest` characters, with unprintable ones escaped. A cut text ends with its whole length."""
    cut = text[:longest]
    shown = cut if cut.isprintable() else "".join(char if char.isprintable() else _escape(char) for char in cut)
    return shown if len(text) <= longest else f"{shown} ... ({len(text)} characters)"


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "replace").decode("ascii")


# Which paths the kernel accepts.

# linux/limits.h, PATH_MAX without its final NUL and NAME_MAX: bytes.
_LONGEST_PATH: Final = 4095
_LONGEST_NAME: Final = 255


def check_path(path: str, field: str) -> None:
    """Raises InvalidRequest, naming `field`, for a path that the kernel refuses."""
    if "\0" in path:
        raise InvalidRequest(f"{field} contains a NUL byte: {path[:80]!r}")
    if len(path.encode()) > _LONGEST_PATH or any(len(name.encode()) > _LONGEST_NAME for name in path.split("/")):
        raise InvalidRequest(
            f"{field}: a path has at most {_LONGEST_PATH} bytes, and each name in it {_LONGEST_NAME}; "
            f"shorten {path[:80]!r}..."
        )


# A listening address: an IP address and a TCP port, or the path of a Unix socket.

_UNIX = "unix:"


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """`path` is "" for TCP."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises InvalidRequest."""
        if text.startswith(f"{_UNIX}/"):
            return cls(path=text.removeprefix(_UNIX))
        host, _, port = text.rpartition(":")
        try:
            found = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
            if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
                raise ValueError  # noqa: TRY301  reported like a wrong host
        except ValueError:
            raise InvalidRequest(
                f"{text!r} is not an address: write an IP address and a port, such as 127.0.0.1:10011 or [::1]:10011, or "
                "unix:/a/path"
            ) from None
        return cls(str(found), int(port))


# Names of nodes and other objects, as the API server accepts them (a DNS subdomain), and addresses of other nodes.
_OBJECT = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
PEER_PORT: Final = 10017
_HOST_AND_PORT = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/\[\]]{1,253}))(?::([0-9]{1,5}))?")


def is_object_name(text: str) -> bool:
    return _OBJECT.fullmatch(text) is not None


def host_and_port(text: str, port: int) -> tuple[str, int]:
    """Host and port in the text. `port`: the port to use if the text has none. Raises InvalidRequest."""
    match = _HOST_AND_PORT.fullmatch(text)
    if match is None or not 0 < int(match[3] or port) < 1 << 16:
        raise InvalidRequest(
            f"{text[:80]!r} is not an address: write a name or an IP address, perhaps with a port, such as 10.0.0.7, "
            "node7.example:10017 or [fd00::7]:10017"
        )
    return match[1] or match[2], int(match[3] or port)


# Kubernetes quantities (`4Gi`, `500M`, `1e9`, `1.5Gi`, `100m`) are <sign><number><suffix>. The suffix is binary,
# decimal or an exponent, never two of them. `1E` is exa, `1E3` an exponent.
_QUANTITY = re.compile(
    r"(?P<sign>[+-]?)"
    r"(?:(?P<whole>[0-9]+)(?:\.(?P<fraction>[0-9]*))?|\.(?P<bare>[0-9]+))"
    r"(?:(?P<suffix>[KMGTPE]i|[numkMGTPE])|[eE](?P<exponent>[+-]?[0-9]{1,9}))?"
)
_BINARY = {f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", start=1)}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}

_LONGEST = 64
_LARGEST = 2**63 - 1
# A quantity has at most 64 digits. So an exponent above 100 makes the amount too large, and one below -100 makes it less than a
# byte.
_EXPONENT_RANGE = 100


def parse_bytes(text: str, largest: int = _LARGEST) -> int:
    """Bytes; a fraction of a byte is rounded up. Raises InvalidRequest if it is not a quantity, negative, or above
    `largest`."""
    match = _QUANTITY.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        raise InvalidRequest(f"{text[:_LONGEST]!r} is not a quantity; write one like 4Gi, 500M or 1.5Gi")
    fraction = match["fraction"] or match["bare"] or ""
    digits = int((match["whole"] or "") + fraction)
    if match["sign"] == "-" and digits:
        raise InvalidRequest(f"{text!r} is negative; write a size of 0 or more")
    suffix = match["suffix"] or ""
    exponent = int(match["exponent"] or _DECIMAL.get(suffix, 0)) - len(fraction)
    amount = _scaled(digits * _BINARY.get(suffix, 1), exponent)
    if amount > largest:
        raise InvalidRequest(f"{text!r} is too large; write at most {largest} bytes")
    return amount


def _scaled(number: int, exponent: int) -> int:
    """`number` times ten to the `exponent`, rounded up; cheap for any exponent."""
    power: int = 10 ** min(abs(exponent), _EXPONENT_RANGE)
    return number * power if exponent >= 0 else -(-number // power)
