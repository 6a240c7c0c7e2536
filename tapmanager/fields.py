"""Typed reading of JSON objects from outside (requests, ledgers, CNI output): each error names the field. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

Json = Mapping[str, object]
T = TypeVar("T")

MAX_UID = 2**32 - 2  # the last number means "no user" to the kernel

_LONGEST_NAME = 80  # characters, in messages

HEX64 = re.compile(r"[0-9a-f]{64}")
MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")


class BadField(ValueError):
    """The message begins with the field's path."""


def refuse_unknown(obj: Json, names: Collection[str], where: str) -> None:
    """Raises BadField for a field that is not in `names`."""
    for name in obj:
        if name not in names:
            shown = name if len(name) <= _LONGEST_NAME and name.isprintable() else repr(name[:_LONGEST_NAME])
            raise BadField(f"{where}.{shown}: unknown field")


def require(obj: Json, names: Collection[str], where: str) -> None:
    """Raises BadField for a missing field. For lists, which the functions below allow to be missing."""
    for name in names:
        if name not in obj:
            raise BadField(f"{where}.{name}: missing")


def as_object(value: object, where: str) -> Json:
    if not isinstance(value, dict):
        raise BadField(f"{where}: must be an object")
    return value


def as_text(value: object, where: str) -> str:
    """A string that can be encoded as UTF-8 and has no NUL."""
    if not isinstance(value, str) or "\0" in value:
        raise BadField(f"{where}: must be a string")
    try:
        value.encode()  # JSON can contain lone surrogates
    except UnicodeEncodeError as exc:
        raise BadField(f"{where}: not valid Unicode") from exc
    return value


def text(obj: Json, name: str, where: str, default: str | None = None) -> str:
    """A string. A missing or null field means the default, if there is one."""
    value = obj.get(name)
    if value is None and default is not None:
        return default
    return as_text(value, f"{where}.{name}")


def number(obj: Json, name: str, where: str, low: int, high: int, default: int | None = None) -> int:
    """A whole number in low..high. A missing or null field means the default, if there is one."""
    value = obj.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadField(f"{where}.{name}: must be a whole number from {low} to {high}")
    return value


def flag(obj: Json, name: str, where: str) -> bool:
    """A missing or null field means false."""
    value = obj.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadField(f"{where}.{name}: must be true or false")
    return bool(value)


def inner(obj: Json, name: str, where: str, read: Callable[[Json, str], T]) -> T:
    """An object, converted by `read`, which gets the object and its path. A missing or null field means an empty object."""
    value = obj.get(name)
    return read(as_object({} if value is None else value, f"{where}.{name}"), f"{where}.{name}")


def each(obj: Json, name: str, where: str, read: Callable[[Json, str], T]) -> tuple[T, ...]:
    """A list of objects, each converted by `read` as in `inner`. A missing or null field means an empty list."""
    return tuple(read(item, f"{where}.{name}[{at}]") for at, item in enumerate(objects(obj, name, where)))


def each_text(obj: Json, name: str, where: str, read: Callable[[str, str], str]) -> tuple[str, ...]:
    """A list of strings, each checked by `read`, which gets the string and its path. Otherwise as `each`."""
    return tuple(read(item, f"{where}.{name}[{at}]") for at, item in enumerate(texts(obj, name, where)))


def objects(obj: Json, name: str, where: str) -> list[Json]:
    """A list of objects. A missing or null field means an empty list."""
    return [as_object(item, f"{where}.{name}[{at}]") for at, item in enumerate(items(obj, name, where))]


def texts(obj: Json, name: str, where: str) -> tuple[str, ...]:
    """A list of strings. A missing or null field means an empty list."""
    return tuple(as_text(item, f"{where}.{name}[{at}]") for at, item in enumerate(items(obj, name, where)))


def items(obj: Json, name: str, where: str) -> list[object]:
    """A list. A missing or null field means an empty list."""
    value = obj.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadField(f"{where}.{name}: must be a list")
    return value
