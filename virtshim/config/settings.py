"""All settings. They come from, in rising order of precedence: defaults, the TOML file, its drop-ins (`config.toml.d/*.toml`
beside it) and environment variables (`VIRTSHIM_LIBVIRT__URI=...`). Unknown keys and bad values are errors. One error names
all of them, each with its place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Self

from pydantic import ValidationError, field_validator, model_validator

from tapmanager import toml_files
from tapmanager.toml_files import Key, Layers
from virtshim.config.devices import DevicePluginSettings, Devices, OfferedResource
from virtshim.config.environment import environment_layer, misspelt_variables
from virtshim.config.faults import BadConfiguration, fault_lines, keys_of
from virtshim.config.images import Images
from virtshim.config.node import Cri, Kubernetes, Log, Metrics, Paths, Peers, Shares, Streaming, Tapmanager, Tracing
from virtshim.config.proxy import Proxy
from virtshim.config.texts import Section
from virtshim.config.vms import Libvirt, Saved, Templates, Vm, Volumes
from virtshim.model.layout import Layout
from virtshim.model.sizing import NodeLimits

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
        if unknown := sorted(named - {*self.cri.runtime_handlers, *self.proxy.pod_handlers}):
            raise ValueError(
                f"vm.profiles: no pod can have the handler {', '.join(unknown)}; also list it in cri.runtime_handlers, or in "
                "pod_handlers of [[proxy.others]]"
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


def read_settings(file: str | None = None) -> Loaded:
    """Like `load_settings`, with the sources of the settings."""
    path = file or DEFAULT_FILE
    layers = toml_files.read(path, must_be_there=file is not None)
    faults = layers.faults + misspelt_variables(os.environ, list(keys_of(Settings)))
    for values, places in environment_layer(os.environ, Settings.model_fields, faults):
        layers.lay(values, places)
    try:
        settings = Settings(**layers.values)
    except ValidationError as exc:
        raise BadConfiguration((*faults, *fault_lines(exc, layers, Settings))) from exc
    if faults:
        raise BadConfiguration(tuple(faults))
    return Loaded(settings, layers, path)


def merged_settings(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """Merges `high` over `low`, table by table."""
    layers = Layers(low)
    layers.lay(high, {})
    return layers.values
