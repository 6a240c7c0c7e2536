"""Compares two versions of the settings: what changed, and which changes a running daemon can adopt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

from virtshim.config.faults import dotted, keys_of, table_in

S = TypeVar("S", bound=BaseModel)


def changed(old: BaseModel, new: BaseModel) -> Iterator[tuple[str, bool]]:
    """(setting, whether a reload changes it) of each setting that differs."""
    for key in keys_of(type(old)):
        if _value(old, key) != _value(new, key):
            yield dotted(key), is_reloaded(type(old), key)


def with_reloaded(old: S, new: S) -> S:
    """`old`, with the values of `new` for all settings that a reload changes."""
    changes: dict[str, Any] = {}
    for name in type(old).model_fields:
        here, there = getattr(old, name), getattr(new, name)
        if table_in(type(old), name) is type(here):
            changes[name] = with_reloaded(here, there)
        elif is_reloaded(type(old), (name,)):
            changes[name] = there
    return old.model_copy(update=changes)


def is_reloaded(model: type[BaseModel], key: Sequence[str | int]) -> bool:
    """Whether a reload changes the setting, as its declaration says."""
    *tables, name = (str(part) for part in key)
    for table in tables:
        model = table_in(model, table) or model
    told = model.model_fields[name].json_schema_extra
    return isinstance(told, dict) and bool(told.get("reload"))


def _value(settings: BaseModel, key: Sequence[str | int]) -> Any:
    found: Any = settings
    for part in key:
        found = getattr(found, str(part))
    return found
