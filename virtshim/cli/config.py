"""`virtshim config show` and `virtshim config check`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from tapmanager.toml_files import Key
from virtshim.cli.diag.secrets import PLAIN_ANNOTATIONS
from virtshim.cli.proxy import routes
from virtshim.config.environment import PREFIX
from virtshim.config.faults import dotted, keys_of
from virtshim.config.settings import Loaded, Settings, read_settings
from virtshim.config.toml_text import toml_value

# `virtshim config check`.


def check_command(file: str | None) -> None:
    """Raises BadConfiguration with every fault, InvalidRequest for tables that contradict each other."""
    loaded = read_settings(file)
    routes(loaded.settings)
    places = [place for key in keys_of(Settings) if (place := loaded.place(key))]
    files = ", ".join(loaded.layers.files) or f"no file ({loaded.file} does not exist)"
    count = "1 setting" if len(places) == 1 else f"{len(places)} settings"
    print(f"no faults found: {count} from {files}; `virtshim config show` lists all settings")


# `virtshim config show`.

# The password in a URL that has a user and a password.
_PASSWORD = re.compile(r"(?<=://)([^/@:\s]*):[^/@\s]*@")


class Shown(NamedTuple):
    """`source`: default, file, drop-in or environment. `place`: FILE:LINE, or the name of an environment variable."""

    key: Key
    value: Any
    source: str
    place: str


def show_command(file: str | None, *, as_json: bool, changed: bool) -> None:
    found = [one for one in shown(read_settings(file)) if one.source != "default" or not changed]
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


def shown(loaded: Loaded) -> Iterator[Shown]:
    """Hides secrets by their type, passwords in URLs by their form, and all annotations that are not known to be harmless."""
    values = loaded.settings.model_dump(mode="json")
    for key in keys_of(Settings):
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
    """A profile's annotations may hold user data and keys, so only those that `virtshim diag` shows stay visible."""
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
