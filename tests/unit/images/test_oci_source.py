"""Pulls survive a registry that does what a real one never does: wrong bytes, odd layers, every kind of login."""

from __future__ import annotations

import email.utils
import gzip
import hashlib
import io
import json
import lzma
import os
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from backports import zstd

from virtshim.images.confined import layers
from virtshim.images.names import resolve
from virtshim.images.oci_manifest import image_config
from virtshim.images.registries.endpoint import Endpoint
from virtshim.images.registries.hosts_toml import RegistryHost
from virtshim.model.errors import InvalidRequest, NotFound, PermissionRefused, ShimError, Unavailable
from virtshim.model.image import ImageConfig
from virtshim.model.image_name import ImageName

# A zstd frame with a larger window than a decoder accepts by default.
WIDE = b"\x28\xb5\x2f\xfd\0\xa8"
SKIPPED = b"\x50\x2a\x4d\x18\x04\0\0\0skip"
OTHER = b"\xeb\x3c" + bytes(1022)


def test_the_disk_is_extracted_from_its_layer(fake_registry, pull, store, qcow2: bytes) -> None:
    name = fake_registry.push("a/disk", {"disk/": b"", "disk/cirros.qcow2": qcow2})
    found = pull(f"{name}:latest")
    assert Path(store.path(found.digest)).read_bytes() == qcow2
    assert found.digest.hex == hashlib.sha256(qcow2).hexdigest()
    assert found.tag == f"{name}:latest"
    manifest = fake_registry.web.seen[0][0]
    assert manifest.endswith("/manifests/latest")
    assert found.repo_digest.startswith(f"{name}@sha256:")
    by_digest = pull(found.repo_digest)
    assert (by_digest.tag, by_digest.repo_digest, by_digest.digest) == ("", found.repo_digest, found.digest)


def test_a_known_manifest_saves_the_layers_but_not_the_request(fake_registry, pull, store, qcow2: bytes) -> None:
    name = fake_registry.push("a", {"disk/x": qcow2})
    first = pull(name)
    manifest, config, layer = fake_registry.web.paths()
    assert manifest == "/v2/a/manifests/latest"
    assert pull(name) == first
    assert fake_registry.web.paths() == [manifest, config, layer, manifest, config]
    store.delete(first.digest)
    assert pull(name) == first
    assert store.stored() == {first.digest, first.tree}


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("name", ["disk/x.img", "./disk/x", "/disk/" + "long" * 60 + ".qcow2"])
@pytest.mark.parametrize("packed", [True, False])
def test_every_tar_a_builder_writes_is_read(
    fake_registry, pull, make_tar, qcow2: bytes, kind: int, name: str, packed: bool
) -> None:
    if kind == tarfile.USTAR_FORMAT and len(name) > 100:
        name = f"disk/{'d' * 90}/x"
    plain = make_tar({"etc/": b"", "etc/passwd": b"root", name: qcow2, "zzz": b"1" * 600}, format=kind)
    fake_registry.manifest("a", [(gzip.compress(plain) if packed else plain, plain)])
    assert pull(fake_registry.name("a")).digest.hex == hashlib.sha256(qcow2).hexdigest()


def test_gzip_of_several_members_and_padding_is_read(fake_registry, pull, make_tar, qcow2: bytes) -> None:
    plain = make_tar({"disk/x": qcow2})
    packed = b"".join(gzip.compress(plain[at : at + 70000]) for at in range(0, len(plain), 70000)) + bytes(1000)
    fake_registry.manifest("a", [(packed, plain)])
    assert pull(fake_registry.name("a")).size == len(qcow2)


@pytest.mark.parametrize(
    "pack",
    [
        pytest.param(zstd.compress, id="one frame"),
        pytest.param(lambda plain: zstd.compress(plain, 19), id="tight"),
        pytest.param(
            lambda plain: b"".join(zstd.compress(plain[at : at + 70000]) for at in range(0, len(plain), 70000)),
            id="several frames",
        ),
        pytest.param(lambda plain: SKIPPED + zstd.compress(plain) + SKIPPED, id="frames that are skipped"),
    ],
)
def test_layers_are_unpacked_from_zstd(
    fake_registry, pull, make_tar, qcow2: bytes, pack: Callable[[bytes], bytes]
) -> None:
    plain = make_tar({"disk/x": qcow2, "zzz": os.urandom(1 << 20)})
    fake_registry.layer_type = "application/vnd.oci.image.layer.v1.tar+zstd"
    fake_registry.manifest("a", [(pack(plain), plain)])
    assert pull(fake_registry.name("a")).digest.hex == hashlib.sha256(qcow2).hexdigest()


def test_a_layer_with_an_absurd_compression_ratio_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = zstd.compress(bytes(64 << 20))
    assert len(zeros) * layers.RATIO < 64 << 20
    image = layers.Inflation()

    def unpacks(layer: bytes) -> int:
        return sum(map(len, layers.unpacked(iter([layer]), "it", image)))

    assert unpacks(zeros) == 64 << 20
    monkeypatch.setattr(layers, "ALWAYS", 96 << 20)
    with pytest.raises(InvalidRequest, match="it and the layers above it unpack to more than 256 times their size"):
        unpacks(zeros)
    assert image.plain == pytest.approx(96 << 20, rel=0.1)
    assert unpacks(os.urandom(1 << 20)) == 1 << 20
    assert unpacks(zeros) == 64 << 20


@pytest.mark.parametrize(
    "trees",
    [
        pytest.param([{"disk/x": OTHER}, {"disk/x": b"DISK"}], id="replaced above"),
        pytest.param([{"disk/y": OTHER}, {"disk/.wh.y": b"", "disk/x": b"DISK"}], id="whited out above"),
        pytest.param([{"disk/y": OTHER}, {"disk/.wh..wh..opq": b"", "disk/x": b"DISK"}], id="opaque directory"),
        pytest.param([{"disk/y": OTHER}, {".wh.disk": b""}, {"disk/x": b"DISK"}], id="directory whited out"),
        pytest.param([{"disk/y": OTHER}, {".wh..wh..opq": b"", "disk/x": b"DISK"}], id="opaque root"),
        pytest.param(
            [{"disk/y": OTHER}, {"disk": b"a file"}, {".wh.disk": b""}, {"disk/x": b"DISK"}], id="dir was a file"
        ),
        pytest.param([{"disk/x": b"DISK"}, {"etc/motd": b"hello"}], id="disk below"),
        pytest.param([{"disk/x": b"DISK"}, {"etc/.wh.disk": b"", "diskette/y": OTHER}], id="names that look like it"),
        pytest.param([{"disk/.wh.x": b"", "disk/x": b"DISK"}], id="whiteout does not act in its own layer"),
    ],
)
def test_upper_layers_hide_files_of_lower_layers(
    fake_registry, pull, qcow2: bytes, trees: list[dict[str, bytes]]
) -> None:
    real = [{name: qcow2 if data == b"DISK" else data for name, data in tree.items()} for tree in trees]
    assert pull(fake_registry.push("a", *real)).digest.hex == hashlib.sha256(qcow2).hexdigest()


@pytest.mark.parametrize(
    ("trees", "why"),
    [
        ([{"etc/": b""}], "no file below /disk"),
        ([{"disk/": b""}], "no file below /disk"),
        ([{"disk/x": OTHER, "disk/y": OTHER}], "two files below /disk"),
        ([{"disk/x": OTHER}, {"disk/y": OTHER}], "two files below /disk"),
        ([{"disk/x": OTHER}, {"disk/.wh.x": b""}], "no file below /disk"),
        ([{"disk/x": OTHER}, {".wh.disk": b""}], "no file below /disk"),
        (
            [{"../x": OTHER}],
            "no file below /disk.*it cannot be a volume either: it holds the name '../x', which contains '..'",
        ),
        ([{"disk/x": b""}], "empty"),
        ([{"disk/x": b"text"}], "512-byte sectors"),
        ([{f"disk/.wh.{number}": b"" for number in range(1100)}], "more than 1000 entries"),
    ],
)
def test_an_image_that_is_no_container_disk_is_refused(
    fake_registry, pull, trees: list[dict[str, bytes]], why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        pull(fake_registry.push("a", *trees))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_a_disk_that_is_a_link_or_a_device_is_refused(fake_registry, pull, kind: bytes) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo("disk/x")
        entry.type, entry.linkname = kind, "/etc/shadow"
        archive.addfile(entry)
    plain = buffer.getvalue()
    fake_registry.manifest("a", [(gzip.compress(plain), plain)])
    with pytest.raises(InvalidRequest, match="link or a device"):
        pull(fake_registry.name("a"))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda packed, plain: (packed[:-20], plain), "cut short"),
        (lambda packed, plain: (packed[:300] + b"\xff" * 64 + packed[364:], plain), "damaged|not a tar|digest"),
        (lambda packed, plain: (packed, plain + b"x"), "digest"),
        (lambda packed, plain: (gzip.compress(plain[:-11000]), plain[:-11000]), "cut short"),
        (lambda packed, plain: (gzip.compress(b"no tar at all" * 100), b"no tar at all" * 100), "not a tar|number"),
        (lambda packed, plain: (b"\x28\xb5\x2f\xfd" + packed, plain), "its zstd data cannot be unpacked"),
        (lambda packed, plain: (zstd.compress(plain)[:-20], plain), "its zstd data is cut short"),
        (lambda packed, plain: (zstd.compress(plain) + b"BZh9", plain), "its zstd data cannot be unpacked"),
        (
            lambda packed, plain: (WIDE + (len(plain) << 3 | 1).to_bytes(3, "little") + plain, plain),
            "its zstd data cannot be unpacked",
        ),
        (lambda packed, plain: (lzma.compress(plain)[:-20], plain), "its xz data is cut short"),
        (lambda packed, plain: (b"", b""), "no file below"),
        (lambda packed, plain: (packed + b"trailing rubbish", plain), "damaged"),
    ],
)
def test_a_corrupt_layer_is_refused(fake_registry, pull, make_tar, spoil: Any, why: str) -> None:
    plain = make_tar({"disk/x": OTHER * 30})
    fake_registry.manifest("a", [spoil(gzip.compress(plain), plain)])
    with pytest.raises(InvalidRequest, match=why):
        pull(fake_registry.name("a"))


def test_a_layer_that_unpacks_endlessly_is_refused(fake_registry, make_store, make_tar) -> None:
    store = make_store(max_bytes=1 << 20)
    plain = make_tar({"filler": bytes(8 << 20), "disk/x": OTHER})
    fake_registry.manifest("a", [(gzip.compress(plain), plain)])
    with pytest.raises(InvalidRequest, match=r"unpacks to more than 1048576 bytes"):
        store.fetch(fake_registry.name("a"), None, threading.Event())


def test_a_blob_with_the_wrong_digest_is_refused(fake_registry, web, pull, qcow2: bytes) -> None:
    name = fake_registry.push("a", {"disk/x": qcow2})
    blobs = [path for path in web.routes if "/blobs/" in path]
    for path in blobs:
        route = web.routes[path]
        web.serve(path, b"something else")
        with pytest.raises(InvalidRequest, match="manifest says"):
            pull(name)
        web.routes[path] = route
    assert pull(name).size == len(qcow2)


@pytest.mark.parametrize("which", [0, 1], ids=["config", "layer"])
def test_a_blob_of_another_image_with_the_same_length_is_refused(
    fake_registry, web, pull, make_tar, qcow2: bytes, which: int
) -> None:
    """A config says which command runs, and its digest alone vouches for it."""
    for repository, command in (("a", "good"), ("b", "evil")):
        plain = make_tar({f"disk/{repository}": qcow2})
        fake_registry.manifest(repository, [(plain, plain)], says={"Cmd": [command]})
    ours, others = ([path for path in web.routes if path.startswith(f"/v2/{name}/blobs/")][which] for name in "ab")
    web.routes[ours] = web.routes[others]
    with pytest.raises(
        InvalidRequest, match=f"has the digest sha256:[0-9a-f]{{64}}, expected {ours.rpartition('/')[2]}"
    ):
        pull(fake_registry.name("a"))


def test_a_manifest_with_the_wrong_digest_is_refused(fake_registry, web, pull, qcow2: bytes) -> None:
    name = fake_registry.push("a", {"disk/x": qcow2})
    wanted = f"sha256:{'0' * 64}"
    web.routes[f"/v2/a/manifests/{wanted}"] = web.routes["/v2/a/manifests/latest"]
    with pytest.raises(InvalidRequest, match=f"expected {wanted}"):
        pull(f"{name}@{wanted}")


def test_an_index_gives_this_nodes_platform(fake_registry, pull, make_tar, qcow2: bytes) -> None:
    entries = []
    for machine, variant, disk in (
        ("arm64", "", OTHER),
        ("amd64", "v3", OTHER * 2),
        ("amd64", "", qcow2),
        ("unknown", "", b""),
    ):
        plain = make_tar({"disk/x": disk})
        part = fake_registry.manifest("multi", [(gzip.compress(plain), plain)], reference=machine, architecture=machine)
        entries.append({**part, "platform": {"os": "linux", "architecture": machine, "variant": variant}})
    listed = fake_registry.document("multi", "latest", {"schemaVersion": 2, "manifests": entries})
    found = pull(fake_registry.name("multi"))
    assert found.digest.hex == hashlib.sha256(qcow2).hexdigest()
    assert found.repo_digest == f"{fake_registry.name('multi')}@{listed['digest']}"
    fake_registry.document("multi", "arm", {"schemaVersion": 2, "manifests": entries[:1]})
    with pytest.raises(NotFound, match=r"no variant for linux/amd64, this node's platform; it has linux/arm64"):
        pull(fake_registry.name("multi:arm"))
    fake_registry.document(
        "multi", "nested", {"schemaVersion": 2, "manifests": [{**listed, "platform": entries[2]["platform"]}]}
    )
    with pytest.raises(InvalidRequest, match="another index"):
        pull(fake_registry.name("multi:nested"))


def test_another_architecture_is_refused(fake_registry, pull, qcow2: bytes) -> None:
    with pytest.raises(InvalidRequest, match="made for arm64, this node is linux/amd64"):
        pull(fake_registry.push("a", {"disk/x": qcow2}, architecture="arm64"))


def test_an_images_config_is_read_at_each_pull(fake_registry, pull, qcow2: bytes) -> None:
    says = {
        "User": "app:staff",
        "Env": ["PATH=/bin", "EMPTY="],
        "Entrypoint": ["/bin/server", "--port"],
        "Cmd": ["80"],
        "WorkingDir": "/srv",
        "StopSignal": "SIGQUIT",
    }
    name = fake_registry.push("a", {"disk/x": qcow2}, says=says)
    wanted = ImageConfig("app:staff", ("PATH=/bin", "EMPTY="), ("/bin/server", "--port"), ("80",), "/srv", "SIGQUIT")
    for _ in range(2):  # the second time its disk is known
        assert pull(name).config == wanted
    assert pull(fake_registry.push("b", {"disk/x": qcow2})).config == ImageConfig()


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("SIGTERM", "SIGTERM"), ("term", "SIGTERM"), ("9", "SIGKILL"), ("37", "SIGRTMIN+3"), ("SIGRTMIN+3", "SIGRTMIN+3"),
        ("rtmax-2", "SIGRTMAX-2"), ("34", "SIGRTMIN"), ("", ""),
    ],
)  # fmt: skip
def test_a_stop_signal_is_recognised_by_its_name(written: str, meant: str) -> None:
    assert image_config(json.dumps({"config": {"StopSignal": written}}).encode(), "a").stop_signal == meant


@pytest.mark.parametrize("nothing", [{}, {"config": None}, {"config": {"Env": None, "User": None, "Labels": {}}}])
def test_an_image_may_have_an_empty_config(nothing: Any) -> None:
    assert image_config(json.dumps(nothing).encode(), "a") == ImageConfig()


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ([], "config is malformed"),
        ({"Env": ["PATH"]}, "Env has an entry that is not NAME=VALUE"),
        ({"Env": ["=x"]}, "Env has an entry that is not NAME=VALUE"),
        ({"Env": "PATH=/bin"}, "Env is malformed"),
        ({"Cmd": [7]}, "Cmd is malformed"),
        ({"Cmd": ["a\0b"]}, "Cmd is malformed"),
        ({"Cmd": ["\udc80"]}, "Cmd is malformed"),
        ({"Cmd": ["x"] * 1001}, "Cmd is too long"),
        ({"WorkingDir": "x" * 70000}, "WorkingDir is too long"),
        ({"Entrypoint": {"a": 1}}, "Entrypoint is malformed"),
        ({"User": "a b"}, "User 'a b' is not a user; write USER name"),
        ({"User": "4294967296"}, "is not a user"),
        ({"User": ":7"}, "is not a user"),
        ({"StopSignal": "SIGNONE"}, "StopSignal 'SIGNONE' is not a signal; write STOPSIGNAL SIGTERM"),
        ({"StopSignal": "RTMIN+31"}, "is not a signal"),
        ({"StopSignal": "0"}, "is not a signal"),
    ],
)
def test_a_config_that_no_container_could_have_is_refused(fake_registry, pull, says: Any, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        pull(fake_registry.push("a", {"disk/x": OTHER}, says=says))


DESCRIPTOR = {"digest": f"sha256:{'1' * 64}", "size": 1}


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ([], "not a JSON object"),
        ({"schemaVersion": 1}, "old or unknown schema"),
        ({"schemaVersion": 2}, "no list layers"),
        ({"schemaVersion": 2, "layers": []}, "0 layers"),
        ({"schemaVersion": 2, "layers": [DESCRIPTOR] * 200, "config": DESCRIPTOR}, "200 layers"),
        ({"schemaVersion": 2, "layers": [DESCRIPTOR]}, "not a descriptor"),
        ({"schemaVersion": 2, "layers": ["x"], "config": DESCRIPTOR}, "not a descriptor"),
        ({"schemaVersion": 2, "layers": [{"digest": "sha512:1", "size": 1}], "config": DESCRIPTOR}, "not sha256"),
        ({"schemaVersion": 2, "layers": [{**DESCRIPTOR, "size": -1}], "config": DESCRIPTOR}, "without a size"),
        (
            {"schemaVersion": 2, "layers": [DESCRIPTOR], "config": {**DESCRIPTOR, "size": 1 << 40}},
            "config of more than",
        ),
        ({"schemaVersion": 2, "layers": [DESCRIPTOR], "manifests": [DESCRIPTOR]}, "ambiguous"),
    ],
)
def test_a_bad_manifest_is_refused(fake_registry, pull, document: Any, why: str) -> None:
    fake_registry.document("a", "latest", document)
    with pytest.raises(InvalidRequest, match=why):
        pull(fake_registry.name("a"))


@pytest.mark.parametrize("body", [b"\xff", b"[" * 100000, b"{" + b" " * (5 << 20) + b"}"])
def test_a_manifest_that_is_no_json_or_too_long_is_refused(web, fake_registry, pull, body: bytes) -> None:
    web.serve("/v2/a/manifests/latest", body)
    with pytest.raises(InvalidRequest):
        pull(fake_registry.name("a"))


@pytest.mark.parametrize(
    "config", [{"rootfs": []}, {"rootfs": {}}, {"rootfs": {"diff_ids": []}}, {"rootfs": {"diff_ids": [7]}}]
)
def test_an_artifact_is_distinguished_from_an_image(fake_registry, pull, make_tar, config: Any) -> None:
    layer = fake_registry.blob("a", make_tar({"disk/x": OTHER}))
    described = fake_registry.blob("a", json.dumps(config).encode())
    fake_registry.document("a", "latest", {"schemaVersion": 2, "config": described, "layers": [layer]})
    with pytest.raises(InvalidRequest, match=r"artifact|diff_ids"):
        pull(fake_registry.name("a"))


@pytest.mark.parametrize(
    ("status", "error", "why"),
    [
        (404, NotFound, "does not have it"),
        (403, PermissionRefused, "image pull secret"),
        (429, Unavailable, "limits the rate of pulls"),
        (500, Unavailable, "HTTP 500"),
    ],
)
def test_each_refusal_has_its_kind(web, fake_registry, pull, status: int, error: type[ShimError], why: str) -> None:
    web.answer("/v2/a/manifests/latest", status)
    with pytest.raises(error, match=why):
        pull(fake_registry.name("a"))


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("what", ["manifests/latest", "blobs"])
def test_a_busy_registry_is_asked_again_after_its_retry_after(
    web, fake_registry, pull, qcow2, status: int, what: str
) -> None:
    name = fake_registry.push("a", {"disk/x": qcow2})
    path = next(path for path in reversed(web.routes) if path.startswith(f"/v2/a/{what}"))
    whole, busy = web.routes[path], [email.utils.formatdate(usegmt=True), "0"]

    def route(request: Any) -> None:
        if not busy:
            whole(request)
            return
        request.send_response(status)
        request.send_header("Retry-After", busy.pop())
        request.send_header("Content-Length", "0")
        request.end_headers()

    web.routes[path] = route
    assert pull(name).digest.hex == hashlib.sha256(qcow2).hexdigest()
    assert web.paths().count(path) == 3


def test_a_registry_that_is_busy_for_long_is_left_to_kubelet(web, fake_registry, pull) -> None:
    web.answer("/v2/a/manifests/latest", 429, Retry_After="3600")
    with pytest.raises(Unavailable, match=r"limits the rate of pulls \(HTTP 429\); try again in 3600 s"):
        pull(fake_registry.name("a"))
    assert len(web.seen) == 1


@pytest.mark.parametrize("said", ["soon", "-1", "0x1", "99999999999999999999999"])
def test_a_busy_registry_without_retry_after_is_not_asked_again(web, fake_registry, pull, said) -> None:
    web.answer("/v2/a/manifests/latest", 429, Retry_After=said)
    with pytest.raises(Unavailable, match="HTTP 429"):
        pull(fake_registry.name("a"))
    assert len(web.seen) == 1


def test_a_registry_that_stays_busy_is_given_up(web, fake_registry, pull) -> None:
    web.answer("/v2/a/manifests/latest", 429, Retry_After="0")
    with pytest.raises(Unavailable, match="limits the rate of pulls"):
        pull(fake_registry.name("a"))
    assert 1 < len(web.seen) < 6


def test_a_registry_without_tls_is_used_only_if_listed_or_loopback(web, make_store) -> None:
    with pytest.raises(Unavailable, match=r"registry\.invalid:5000 cannot be reached"):
        make_store(insecure_registries=("registry.invalid:5000",)).fetch(
            "registry.invalid:5000/a", None, threading.Event()
        )

    def root(name: str, *insecure: str) -> str:
        return Endpoint(resolve(ImageName.parse(name), [], "https"), RegistryHost(), None, None, insecure).root  # type: ignore[arg-type]

    assert root("registry.example:5000/a") == "https://registry.example:5000/v2/a"
    assert root("registry.example:5000/a", "registry.example") == "https://registry.example:5000/v2/a"
    assert root("registry.example:5000/a", "registry.example:5000") == "http://registry.example:5000/v2/a"
    assert root("localhost:5000/a") == "http://localhost:5000/v2/a"
    assert root("127.0.0.1:443/a") == "https://127.0.0.1:443/v2/a"
    assert root("fedora") == "https://registry-1.docker.io/v2/library/fedora"
