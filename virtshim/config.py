"""The one table of settings. Order, low to high: defaults, the TOML file, its drop-ins (`config.toml.d/*.toml` beside it),
the environment (`VIRTSHIM_LIBVIRT__URI=...`). Unknown keys and bad values are errors, all told together."""

from __future__ import annotations

import ipaddress
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ByteSize,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from virtshim.domain.devices.pools import socket_of, variable_of
from virtshim.domain.errors import InvalidRequest
from virtshim.domain.layout import LONGEST_SOCKET_PATH, Layout
from virtshim.domain.sizing import NodeLimits
from virtshim.proxy_settings import Proxy
from virtshim.setting_texts import HexId, NetworkText, PathText, PciText, ResourceName
from virtshim.setting_texts import Section as _Section

DEFAULT_FILE = "/etc/virtshim/config.toml"


class Paths(_Section):
    """[paths]"""

    state_dir: PathText = Field("/var/lib/virtshim", description="records, images, disks; survives a reboot")
    run_dir: PathText = Field("/run/virtshim", description="sockets; gone after a reboot")


class Cri(_Section):
    """[cri]"""

    socket: str = Field("", description="CRI socket; default RUN_DIR/virtshim.sock")
    runtime_handlers: tuple[str, ...] = Field(
        ("virtshim",), description="RuntimeClass handlers this node answers to, beside the default one"
    )
    cgroup_driver: Literal["auto", "systemd", "cgroupfs"] = Field(
        "auto", description="what RuntimeConfig tells kubelet; auto: systemd where systemd runs the machine"
    )
    max_calls: int = Field(
        1024,
        ge=8,
        le=8192,
        description="calls served at once, waiting ones included; lists and Status have their own 32",
    )
    pod_commands: int = Field(16, ge=1, le=4096, description="commands of ExecSync that one pod may run at once")
    reconcile_interval: float = Field(
        300.0, ge=1, le=86400, description="seconds between two searches for leftovers; see When something dies"
    )
    stop_timeout: float = Field(30.0, gt=0, description="seconds that undo and clean-up steps may take")


class Streaming(_Section):
    """[streaming]"""

    address: str = Field("127.0.0.1", description="address of exec, attach and port-forward; a loopback one")
    port: int = Field(0, ge=0, le=65535, description="its TCP port; 0: the kernel chooses one at each start")
    sessions: int = Field(
        512, ge=4, le=65536, description="sessions of all pods; the last quarter is for pods without one"
    )
    pod_sessions: int = Field(
        64, ge=1, le=65536, description="sessions of one pod: exec, attach and port-forward together"
    )
    pod_connections: int = Field(128, ge=1, le=65536, description="connections that are forwarded to one pod at once")
    pod_bytes: ByteSize = Field(ByteSize(8 << 20), ge=1 << 20, description="bytes sent to one pod that it has not read")

    @field_validator("address")
    @classmethod
    def _loopback(cls, address: str) -> str:
        # Whoever reaches the port and learns a token has a shell in a guest, and there is no TLS: kubelet, which relays its
        # users' connections, is on the same machine.
        if not ipaddress.ip_address(address).is_loopback:
            raise ValueError("must be a loopback address: kubelet relays its users' connections from this machine")
        return address


class Libvirt(_Section):
    """[libvirt]"""

    uri: str = Field("qemu:///system", description="qemu:///system, or qemu:///embed?root=DIR")
    domain_type: Literal["auto", "kvm", "qemu"] = Field(
        "auto", description="auto boots a probe guest once to see whether KVM really works; qemu is TCG"
    )
    emulator: PathText = Field("/usr/bin/qemu-system-x86_64", description="the real QEMU")
    vmwrapper: PathText = Field("/usr/libexec/virtshim/vmwrapper", description="what libvirt starts in QEMU's place")
    qemu_user: str = Field("", description="unprivileged user that QEMU runs as; default: the distribution's own")
    qemu_group: str = Field("", description="its group, and all VMs'; default: the distribution's own")
    confine: tuple[Literal["landlock", "seccomp", "core-scheduling"], ...] = Field(
        ("landlock", "seccomp", "core-scheduling"), description="what holds QEMU back, beside its user"
    )
    parts: tuple[PathText, ...] = Field(
        (), description="what QEMU may read and run besides: for one in an unusual place"
    )
    first_vm_uid: int = Field(2_130_706_432, ge=65_536, le=4_000_000_000, description="first of the VMs' own user ids")
    vm_uids: int = Field(65_536, ge=0, le=1 << 24, description="how many there are; 0: all VMs run as `qemu_user`")


class Tapmanager(_Section):
    """[tapmanager]: tapmanager reads the same table of the same file; a test holds names and defaults together."""

    socket: PathText = Field("/run/virtshim/tapmanager.sock", description="its socket")
    state_dir: PathText = Field("/var/lib/virtshim/tapmanager", description="its ledger: records of attached pods")
    netns_dir: PathText = Field("/run/netns", description="where network namespaces get their names")
    cni_conf_dir: PathText = Field("/etc/cni/net.d", description="CNI configuration; the first file by name is used")
    cni_bin_dir: tuple[PathText, ...] = Field(
        ("/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"), description="where CNI plugins are looked for"
    )
    qemu_user: str = Field("", description="user or uid that QEMU runs as; default: the distribution's own")
    qemu_group: str = Field(
        "", description="group or gid of VMs' users: `libvirt.qemu_group`; default: that of `qemu_user`"
    )
    cni_timeout: float = Field(90.0, gt=0, le=3600, description="longest run of one CNI plugin, seconds")
    undo_timeout: float = Field(30.0, gt=0, le=3600, description="longest clean-up after a failed attach, seconds")
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class Shares(_Section):
    """[shares]: the share program reads the same table of the same file; a test holds names and defaults together."""

    socket: PathText = Field(
        "/run/virtshim/shares.sock", description="socket of the program that serves volumes to VMs"
    )
    virtiofsd: str = Field("", description="the virtiofsd that it starts; default: where distributions have it")


class Images(_Section):
    """[images]"""

    download_protocol: Literal["https", "http"] = Field(
        "https", description="for image names that are URLs without scheme"
    )
    translations_dir: PathText = Field("/etc/virtshim/images", description="Virtlet image translation files")
    registry_hosts_dir: PathText = Field(
        "/etc/containerd/certs.d",
        description="registries' mirrors and certificates: hosts.toml as containerd reads them",
    )
    insecure_registries: tuple[str, ...] = Field((), description="host[:port] of registries contacted without TLS")
    forbidden_networks: tuple[NetworkText, ...] = Field(
        (), description="networks that images are not fetched from, beside link-local and metadata addresses"
    )
    max_bytes: ByteSize = Field(ByteSize(1 << 40), description="largest disk, as published and as the guest sees it")
    progress_timeout: float = Field(60.0, gt=0, description="seconds without a byte after which a pull is given up")
    pull_timeout: float = Field(
        21600.0,
        ge=0,
        description="seconds that a pull may take in all, however its source trickles; 0: as long as it likes",
    )
    parser_user: str = Field("", description="unprivileged user that reads images; default: virtshim-parser or nobody")


class Vm(_Section):
    """[vm]"""

    default_memory: ByteSize = Field(
        ByteSize(1 << 30), description="guest memory of a container without a memory limit"
    )
    min_memory: ByteSize = Field(
        ByteSize(32 << 20), description="a smaller memory limit is refused: no guest boots in it"
    )
    max_vcpus: int = Field(64, ge=1, le=255, description="more vCPUs than this are refused")
    room_vcpus: int = Field(
        0, ge=0, le=255, description="vCPUs a VM can be resized to; 0: what it starts with. A pod may override it"
    )
    room_memory: ByteSize = Field(
        ByteSize(0), description="memory a VM can be resized to; 0: what it starts with. A pod may override it"
    )
    max_root_volume: ByteSize = Field(
        ByteSize(0),
        description="a larger VirtletRootVolumeSize, or disk of virtshim.io/disks, is refused; 0: up to 64 TiB",
    )
    disk_iops: int = Field(
        0, ge=0, description="requests a second that each root disk serves at most; 0: as many as it can"
    )
    disk_bandwidth: ByteSize = Field(
        ByteSize(0), description="bytes a second that each root disk reads and writes at most; 0: as many as it can"
    )
    overhead: ByteSize = Field(
        ByteSize(256 << 20), description="memory for QEMU beside the guest's, for pods without RuntimeClass overhead"
    )
    command: Literal["run", "ignore"] = Field(
        "run",
        description="a container's command and args: run in the guest by its agent, or ignored. A pod may override it",
    )
    agent_timeout: float = Field(
        300.0,
        gt=0,
        description="seconds after its start for the agent of a guest that is to run a command, or a postStart hook, to answer",
    )


class Devices(_Section):
    """[devices]: what device plugins granted"""

    bind: bool = Field(
        True,
        description="bind a granted PCI function of another driver to vfio-pci while a VM has it; false: refuse it",
    )
    unplug: float = Field(
        2.0,
        ge=0,
        le=30,
        description="seconds a guest gets to release its devices before its VM is ended by force; 0: it is not asked",
    )
    reset: bool = Field(
        True,
        description="reset a PCI function when its VM has ended, and hand out none whose reset failed; false: leave it to the "
        "kernel, which does so when QEMU releases it, and reports no failure",
    )
    pod_resources_socket: str = Field(
        "/var/lib/kubelet/pod-resources/kubelet.sock",
        pattern="^(/|$)",
        description="where kubelet lists the devices of each container; empty: it is not asked",
    )
    cdi_dirs: tuple[PathText, ...] = Field(
        ("/etc/cdi", "/var/run/cdi"), description="CDI specifications; later directories win"
    )
    keep: tuple[PciText, ...] = Field(
        (), description="PCI addresses that no VM gets, beside the node's own network card and disks"
    )


class OfferedResource(_Section):
    """[[device_plugin.resources]]: a function that meets all criteria which are set belongs to it."""

    name: Annotated[ResourceName, Field(max_length=128, description="domain/name, as pods ask for it")]
    vendor: HexId = Field("", description="PCI vendor id, four hex digits")
    devices: tuple[HexId, ...] = Field((), description="PCI device ids of that vendor")
    drivers: tuple[str, ...] = Field(
        (), description="drivers a healthy one is bound to; default: vfio-pci, its variants"
    )
    pfs: tuple[PciText, ...] = Field((), description="PCI addresses; their virtual functions")
    addresses: tuple[PciText, ...] = Field((), description="PCI addresses of the functions themselves")
    functions: Literal["any", "virtual", "physical"] = Field("any", description="VFs only, or none of them")

    @model_validator(mode="after")
    def _chosen(self) -> Self:
        if not (self.vendor or self.pfs or self.addresses):
            raise ValueError("set vendor, pfs or addresses: this would offer every PCI function of the node")
        if self.devices and not self.vendor:
            raise ValueError("devices are ids of a vendor: set vendor too")
        return self


class DevicePluginSettings(_Section):
    """[device_plugin]: what `virtshim device-plugin` offers to kubelet."""

    directory: PathText = Field("/var/lib/kubelet/device-plugins", description="where kubelet has kubelet.sock")
    resources: tuple[OfferedResource, ...] = Field((), description="what is offered; a function belongs to one at most")
    deliver: Literal["nodes", "cdi"] = Field("nodes", description="what containers get: device nodes, or CDI names")
    cdi_dir: PathText = Field("/var/run/cdi", description="where CDI specifications are written")
    interval: float = Field(5.0, gt=0, le=3600, description="seconds between two checks of the devices")

    @field_validator("resources")
    @classmethod
    def _once(cls, resources: tuple[OfferedResource, ...]) -> tuple[OfferedResource, ...]:
        names = [resource.name for resource in resources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"these are listed twice: {', '.join(twice)}")
        by_variable: dict[str, str] = {}
        for name in names:
            other = by_variable.setdefault(variable_of(name), name)
            if other != name:
                raise ValueError(
                    f"{other} and {name} would set the same variable, {variable_of(name)}, in a container; rename one"
                )
        return resources

    @model_validator(mode="after")
    def _room_for_sockets(self) -> Self:
        for resource in self.resources:
            path = f"{self.directory}/{socket_of(resource.name)}"
            if len(path.encode()) > LONGEST_SOCKET_PATH:
                raise ValueError(
                    f"{resource.name} is too long a name: its socket {path} would have {len(path.encode())} bytes, and "
                    f"{LONGEST_SOCKET_PATH} is the most for one"
                )
        return self


class Log(_Section):
    """[log]"""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "text", "json"] = Field("auto", description="auto: text on a terminal, else JSON lines")


class Settings(BaseSettings):
    """A frozen value; build it with `load`."""

    model_config = SettingsConfigDict(
        env_prefix="VIRTSHIM_", env_nested_delimiter="__", extra="forbid", frozen=True, validate_default=True
    )

    paths: Paths = Paths()
    cri: Cri = Cri()
    streaming: Streaming = Streaming()
    libvirt: Libvirt = Libvirt()
    tapmanager: Tapmanager = Tapmanager()
    shares: Shares = Shares()
    images: Images = Images()
    vm: Vm = Vm()
    devices: Devices = Devices()
    device_plugin: DevicePluginSettings = DevicePluginSettings()
    proxy: Proxy = Proxy()
    log: Log = Log()

    @field_validator("paths")
    @classmethod
    def _room_for_sockets(cls, paths: Paths) -> Paths:
        # The longest socket is RUN_DIR/vm/<20>/console.sock.
        if len(paths.run_dir.encode()) > 60:
            raise ValueError(f"run_dir is {len(paths.run_dir.encode())} bytes long; Unix sockets allow for 60 at most")
        return paths

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        del settings_cls, dotenv_settings, file_secret_settings
        return env_settings, init_settings  # the environment wins over the file, which comes in as init values

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


def load(file: str | None = None, overrides: dict[str, Any] | None = None) -> Settings:
    """Reads `file` (must be there), or the default one if it is there, its drop-ins, and the environment. Raises
    InvalidRequest that names every bad key at once."""
    values: dict[str, Any] = {}
    path = Path(file or DEFAULT_FILE)
    if file is not None or path.exists():
        values = _read(path)
        for drop_in in sorted(Path(f"{path}.d").glob("*.toml")):
            values = merged(values, _read(drop_in))
    try:
        return Settings(**merged(values, overrides or {}))
    except ValidationError as exc:
        faults = "; ".join(
            f"{'.'.join(str(part) for part in error['loc'])}: {error['msg'].removeprefix('Value error, ')}"
            for error in exc.errors(include_url=False)
        )
        raise InvalidRequest(f"configuration {path}: {faults}. `virtshim config schema` lists all settings") from exc


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise InvalidRequest(f"configuration {path} cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"configuration {path} is not TOML: {exc}") from exc


def merged(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """`high` laid over `low`, table by table."""
    out = dict(low)
    for key, value in high.items():
        below = out.get(key)
        out[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return out
