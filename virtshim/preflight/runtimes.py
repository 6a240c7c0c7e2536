"""What the runtimes behind `virtshim proxy` answer, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from criproto.runtime_v1 import api_pb2 as pb
from criproto.runtime_v1 import api_pb2_grpc
from virtshim.neighbours.runtimes import RuntimeSetup
from virtshim.preflight.finding import Finding, error, ok, warning

_RUNTIMES_SUBJECT = "proxy"
_STORES = "image file system"
_LIMIT = 3.0


@dataclass(frozen=True, slots=True)
class Runtime:
    name: str
    socket: str
    silence: str = ""
    """Why it does not answer."""
    version: str = ""
    cgroup_driver: str = ""
    """ "" if it does not say: older ones do not."""
    image_store: str = ""
    """The directory on whose file system kubelet finds its images, "" if it does not say."""


@dataclass(frozen=True, slots=True)
class OwnStore:
    """virtshim's images and disks: the directory, and at how many percent unused images are removed there, 100 for never."""

    directory: str
    gc_high_percent: int


def ask(name: str, socket: str) -> Runtime:
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        runtime = api_pb2_grpc.RuntimeServiceStub(channel)
        try:
            version = runtime.Version(pb.VersionRequest(version="0.1.0"), timeout=_LIMIT)
        except grpc.RpcError as exc:
            return Runtime(name, socket, silence=str(exc.details()))
        told = f"{version.runtime_name} {version.runtime_version}"
        return Runtime(
            name, socket, "", told, _runtimes_driver(runtime), _image_store(api_pb2_grpc.ImageServiceStub(channel))
        )


def _runtimes_driver(runtime: api_pb2_grpc.RuntimeServiceStub) -> str:
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


def watched(primary: Runtime, own: OwnStore, device_of: Callable[[str], str]) -> list[Finding]:
    """Whether kubelet looks at the file system of our store: of those in the merged list it looks at the first, the primary's.
    Nothing where that is not known. `device_of`: what a directory's file system is on, "" if that is not known."""
    theirs, ours = device_of(primary.image_store) if primary.image_store else "", device_of(own.directory)
    if not theirs or not ours:
        return []
    if theirs == ours:
        return [ok(_STORES, f"{own.directory} is on that of {primary.name}'s images, which kubelet watches")]
    text = (
        f"kubelet watches {primary.name}'s, {primary.image_store}; {own.directory} is on another one, where it removes no unused "
        "image, and does not see which VM fills it"
    )
    if own.gc_high_percent == 100:
        remedy = f"put paths.state_dir on the file system of {primary.image_store}, or set images.gc_high_percent = 85"
        return [error(_STORES, text, remedy)]
    text = f"{text}; virtshim removes images at {own.gc_high_percent} %"
    return [
        warning(_STORES, text, "watch the free room there, since VMs are paused when there is none, or put both on one")
    ]


def findings(runtimes: Sequence[Runtime]) -> list[Finding]:
    """Pure."""
    told = [_finding(one) for one in runtimes]
    drivers = {one.name: one.cgroup_driver for one in runtimes if one.cgroup_driver}
    if len(set(drivers.values())) > 1:
        listed = ", ".join(f"{name}: {driver}" for name, driver in drivers.items())
        remedy = "set them to the same one (virtshim: cri.cgroup_driver); the proxy does not start otherwise"
        told.append(error(_RUNTIMES_SUBJECT, f"the runtimes use different cgroup drivers ({listed})", remedy))
    return told


def _finding(one: Runtime) -> Finding:
    if one.silence:
        remedy = "start it; proxy.primary and proxy.others say where the runtimes are"
        return warning(_RUNTIMES_SUBJECT, f"{one.name} does not answer on {one.socket}: {one.silence}", remedy)
    driver = f", cgroup driver {one.cgroup_driver}" if one.cgroup_driver else ""
    return ok(_RUNTIMES_SUBJECT, f"{one.name} is {one.version} on {one.socket}{driver}")


# Findings about the container runtime beside virtshim: its configuration against ours. Pure.

_BESIDE_SUBJECT = "containers"


def beside_findings(
    found: Sequence[RuntimeSetup], driver: str, cni_conf_dir: str, *, behind_proxy: bool
) -> list[Finding]:
    """`driver`, `cni_conf_dir`: ours. `behind_proxy`: whether this node's proxy sends pods to one of them."""
    if not found:
        return [ok(_BESIDE_SUBJECT, "neither containerd nor CRI-O here: all pods of this node are virtual machines")]
    return [finding for one in found for finding in _of(one, driver, cni_conf_dir, behind_proxy=behind_proxy)]


def beside_unused() -> Finding:
    return ok(_BESIDE_SUBJECT, "kubelet asks virtshim itself: all pods of this node are virtual machines")


def _of(one: RuntimeSetup, driver: str, cni_conf_dir: str, *, behind_proxy: bool) -> list[Finding]:
    if one.trouble:
        return [warning(_BESIDE_SUBJECT, f"{one.name}: {one.trouble}", "correct the file, or run this as root")]
    if not one.serves_cri:
        text = f"{one.name} does not serve CRI: `cri` is in disabled_plugins of {one.file}"
        remedy = f"for containers beside VMs take it out, and run: systemctl restart {one.name}"
        return [warning(_BESIDE_SUBJECT, text, remedy)]
    told = [
        found
        for found in (_beside_driver(one, driver, behind_proxy=behind_proxy), _network(one, cni_conf_dir))
        if found
    ]
    runs = "is there" if one.is_running else "is installed and does not run"
    return told or [ok(_BESIDE_SUBJECT, f"{one.name} {runs}, with virtshim's cgroup driver and network ({one.file})")]


def _beside_driver(one: RuntimeSetup, driver: str, *, behind_proxy: bool) -> Finding | None:
    if one.cgroup_driver == driver or (not one.cgroup_driver and driver == "cgroupfs"):
        return None
    says = f"uses {one.cgroup_driver}" if one.cgroup_driver else "says nothing of SystemdCgroup, by default false"
    text = f"{one.name} {says}, virtshim uses {driver}: one kubelet cannot have both"
    sure = behind_proxy and one.cgroup_driver
    return (error if sure else warning)(_BESIDE_SUBJECT, text, f"{one.remedy(driver)}; or set cri.cgroup_driver here")


def _network(one: RuntimeSetup, cni_conf_dir: str) -> Finding | None:
    if one.cni_conf_dir.rstrip("/") == cni_conf_dir.rstrip("/"):
        return None
    text = f"{one.name}'s CNI configuration is in {one.cni_conf_dir}, virtshim's in {cni_conf_dir}: two pod networks"
    return warning(_BESIDE_SUBJECT, text, f'set tapmanager.cni_conf_dir = "{one.cni_conf_dir}"')
