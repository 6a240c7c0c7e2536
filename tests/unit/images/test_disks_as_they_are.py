"""Disks may also be packed files on web servers, and OCI artifacts whose layer is the disk."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from backports import zstd
from fakes.registry import FakeRegistry
from fakes.webserver import WebServer

from virtshim.images.filestore import ImageFileStore
from virtshim.images.names import HttpLocation, RegistryLocation, resolve
from virtshim.model.errors import InvalidRequest, Unavailable
from virtshim.model.image import ImageConfig
from virtshim.model.image_name import ImageName

NEVER = threading.Event()
AT = 60_000
EMPTY = b"{}"
PACKERS = [
    pytest.param("gz", gzip.compress, id="gz"),
    pytest.param("xz", lzma.compress, id="xz"),
    pytest.param("zst", zstd.compress, id="zst"),
]


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def stored(store: ImageFileStore, found: Any) -> bytes:
    return Path(store.path(found.digest)).read_bytes()


@pytest.fixture
def noise(qcow2: bytes) -> bytes:
    """A raw disk that does not shrink when it is packed."""
    return b"\xeb\x3c" + os.urandom(256 * 1024 - 2)


@pytest.mark.parametrize(("suffix", "pack"), PACKERS)
def test_a_packed_disk_is_unpacked(web: WebServer, store, qcow2: bytes, incoming, suffix: str, pack: Any) -> None:
    url = web.serve(f"/disk.qcow2.{suffix}", pack(qcow2), ETag='"1"')
    found = store.fetch(url, None, NEVER)
    assert stored(store, found) == qcow2
    assert str(found.digest) == found.id.value == digest_of(qcow2)
    assert incoming() == []
    assert store.fetch(url, None, NEVER) == found


@pytest.mark.parametrize(("suffix", "pack"), PACKERS)
def test_a_digest_in_the_name_may_be_of_the_packed_or_unpacked_file(
    web: WebServer, store, qcow2: bytes, suffix: str, pack: Any
) -> None:
    packed = pack(qcow2)
    url = web.serve(f"/disk.qcow2.{suffix}", packed, ETag='"1"')
    for digest in (digest_of(packed), digest_of(qcow2)):
        for _ in range(2):  # brought, and known
            assert store.fetch(f"{url}@{digest}", None, NEVER).repo_digest == f"{url}@{digest_of(qcow2)}"
    with pytest.raises(InvalidRequest, match="has changed or was tampered with"):
        store.fetch(f"{url}@{digest_of(b'other')}", None, NEVER)


@pytest.mark.parametrize(("suffix", "pack"), PACKERS)
def test_an_interrupted_download_of_a_packed_disk_is_resumed(
    web: WebServer, make_store, noise: bytes, partial, suffix: str, pack: Any
) -> None:
    path = f"/disk.raw.{suffix}"
    url = web.serve_parts(path, pack(noise), [AT, 0, 0, 0])
    with pytest.raises(Unavailable, match="broke off"):
        make_store().fetch(url, None, NEVER)
    assert [one.stat().st_size for one in partial()] == [AT]
    store = make_store()
    assert stored(store, store.fetch(url, None, NEVER)) == noise
    assert web.ranges(path)[-1] == f"bytes={AT}-"
    assert partial() == []


@pytest.mark.parametrize(("suffix", "pack"), PACKERS)
def test_a_truncated_packed_disk_is_refused(web: WebServer, store, noise: bytes, suffix: str, pack: Any) -> None:
    with pytest.raises(InvalidRequest, match="cut short"):
        store.fetch(web.serve(f"/disk.raw.{suffix}", pack(noise)[:-30]), None, NEVER)


@pytest.mark.parametrize("zeros", [8, 600_000])
@pytest.mark.parametrize(("suffix", "pack"), PACKERS)
def test_data_after_padding_is_not_lost(
    web: WebServer, store, noise: bytes, suffix: str, pack: Any, zeros: int
) -> None:
    padding = bytes(zeros)
    url = web.serve(f"/disk.raw.{suffix}", pack(noise[:AT]) + padding + pack(noise[AT:]) + padding)
    assert stored(store, store.fetch(url, None, NEVER)) == noise
    with pytest.raises(InvalidRequest, match="is damaged"):
        store.fetch(web.serve(f"/disk.raw.{suffix}", pack(noise) + padding + b"no disk"), None, NEVER)


def test_the_unpacked_size_of_a_packed_disk_is_limited(web: WebServer, make_store) -> None:
    url = web.serve("/disk.raw.zst", zstd.compress(b"\xeb\x3c" + bytes(64 << 20)))
    with pytest.raises(InvalidRequest, match=r"images\.max_bytes"):
        make_store(max_bytes=32 << 20).fetch(url, None, NEVER)


def test_an_unpacked_file_with_the_name_of_a_packed_one_is_accepted(web: WebServer, store, qcow2: bytes) -> None:
    assert stored(store, store.fetch(web.serve("/disk.qcow2.gz", qcow2), None, NEVER)) == qcow2


@pytest.mark.parametrize(
    ("name", "kind", "packed"),
    [
        ("host.test/a/disk.qcow2.xz", HttpLocation, True),
        ("host.test/a/disk.img.gz", HttpLocation, True),
        ("host.test/disk.raw.zst", HttpLocation, True),
        ("host.test/disk.raw", HttpLocation, False),
        ("https://host.test/disk.xz?token=a.qcow2", HttpLocation, True),
        ("host.test/a/archive.gz", RegistryLocation, None),
        ("host.test/a/disk.tar.gz", RegistryLocation, None),
    ],
)
def test_the_name_shows_whether_a_file_may_be_packed(name: str, kind: type, packed: bool | None) -> None:
    location = resolve(ImageName.parse(name), [], "https")
    assert isinstance(location, kind)
    assert packed is None or (isinstance(location, HttpLocation) and location.is_packed is packed)


@pytest.fixture
def push(fake_registry: FakeRegistry) -> Callable[..., str]:
    """As oras does: files as layers, each with its name; the config is empty."""

    def push(repository: str, *files: tuple[str, bytes], media_type: str = "", config: bytes = EMPTY) -> str:
        layers = []
        for title, data in files:
            described = fake_registry.blob(repository, data)
            kind = media_type or "application/octet-stream"
            layers.append({**described, "mediaType": kind, "annotations": {"org.opencontainers.image.title": title}})
        document = {
            "schemaVersion": 2,
            "artifactType": "application/vnd.acme.disk",
            "config": {**fake_registry.blob(repository, config), "mediaType": "application/vnd.oci.empty.v1+json"},
            "layers": layers,
        }
        fake_registry.document(repository, "latest", document)
        return fake_registry.name(repository)

    return push


@pytest.mark.parametrize("config", [EMPTY, b"", b"no JSON", b'["a"]', b'{"config": {"User": "7"}}'])
def test_an_artifacts_only_layer_is_the_disk(push, store, qcow2: bytes, config: bytes) -> None:
    found = store.fetch(push("a", ("anything", qcow2), config=config), None, NEVER)
    assert stored(store, found) == qcow2
    assert found.config == ImageConfig()


def test_artifacts_are_identified_by_their_disks(push, store, qcow2: bytes, noise: bytes) -> None:
    """Their configs are all the same."""
    one, other = (store.fetch(push(name, ("x.raw", disk)), None, NEVER) for name, disk in (("a", qcow2), ("b", noise)))
    assert (one.id.value, other.id.value) == (str(one.digest), str(other.digest))
    assert one.id != other.id
    assert one.repo_digest.partition("@")[2] != str(one.digest)


def test_an_artifacts_disk_is_the_file_named_like_a_disk(push, store, qcow2: bytes) -> None:
    name = push("a", ("README.md", b"read me"), ("disk.qcow2", qcow2), ("SHA256SUMS", b"0"))
    assert stored(store, store.fetch(name, None, NEVER)) == qcow2


@pytest.mark.parametrize(("suffix", "pack"), PACKERS)
def test_an_artifacts_disk_may_be_packed(push, store, qcow2: bytes, suffix: str, pack: Any) -> None:
    name = push("a", ("README.md", b"read me"), (f"disk.qcow2.{suffix}", pack(qcow2)))
    assert stored(store, store.fetch(name, None, NEVER)) == qcow2


def test_an_artifact_with_two_disks_is_refused(push, store) -> None:
    with pytest.raises(InvalidRequest, match="it is an artifact with 2 disks; push one"):
        store.fetch(push("a", ("a.qcow2", b"1"), ("b.img", b"2")), None, NEVER)


def test_an_artifact_whose_archives_are_malformed_is_refused(push, store) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read: it"):
        store.fetch(
            push("a", ("disk.qcow2", b"1" * 512), media_type="application/vnd.oci.image.layer.v1.tar+gzip"), None, NEVER
        )


def test_an_artifacts_file_that_is_only_named_like_a_disk_is_refused(push, store) -> None:
    with pytest.raises(InvalidRequest, match="512-byte sectors"):
        store.fetch(push("a", ("chart.img", b"text")), None, NEVER)


def test_a_known_artifact_is_looked_up_but_not_downloaded(push, store, web: WebServer, qcow2: bytes) -> None:
    name = push("a", ("disk.qcow2", qcow2))
    first = store.fetch(name, None, NEVER)
    asked = len(web.seen)
    assert store.fetch(name, None, NEVER) == first
    assert len(web.seen) == asked + 2
