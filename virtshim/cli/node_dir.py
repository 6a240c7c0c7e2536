"""The directory of a node that `up` writes and `down` removes.

DIR/config.toml          the settings; each `up` rewrites them
DIR/state  DIR/run       paths.state_dir and paths.run_dir
DIR/libvirt              root of the embedded libvirt driver
DIR/cni                  generated CNI configuration and address leases
DIR/log                  copies of the daemons' logs, for `virtshim diag`
DIR/bin/vmwrapper
DIR/containerd           with --with-containerd; see virtshim.cli.containerd
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import shutil
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from virtshim.cli.own_path import refuse_strangers
from virtshim.config.settings import Settings, load_settings, merged_settings
from virtshim.config.toml_text import toml_key, toml_value
from virtshim.model.errors import InvalidRequest, WrongState
from virtshim.model.sandbox import VMS
from virtshim.system.files import remove_tree, replace_text

# Names of settings in environment variables, VIRTSHIM_<TABLE>__<KEY>. A variable may also hold a whole table as JSON.
_OWN_TABLES = ("PATHS", "PROXY", "SHARES", "TAPMANAGER")
_OWN_KEYS = ("CRI", "CRI__SOCKET", "LIBVIRT", "LIBVIRT__URI", "LIBVIRT__VMWRAPPER")


@dataclass(frozen=True, slots=True)
class NodeOptions:
    directory: str
    config: str | None = None
    cni_conf_dir: str | None = None
    cni_bin_dir: str | None = None
    domain_type: str | None = None
    pod_cidr: str = "10.88.0.0/16"
    with_containerd: bool = False


@dataclass(frozen=True, slots=True)
class NodeDir:
    """The paths and names of one node. They depend only on its directory."""

    path: str

    @classmethod
    def at(cls, directory: str) -> NodeDir:
        """Raises InvalidRequest for "": it is most likely an unset variable in a script, and would mean the working directory."""
        if not directory:
            raise InvalidRequest("--dir is empty; name a directory for the node")
        return cls(os.path.realpath(directory))

    @property
    def config_file(self) -> str:
        return f"{self.path}/config.toml"

    @property
    def state(self) -> str:
        return f"{self.path}/state"

    @property
    def vms(self) -> str:
        """VMs that outlive their pods."""
        return f"{self.state}/{VMS}"

    @property
    def run(self) -> str:
        return f"{self.path}/run"

    @property
    def libvirt(self) -> str:
        return f"{self.path}/libvirt"

    @property
    def cni(self) -> str:
        return f"{self.path}/cni"

    @property
    def log(self) -> str:
        return f"{self.path}/log"

    @property
    def vmwrapper(self) -> str:
        return f"{self.path}/bin/vmwrapper"

    @property
    def containerd(self) -> str:
        return f"{self.path}/containerd"

    @property
    def containerd_socket(self) -> str:
        return f"{self.run}/containerd.sock"

    @property
    def lock(self) -> str:
        return f"{self.run}/up.lock"

    @property
    def path_hash(self) -> str:
        """Makes the names of bridges and networks unique among several node directories on one machine."""
        return hashlib.sha256(self.path.encode()).hexdigest()[:8]

    @property
    def bridge(self) -> str:
        """An interface name holds at most 15 bytes."""
        return f"vs-{self.path_hash}"


def write_node(node: NodeDir, options: NodeOptions) -> Settings:
    """Makes the directories, the CNI configuration and config.toml; returns the settings. Raises InvalidRequest."""
    refuse_drop_ins(node)
    for directory in (
        node.path,
        node.state,
        node.run,
        node.libvirt,
        node.cni,
        node.log,
        os.path.dirname(node.vmwrapper),
    ):
        make_directory(directory)
    os.chmod(node.log, 0o700)
    conf_dir = options.cni_conf_dir
    if conf_dir is None:
        conf_dir = f"{node.cni}/net.d"
        make_directory(conf_dir)
        replace_text(_network_file(conf_dir), json.dumps(bridge_network(node, options.pod_cidr), indent=2), mode=0o644)
    values = node_settings(node, conf_dir, options)
    if options.config is not None:
        values = merged_settings(values, _toml(options.config))
    before = Path(node.config_file).read_text(encoding="utf-8") if os.path.exists(node.config_file) else None
    replace_text(node.config_file, to_toml(values), mode=0o644)
    try:
        return load_settings(node.config_file)
    except InvalidRequest:
        # `down` needs settings that can be read.
        if before is None:
            os.unlink(node.config_file)
        else:
            replace_text(node.config_file, before, mode=0o644)
        raise


def drop_path_variables() -> list[str]:
    """Removes variables from this process's environment that would point the node outside its directory, maybe at another
    node: sockets, directories, libvirt's URI, and all settings that tapmanager reads only from the file. Returns their
    names."""
    found = [name for name in os.environ if _leads_elsewhere(name.upper())]
    for name in found:
        del os.environ[name]
    return sorted(found)


def _leads_elsewhere(name: str) -> bool:
    prefix, _, key = name.partition("_")
    table = key.partition("__")[0]
    return prefix == "VIRTSHIM" and (table in _OWN_TABLES or key in _OWN_KEYS)


def remove_unstarted(node: NodeDir) -> bool:
    """Removes the files of an `up` whose settings were refused, so that it never ran. Returns False and removes nothing if
    the directory holds other files, or none."""
    parts = (node.state, node.run, node.libvirt, node.cni, node.log, os.path.dirname(node.vmwrapper))
    left = {os.path.join(place, name) for place, _, names in os.walk(node.path) for name in names}
    there = [part for part in parts if os.path.isdir(part)]
    if not there or not left <= {node.lock, _network_file(f"{node.cni}/net.d")}:
        return False
    for part in there:
        shutil.rmtree(part)
    return True


def remove_parts(node: NodeDir, *, everything: bool) -> None:
    """Removes the node's files, when its pods and daemons have gone: all but images and settings, or `everything`. Raises
    WrongState."""
    for path in (node.vms, node.run, node.libvirt, node.cni, node.log, os.path.dirname(node.vmwrapper)):
        remove_part(path)
    if everything:
        remove_part(node.path)


def remove_part(path: str) -> None:
    """Removes a directory that `up` made, but nothing that is mounted in it. Raises WrongState, which names the obstacle."""
    try:
        remove_tree(*os.path.split(path))
    except OSError as exc:
        raise WrongState(
            f"{path} cannot be removed: {exc.strerror}. Clear the cause and repeat `virtshim down`"
        ) from exc


def make_directory(path: str) -> None:
    """Makes `path` and its missing parents. Raises InvalidRequest if that fails, or if another user could change them (see
    `own_path`)."""
    refuse_strangers(path)
    try:
        missing = [path]
        while not os.path.lexists(above := os.path.dirname(missing[-1])):
            missing.append(above)
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, 0o711)
        os.listdir(path)
    except OSError as exc:
        raise InvalidRequest(f"--dir: {path} cannot be made: {exc.strerror}; choose another directory") from exc
    refuse_strangers(path)  # also checks what another user may have created first


def refuse_drop_ins(node: NodeDir) -> None:
    """Raises InvalidRequest for a drop-in directory: the settings of such a node are one file, which `up` writes."""
    if os.path.lexists(f"{node.config_file}.d"):
        raise InvalidRequest(
            f"--dir: {node.config_file}.d exists, but a node of `up` reads no drop-ins; put the settings into a file, name it "
            "with --config, and remove that directory"
        )


def bridge_network(node: NodeDir, pod_cidr: str) -> dict[str, Any]:
    """A CNI 1.0.0 configuration list: one bridge with its own address range, NAT to the outside, and host ports."""
    try:
        subnet = ipaddress.ip_network(pod_cidr)
    except ValueError as exc:
        raise InvalidRequest(f"--pod-cidr: {exc}; write a network such as 10.88.0.0/16") from exc
    if subnet.num_addresses < 8:
        raise InvalidRequest(f"--pod-cidr {pod_cidr!r} holds too few addresses; /29 or larger is needed")
    default = "0.0.0.0/0" if subnet.version == 4 else "::/0"
    return {
        "cniVersion": "1.0.0",
        "name": f"virtshim-{node.path_hash}",
        "plugins": [
            {
                "type": "bridge",
                "bridge": node.bridge,
                "isGateway": True,
                "ipMasq": True,
                "capabilities": {"ips": True},
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": str(subnet)}]],
                    "routes": [{"dst": default}],
                    "dataDir": f"{node.cni}/leases",
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def refuse_routed(node: NodeDir, pod_cidr: str, routes: Iterable[tuple[str, str]]) -> None:
    """`routes`: (destination, interface) of the machine's routing tables. Raises InvalidRequest if a route already sends
    addresses of `pod_cidr` elsewhere, because nothing could reach those pods. A wider route does no harm."""
    subnet = ipaddress.ip_network(pod_cidr)
    for destination, interface in routes:
        try:
            taken = ipaddress.ip_network(destination)
        except ValueError:  # "default", and types such as "unreachable"
            continue
        if interface == node.bridge or taken.version != subnet.version or taken.prefixlen < subnet.prefixlen:
            continue
        if taken.overlaps(subnet):
            raise InvalidRequest(
                f"--pod-cidr {pod_cidr}: this machine already routes {destination} to {interface};"
                " choose an unused network, such as --pod-cidr 10.91.0.0/16"
            )


def node_settings(node: NodeDir, conf_dir: str, options: NodeOptions) -> dict[str, Any]:
    values: dict[str, Any] = {
        "paths": {"state_dir": node.state, "run_dir": node.run},
        "cri": {"cgroup_driver": "cgroupfs"},
        "libvirt": {"uri": f"qemu:///embed?root={node.libvirt}", "vmwrapper": node.vmwrapper},
        "tapmanager": {
            "socket": f"{node.run}/tapmanager.sock",
            "state_dir": f"{node.state}/tapmanager",
            "cni_conf_dir": conf_dir,
        },
        "shares": {"socket": f"{node.run}/shares.sock"},
        # People who try out a node often serve their own images there.
        "images": {"insecure_registries": ["127.0.0.1", "localhost"]},
        "log": {"format": "text"},
    }
    if options.with_containerd:
        values["proxy"] = {"primary": {"name": "containerd", "socket": node.containerd_socket}}
    if options.cni_bin_dir is not None:
        values["tapmanager"]["cni_bin_dir"] = [options.cni_bin_dir]
    if options.domain_type is not None:
        values["libvirt"]["domain_type"] = options.domain_type
    return values


def _toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"--config {path}: {exc}") from exc


def to_toml(values: dict[str, Any]) -> str:
    """TOML of top-level tables. A table within a table or an array is written inline."""
    lines: list[str] = []
    for table, content in values.items():
        if not isinstance(content, dict):
            raise InvalidRequest(f"--config: {table} must be a table, such as [{table}]")
        lines.append(f"[{toml_key(table)}]")
        lines.extend(f"{toml_key(key)} = {toml_value(value)}" for key, value in content.items())
        lines.append("")
    return "\n".join(lines)


def _network_file(conf_dir: str) -> str:
    return f"{conf_dir}/10-virtshim.conflist"
