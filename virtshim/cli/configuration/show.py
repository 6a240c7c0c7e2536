"""`virtshim config show`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from tapmanager.toml_files import Key
from virtshim import config
from virtshim.cli.diag.harmless import PLAIN_ANNOTATIONS
from virtshim.cli.node_dir import toml_value
from virtshim.settings.environment import PREFIX
from virtshim.settings.faults import dotted, keys_of

# Of a URL with a user and a password the password.
_PASSWORD = re.compile(r"(?<=://)([^/@:\s]*):[^/@\s]*@")


class Shown(NamedTuple):
    """`source`: default, file, drop-in or environment. `place`: FILE:LINE, or a variable's name."""

    key: Key
    value: Any
    source: str
    place: str


def show_command(file: str | None, *, as_json: bool, changed: bool) -> None:
    found = [one for one in shown(config.read(file)) if one.source != "default" or not changed]
    if as_json:
        table = {dotted(one.key): {"value": one.value, "source": one.source, "place": one.place} for one in found}
        print(json.dumps(table, indent=2))
        return
    table_before = ""
    for one in found:
        if table_before and one.key[0] != table_before:
            print()
        table_before = str(one.key[0])
        print(f"{f'{dotted(one.key)} = {toml_value(one.value)}':<60}  # {one.place or one.source}")


def shown(loaded: config.Loaded) -> Iterator[Shown]:
    """Secrets are hidden by their type, passwords in addresses by their form, annotations but for harmless ones."""
    values = loaded.settings.model_dump(mode="json")
    for key in keys_of(config.Settings):
        value: Any = values
        for part in key:
            value = value[part]
        place = loaded.place(key)
        yield Shown(key, _hidden(value), _source(place, loaded.file), place)


def _source(place: str, file: str) -> str:
    if not place:
        return "default"
    if place.startswith(f"{file}:"):
        return "file"
    return "environment" if place.upper().startswith(PREFIX) else "drop-in"


def _hidden(value: Any) -> Any:
    """Annotations of a profile may hold user data and keys: those stay that `virtshim diag` shows, too."""
    match value:
        case str():
            return _PASSWORD.sub(r"\1:***@", value)
        case list():
            return [_hidden(one) for one in value]
        case dict():
            return {
                key: _annotations(one) if key == "annotations" and isinstance(one, dict) else _hidden(one)
                for key, one in value.items()
            }
        case _:
            return value


def _annotations(values: dict[str, str]) -> dict[str, str]:
    return {
        name: text if name in PLAIN_ANNOTATIONS else f"(hidden, {len(text)} characters)"
        for name, text in values.items()
    }
