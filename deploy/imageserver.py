"""Serves VM images for the demo and the tests: a directory by HTTP, and a real OCI registry with pushed images.

Everything listens on loopback, on a port that the kernel chooses, until its ``with`` block ends. The registry needs the packages
docker-registry and skopeo; everything else needs only the standard library.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import gzip
import hashlib
import http.client
import http.server
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 5.0
_QEMU_UID = 107  # the owner of a container disk's file in KubeVirt's documentation


class ImageServerError(Exception):
    """A registry did not start, or an image could not be pushed."""


# ---- HTTP -----------------------------------------------------------------------------------------------------------


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Logs nothing into the caller's output."""


@contextlib.contextmanager
def serve_directory(directory: Path) -> Iterator[str]:
    """Serves a directory; yields its URL, without a slash at the end."""
    handler = functools.partial(_QuietHandler, directory=os.fspath(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="image-http")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


# ---- registry -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Registry:
    """A running registry; ``address``: HOST:PORT, as in image names."""

    address: str
    directory: Path
    process_id: int

    def log(self) -> str:
        """The registry's output, including its access log."""
        return (self.directory / "log").read_text(errors="replace")


@contextlib.contextmanager
def registry(
    users: Mapping[str, str] | None = None, directory: Path | None = None, tls: tuple[Path, Path] | None = None
) -> Iterator[Registry]:
    """Runs a registry. ``users``: name to password, if it asks for them. ``tls``: its certificate and key; a client must
    then have a certificate of the same CA. Without ``tls`` it speaks plain HTTP. ``directory``: keeps the images; without
    it they are temporary."""
    with contextlib.ExitStack() as stack:
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="registry-")))
        config = _write_registry_config(directory, users, tls)
        log = directory / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["docker-registry", "serve", os.fspath(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Not the caller's environment, because the registry reads REGISTRY_... variables as settings.
                env={"PATH": os.environ.get("PATH", os.defpath), "OTEL_TRACES_EXPORTER": "none"},
            )
        stack.callback(_stop, process)
        yield Registry(_wait_for_address(process, log), directory, process.pid)


def _write_registry_config(directory: Path, users: Mapping[str, str] | None, tls: tuple[Path, Path] | None) -> Path:
    settings: dict[str, Any] = {
        "version": 0.1,
        "log": {"level": "info", "accesslog": {"disabled": False}},
        "storage": {
            "filesystem": {"rootdirectory": os.fspath(directory / "images")},
            "delete": {"enabled": True},
        },
        "http": {"addr": "127.0.0.1:0", "secret": base64.b64encode(os.urandom(16)).decode()},
    }
    if users is not None:
        passwords = directory / "htpasswd"
        passwords.write_text("".join(f"{name}:{_bcrypt(password)}\n" for name, password in users.items()))
        settings["auth"] = {"htpasswd": {"realm": "registry", "path": os.fspath(passwords)}}
    if tls is not None:
        certificate, key = map(os.fspath, tls)
        settings["http"]["tls"] = {"certificate": certificate, "key": key, "clientcas": [certificate]}
    config = directory / "config.yml"
    config.write_text(json.dumps(settings))  # JSON is YAML
    return config


def _bcrypt(password: str) -> str:
    """The registry only accepts bcrypt hashes, which libcrypt makes."""
    library = ctypes.CDLL("libcrypt.so.1")
    library.crypt_gensalt.restype = ctypes.c_char_p
    library.crypt_gensalt.argtypes = [ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_int]
    library.crypt.restype = ctypes.c_char_p
    library.crypt.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    salt: bytes | None = library.crypt_gensalt(b"$2b$", 4, os.urandom(16), 16)
    hashed: bytes | None = library.crypt(password.encode(), salt) if salt else None
    if hashed is None or not hashed.startswith(b"$2"):
        raise ImageServerError("libcrypt.so.1 cannot make bcrypt hashes here")
    return hashed.decode()


def _wait_for_address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        text = log.read_text(errors="replace")
        if process.poll() is not None:
            raise ImageServerError(f"docker-registry ended with status {process.returncode}: {text.strip()}")
        found = re.search(r"listening on (127\.0\.0\.1:\d+)", text)
        if found and _answers(found[1]):
            return found[1]
        time.sleep(0.02)
    raise ImageServerError(f"docker-registry did not answer within {_START_TIMEOUT_S:.0f} s: {log.read_text().strip()}")


def _answers(address: str) -> bool:
    connection = http.client.HTTPConnection(address, timeout=2)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/v2/")
            return connection.getresponse().status in {200, 400, 401}  # 400: it wants TLS
        except OSError:
            return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ---- images ---------------------------------------------------------------------------------------------------------


def write_container_disk(
    directory: Path,
    disk: Path | None,
    tag: str = "latest",
    says: Mapping[str, Any] | None = None,
    boot: Sequence[Path] = (),
) -> str:
    """Writes an OCI image layout with one layer, which only has ``disk/NAME``, if there is a disk, and ``boot/NAME`` for each of
    ``boot``. Returns the manifest's digest. The same files give the same digests. ``says``: the container's configuration
    (Entrypoint, Env ...)."""
    files = {f"disk/{disk.name}": disk} if disk else {}
    files |= {f"boot/{file.name}": file for file in boot}

    def fill(archive: tarfile.TarFile) -> None:
        for above in dict.fromkeys(name.partition("/")[0] for name in files):
            _add(archive, above, None)
        for name, file in files.items():
            _add(archive, name, file)

    return _write_image(directory, fill, tag, says or {}, [f"ADD {file.name} /{name}" for name, file in files.items()])


def write_files(directory: Path, files: Mapping[str, bytes], tag: str = "latest") -> str:
    """Writes an ordinary image with these files, owned by root, as ``write_container_disk`` does."""

    def fill(archive: tarfile.TarFile) -> None:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.mode, entry.size = 0o755, len(data)
            archive.addfile(entry, io.BytesIO(data))

    return _write_image(directory, fill, tag, {}, ["ADD"])


def _write_image(
    directory: Path, fill: Callable[[tarfile.TarFile], None], tag: str, says: Mapping[str, Any], made_by: Sequence[str]
) -> str:
    blobs = directory / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    layer, diff_id = _write_layer(blobs, fill)
    config = _write_blob(
        blobs,
        {
            "architecture": "amd64",
            "os": "linux",
            "config": dict(says),
            "rootfs": {"type": "layers", "diff_ids": [diff_id]},
            "history": [{"created_by": one} for one in made_by],
        },
        "application/vnd.oci.image.config.v1+json",
    )
    manifest = _write_blob(
        blobs,
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": config,
            "layers": [layer],
        },
        "application/vnd.oci.image.manifest.v1+json",
    )
    named = manifest | {"annotations": {"org.opencontainers.image.ref.name": tag}}
    (directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [named]}))
    (directory / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
    return str(manifest["digest"])


def _write_layer(blobs: Path, fill: Callable[[tarfile.TarFile], None]) -> tuple[dict[str, Any], str]:
    plain, packed = blobs / "layer.tar", blobs / "layer.tar.gz"
    with tarfile.open(plain, "w", format=tarfile.GNU_FORMAT) as archive:
        fill(archive)
    with (
        plain.open("rb") as source,
        packed.open("wb") as target,
        gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=target, mtime=0) as compressor,
    ):
        shutil.copyfileobj(source, compressor, 1 << 20)
    diff_id, digest = _digest(plain), _digest(packed)
    plain.unlink()
    size = packed.stat().st_size
    packed.rename(blobs / digest.removeprefix("sha256:"))
    media_type = "application/vnd.oci.image.layer.v1.tar+gzip"
    return {"mediaType": media_type, "digest": digest, "size": size}, diff_id


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _add(archive: tarfile.TarFile, name: str, content: Path | None) -> None:
    entry = tarfile.TarInfo(name)
    entry.uid = entry.gid = _QEMU_UID
    if content is None:
        entry.type = tarfile.DIRTYPE
        entry.mode = 0o555
        archive.addfile(entry)
        return
    entry.mode = 0o440
    entry.size = content.stat().st_size
    with content.open("rb") as file:
        archive.addfile(entry, file)


def _write_blob(blobs: Path, document: Mapping[str, Any], media_type: str) -> dict[str, Any]:
    data = json.dumps(document, sort_keys=True).encode()
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


def push_container_disk(
    server: str,
    name: str,
    disk: Path | None,
    *,
    tag: str = "latest",
    credentials: tuple[str, str] | None = None,
    docker_format: bool = False,
    says: Mapping[str, Any] | None = None,
    boot: Sequence[Path] = (),
) -> str:
    """Pushes a disk image as SERVER/NAME:TAG, with ``docker_format`` under Docker's media types, and returns the manifest's
    digest. ``says``: the container's configuration; ``boot``: files for /boot, with which the image needs no disk."""
    with tempfile.TemporaryDirectory(prefix="containerdisk-") as scratch:
        write_container_disk(Path(scratch, "layout"), disk, tag, says, boot)
        return _push(Path(scratch), f"{server}/{name}", tag, credentials, docker_format=docker_format)


def push_files(server: str, name: str, files: Mapping[str, bytes]) -> str:
    """Pushes an ordinary image with these files, and returns its manifest's digest."""
    with tempfile.TemporaryDirectory(prefix="files-") as scratch:
        write_files(Path(scratch, "layout"), files)
        return _push(Path(scratch), f"{server}/{name}", "latest", None, docker_format=False)


def _push(work: Path, name: str, tag: str, credentials: tuple[str, str] | None, *, docker_format: bool) -> str:
    login = base64.b64encode(":".join(credentials).encode()).decode() if credentials else None
    server = name.partition("/")[0]
    (work / "auth.json").write_text(json.dumps({"auths": {server: {"auth": login}} if login else {}}))
    # Without --insecure-policy skopeo needs a policy file, which a minimal installation lacks.
    command = ["skopeo", "--insecure-policy", "copy", "--quiet", "--dest-tls-verify=false"]
    command += ["--authfile", str(work / "auth.json"), "--digestfile", str(work / "digest")]
    command += ["--format", "v2s2" if docker_format else "oci"]
    command += [f"oci:{work / 'layout'}:{tag}", f"docker://{name}:{tag}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise ImageServerError(f"skopeo could not push {name}:{tag}: {done.stderr.strip()}")
    return (work / "digest").read_text().strip()
