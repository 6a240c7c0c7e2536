"""All settings. They come from, in rising order of precedence: defaults, the TOML file, its drop-ins (`config.toml.d/*.toml`
beside it) and environment variables (`VIRTSHIM_LIBVIRT__URI=...`). Unknown keys and bad values are errors. One error names
all of them, each with its place."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from pydantic import ValidationError, field_validator, model_validator

from tapmanager import toml_files
from tapmanager.toml_files import Key, Layers
from virtshim.config.devices import DevicePluginSettings, Devices, OfferedResource
from virtshim.config.faults import BadConfiguration, keys_of, told
from virtshim.config.images import Images
from virtshim.config.node import Cri, Kubernetes, Log, Metrics, Paths, Peers, Shares, Streaming, Tapmanager, Tracing
from virtshim.config.proxy import Proxy
from virtshim.config.texts import Section
from virtshim.config.vms import Libvirt, Saved, Templates, Vm, Volumes
from virtshim.model.layout import Layout
from virtshim.model.sizing import NodeLimits

# Environment variables: `VIRTSHIM_VM__MAX_VCPUS=7`. A list or a whole table is JSON: `VIRTSHIM_LIBVIRT__PARTS='["/opt"]'`.
#
# A variable with the prefix is ignored unless it names a table, or has `__`: a Kubernetes Service named virtshim sets such
# variables in each pod.

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


__all__ = [
    "BadConfiguration", "Cri", "DevicePluginSettings", "Devices", "Images", "Kubernetes", "Libvirt", "Log", "Metrics",
    "OfferedResource", "Paths", "Peers", "Proxy", "Saved", "Settings", "Shares", "Streaming", "Tapmanager", "Tracing", "Vm",
    "Volumes",
]  # fmt: skip

DEFAULT_FILE = toml_files.DEFAULT_FILE


class Settings(Section):
    """All settings, frozen. `load_settings` builds it."""

    paths: Paths = Paths()
    cri: Cri = Cri()
    streaming: Streaming = Streaming()
    kubernetes: Kubernetes = Kubernetes()
    libvirt: Libvirt = Libvirt()
    tapmanager: Tapmanager = Tapmanager()
    shares: Shares = Shares()
    images: Images = Images()
    vm: Vm = Vm()
    volumes: Volumes = Volumes()
    saved: Saved = Saved()
    templates: Templates = Templates()
    peers: Peers = Peers()
    devices: Devices = Devices()
    device_plugin: DevicePluginSettings = DevicePluginSettings()
    proxy: Proxy = Proxy()
    log: Log = Log()
    metrics: Metrics = Metrics()
    tracing: Tracing = Tracing()

    @field_validator("paths")
    @classmethod
    def _room_for_sockets(cls, paths: Paths) -> Paths:
        # The longest socket is RUN_DIR/vm/<20>/console.sock.
        if len(paths.run_dir.encode()) > 60:
            raise ValueError(
                f"run_dir is {len(paths.run_dir.encode())} bytes long; Unix sockets below it allow 60 at most"
            )
        return paths

    @model_validator(mode="after")
    def _profiles_of_known_handlers(self) -> Self:
        named = {handler for profile in self.vm.profiles for handler in profile.handlers}
        if unknown := sorted(named - set(self.cri.runtime_handlers)):
            raise ValueError(
                f"vm.profiles: no pod can have the handler {', '.join(unknown)}; also list it in cri.runtime_handlers"
            )
        return self

    def layout(self) -> Layout:
        return Layout(state_dir=self.paths.state_dir, run_dir=self.paths.run_dir)

    def sizes(self) -> NodeLimits:
        vm = self.vm
        rooms = (vm.room_vcpus, vm.room_memory)
        return NodeLimits(vm.default_memory, vm.min_memory, vm.max_vcpus, *rooms, vm.overhead, vm.max_root_volume)

    @property
    def cri_socket(self) -> str:
        return self.cri.socket or f"{self.paths.run_dir}/virtshim.sock"

    @property
    def proxy_socket(self) -> str:
        return self.proxy.socket or f"{self.paths.run_dir}/proxy.sock"

    def value(self, key: Key) -> Any:
        """The value of the setting at `key`."""
        found: Any = self
        for part in key:
            found = getattr(found, str(part))
        return found


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings in force, and the source of each."""

    settings: Settings
    layers: Layers
    file: str

    def place(self, key: Key) -> str:
        """`FILE:LINE` or the name of a variable; "" for a default. For a list, the line where it begins."""
        return next((place for other, place in self.layers.places.items() if other[: len(key)] == key), "")


def load_settings(file: str | None = None) -> Settings:
    """Reads the settings file, its drop-ins and the environment. `file` or one of its drop-ins must exist; None means the
    default file, which may be missing. Raises BadConfiguration, which names every bad key."""
    return read_settings(file).settings


def read_settings(file: str | None = None, environ: Mapping[str, str] = os.environ) -> Loaded:
    """Like `load_settings`, with the sources of the settings."""
    path = file or DEFAULT_FILE
    layers = toml_files.read(path, must_be_there=file is not None)
    faults = layers.faults + misspelt_variables(environ, list(keys_of(Settings)))
    for values, places in environment_layer(environ, Settings.model_fields, faults):
        layers.lay(values, places)
    try:
        settings = Settings(**layers.values)
    except ValidationError as exc:
        raise BadConfiguration((*faults, *told(exc, layers, Settings))) from exc
    if faults:
        raise BadConfiguration(tuple(faults))
    return Loaded(settings, layers, path)


def merged_settings(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """Merges `high` over `low`, table by table."""
    layers = Layers(low)
    layers.lay(high, {})
    return layers.values
