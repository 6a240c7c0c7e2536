"""Settings of the environment: `VIRTSHIM_VM__MAX_VCPUS=7`; a list or a whole table as JSON, `VIRTSHIM_LIBVIRT__PARTS='["/opt"]'`.

Other variables may begin with the prefix (a Kubernetes Service of our name makes some in each of its pods): one that names
neither a table nor, by `__`, a key in one is not ours.
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
    """(key, variable, text) of each that is meant for us; whole tables come first."""
    found: list[tuple[Key, str, str]] = []
    for name, text in environ.items():
        if name.upper().startswith(PREFIX):
            key = tuple(name[len(PREFIX) :].lower().split("__"))
            if key[0] in tables or len(key) > 1:
                found.append((key, name, text))
    return sorted(found, key=lambda one: len(one[0]))


def value_of(text: str) -> Any:
    """Lists and tables are JSON, all else is text, as numbers and flags are to pydantic. Raises ValueError."""
    return json.loads(text) if text.lstrip()[:1] in ("[", "{") else text


def misspelt(environ: Mapping[str, str], keys: Collection[Key]) -> list[str]:
    """Faults: variables with one underscore where a setting's has two. They would be passed over in silence."""
    ours = {variable_of(key).replace("__", "_"): variable_of(key) for key in keys}
    names = {variable_of(key) for key in keys}
    return [
        f"{name}: no setting has this variable; did you mean {ours[upper]}?"
        for name in sorted(environ)
        if (upper := name.upper()) not in names and upper in ours
    ]


def layer(
    environ: Mapping[str, str], tables: Collection[str], faults: list[str]
) -> list[tuple[dict[str, Any], dict[Key, str]]]:
    """(values, places) for `Layers.lay`, one a variable."""
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
