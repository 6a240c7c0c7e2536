"""The containerd that `virtshim up --with-containerd` runs for its node, on the node's pod network.

DIR/containerd           configuration, images and files of containers
DIR/run/containerd       state
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from dataclasses import dataclass

import grpc

from criproto.runtime_v1 import api_pb2 as pb
from criproto.runtime_v1 import api_pb2_grpc
from virtshim.cli.daemons import ENDS_WITH_US, Daemon, Orphans
from virtshim.cli.node_dir import NodeDir, make_directory
from virtshim.config.settings import Settings
from virtshim.model.deadline import Deadline
from virtshim.model.errors import NotFound, Unavailable, WrongState
from virtshim.system.clock import SystemClock
from virtshim.system.files import replace_text

_START_LIMIT = 60.0
_POD_LIMIT = 120.0
# containerd's shims keep their sockets here, wherever the state directory is.
_SHIMS = "/run/containerd"

_CONFIGURATION = """\
version = 2
root = "{root}"
state = "{state}"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.aufs", "io.containerd.tracing.processor.v1.otlp"]
[grpc]
  address = "{socket}"
[debug]
  level = "warn"
[plugins."io.containerd.internal.v1.opt"]
  path = "{root}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  # The node may itself run in a container, which cannot lower the OOM score.
  restrict_oom_score_adj = true
  {more}
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni_bin_dir}"
    conf_dir = "{cni_conf_dir}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "runc"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
      Root = "{state}/runc"
  # Pods with containers beside their VM.
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.virtshim-pod]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.virtshim-pod.options]
      SystemdCgroup = false
      Root = "{state}/runc"
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one containerd keeps its files, and the CNI network that it uses."""

    root: str
    state: str
    socket: str
    cni_conf_dir: str
    cni_bin_dir: str

    def configuration(self, more: str = "") -> str:
        """The content of config.toml. `more`: further settings of the CRI plugin, as TOML."""
        return _CONFIGURATION.format(
            root=self.root, state=self.state, socket=self.socket,
            cni_conf_dir=self.cni_conf_dir, cni_bin_dir=self.cni_bin_dir, more=more,
        )  # fmt: skip


def set_up(node: NodeDir, settings: Settings) -> None:
    """Writes containerd's configuration. Raises NotFound if containerd or runc is not installed."""
    for program in ("containerd", "runc"):
        if shutil.which(program) is None:
            raise NotFound(f"--with-containerd: {program} is not installed; run `apt-get install containerd runc`")
    bin_dirs = settings.tapmanager.cni_bin_dir
    place = Place(
        root=f"{node.containerd}/root",
        state=f"{node.run}/containerd",
        socket=node.containerd_socket,
        cni_conf_dir=settings.tapmanager.cni_conf_dir,
        cni_bin_dir=next((one for one in bin_dirs if os.path.exists(f"{one}/bridge")), bin_dirs[0]),
    )
    make_directory(node.containerd)
    replace_text(_file(node), place.configuration(), mode=0o644)


def daemon(node: NodeDir, orphans: Orphans | None = None) -> Daemon:
    return Daemon("containerd", (*ENDS_WITH_US, "containerd", "--config", _file(node)), orphans or Orphans())


def remove_pods(node: NodeDir) -> list[str]:
    """Removes the pods of an earlier `up --with-containerd` and returns their names. Raises ShimError if it cannot remove
    one."""
    if not os.path.exists(_file(node)):
        return []
    containerd = daemon(node)
    containerd.start()
    try:
        with grpc.insecure_channel(f"unix:{node.containerd_socket}") as channel:
            return _remove_all(api_pb2_grpc.RuntimeServiceStub(channel))
    finally:
        containerd.stop()
        _remove_shims_directory()


def _remove_all(cri: api_pb2_grpc.RuntimeServiceStub) -> list[str]:
    removed: list[str] = []
    for pod in _pods(cri):
        name = f"{pod.metadata.namespace}/{pod.metadata.name}"
        try:
            cri.StopPodSandbox(pb.StopPodSandboxRequest(pod_sandbox_id=pod.id), timeout=_POD_LIMIT)
            cri.RemovePodSandbox(pb.RemovePodSandboxRequest(pod_sandbox_id=pod.id), timeout=_POD_LIMIT)
        except grpc.RpcError as exc:
            raise WrongState(
                f"could not remove pod {name} from containerd: {exc.details()}. Repeat `virtshim down`"
            ) from exc
        removed.append(name)
    return removed


def _pods(cri: api_pb2_grpc.RuntimeServiceStub) -> list[pb.PodSandbox]:
    """Waits until containerd can list its pods: it starts to serve before it has loaded them."""
    clock, never = SystemClock(), threading.Event()
    deadline = Deadline.after(clock.monotonic(), _START_LIMIT)
    while True:
        try:
            return list(cri.ListPodSandbox(pb.ListPodSandboxRequest(), timeout=_START_LIMIT).items)
        except grpc.RpcError as exc:
            if deadline.left(clock.monotonic()) <= 0:
                raise Unavailable(f"containerd does not list its pods: {exc.details()}") from exc
            clock.wait(never, 0.1)


def _remove_shims_directory() -> None:
    """Removes the directory unless the machine's own containerd has files in it."""
    with contextlib.suppress(OSError):
        if set(os.listdir(_SHIMS)) <= {"s"}:
            for directory in (f"{_SHIMS}/s", _SHIMS):
                os.rmdir(directory)


def _file(node: NodeDir) -> str:
    return f"{node.containerd}/config.toml"
