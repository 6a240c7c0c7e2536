"""`json` in the written vmwrapper: only the standard library's C parser, because the rest loads `re`, which would double
vmwrapper's time. It has what vmwrapper and tapmanager.protocol use."""

from __future__ import annotations

from _json import encode_basestring_ascii, make_scanner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, cast
else:

    def cast(_kind: object, value: object) -> object:
        return value


class _Rules:
    """The attributes that the parser reads from its decoder."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float
    memo: dict[str, str] = {}  # noqa: RUF012  the parser keeps keys here while it reads


_scan = make_scanner(cast("make_scanner", _Rules))  # any object with these attributes will do


def loads(text: str | bytes) -> Any:
    """Raises ValueError, RecursionError."""
    if isinstance(text, bytes):
        text = text.decode()
    try:
        value, end = _scan(text, 0)
    except (StopIteration, ImportError, SystemError) as exc:  # the parser's error is in a module that is not included
        raise ValueError("malformed JSON") from exc
    if text[end:].strip():
        raise ValueError("there is more after the JSON value")
    return value


def dumps(value: object, *, separators: tuple[str, str] = (",", ":")) -> str:
    """For strings, numbers, truth values, and mappings of them. Raises TypeError for anything else."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return encode_basestring_ascii(value)
    if isinstance(value, dict):
        comma, colon = separators
        return "{" + comma.join(f"{dumps(key)}{colon}{dumps(item)}" for key, item in value.items()) + "}"
    if type(value) in (int, float):
        return repr(value)
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON here")
