"""How much memory an object holds, independent of its attribute names."""

from __future__ import annotations

import gc
import types
from typing import Any

_NOT_ITS_OWN = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def bytes_held(thing: object) -> int:
    """Counts the characters and bytes of all strings and bytes that are reachable from it."""
    total, seen, rest = 0, set(), [thing]
    while rest:
        one: Any = rest.pop()
        if id(one) in seen or isinstance(one, _NOT_ITS_OWN):
            continue
        seen.add(id(one))
        if isinstance(one, str | bytes | bytearray):
            total += len(one)
        else:
            rest += gc.get_referents(one)
    return total
