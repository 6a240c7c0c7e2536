"""Writes values as TOML."""

from __future__ import annotations

import datetime as dt
import json
import re
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_key(name: str) -> str:
    """Quotes keys such as annotation names: a bare key may not contain dots and slashes."""
    return name if _BARE_KEY.fullmatch(name) else toml_value(name)


def toml_value(value: Any) -> str:
    """JSON's integers and booleans are valid TOML. So are its strings, unless they hold surrogate pairs or DEL. Writes a table
    inline."""
    match value:
        case dict():
            return "{" + ", ".join(f"{toml_key(key)} = {toml_value(one)}" for key, one in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(toml_value, value)) + "]"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case float():
            return repr(value)
        case dt.date() | dt.time():
            return value.isoformat()
        case _:
            return json.dumps(value)
