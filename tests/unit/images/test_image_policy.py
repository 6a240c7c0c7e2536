"""An operator can allow images by origin, by digest and by signature."""

import base64
import gzip
import hashlib
import json
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from fakes.registry import FakeRegistry, tar

from virtshim.config.images import ImageDiskPath, ImagePolicy
from virtshim.images.filestore import ImageFileStore
from virtshim.images.names import resolve
from virtshim.images.policy import Requirement, Rule, keys_wanted, origin_of
from virtshim.model.errors import InvalidRequest, PermissionRefused, SignatureRefused, Unavailable, WrongState
from virtshim.model.image_name import ImageName

NEVER = threading.Event()
HEX = "ab" * 32


def location(name: str) -> Any:
    return resolve(ImageName.parse(name), [], "https")


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        ("file:///var/lib/vms/a.img", "file:/var/lib/vms/a.img"),
        ("nginx", "docker.io/library/nginx"),
        ("index.docker.io/me/vm:1", "docker.io/me/vm"),
        ("Reg.example:5000/team/vm", "reg.example:5000/team/vm"),
        ("https://Files.example:443/a/disk.qcow2", "files.example/a/disk.qcow2"),
        ("https://files.example:8443/a/disk.qcow2", "files.example:8443/a/disk.qcow2"),
        ("http://files.example:443/a/disk.qcow2", "files.example:443/a/disk.qcow2"),
        ("https://[2001:db8::1]:8443/disk.qcow2", "[2001:db8::1]:8443/disk.qcow2"),
        ("https://files.example/%70rod/disk.qcow2?a=b", "files.example/prod/disk.qcow2"),
        ("virtlet.cloud/files.example/disk.qcow2", "files.example/disk.qcow2"),
    ],
)
def test_an_origin_is_where_an_image_really_comes_from(name: str, origin: str) -> None:
    assert origin_of(location(name)) == origin


@pytest.mark.parametrize("path", ["a/./b.img", "a//b.img", "%2e%2e/b.img", "a%2f..%2fb.img", "a/%2e%2e", "a\\b.img"])
def test_an_ambiguous_path_has_no_origin(path: str) -> None:
    with pytest.raises(InvalidRequest, match=r"images\.policy cannot tell"):
        keys_wanted([Rule("", "nothing")], location(f"https://files.example/{path}"))


def test_without_rules_every_image_is_allowed() -> None:
    assert keys_wanted([], location("https://files.example/a//b.img")) is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("reg.example/prod/vm", "nothing"),
        ("reg.example/prod", "nothing"),
        ("reg.example/production/vm", "for 'reg.example'"),
        ("reg.example/vm", "for 'reg.example'"),
        ("reg.example.evil.test/prod/vm", "for all other images"),
        ("https://files.example/disk.img", "for all other images"),
    ],
)
def test_the_rule_with_the_longest_prefix_decides_by_whole_components(name: str, said: str) -> None:
    rules = [Rule("reg.example/prod/", "nothing"), Rule("", "refuse"), Rule("reg.example", "refuse")]
    if said == "nothing":
        assert keys_wanted(rules, location(name)) is None
    else:
        with pytest.raises(PermissionRefused, match=said):
            keys_wanted(rules, location(name))


def test_a_rule_may_demand_the_digest_in_the_name() -> None:
    rules = [Rule("reg.example", "digest")]
    assert keys_wanted(rules, location(f"reg.example/vm@sha256:{HEX}")) is None
    assert keys_wanted(rules, location("other.example/vm")) is None
    with pytest.raises(PermissionRefused, match=r"named without its digest .* write NAME@sha256"):
        keys_wanted(rules, location("reg.example/vm:1.0"))


def test_a_web_server_has_no_signatures() -> None:
    rules = [Rule("", "signature", ("/key.pub",))]
    assert keys_wanted(rules, location("reg.example/vm")) == ("/key.pub",)
    with pytest.raises(PermissionRefused, match="publish it in a registry"):
        keys_wanted(rules, location(f"https://files.example/disk.img@sha256:{HEX}"))


class Signer:
    """Signs what is in a registry, as cosign does."""

    def __init__(self, registry: FakeRegistry, directory: Path, kind: str = "ecdsa") -> None:
        self.registry = registry
        self._key: Any = {
            "ecdsa": lambda: ec.generate_private_key(ec.SECP256R1()),
            "rsa": lambda: rsa.generate_private_key(65537, 2048),
            "ed25519": ed25519.Ed25519PrivateKey.generate,
        }[kind]()
        self.file = directory / f"{id(self)}.pub"
        public = self._key.public_key()
        self.file.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))

    def sign(self, data: bytes) -> str:
        if isinstance(self._key, ec.EllipticCurvePrivateKey):
            signature = self._key.sign(data, ec.ECDSA(SHA256()))
        elif isinstance(self._key, rsa.RSAPrivateKey):
            signature = self._key.sign(data, padding.PKCS1v15(), SHA256())
        else:
            signature = self._key.sign(data)
        return base64.b64encode(signature).decode()

    def layer(self, repository: str, digest: str, kind: str = "cosign container image signature") -> dict[str, Any]:
        payload = {
            "critical": {"type": kind, "image": {"docker-manifest-digest": digest}, "identity": {}},
            "optional": None,
        }
        data = json.dumps(payload).encode()
        annotations = {"dev.cosignproject.cosign/signature": self.sign(data)}
        return {**self.registry.blob(repository, data), "annotations": annotations}

    def attach(self, repository: str, digest: str, *layers: dict[str, Any]) -> None:
        self.registry.document(repository, f"{digest.replace(':', '-')}.sig", {"schemaVersion": 2, "layers": layers})

    def bundle(self, digest: str, predicate: str = "https://sigstore.dev/cosign/sign/v1") -> dict[str, Any]:
        statement = {"subject": [{"digest": {"sha256": digest.removeprefix("sha256:")}}], "predicateType": predicate}
        payload = json.dumps(statement).encode()
        kind = b"application/vnd.in-toto+json"
        signed = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
        envelope = {"payload": base64.b64encode(payload).decode(), "payloadType": kind.decode()}
        return {"dsseEnvelope": {**envelope, "signatures": [{"sig": self.sign(signed)}]}}

    def refer(self, repository: str, digest: str, bundle: Any, *, by_tag: bool = False) -> None:
        blob = self.registry.blob(repository, json.dumps(bundle).encode())
        found = self.registry.document(repository, "bundle", {"schemaVersion": 2, "layers": [blob]})
        index = {"manifests": [{**found, "artifactType": "application/vnd.dev.sigstore.bundle.v0.3+json"}]}
        if by_tag:
            self.registry.document(repository, digest.replace(":", "-"), index)
        else:
            self.registry.web.serve(f"/v2/{repository}/referrers/{digest}", json.dumps(index).encode())


@pytest.fixture(autouse=True)
def amd64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.fixture
def signer(fake_registry: FakeRegistry, tmp_path: Path) -> Signer:
    return Signer(fake_registry, tmp_path)


@pytest.fixture
def digest(fake_registry: FakeRegistry, qcow2: bytes) -> str:
    """Of the image `vm` that is pushed."""
    layer = tar({"disk/": b"", "disk/vm.qcow2": qcow2})
    return str(fake_registry.manifest("vm", [(gzip.compress(layer, 1), layer)])["digest"])


@pytest.fixture
def guarded(make_store: Callable[..., ImageFileStore], signer: Signer) -> ImageFileStore:
    """A store that takes signed images alone."""
    return make_store(policy=(Rule("", "signature", (str(signer.file),)),))


def pull(store: ImageFileStore, registry: FakeRegistry) -> None:
    store.fetch(registry.name("vm"), None, NEVER)


def refused(store: ImageFileStore, registry: FakeRegistry) -> str:
    with pytest.raises(SignatureRefused) as caught:
        pull(store, registry)
    assert store.stored() == frozenset()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["ecdsa", "rsa", "ed25519"])
def test_an_image_signed_by_a_key_is_allowed(
    fake_registry: FakeRegistry, make_store: Callable[..., ImageFileStore], digest: str, tmp_path: Path, kind: str
) -> None:
    signer = Signer(fake_registry, tmp_path, kind)
    signer.attach("vm", digest, signer.layer("vm", digest))
    pull(make_store(policy=(Rule("", "signature", (str(signer.file),)),)), fake_registry)


@pytest.mark.parametrize("by_tag", [False, True])
def test_an_image_with_a_signed_bundle_is_allowed(
    fake_registry: FakeRegistry, guarded: ImageFileStore, signer: Signer, digest: str, by_tag: bool
) -> None:
    signer.refer("vm", digest, signer.bundle(digest), by_tag=by_tag)
    pull(guarded, fake_registry)


def test_an_image_without_a_signature_is_refused_with_the_command_that_signs_it(
    fake_registry: FakeRegistry, guarded: ImageFileStore, signer: Signer, digest: str
) -> None:
    said = refused(guarded, fake_registry)
    assert f"cosign sign --key KEY {fake_registry.name('vm')}@{digest}" in said
    assert str(signer.file) in said


def test_one_of_several_signatures_and_one_of_several_keys_are_enough(
    fake_registry: FakeRegistry, make_store: Callable[..., ImageFileStore], digest: str, tmp_path: Path
) -> None:
    one, two, three = (Signer(fake_registry, tmp_path) for _ in range(3))
    one.attach("vm", digest, one.layer("vm", digest), two.layer("vm", digest))
    pull(make_store(policy=(Rule("", "signature", (str(three.file), str(two.file))),)), fake_registry)


def test_a_signature_by_another_key_does_not_count(
    fake_registry: FakeRegistry, guarded: ImageFileStore, digest: str, tmp_path: Path
) -> None:
    stranger = Signer(fake_registry, tmp_path)
    stranger.attach("vm", digest, stranger.layer("vm", digest))
    stranger.refer("vm", digest, stranger.bundle(digest))
    assert "has 2 signatures, none by" in refused(guarded, fake_registry)


def test_a_signature_of_another_image_does_not_count(
    fake_registry: FakeRegistry, guarded: ImageFileStore, signer: Signer, digest: str
) -> None:
    other = f"sha256:{hashlib.sha256(b'other').hexdigest()}"
    signer.attach("vm", digest, signer.layer("vm", other), signer.layer("vm", digest, kind="attestation"))
    signer.refer("vm", digest, signer.bundle(other))
    assert "no cosign signature" in refused(guarded, fake_registry)


def test_an_attestation_about_the_image_is_no_signature_of_it(
    fake_registry: FakeRegistry, guarded: ImageFileStore, signer: Signer, digest: str
) -> None:
    signer.refer("vm", digest, signer.bundle(digest, predicate="https://spdx.dev/Document"))
    assert "no cosign signature" in refused(guarded, fake_registry)


@pytest.mark.parametrize(
    "layer",
    [
        {},
        {"annotations": None},
        {"digest": "sha256:../../x", "size": 3},
        {"digest": f"sha256:{HEX}", "size": 1 << 40},
        {"digest": f"sha256:{HEX}", "size": "3"},
        {"digest": f"sha256:{HEX}", "size": 3},
    ],
)
def test_malformed_signatures_are_skipped(
    fake_registry: FakeRegistry, guarded: ImageFileStore, signer: Signer, digest: str, layer: dict[str, Any]
) -> None:
    bad = {"annotations": {"dev.cosignproject.cosign/signature": "AAAA"}, **layer}
    signer.attach("vm", digest, bad, signer.layer("vm", digest))
    pull(guarded, fake_registry)


@pytest.mark.parametrize("document", [b"", b"[]", b'{"layers": 3}', b'{"layers": [1, null]}', b"[" * 100_000])
def test_a_malformed_list_of_signatures_counts_as_empty(
    fake_registry: FakeRegistry, guarded: ImageFileStore, digest: str, document: bytes
) -> None:
    for place in (f"manifests/{digest.replace(':', '-')}.sig", f"referrers/{digest}"):
        fake_registry.web.serve(f"/v2/vm/{place}", document)
    assert "no cosign signature" in refused(guarded, fake_registry)


@pytest.mark.parametrize("bundle", [{}, [], {"dsseEnvelope": {"payload": "?"}}, {"dsseEnvelope": None}])
def test_a_malformed_bundle_is_no_signature(
    fake_registry: FakeRegistry, guarded: ImageFileStore, signer: Signer, digest: str, bundle: Any
) -> None:
    signer.refer("vm", digest, bundle)
    assert "no cosign signature" in refused(guarded, fake_registry)


@pytest.mark.parametrize("status", [400, 404, 405, 406])
def test_a_registry_without_referrers_api_is_asked_for_the_fallback_tag(
    fake_registry: FakeRegistry, guarded: ImageFileStore, signer: Signer, digest: str, status: int
) -> None:
    fake_registry.web.answer(f"/v2/vm/referrers/{digest}", status, b"unsupported")
    assert "no cosign signature" in refused(guarded, fake_registry)
    signer.refer("vm", digest, signer.bundle(digest), by_tag=True)
    pull(guarded, fake_registry)


@pytest.mark.parametrize("body", [b'{"manifests": []}', b'{"manifests": null}', b"<html>"])
def test_an_empty_list_of_referrers_is_no_signature(
    fake_registry: FakeRegistry, guarded: ImageFileStore, signer: Signer, digest: str, body: bytes
) -> None:
    """The image was signed before its registry had the call, or that serves another's."""
    fake_registry.web.serve(f"/v2/vm/referrers/{digest}", body)
    assert "no cosign signature" in refused(guarded, fake_registry)
    signer.refer("vm", digest, signer.bundle(digest), by_tag=True)
    pull(guarded, fake_registry)


@pytest.mark.parametrize("place", ["manifests/{tag}.sig", "referrers/{digest}", "manifests/{tag}"])
@pytest.mark.parametrize(
    ("status", "said"), [(401, "wants a login"), (403, "wants a login"), (429, "429"), (500, "500")]
)
def test_if_a_registry_cannot_say_whether_an_image_is_signed_the_image_is_refused(
    fake_registry: FakeRegistry, guarded: ImageFileStore, digest: str, place: str, status: int, said: str
) -> None:
    where = place.format(tag=digest.replace(":", "-"), digest=digest)
    fake_registry.web.answer(f"/v2/vm/{where}", status)
    with pytest.raises((Unavailable, PermissionRefused), match=said):
        pull(guarded, fake_registry)
    assert guarded.stored() == frozenset()


def test_an_image_that_is_already_stored_is_still_checked(
    fake_registry: FakeRegistry, store: ImageFileStore, guarded: ImageFileStore, digest: str
) -> None:
    del digest
    pull(store, fake_registry)
    with pytest.raises(SignatureRefused):
        pull(guarded, fake_registry)


@pytest.mark.parametrize(("content", "said"), [(None, "No such file"), (b"no key", "is not a public key in PEM")])
def test_an_unreadable_key_allows_no_image(
    fake_registry: FakeRegistry,
    make_store: Callable[..., ImageFileStore],
    digest: str,
    tmp_path: Path,
    content: bytes | None,
    said: str,
) -> None:
    del digest
    key = tmp_path / "key.pub"
    if content is not None:
        key.write_bytes(content)
    with pytest.raises(WrongState, match=said):
        pull(make_store(policy=(Rule("", "signature", (str(key),)),)), fake_registry)


@pytest.mark.parametrize("require", ["nothing", "refuse"])
def test_no_signature_is_requested_if_the_rule_needs_none(
    fake_registry: FakeRegistry, make_store: Callable[..., ImageFileStore], digest: str, require: Requirement
) -> None:
    del digest
    store = make_store(policy=(Rule(fake_registry.name("vm"), require),))
    if require == "refuse":
        with pytest.raises(PermissionRefused, match="is not allowed on this node"):
            pull(store, fake_registry)
    else:
        pull(store, fake_registry)
    assert not [path for path in (path for path, _ in fake_registry.web.seen) if ".sig" in path or "referrers" in path]


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        ("quay.example:443/team/vm", "quay.example/team/vm"),
        ("quay.example./team/vm", "quay.example/team/vm"),
        ("quay.example:5000/team/vm", "quay.example:5000/team/vm"),
        ("registry-1.docker.io/library/vm", "docker.io/library/vm"),
    ],
)
def test_another_spelling_of_a_registry_does_not_bypass_its_rule(name: str, origin: str) -> None:
    assert origin_of(location(name)) == origin


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        ("https://files.example/a", "has a scheme"),
        ("Quay.example/team", "write quay.example/"),
        ("quay.example:443/team", "write quay.example/"),
        ("registry-1.docker.io/library", "write docker.io/"),
    ],
)
def test_a_prefix_that_matches_nothing_is_refused_when_it_is_read(prefix: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ImagePolicy(prefix=prefix)
    for sound in ("", "quay.example/team", "quay.example:5000/x", "file:/var/lib/vms", "docker.io/library"):
        assert ImagePolicy(prefix=sound).prefix == sound


@pytest.mark.parametrize("path", ["/", "//", "/a/../b", "/a//b", "/./a"])
def test_a_disk_path_that_no_archive_entry_can_have_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="cannot be a path in an image"):
        ImageDiskPath(path=path)
