"""The one table of settings. Order, low to high: defaults, the TOML file, its drop-ins (`config.toml.d/*.toml` beside it),
the environment (`VIRTSHIM_LIBVIRT__URI=...`). Unknown keys and bad values are errors, all told together, each with its place."""

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
from virtshim.config.node import Cri, Kubernetes, Log, Metrics, Paths, Shares, Streaming, Tapmanager, Tracing
from virtshim.config.proxy import Proxy
from virtshim.config.texts import Section
from virtshim.config.vms import Libvirt, Vm, Volumes
from virtshim.model.layout import Layout
from virtshim.model.sizing import NodeLimits

# Settings of the environment: `VIRTSHIM_VM__MAX_VCPUS=7`; a list or a whole table as JSON,
# `VIRTSHIM_LIBVIRT__PARTS='["/opt"]'`.
#
# Other variables may begin with the prefix (a Kubernetes Service of our name makes some in each of its pods): one
# that names neither a table nor, by `__`, a key in one is not ours.

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


def environment_misspelt(environ: Mapping[str, str], keys: Collection[Key]) -> list[str]:
    """Faults: variables with one underscore where a setting's has two. They would be passed over in silence."""
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


__all__ = [
    "BadConfiguration", "Cri", "DevicePluginSettings", "Devices", "Images", "Kubernetes", "Libvirt", "Log", "Metrics",
    "OfferedResource", "Paths", "Proxy", "Settings", "Shares", "Streaming", "Tapmanager", "Tracing", "Vm", "Volumes",
]  # fmt: skip

CONFIG_DEFAULT_FILE = toml_files.DEFAULT_FILE


class Settings(Section):
    """A frozen value; build it with `load`."""

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
            raise ValueError(f"run_dir is {len(paths.run_dir.encode())} bytes long; Unix sockets allow for 60 at most")
        return paths

    @model_validator(mode="after")
    def _profiles_of_known_handlers(self) -> Self:
        named = {handler for profile in self.vm.profiles for handler in profile.handlers}
        if unknown := sorted(named - set(self.cri.runtime_handlers)):
            raise ValueError(
                f"vm.profiles: no pod has the handler {', '.join(unknown)}; list it in cri.runtime_handlers too"
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
        """Of the setting at `key`."""
        found: Any = self
        for part in key:
            found = getattr(found, str(part))
        return found


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings in force, and where each one comes from."""

    settings: Settings
    layers: Layers
    file: str

    def place(self, key: Key) -> str:
        """`FILE:LINE` or a variable; "" for a default. A list's is where it begins."""
        return next((place for other, place in self.layers.places.items() if other[: len(key)] == key), "")


def config_load(file: str | None = None) -> Settings:
    """Reads `file` (it or a drop-in of it must be there), or the default one if it is there, its drop-ins, and the environment.
    Raises BadConfiguration that names every bad key at once."""
    return config_read(file).settings


def config_read(file: str | None = None, environ: Mapping[str, str] = os.environ) -> Loaded:
    """As `load`, with the places."""
    path = file or CONFIG_DEFAULT_FILE
    layers = toml_files.read(path, must_be_there=file is not None)
    faults = layers.faults + environment_misspelt(environ, list(keys_of(Settings)))
    for values, places in environment_layer(environ, Settings.model_fields, faults):
        layers.lay(values, places)
    try:
        settings = Settings(**layers.values)
    except ValidationError as exc:
        raise BadConfiguration((*faults, *told(exc, layers, Settings))) from exc
    if faults:
        raise BadConfiguration(tuple(faults))
    return Loaded(settings, layers, path)


def config_merged(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """`high` laid over `low`, table by table."""
    layers = Layers(low)
    layers.lay(high, {})
    return layers.values
