"""The one table of settings. Order, low to high: defaults, the TOML file, its drop-ins (`config.toml.d/*.toml` beside it),
the environment (`VIRTSHIM_LIBVIRT__URI=...`). Unknown keys and bad values are errors, all told together, each with its place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import ValidationError, field_validator, model_validator

from tapmanager import toml_files
from tapmanager.toml_files import Key, Layers
from virtshim.domain.layout import Layout
from virtshim.domain.sizing import NodeLimits
from virtshim.settings import environment
from virtshim.settings.devices import DevicePluginSettings, Devices, OfferedResource
from virtshim.settings.faults import BadConfiguration, keys_of, told
from virtshim.settings.images import Images
from virtshim.settings.node import Cri, Kubernetes, Log, Paths, Shares, Streaming, Tapmanager
from virtshim.settings.proxy import Proxy
from virtshim.settings.telemetry import Metrics, Tracing
from virtshim.settings.texts import Section
from virtshim.settings.vms import Libvirt, Vm, Volumes

__all__ = [
    "BadConfiguration", "Cri", "DevicePluginSettings", "Devices", "Images", "Kubernetes", "Libvirt", "Log", "Metrics",
    "OfferedResource", "Paths", "Proxy", "Settings", "Shares", "Streaming", "Tapmanager", "Tracing", "Vm", "Volumes",
]  # fmt: skip

DEFAULT_FILE = toml_files.DEFAULT_FILE


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


def load(file: str | None = None) -> Settings:
    """Reads `file` (it or a drop-in of it must be there), or the default one if it is there, its drop-ins, and the environment.
    Raises BadConfiguration that names every bad key at once."""
    return read(file).settings


def read(file: str | None = None, environ: Mapping[str, str] = os.environ) -> Loaded:
    """As `load`, with the places."""
    path = file or DEFAULT_FILE
    layers = toml_files.read(path, must_be_there=file is not None)
    faults = layers.faults + environment.misspelt(environ, list(keys_of(Settings)))
    for values, places in environment.layer(environ, Settings.model_fields, faults):
        layers.lay(values, places)
    try:
        settings = Settings(**layers.values)
    except ValidationError as exc:
        raise BadConfiguration((*faults, *told(exc, layers, Settings))) from exc
    if faults:
        raise BadConfiguration(tuple(faults))
    return Loaded(settings, layers, path)


def merged(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """`high` laid over `low`, table by table."""
    layers = Layers(low)
    layers.lay(high, {})
    return layers.values
