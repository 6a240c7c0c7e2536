"""What the runtimes behind `virtshim proxy` answer, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from criproto.runtime_v1 import api_pb2 as pb
from criproto.runtime_v1 import api_pb2_grpc
from virtshim.preflight.finding import Finding, error, ok, warning

_SUBJECT = "proxy"
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


def ask(name: str, socket: str) -> Runtime:
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        runtime = api_pb2_grpc.RuntimeServiceStub(channel)
        try:
            version = runtime.Version(pb.VersionRequest(version="0.1.0"), timeout=_LIMIT)
        except grpc.RpcError as exc:
            return Runtime(name, socket, silence=str(exc.details()))
        return Runtime(name, socket, "", f"{version.runtime_name} {version.runtime_version}", _driver(runtime))


def _driver(runtime: api_pb2_grpc.RuntimeServiceStub) -> str:
    try:
        answer = runtime.RuntimeConfig(pb.RuntimeConfigRequest(), timeout=_LIMIT)
    except grpc.RpcError:
        return ""
    return pb.CgroupDriver.Name(answer.linux.cgroup_driver).lower() if answer.HasField("linux") else ""


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
