"""What the runtimes behind `virtshim proxy` answer, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from criproto.runtime_v1 import api_pb2 as pb
from criproto.runtime_v1 import api_pb2_grpc
from virtshim.preflight.finding import Finding, error, ok, warning

_SUBJECT = "proxy"
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
        return Runtime(name, socket, "", told, _driver(runtime), _image_store(api_pb2_grpc.ImageServiceStub(channel)))


def _driver(runtime: api_pb2_grpc.RuntimeServiceStub) -> str:
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
        told.append(error(_SUBJECT, f"the runtimes use different cgroup drivers ({listed})", remedy))
    return told


def _finding(one: Runtime) -> Finding:
    if one.silence:
        remedy = "start it; proxy.primary and proxy.others say where the runtimes are"
        return warning(_SUBJECT, f"{one.name} does not answer on {one.socket}: {one.silence}", remedy)
    driver = f", cgroup driver {one.cgroup_driver}" if one.cgroup_driver else ""
    return ok(_SUBJECT, f"{one.name} is {one.version} on {one.socket}{driver}")
