"""What `virtshim agent` needs of the settings. It is read without pydantic and the models, which take 11 MiB. virtshim itself
reports faults of all other settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tapmanager import toml_files
from virtshim.config.environment import environment_layer, misspelt_variables


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """A test compares names and defaults with `virtshim.config.settings`."""

    run_dir: str = "/run/virtshim"
    translations_dir: str = "/etc/virtshim/images"


_KEYS = (("paths", "run_dir"), ("images", "translations_dir"))


def agent_settings(file: str | None = None, environ: Mapping[str, str] = os.environ) -> AgentSettings:
    """From the same sources as `virtshim.config.settings.load_settings`. Raises BadConfiguration."""
    layers = toml_files.read(file or toml_files.DEFAULT_FILE, must_be_there=file is not None)
    faults = layers.faults + misspelt_variables(environ, _KEYS)
    for values, places in environment_layer(environ, [table for table, _ in _KEYS], faults):
        layers.lay(values, places)
    found: dict[str, str] = {}
    for table, name in _KEYS:
        values = layers.values.get(table, {})
        if not isinstance(values, Mapping):
            faults.append(f"{layers.place((table,))}: {table}: must be a table, [{table}]")
        elif name in values:
            found[name] = values[name]
            if not isinstance(found[name], str) or not found[name].startswith("/"):
                faults.append(f"{layers.place((table, name))}: {table}.{name}: must be an absolute path")
    if faults:
        from virtshim.config.faults import BadConfiguration

        raise BadConfiguration(tuple(faults))
    return AgentSettings(**found)
