"""Kubernetes quantities (`4Gi`, `500M`, `1e9`, `1.5Gi`, `100m`) as whole bytes. No I/O."""

from __future__ import annotations

import re

from virtshim.domain.errors import InvalidRequest

# <sign><number><suffix>; the suffix is binary, decimal or an exponent, never two of them. `1E` is exa, `1E3` an exponent.
_QUANTITY = re.compile(
    r"(?P<sign>[+-]?)"
    r"(?:(?P<whole>[0-9]+)(?:\.(?P<fraction>[0-9]*))?|\.(?P<bare>[0-9]+))"
    r"(?:(?P<suffix>[KMGTPE]i|[numkMGTPE])|[eE](?P<exponent>[+-]?[0-9]{1,9}))?"
)
_BINARY = {f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", start=1)}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}

_LONGEST = 64
_LARGEST = 2**63 - 1
# With at most 64 digits, an exponent beyond these makes the amount too large, or smaller than one byte.
_EXPONENT_RANGE = 100


def parse_bytes(text: str, largest: int = _LARGEST) -> int:
    """Bytes, a fraction of a byte rounded up. InvalidRequest if it is no quantity, negative, or more than `largest`."""
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
