"""Settings from environment variables: `VIRTSHIM_VM__MAX_VCPUS=7`. A list or a whole table is JSON:
`VIRTSHIM_LIBVIRT__PARTS='["/opt"]'`.

A variable with the prefix is ignored unless it names a table, or has `__`: a Kubernetes Service named virtshim sets such
variables in each pod.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Final

from tapmanager.toml_files import Key

PREFIX: Final = "VIRTSHIM_"


def variable_of(key: Key) -> str:
    return PREFIX + "__".join(str(part).upper() for part in key)


def variables(environ: Mapping[str, str], tables: Collection[str]) -> list[tuple[Key, str, str]]:
    """(key, variable, text) of each variable that is a setting. Whole tables come first."""
    found: list[tuple[Key, str, str]] = []
    for name, text in environ.items():
        if name.upper().startswith(PREFIX):
            key = tuple(name[len(PREFIX) :].lower().split("__"))
            if key[0] in tables or len(key) > 1:
                found.append((key, name, text))
    return sorted(found, key=lambda one: len(one[0]))


def value_of(text: str) -> Any:
    """Parses lists and tables as JSON, and leaves all else as text: pydantic parses numbers and booleans. Raises ValueError."""
    return json.loads(text) if text.lstrip()[:1] in ("[", "{") else text


def misspelt_variables(environ: Mapping[str, str], keys: Collection[Key]) -> list[str]:
    """Faults: variables with one underscore where a setting's variable has two. They would otherwise be ignored silently."""
    ours = {variable_of(key).replace("__", "_"): variable_of(key) for key in keys}
    names = {variable_of(key) for key in keys}
    return [
        f"{name}: no setting has this variable; did you mean {ours[upper]}?"
        for name in sorted(environ)
        if (upper := name.upper()) not in names and upper in ours
    ]


def environment_layer(
    environ: Mapping[str, str], tables: Collection[str], faults: list[str]
) -> list[tuple[dict[str, Any], dict[Key, str]]]:
    """(values, places) for `Layers.lay`, one pair per variable."""
    layers = []
    for key, name, text in variables(environ, tables):
        try:
            value = value_of(text)
        except ValueError as exc:
            faults.append(f'{name}: is not JSON: {exc}; write a list such as ["a", "b"]')
            continue
        places: dict[Key, str] = {key[:length]: name for length in range(1, len(key) + 1)}
        if isinstance(value, dict):
            places |= {(*key, inner): name for inner in value}
        for part in reversed(key):
            value = {part: value}
        layers.append((value, places))
    return layers
