"""Findings about the container runtimes behind `virtshim proxy`, by their answers, and about those installed on the node."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from criproto.runtime_v1 import api_pb2 as pb
from criproto.runtime_v1 import api_pb2_grpc
from virtshim.neighbours.runtimes import RuntimeSetup
from virtshim.preflight.finding import Finding, error, ok, warning

_SUBJECT = "proxy"
_STORES = "image file system"
_LIMIT = 3.0


@dataclass(frozen=True, slots=True)
class Runtime:
    name: str
    socket: str
    silence: str = ""
    """Why the runtime does not answer; "" if it does."""
    version: str = ""
    cgroup_driver: str = ""
    """ "" if the runtime does not report it, as older ones do not."""
    image_store: str = ""
    """The directory that tells kubelet the file system of the runtime's images; "" if the runtime does not report it."""


@dataclass(frozen=True, slots=True)
class OwnStore:
    """virtshim's images and disks: their directory, and the disk usage in percent at which virtshim removes unused images; 100
    means never."""

    directory: str
    gc_high_percent: int


def ask(name: str, socket: str) -> Runtime:
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        runtime = api_pb2_grpc.RuntimeServiceStub(channel)
        try:
            version = runtime.Version(pb.VersionRequest(version="0.1.0"), timeout=_LIMIT)
        except grpc.RpcError as exc:
            return Runtime(name, socket, silence=str(exc.details()))
        version_text = f"{version.runtime_name} {version.runtime_version}"
        return Runtime(
            name,
            socket,
            "",
            version_text,
            _cgroup_driver(runtime),
            _image_store(api_pb2_grpc.ImageServiceStub(channel)),
        )


def _cgroup_driver(runtime: api_pb2_grpc.RuntimeServiceStub) -> str:
    try:
        answer = runtime.RuntimeConfig(pb.RuntimeConfigRequest(), timeout=_LIMIT)
    except grpc.RpcError:
        return ""
    return pb.CgroupDriver.Name(answer.linux.cgroup_driver).lower() if answer.HasField("linux") else ""


def _image_store(images: api_pb2_grpc.ImageServiceStub) -> str:
    try:
        answer = images.ImageFsInfo(pb.ImageFsInfoRequest(), timeout=_LIMIT)
    except grpc.RpcError:
        return ""
    return answer.image_filesystems[0].fs_id.mountpoint if answer.image_filesystems else ""


def info(socket: str) -> Mapping[str, Any]:
    """virtshim's facts about itself, which `crictl info` shows below `config`; empty if virtshim does not answer."""
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        try:
            answer = api_pb2_grpc.RuntimeServiceStub(channel).Status(pb.StatusRequest(verbose=True), timeout=_LIMIT)
            found = json.loads(answer.info.get("config", "{}"))
        except (grpc.RpcError, ValueError):
            return {}
    return found if isinstance(found, dict) else {}


def watched(primary: Runtime, own: OwnStore, device_of: Callable[[str], str]) -> list[Finding]:
    """Whether kubelet watches the file system of virtshim's images. kubelet watches only the first file system in the proxy's
    merged list, which is the primary's. No finding if one of the two file systems is not known. `device_of`: the device of a
    directory's file system, "" if not known."""
    theirs, ours = device_of(primary.image_store) if primary.image_store else "", device_of(own.directory)
    if not theirs or not ours:
        return []
    if theirs == ours:
        return [ok(_STORES, f"{own.directory} is on the file system of {primary.name}'s images, which kubelet watches")]
    text = (
        f"kubelet watches the file system of {primary.image_store}, {primary.name}'s; {own.directory} is on another file "
        "system, where kubelet removes no unused images and does not see which VM fills the disk"
    )
    if own.gc_high_percent == 100:
        remedy = f"put paths.state_dir on the file system of {primary.image_store}, or set images.gc_high_percent = 85"
        return [error(_STORES, text, remedy)]
    text = f"{text}; virtshim removes images at {own.gc_high_percent} %"
    return [
        warning(
            _STORES,
            text,
            "monitor its free space, because VMs are paused when it is full; or put both on one file system",
        )
    ]


def findings(runtimes: Sequence[Runtime]) -> list[Finding]:
    """Compares the runtimes' answers. Pure."""
    result = [_finding(one) for one in runtimes]
    drivers = {one.name: one.cgroup_driver for one in runtimes if one.cgroup_driver}
    if len(set(drivers.values())) > 1:
        listed = ", ".join(f"{name}: {driver}" for name, driver in drivers.items())
        remedy = "set all to the same driver (virtshim: cri.cgroup_driver); otherwise the proxy does not start"
        result.append(error(_SUBJECT, f"the runtimes use different cgroup drivers ({listed})", remedy))
    return result


def _finding(one: Runtime) -> Finding:
    if one.silence:
        remedy = "start the runtime; proxy.primary and proxy.others set the sockets"
        return warning(_SUBJECT, f"{one.name} does not answer on {one.socket}: {one.silence}", remedy)
    driver = f", cgroup driver {one.cgroup_driver}" if one.cgroup_driver else ""
    return ok(_SUBJECT, f"{one.name} is {one.version} on {one.socket}{driver}")


# Container runtimes that are installed on the node. Their configuration must match virtshim's. Pure.

_CONTAINERS = "containers"


def installed_findings(
    found: Sequence[RuntimeSetup],
    driver: str,
    cni_conf_dir: str,
    *,
    behind_proxy: bool,
    pod_handlers: Sequence[str] = (),
) -> list[Finding]:
    """`driver`, `cni_conf_dir`: virtshim's own. `behind_proxy`: whether this node's proxy sends pods to one of the runtimes.
    `pod_handlers`: the handlers of pods with containers beside their VM."""
    if not found:
        return [
            ok(_CONTAINERS, "neither containerd nor CRI-O is installed: all pods of this node are virtual machines")
        ]
    result = [finding for one in found for finding in _of(one, driver, cni_conf_dir, behind_proxy=behind_proxy)]
    shared = [_entry(one, pod_handlers) for one in found if behind_proxy and one.serves_cri and not one.trouble]
    return [*result, *(one for one in shared if one)]


def installed_unused() -> Finding:
    return ok(_CONTAINERS, "kubelet calls virtshim directly: all pods of this node are virtual machines")


def _of(one: RuntimeSetup, driver: str, cni_conf_dir: str, *, behind_proxy: bool) -> list[Finding]:
    if one.trouble:
        return [warning(_CONTAINERS, f"{one.name}: {one.trouble}", "correct the file, or run this command as root")]
    if not one.serves_cri:
        text = f"{one.name} does not serve CRI: `cri` is in disabled_plugins of {one.file}"
        remedy = f"to run containers too, remove it and run: systemctl restart {one.name}"
        return [warning(_CONTAINERS, text, remedy)]
    result = [
        found
        for found in (_driver_finding(one, driver, behind_proxy=behind_proxy), _network(one, cni_conf_dir))
        if found
    ]
    runs = "runs" if one.is_running else "is installed but does not run"
    return result or [ok(_CONTAINERS, f"{one.name} {runs}, with virtshim's cgroup driver and network ({one.file})")]


def _entry(one: RuntimeSetup, pod_handlers: Sequence[str]) -> Finding | None:
    """About the runtime's entry for pods with containers beside their VM; None if containerd has it."""
    missing = ", ".join(handler for handler in pod_handlers if handler not in one.handlers)
    if pod_handlers and not one.tells_handlers:
        text = (
            f"pods with containers beside their VM need containerd, because {one.name} does not report a pod's handler"
        )
        if not (there := ", ".join(handler for handler in pod_handlers if handler in one.handlers)):
            return ok(_CONTAINERS, f"{text}; {one.name} has no OCI runtime {missing}, so it refuses such pods")
        text = (
            f"{text}; {one.name} has the OCI runtime {there}, so it starts such pods, but the proxy refuses their VMs"
        )
        return warning(_CONTAINERS, text, f"remove {there} from {one.name}'s configuration, and restart {one.name}")
    if not missing:
        return None
    text = f"{one.name} has no OCI runtime {missing}, so pods with containers beside their VM do not start"
    table = f"[{one.handlers_table}.{missing}]"
    remedy = f"run virtshim setup, or copy the table of {one.name}'s default runtime to {table}, and restart {one.name}"
    return warning(_CONTAINERS, text, remedy)


def _driver_finding(one: RuntimeSetup, driver: str, *, behind_proxy: bool) -> Finding | None:
    if one.cgroup_driver == driver or (not one.cgroup_driver and driver == "cgroupfs"):
        return None
    says = f"uses {one.cgroup_driver}" if one.cgroup_driver else "does not set SystemdCgroup, which is false by default"
    text = f"{one.name} {says}, virtshim uses {driver}, but one kubelet can use only one driver"
    sure = behind_proxy and one.cgroup_driver
    return (error if sure else warning)(
        _CONTAINERS, text, f"{one.remedy(driver)}; or set cri.cgroup_driver in virtshim's settings"
    )


def _network(one: RuntimeSetup, cni_conf_dir: str) -> Finding | None:
    if one.cni_conf_dir.rstrip("/") == cni_conf_dir.rstrip("/"):
        return None
    text = f"{one.name}'s CNI configuration is in {one.cni_conf_dir}, virtshim's in {cni_conf_dir}: two pod networks"
    return warning(_CONTAINERS, text, f'set tapmanager.cni_conf_dir = "{one.cni_conf_dir}"')
