"""Reads the configuration of the node's container runtime, containerd or CRI-O, as far as virtshim must match it. Changes
nothing."""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from virtshim.devices.host_files import HostFiles
from virtshim.model.errors import InvalidRequest

CONTAINERD: Final = "containerd"
CRIO: Final = "cri-o"
_MAX_BYTES: Final = 1 << 20
CONTAINERD_FILE: Final = "/etc/containerd/config.toml"
_CRIO_FILE: Final = "/etc/crio/crio.conf"
_CRIO_DROP_INS: Final = f"{_CRIO_FILE}.d"
_PROGRAMS: Final = ("/usr/bin", "/usr/local/bin", "/usr/sbin")
# Version 2 of containerd's file has one table for CRI, version 3 has two.
_CRI: Final = "io.containerd.grpc.v1.cri"
_CRI_RUNTIME: Final = "io.containerd.cri.v1.runtime"
_CRI_IMAGES: Final = "io.containerd.cri.v1.images"


@dataclass(frozen=True, slots=True)
class RuntimeSetup:
    """The configuration of a runtime. `cgroup_driver` (of containerd's default runtime) and `registry_hosts_dir`: "" if the
    file does not set them. `trouble`: why the file could not be read; "" if it was read or does not exist. `serves_cri`:
    False for a containerd whose CRI is turned off, as in Docker's package."""

    name: str
    socket: str
    file: str
    trouble: str = ""
    is_running: bool = False
    serves_cri: bool = True
    cgroup_driver: str = ""
    cni_conf_dir: str = "/etc/cni/net.d"
    cni_bin_dirs: tuple[str, ...] = ("/opt/cni/bin",)
    registry_hosts_dir: str = ""
    driver_table: str = ""
    """The table of the file that sets the cgroup driver."""
    default_runtime: str = ""
    """containerd's OCI runtime of pods without a RuntimeClass."""
    handlers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The tables of OCI runtimes in its files, by the RuntimeClass handler."""
    handlers_table: str = ""
    """containerd's name of the table that holds these tables; "" for CRI-O, which gets no further table."""
    elsewhere: str = ""
    """The imported file with settings of containerd's CRI. containerd 1 then ignores those settings of the main file."""

    @property
    def tells_handlers(self) -> bool:
        """Whether it tells a pod's RuntimeClass handler, by which `virtshim proxy` knows pods with containers beside their VM."""
        return self.name == CONTAINERD

    def remedy(self, driver: str) -> str:
        """How to set this cgroup driver in the runtime."""
        key, unit = f'cgroup_manager = "{driver}"', "crio"
        if self.name == CONTAINERD:
            key, unit = f"SystemdCgroup = {'true' if driver == 'systemd' else 'false'}", CONTAINERD
        return f"write {key} below {self.driver_table} in {self.file}, and restart {unit} (docs/how-to/beside-containerd.md)"


def read(files: HostFiles) -> list[RuntimeSetup]:
    """The installed runtimes, containerd first."""
    found = []
    if _installed(files, "containerd", "/run/containerd/containerd.sock"):
        found.append(_containerd(files))
    if _installed(files, "crio", "/run/crio/crio.sock"):
        found.append(_crio(files))
    return found


def _installed(files: HostFiles, program: str, socket: str) -> bool:
    return files.exists(socket) or any(files.exists(f"{place}/{program}") for place in _PROGRAMS)


def _containerd(files: HostFiles) -> RuntimeSetup:
    document, trouble = _document(files, CONTAINERD_FILE)
    elsewhere = ""
    for pattern in _texts(document.get("imports")):
        directory, _, ending = pattern.rpartition("/")
        for name in fnmatch.filter(files.names(directory), ending):
            imported, bad = _document(files, f"{directory}/{name}")
            document, trouble = _merged(document, imported), trouble or bad
            if {_CRI, _CRI_RUNTIME} & set(_table(imported, "plugins")):
                elsewhere = f"{directory}/{name}"
    plugins = _table(document, "plugins")
    cri = _table(plugins, _CRI_RUNTIME) or _table(plugins, _CRI)
    cni = _table(cri, "cni")
    default = str(_table(cri, "containerd").get("default_runtime_name") or "runc")
    systemd = _table(cri, "containerd", "runtimes", default, "options").get("SystemdCgroup")
    plugin = _CRI_RUNTIME if str(document.get("version")) == "3" else _CRI
    images = _table(plugins, _CRI_IMAGES) or cri
    socket = str(_table(document, "grpc").get("address") or "/run/containerd/containerd.sock")
    bins = _texts(cni.get("bin_dirs")) or _texts([cni.get("bin_dir")])
    off = {"cri", _CRI, _CRI_RUNTIME} & set(_texts(document.get("disabled_plugins")))
    return RuntimeSetup(
        CONTAINERD,
        socket,
        CONTAINERD_FILE,
        trouble,
        is_running=files.exists(socket),
        serves_cri=not off,
        cgroup_driver="" if systemd is None else "systemd" if systemd is True else "cgroupfs",
        cni_conf_dir=str(cni.get("conf_dir") or "/etc/cni/net.d"),
        cni_bin_dirs=bins or ("/opt/cni/bin",),
        registry_hosts_dir=str(_table(images, "registry").get("config_path") or "").split(":")[0],
        driver_table=f'[plugins."{plugin}".containerd.runtimes.{default}.options]',
        default_runtime=default,
        handlers=_tables(_table(cri, "containerd", "runtimes")),
        handlers_table=f'plugins."{plugin}".containerd.runtimes',
        elsewhere=elsewhere,
    )


def _crio(files: HostFiles) -> RuntimeSetup:
    document, trouble = _document(files, _CRIO_FILE)
    for name in files.names(_CRIO_DROP_INS):
        imported, bad = _document(files, f"{_CRIO_DROP_INS}/{name}")
        document, trouble = _merged(document, imported), trouble or bad
    crio = _table(document, "crio")
    network = _table(crio, "network")
    runtime = _table(crio, "runtime")
    socket = str(_table(crio, "api").get("listen") or "/run/crio/crio.sock").removeprefix("/var")
    return RuntimeSetup(
        CRIO,
        socket,
        _CRIO_FILE,
        trouble,
        is_running=files.exists(socket),
        # CRI-O's default.
        cgroup_driver=str(runtime.get("cgroup_manager") or "systemd"),
        cni_conf_dir=str(network.get("network_dir") or "/etc/cni/net.d").rstrip("/"),
        cni_bin_dirs=tuple(one.rstrip("/") for one in _texts(network.get("plugin_dirs"))) or ("/opt/cni/bin",),
        driver_table="[crio.runtime]",
        handlers=_tables(_table(runtime, "runtimes")),
    )


def _document(files: HostFiles, path: str) -> tuple[dict[str, Any], str]:
    """(tables, why the file could not be read); "" if it was read or does not exist."""
    if not files.exists(path):
        return {}, ""
    try:
        return tomllib.loads(files.content(path, _MAX_BYTES).decode()), ""
    except (InvalidRequest, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as exc:
        return {}, f"{path}: {exc}"


def _table(tables: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """The nested table; {} if one of the names is missing or is not a table."""
    found: Any = tables
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _tables(tables: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {name: table for name, table in tables.items() if isinstance(table, dict)}


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(one for one in value if isinstance(one, str) and one) if isinstance(value, list) else ()


def _merged(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    out = dict(low)
    for key, value in high.items():
        below = out.get(key)
        out[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return out
