"""Turns faults of the settings into messages: the place, the key, the fault and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from tapmanager.toml_files import Key, Layers, nearest
from virtshim.model.errors import InvalidRequest


class BadConfiguration(InvalidRequest):
    """Every fault of the settings, one line each."""

    def __init__(self, faults: tuple[str, ...]) -> None:
        lines = "".join(f"\n  {fault}" for fault in faults)
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        super().__init__(f"configuration: {count} to correct; `virtshim config schema` lists all settings{lines}")
        self.faults = faults


def fault_lines(error: ValidationError, layers: Layers, root: type[BaseModel]) -> list[str]:
    """One line per fault, in the order of the files. Suggestions for unknown keys come from the fields of `root`."""
    found = [_fault(one, layers, root) for one in error.errors(include_url=False)]
    return list(dict.fromkeys(found))


def _fault(one: Any, layers: Layers, root: type[BaseModel]) -> str:
    key: Key = tuple(one["loc"])
    if one["type"] == "extra_forbidden":
        text = _unknown(key, root)
    else:
        text = one["msg"].removeprefix("Value error, ")
        if one["type"] == "string_pattern_mismatch" and one["ctx"]["pattern"].startswith(("^/", "^(/|")):
            text = "must be an absolute path"
        if one["type"] in ("byte_size", "byte_size_unit"):
            text = "must be a size, such as 4GiB, 512MiB or a number of bytes"
        names_value = one["type"] in ("missing", "value_error") or isinstance(one["input"], dict | BaseModel)
        if (
            not names_value and "annotations" not in key
        ):  # annotations may hold user data or keys, and this text goes to the log
            text += f"; it is {one['input']!r}"
    place = layers.place(key)
    return f"{place + ': ' if place else ''}{dotted(key)}: {text}"


def dotted(key: Key) -> str:
    """The key as text, such as `device_plugin.resources[0].name`."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _unknown(key: Key, root: type[BaseModel]) -> str:
    *table, name = key
    known = _fields(root, tuple(table))
    if near := nearest(str(name), known):
        return f"there is no such setting; did you mean {dotted((*table, near))}?"
    elsewhere = [dotted(other) for other in keys_of(root) if other[-1] == name]
    if elsewhere:
        return f"there is no such setting; did you mean {' or '.join(elsewhere)}?"
    what = f"[{dotted(tuple(table))}] has" if table else "there are the tables"
    return f"there is no such setting; {what} {', '.join(known)}"


def _fields(model: type[BaseModel], table: Key) -> list[str]:
    for part in table:
        if isinstance(part, str) and (inner := table_in(model, part)) is not None:
            model = inner
    return list(model.model_fields)


def table_in(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The table type of a field that is a table or a list of tables; None for a plain value."""
    field = model.model_fields.get(name)
    kinds = [field.annotation, *get_args(field.annotation)] if field is not None else []
    return next((one for one in kinds if isinstance(one, type) and issubclass(one, BaseModel)), None)


def keys_of(model: type[BaseModel], at: Key = ()) -> Iterator[Key]:
    """The key of each setting. A list of tables counts as one setting; a table within a table does not."""
    for name, field in model.model_fields.items():
        inner = table_in(model, name)
        listed = field.annotation is not inner
        if inner is None or listed:
            yield (*at, name)
        else:
            yield from keys_of(inner, (*at, name))
