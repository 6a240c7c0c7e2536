"""The bare counterpart of a pod: containerd with runc, as Debian has them, private below a directory. It uses the node's CNI
configuration, and an image that is made here: nothing comes from a network."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import signal
import subprocess
import tarfile
from pathlib import Path
from types import TracebackType
from typing import Self

from podclient import PodClient, wait_until

from criproto.runtime_v1 import api_pb2 as pb

IMAGE = "virtshim.test/sleeper:1"
# containerd's shims keep their sockets here, wherever its state is.
_SHIMS = "/run/containerd"
_BUSYBOX = "/bin/busybox"
_SLEEPS = ["/busybox", "sleep", "2147483647"]

_CONFIG = """\
version = 2
root = "{directory}/root"
state = "{directory}/state"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.aufs", "io.containerd.tracing.processor.v1.otlp"]
[grpc]
  address = "{socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{directory}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{image}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{cni}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
      Root = "{directory}/runc"
"""


class Containerd:
    """`with Containerd(directory, cni) as made:` serves CRI at `made.socket`, with the CNI configurations in `cni`. Afterwards
    nothing is left but files below `directory`."""

    def __init__(self, directory: str, cni: str) -> None:
        self._directory = f"{directory}/c"
        self._socket = f"{self._directory}/containerd.sock"
        self._cni = cni
        self._process: subprocess.Popen[bytes] | None = None
        self._has_shim_directory = os.path.isdir(_SHIMS)

    def __enter__(self) -> Self:
        os.makedirs(self._directory, mode=0o711)
        config = Path(f"{self._directory}/config.toml")
        config.write_text(_CONFIG.format(directory=self._directory, socket=self._socket, cni=self._cni, image=IMAGE))
        try:
            self.start()
            with PodClient(self._socket) as cri:
                archive = f"{self._directory}/image.tar"
                Path(archive).write_bytes(_oci_archive())
                subprocess.run(
                    ["ctr", "--address", self._socket, "--namespace", "k8s.io", "images", "import", archive],
                    check=True,
                    stdout=subprocess.DEVNULL,
                )
                wait_until(lambda: _knows(cri), 60, "the image is known to containerd's CRI")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    @property
    def socket(self) -> str:
        return self._socket

    def start(self) -> None:
        """Also after a `kill`; returns when it serves."""
        with open(f"{self._directory}/log", "ab") as log:
            self._process = subprocess.Popen(
                ["containerd", "--config", f"{self._directory}/config.toml"],
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        with PodClient(self._socket) as cri:
            wait_until(lambda: self._answers(cri), 60, f"containerd serves; see {self._directory}/log")

    def signal(self, number: int) -> None:
        """After SIGKILL its containers run on."""
        assert self._process is not None
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait(30)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        process = self._process
        if process is None:
            return
        try:
            if process.poll() is None:
                with contextlib.suppress(Exception), PodClient(self._socket, timeout=20) as cri:
                    for pod in cri.pods():  # of a round or test that failed
                        cri.stop_pod(pod.id)
                        cri.remove_pod(pod.id)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
            self._process = None
            if not self._has_shim_directory:
                for directory in (f"{_SHIMS}/s", _SHIMS):
                    with contextlib.suppress(OSError):  # another containerd came meanwhile
                        os.rmdir(directory)

    def _answers(self, cri: PodClient) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, Path(f"{self._directory}/log").read_text()
        with contextlib.suppress(Exception):
            status = cri.runtime.Status(pb.StatusRequest(), timeout=5).status
            return all(condition.status for condition in status.conditions)
        return False


def _knows(cri: PodClient) -> bool:
    request = pb.ImageStatusRequest(image=pb.ImageSpec(image=IMAGE))
    return bool(cri.images.ImageStatus(request, timeout=5).image.id)


def _oci_archive() -> bytes:
    """An OCI layout of one layer, a static busybox that sleeps; it is the pause image too."""
    layer = _tar({"busybox": (Path(_BUSYBOX).read_bytes(), 0o755)})
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": _SLEEPS},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    ).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": _described(config, "application/vnd.oci.image.config.v1+json"),
            "layers": [_described(layer, "application/vnd.oci.image.layer.v1.tar")],
        }
    ).encode()
    named = {
        **_described(manifest, "application/vnd.oci.image.manifest.v1+json"),
        "annotations": {"io.containerd.image.name": IMAGE},
    }
    files = {
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
        "index.json": json.dumps({"schemaVersion": 2, "manifests": [named]}).encode(),
        **{f"blobs/{_digest(blob).replace(':', '/')}": blob for blob in (layer, config, manifest)},
    }
    return _tar({name: (data, 0o644) for name, data in files.items()})


def _tar(files: dict[str, tuple[bytes, int]]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, (data, mode) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), mode
            tar.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _described(data: bytes, media_type: str) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(data), "size": len(data)}
