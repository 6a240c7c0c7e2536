"""Parses untrusted YAML (or JSON) text into a plain mapping, within limits. No I/O.

The result holds only dict, list, str, int, float, bool, None, bytes, date and datetime. It is a tree, because aliases
are copied, and its depth and size are limited. So callers can merge it and write it again without further checks.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from typing import Any, Final

import yaml

from virtshim.model.errors import InvalidRequest

MAX_TEXT_BYTES: Final = 256 * 1024
_MAX_DEPTH: Final = 64
# Characters and nodes after aliases are copied out. Text without aliases cannot reach it.
_MAX_WEIGHT: Final = 2 * MAX_TEXT_BYTES
# The time to read or write an integer grows with the square of its length.
_MAX_INTEGER_CHARS: Final = 400
_INTEGER_TAG: Final = "tag:yaml.org,2002:int"

# The beginning of PyYAML's message, up to the first quoted word, which is text of the document. A single quoted
# character is the one that is missing.
_UNTIL_A_WORD: Final = re.compile(r"""(?:[^'"]|'[^'"]')*""")

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# PyYAML's constructors raise all of these for text such as `!!int ""`, `!!bool x`, `!!timestamp x` or `0000-01-01`.
_UNREADABLE: Final = (yaml.YAMLError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError)


def parse_mapping(text: str) -> dict[str, Any]:
    """The mapping; {} for empty text or null. The InvalidRequest names the place of the fault and never quotes the
    text."""
    loaded = parse_value(text)
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise InvalidRequest("not a YAML mapping; write `key: value` lines")
    if not all(isinstance(key, str) for key in loaded):
        raise InvalidRequest("a key of the mapping is not text; put it in quotes")
    return loaded


def parse_value(text: str) -> Any:
    """The value in the text, of any kind; None for empty text. Raises InvalidRequest like `parse_mapping`."""
    try:
        return _from_json(text) or _from_yaml(text)
    except _UNREADABLE as error:
        raise InvalidRequest(f"not valid YAML{_place(error)}; correct it") from None


def _place(error: Exception) -> str:
    """The place of the error, and the problem without words of the text. Some problems quote the text, which may be a
    password: a word that begins with "!" is a tag."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f" at line {mark.line + 1}, column {mark.column + 1} ({_problem(error)})"
    return ""


def _problem(error: yaml.MarkedYAMLError) -> str:
    found = _UNTIL_A_WORD.match(str(error.problem))
    return found[0].strip()[:100] if found else ""


def _from_json(text: str) -> Any:
    """Parses a JSON mapping; None for any other text. libyaml refuses JSON's surrogate pairs and tabs."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        return _plain(json.loads(text, parse_constant=_no_constant))
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _check_depth(text: str) -> None:
    """Refuses text that is nested too deeply, before any recursive function reads it."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _MAX_DEPTH:
            raise _too_deep()


def _from_yaml(text: str) -> Any:
    _check_depth(text)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _weight(node, {})
        return _plain(loader.construct_document(node))
    finally:
        loader.dispose()


def _weight(node: yaml.Node, known: dict[int, int | None]) -> int:
    """The size after all aliases are copied. Visits each node once, and refuses a node that contains itself."""
    if id(node) in known:
        weight = known[id(node)]
        if weight is None:
            raise InvalidRequest("an alias is inside its own anchor; write the value out")
        return weight
    known[id(node)] = None
    total = 1
    if isinstance(node, yaml.ScalarNode):
        if node.tag == _INTEGER_TAG and len(node.value) > _MAX_INTEGER_CHARS:
            raise InvalidRequest("a number is too large; put it in quotes")
        total += len(node.value)
    elif isinstance(node, yaml.SequenceNode):
        total += sum(_weight(child, known) for child in node.value)
    elif isinstance(node, yaml.MappingNode):
        total += sum(_weight(key, known) + _weight(value, known) for key, value in node.value)
    if total > _MAX_WEIGHT:
        raise InvalidRequest("too large once its aliases are written out; use fewer aliases")
    known[id(node)] = total
    return total


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"nested more than {_MAX_DEPTH} levels deep; reduce the nesting")


def _plain(value: Any, depth: int = 1) -> Any:
    """A copy that shares no object with the original or within itself."""
    if isinstance(value, dict | list) and depth > _MAX_DEPTH:
        raise _too_deep()
    if isinstance(value, dict):
        return {_plain_key(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, str):
        value.encode()  # half a surrogate pair is a ValueError
        return value
    if value is None or isinstance(value, bool | int | float | bytes | dt.date):
        return value
    raise InvalidRequest(f"a value of the YAML type {type(value).__name__} is not allowed; write a list or a mapping")


def _plain_key(key: Any) -> Any:
    if key is None or isinstance(key, str | bool | int | float):
        return _plain(key)
    raise InvalidRequest("a key is neither text nor a number; put it in quotes")
