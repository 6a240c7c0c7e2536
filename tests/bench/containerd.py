"""The bare counterpart of a pod is Debian's containerd and runc, in a private directory. It uses the node's CNI
configuration and an image that is made here, so nothing comes from a network."""

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
from virtshim.cli.containerd import Place

IMAGE = "virtshim.test/sleeper:1"
# containerd's shims keep their sockets here, wherever its state is.
_SHIMS = "/run/containerd"
_BUSYBOX = "/bin/busybox"
_SLEEPS = ["/busybox", "sleep", "2147483647"]


class Containerd:
    """`with Containerd(directory, cni) as made:` serves CRI at `made.socket`, with the CNI configurations in `cni`.
    Afterwards only files below `directory` are left."""

    def __init__(self, directory: str, cni: str) -> None:
        self._directory = f"{directory}/c"
        self._socket = f"{self._directory}/containerd.sock"
        self._cni = cni
        self._process: subprocess.Popen[bytes] | None = None
        self._has_shim_directory = os.path.isdir(_SHIMS)

    def __enter__(self) -> Self:
        os.makedirs(self._directory, mode=0o711)
        config = Path(f"{self._directory}/config.toml")
        place = Place(f"{self._directory}/root", f"{self._directory}/state", self._socket, self._cni, "/usr/lib/cni")
        config.write_text(place.configuration(f'sandbox_image = "{IMAGE}"'))
        try:
            self.start()
            with PodClient(self._socket) as cri:
                bring_image(self._socket, self._directory, cri)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    @property
    def socket(self) -> str:
        return self._socket

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts containerd, also after a `kill`; returns when it serves."""
        with open(f"{self._directory}/log", "ab") as log:
            self._process = subprocess.Popen(
                ["containerd", "--config", f"{self._directory}/config.toml"],
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        with PodClient(self._socket) as cri:
            wait_until(lambda: self._answers(cri), 60, f"containerd serves; see {self._directory}/log")

    def signal(self, number: int) -> None:
        """Sends a signal. After SIGKILL the containers keep running."""
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


def bring_image(socket: str, directory: str, cri: PodClient, *names: str) -> None:
    """Imports IMAGE, under `names` too; returns when containerd's CRI has it. `directory` holds temporary files."""
    archive = Path(f"{directory}/image.tar")
    archive.write_bytes(_oci_archive())
    for command in (["import", str(archive)], *(["tag", IMAGE, name] for name in names)):
        subprocess.run(
            ["ctr", "--address", socket, "--namespace", "k8s.io", "images", *command],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    archive.unlink()
    wait_until(lambda: all(_knows(cri, one) for one in (IMAGE, *names)), 60, "the image is known to containerd's CRI")


def _knows(cri: PodClient, name: str) -> bool:
    request = pb.ImageStatusRequest(image=pb.ImageSpec(image=name))
    return bool(cri.images.ImageStatus(request, timeout=5).image.id)


def _oci_archive() -> bytes:
    """An OCI layout with one layer, a static busybox that sleeps. It is the pause image, too."""
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
