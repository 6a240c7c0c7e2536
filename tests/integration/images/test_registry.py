"""Pulls work from a real registry (docker-registry) and a real web server, with kubelet's requests."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import imageserver
import pytest
from fakes.background import Background
from fakes.journal import WAIT_LIMIT
from fakes.relay import relaying
from fakes.waiting import eventually
from fakes.webserver import LOOPBACK

from virtshim.images.downloads import parallel
from virtshim.images.filestore import ImageFileStore, ImageSettings
from virtshim.images.policy import Rule
from virtshim.model.errors import NotFound, PermissionRefused, SignatureRefused, Unavailable
from virtshim.model.image import NO_DISK, Credentials, DiskFormat, ImageConfig

pytestmark = [
    pytest.mark.images,
    pytest.mark.skipif(not shutil.which("docker-registry"), reason="AREA images NOT TESTED: needs docker-registry"),
    pytest.mark.skipif(not shutil.which("skopeo"), reason="AREA images NOT TESTED: needs skopeo"),
]

NEVER = threading.Event()
USER, PASSWORD = "puller", "c0rrect"


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A disk with 8 incompressible MiB, so that it comes in many pieces."""
    directory = tmp_path_factory.mktemp("disk")
    raw, disk = directory / "raw", directory / "disk.qcow2"
    raw.write_bytes(b"\xeb" + os.urandom((8 << 20) - 1) + bytes(8 << 20))
    subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, disk], check=True)
    return disk


@pytest.fixture
def open_registry(tmp_path: Path) -> Iterator[imageserver.Registry]:
    (tmp_path / "registry").mkdir()
    with imageserver.registry(directory=tmp_path / "registry") as registry:
        yield registry


@pytest.fixture
def closed_registry(tmp_path: Path) -> Iterator[imageserver.Registry]:
    (tmp_path / "registry").mkdir()
    with imageserver.registry({USER: PASSWORD}, tmp_path / "registry") as registry:
        yield registry


@pytest.fixture
def store(tmp_path: Path) -> ImageFileStore:
    store = ImageFileStore(str(tmp_path / "images"), ImageSettings(insecure_registries=LOOPBACK))
    store.sweep()
    return store


@pytest.mark.parametrize("docker_format", [False, True])
def test_a_container_disk_is_pulled_by_tag_and_digest(
    open_registry: imageserver.Registry, store: ImageFileStore, disk: Path, docker_format: bool
) -> None:
    server = open_registry.address
    digest = imageserver.push_container_disk(server, "vm/disk", disk, tag="1.0", docker_format=docker_format)
    found = store.fetch(f"{server}/vm/disk:1.0", None, NEVER)
    assert (found.tag, found.repo_digest) == (f"{server}/vm/disk:1.0", f"{server}/vm/disk@{digest}")
    assert (found.format, found.virtual_size, found.size) == (DiskFormat.QCOW2, 16 << 20, disk.stat().st_size)
    assert Path(store.path(found.digest)).read_bytes() == disk.read_bytes()
    by_digest = store.fetch(f"{server}/vm/disk@{digest}", None, NEVER)
    assert (by_digest.tag, by_digest.repo_digest, by_digest.digest) == ("", found.repo_digest, found.digest)


@pytest.mark.parametrize("docker_format", [False, True])
def test_kernels_are_pulled_with_and_without_a_disk(
    open_registry: imageserver.Registry, store: ImageFileStore, disk: Path, tmp_path: Path, docker_format: bool
) -> None:
    files = [tmp_path / name for name in ("initrd.img", "vmlinuz-6.1.0-1+x")]
    for file in files:
        file.write_bytes(os.urandom(3 << 20))
    server = open_registry.address
    imageserver.push_container_disk(server, "vm/both", disk, boot=files, docker_format=docker_format)
    imageserver.push_container_disk(server, "vm/kernel", None, boot=files, docker_format=docker_format)
    both, kernel = (store.fetch(f"{server}/vm/{name}", None, NEVER) for name in ("both", "kernel"))
    assert Path(store.path(both.digest)).read_bytes() == disk.read_bytes()
    assert kernel.digest == NO_DISK
    assert both.boot == kernel.boot
    assert [one.path for one in both.boot] == [f"/boot/{file.name}" for file in files]
    assert [Path(store.boot.path(one.digest)).read_bytes() for one in both.boot] == [
        file.read_bytes() for file in files
    ]


def test_a_registrys_ca_and_client_certificates_come_from_containerds_files(tmp_path: Path, disk: Path) -> None:
    (tmp_path / "registry").mkdir()
    with imageserver.registry(directory=tmp_path / "registry") as registry:
        imageserver.push_container_disk(registry.address, "vm", disk)
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    argv = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    argv += ["-subj", "/CN=registry", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(argv, check=True, capture_output=True)
    hosts = tmp_path / "certs.d" / "_default" / "hosts.toml"
    hosts.parent.mkdir(parents=True)
    store = ImageFileStore(
        str(tmp_path / "images"),
        ImageSettings(insecure_registries=LOOPBACK, registry_hosts_dir=str(tmp_path / "certs.d")),
    )
    store.sweep()
    with imageserver.registry(directory=tmp_path / "registry", tls=(certificate, key)) as registry:
        server = f'server = "https://{registry.address}"\n'
        for said in ("", f'client = [["{certificate}", "{key}"]]', f'ca = "{certificate}"'):
            hosts.write_text(server + said)
            with pytest.raises(Unavailable):
                store.fetch("images.test/vm", None, NEVER)
        hosts.write_text(server + f'ca = "{certificate}"\nclient = [["{certificate}", "{key}"]]')
        found = store.fetch("images.test/vm", None, NEVER)
        assert Path(store.path(found.digest)).read_bytes() == disk.read_bytes()
        assert found.tag == "images.test/vm:latest"


def test_the_default_tag_is_latest_and_the_same_disk_is_one_file(
    open_registry: imageserver.Registry, store: ImageFileStore, disk: Path
) -> None:
    server = open_registry.address
    for name in ("one", "two"):
        imageserver.push_container_disk(server, name, disk)
    found = {store.fetch(f"{server}/{name}", None, NEVER) for name in ("one", "two")}
    assert {image.tag for image in found} == {f"{server}/one:latest", f"{server}/two:latest"}
    (disk_file,) = {image.digest for image in found}
    assert store.stored() == {disk_file, *(image.tree for image in found)}


def test_images_of_one_disk_are_identified_by_their_configs(
    open_registry: imageserver.Registry, store: ImageFileStore, disk: Path
) -> None:
    server = open_registry.address
    trees = set()
    for name in ("one", "two"):
        imageserver.push_container_disk(server, name, disk, says={"User": "7", "Entrypoint": [f"/bin/{name}"]})
        found = store.fetch(f"{server}/{name}", None, NEVER)
        raw = subprocess.run(
            ["skopeo", "--insecure-policy", "inspect", "--raw", "--tls-verify=false", f"docker://{server}/{name}"],
            check=True, capture_output=True,
        ).stdout  # fmt: skip
        assert found.id.value == json.loads(raw)["config"]["digest"]
        assert found.repo_digest == f"{server}/{name}@sha256:{hashlib.sha256(raw).hexdigest()}"
        assert found.config == ImageConfig(user="7", entrypoint=(f"/bin/{name}",))
        trees.add(found.tree)
        assert store.stored() == {found.digest, *trees}


def test_an_ordinary_image_is_kept_as_files_for_volumes(
    open_registry: imageserver.Registry, store: ImageFileStore
) -> None:
    name = f"{open_registry.address}/files"
    imageserver.push_files(open_registry.address, "files", {"etc/motd": b"hello", "bin/tool": b"#!/bin/sh\n"})
    found = store.fetch(name, None, NEVER)
    assert found.tree == found.digest
    root = Path(store.path(found.tree, ""))
    assert (root / "etc/motd").read_text() == "hello"
    assert os.access(root / "bin/tool", os.X_OK)
    assert store.path(found.tree, "etc") == str(root / "etc")
    assert store.fetch(name, None, NEVER) == found
    store.delete(found.tree)
    assert (store.stored(), root.exists()) == (frozenset(), False)


def test_a_second_pull_reads_the_config_but_not_the_disk(
    open_registry: imageserver.Registry, store: ImageFileStore, disk: Path
) -> None:
    imageserver.push_container_disk(open_registry.address, "vm", disk)
    first = store.fetch(f"{open_registry.address}/vm", None, NEVER)
    before = open_registry.log()
    assert store.fetch(f"{open_registry.address}/vm", None, NEVER) == first
    asked = open_registry.log()[len(before) :]
    assert "GET /v2/vm/manifests/latest" in asked
    blobs = re.findall(r'"GET /v2/vm/blobs/\S+ HTTP/1.1" 200 (\d+) ', asked)
    assert [int(size) < 1024 < disk.stat().st_size for size in blobs] == [True]


@pytest.mark.parametrize("name", ["no/such/image", "vm:no-such-tag", f"vm@sha256:{'0' * 64}"])
def test_a_missing_image_is_not_found(
    open_registry: imageserver.Registry, store: ImageFileStore, disk: Path, name: str
) -> None:
    imageserver.push_container_disk(open_registry.address, "vm", disk)
    with pytest.raises(NotFound, match="does not have it"):
        store.fetch(f"{open_registry.address}/{name}", None, NEVER)


@pytest.mark.parametrize(
    "credentials",
    [
        Credentials(USER, PASSWORD),
        Credentials(auth=base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()),
    ],
)
def test_a_password_is_used_for_its_own_pull_only(
    closed_registry: imageserver.Registry, store: ImageFileStore, disk: Path, credentials: Credentials
) -> None:
    name = f"{closed_registry.address}/vm"
    imageserver.push_container_disk(closed_registry.address, "vm", disk, credentials=(USER, PASSWORD))
    with pytest.raises(PermissionRefused, match="wants a login"):
        store.fetch(name, None, NEVER)
    assert store.stored() == frozenset()
    first = store.fetch(name, credentials, NEVER)
    assert store.fetch(name, credentials, NEVER) == first
    # The image is stored now, and a pull without the password still fails.
    with pytest.raises(PermissionRefused, match="wants a login"):
        store.fetch(name, None, NEVER)
    with pytest.raises(PermissionRefused, match="refuses the given login") as caught:
        store.fetch(name, Credentials(USER, "wr0ng"), NEVER)
    assert "wr0ng" not in str(caught.value)


def test_a_deleted_manifest_is_not_found_even_if_the_disk_is_stored(
    open_registry: imageserver.Registry, store: ImageFileStore, disk: Path
) -> None:
    digest = imageserver.push_container_disk(open_registry.address, "vm", disk)
    store.fetch(f"{open_registry.address}/vm", None, NEVER)
    connection = http.client.HTTPConnection(open_registry.address)
    connection.request("DELETE", f"/v2/vm/manifests/{digest}")
    assert connection.getresponse().status == 202
    connection.close()
    with pytest.raises(NotFound):
        store.fetch(f"{open_registry.address}/vm", None, NEVER)


PULL = """
import sys, threading
from virtshim.images.filestore import ImageFileStore, ImageSettings
from virtshim.images.policy import Rule
ImageFileStore(sys.argv[1], ImageSettings(insecure_registries=("127.0.0.1",))).fetch(sys.argv[2], None, threading.Event())
"""


def test_a_pull_killed_near_its_end_resumes_there(
    open_registry: imageserver.Registry, store: ImageFileStore, disk: Path, tmp_path: Path
) -> None:
    imageserver.push_container_disk(open_registry.address, "vm", disk)
    with relaying(open_registry.address) as relay:
        relay.hold_after = disk.stat().st_size * 9 // 10
        partial = tmp_path / "images" / "partial"
        name = f"{relay.address}/vm"
        path = os.pathsep.join(sys.path)
        with subprocess.Popen(
            [sys.executable, "-c", PULL, tmp_path / "images", name], env=os.environ | {"PYTHONPATH": path}
        ) as puller:
            assert relay.held.wait(WAIT_LIMIT)
            eventually(lambda: sum(file.stat().st_size for file in partial.glob("*/*")) > disk.stat().st_size * 8 // 10)
            puller.kill()
        relay.hold_after = None
        before = open_registry.log()
        found = store.fetch(name, None, NEVER)
    assert Path(store.path(found.digest)).read_bytes() == disk.read_bytes()
    parts = re.findall(r'"GET /v2/vm/blobs/\S+ HTTP/1.1" 206 (\d+) ', open_registry.log()[len(before) :])
    assert [0 < int(size) < disk.stat().st_size // 4 for size in parts] == [True]


def test_a_registry_with_slow_connections_is_read_over_several(
    open_registry: imageserver.Registry, store: ImageFileStore, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "PIECE", 1 << 20)
    monkeypatch.setattr(parallel.Trial, "is_waited_for", lambda _, left: True)
    imageserver.push_container_disk(open_registry.address, "vm", disk)
    found = store.fetch(f"{open_registry.address}/vm", None, NEVER)
    assert Path(store.path(found.digest)).read_bytes() == disk.read_bytes()
    parts = re.findall(r'"GET /v2/vm/blobs/\S+ HTTP/1.1" 206 (\d+) ', open_registry.log())
    assert parts.count(str(1 << 20)) >= 7


def test_five_pulls_at_once_read_the_disk_once(
    open_registry: imageserver.Registry, store: ImageFileStore, disk: Path
) -> None:
    imageserver.push_container_disk(open_registry.address, "vm", disk)
    name = f"{open_registry.address}/vm"
    pulls = [Background(lambda: store.fetch(name, None, NEVER)) for _ in range(5)]
    assert len({pull.done() for pull in pulls}) == 1
    sizes = re.findall(r'"GET /v2/vm/blobs/\S+ HTTP/1.1" 200 (\d+) ', open_registry.log())
    assert [int(size) > 1 << 20 for size in sizes].count(True) == 1


def test_a_directory_on_a_web_server_is_an_image_source(tmp_path: Path, store: ImageFileStore, disk: Path) -> None:
    with imageserver.serve_directory(disk.parent) as url:
        found = store.fetch(f"{url}/{disk.name}", None, NEVER)
        assert Path(store.path(found.digest)).read_bytes() == disk.read_bytes()
        plain = ImageFileStore(
            str(tmp_path / "other"), ImageSettings(insecure_registries=LOOPBACK, download_protocol="http")
        )
        name = url.removeprefix("http://")
        assert plain.fetch(f"{name}/{disk.name}", None, NEVER).tag == f"{name}/{disk.name}:latest"
        assert plain.fetch(f"virtlet.cloud/{name}/{disk.name}", None, NEVER).digest == found.digest


def test_a_signed_disk_is_pulled_from_a_real_registry(
    open_registry: imageserver.Registry, tmp_path: Path, disk: Path
) -> None:
    server = open_registry.address
    digest = imageserver.push_container_disk(server, "vm/disk", disk)
    key, public = tmp_path / "key.pem", tmp_path / "key.pub"
    subprocess.run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key], check=True)
    subprocess.run(["openssl", "ec", "-in", key, "-pubout", "-out", public], check=True, capture_output=True)
    settings = ImageSettings(insecure_registries=LOOPBACK, policy=(Rule(server, "signature", (str(public),)),))
    guarded = ImageFileStore(str(tmp_path / "images"), settings)
    guarded.sweep()
    with pytest.raises(SignatureRefused, match=f"vm/disk' \\({digest}\\) has no cosign signature"):
        guarded.fetch(f"{server}/vm/disk", None, NEVER)
    _push_signature(server, "vm/disk", digest, key, tmp_path / "layout")
    assert guarded.fetch(f"{server}/vm/disk", None, NEVER).repo_digest == f"{server}/vm/disk@{digest}"


def _push_signature(server: str, repository: str, digest: str, key: Path, layout: Path) -> None:
    """Pushes a signature as cosign stores it: a separate manifest, with a tag made of the digest."""
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(data: bytes, kind: str) -> dict[str, object]:
        name = hashlib.sha256(data).hexdigest()
        (blobs / name).write_bytes(data)
        return {"mediaType": kind, "digest": f"sha256:{name}", "size": len(data)}

    said = {"type": "cosign container image signature", "image": {"docker-manifest-digest": digest}, "identity": {}}
    payload = json.dumps({"critical": said, "optional": None}).encode()
    signed = subprocess.run(
        ["openssl", "dgst", "-sha256", "-sign", key], input=payload, capture_output=True, check=True
    )
    signature = {"dev.cosignproject.cosign/signature": base64.b64encode(signed.stdout).decode()}
    layer = {**blob(payload, "application/vnd.dev.cosign.simplesigning.v1+json"), "annotations": signature}
    config = {"architecture": "", "os": "", "config": {}, "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]}}
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob(json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json"),
        "layers": [layer],
    }
    listed = blob(json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [listed]}))
    (layout / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
    tag = f"{digest.replace(':', '-')}.sig"
    command = ["skopeo", "--insecure-policy", "copy", "--quiet", "--dest-tls-verify=false", "--preserve-digests"]
    subprocess.run([*command, f"oci:{layout}", f"docker://{server}/{repository}:{tag}"], check=True)
