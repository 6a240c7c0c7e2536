"""Checks that a known key signed a manifest. cosign stores signatures beside images, in two forms:

- Up to cosign 2, the tag `sha256-HEX.sig` has signed payloads, each of which names the manifest's digest
  (https://github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md).
- Since cosign 3, bundles refer to the manifest. Each is a signed in-toto statement about the manifest's digest
  (https://github.com/sigstore/cosign/blob/main/specs/BUNDLE_SPEC.md).

Signatures by certificate (keyless) are ignored.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from virtshim.images.oci_manifest import Descriptor
from virtshim.images.registries.repository import Repository
from virtshim.model.errors import InvalidRequest, NotFound, SignatureRefused, WrongState

_SIGNATURE = "dev.cosignproject.cosign/signature"
_PAYLOAD_KIND = "cosign container image signature"
_BUNDLE = "application/vnd.dev.sigstore.bundle"
_STATEMENT = "application/vnd.in-toto+json"
_PREDICATE = "https://sigstore.dev/cosign/sign/v1"
# Images have few signatures, but whoever can push to the repository can push any number.
_MAX_SIGNATURES = 64
_MAX_SIGNATURE_BYTES = 256 << 10
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# Errors that malformed documents cause.
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, InvalidRequest, NotFound)

Verify = Callable[[bytes, bytes], bool]
"""Takes a signature and the signed bytes. Says whether the key made the signature."""


def check_signed(image: str, digest: str, key_files: Sequence[str], repository: Repository) -> None:
    """`digest`: of the image's manifest or index. Raises SignatureRefused unless one of the keys signed it, WrongState for a key
    that cannot be read."""
    keys = [read_key(file) for file in key_files]
    found = 0
    for signature, signed in _signatures(digest, repository):
        found += 1
        if any(verify(signature, signed) for verify in keys):
            return
    names = ", ".join(key_files)
    if found:
        raise SignatureRefused(
            f"image {image!r} ({digest}) has {found} signatures, none by {names}; sign it with that key"
        )
    raise SignatureRefused(
        f"image {image!r} ({digest}) has no cosign signature by a key; sign it: cosign sign --key KEY {image}@{digest}; "
        f"accepted keys: {names}"
    )


def read_key(file: str) -> Verify:
    """`file`: in PEM. Raises WrongState."""
    try:
        key = load_pem_public_key(Path(file).read_bytes())
    except OSError as exc:
        raise WrongState(f"images.policy: key {file} cannot be read: {exc.strerror}; correct keys") from exc
    except (ValueError, UnsupportedAlgorithm) as exc:
        raise WrongState(
            f"images.policy: key {file} is not a public key in PEM (cosign public-key); correct it"
        ) from exc
    if isinstance(key, ec.EllipticCurvePublicKey):
        return lambda signature, signed: _is_valid(lambda: key.verify(signature, signed, ec.ECDSA(SHA256())))
    if isinstance(key, ed25519.Ed25519PublicKey):
        return lambda signature, signed: _is_valid(lambda: key.verify(signature, signed))
    if isinstance(key, rsa.RSAPublicKey):
        return lambda signature, signed: _is_valid(lambda: key.verify(signature, signed, padding.PKCS1v15(), SHA256()))
    raise WrongState(
        f"images.policy: key {file} is neither ECDSA, RSA nor Ed25519; make one with cosign generate-key-pair"
    )


def _is_valid(check: Callable[[], None]) -> bool:
    try:
        check()
    except (InvalidSignature, ValueError):
        return False
    return True


def _signatures(digest: str, repository: Repository) -> Iterator[tuple[bytes, bytes]]:
    """Signatures that claim to be about `digest`, with the bytes that they sign. Malformed ones are skipped."""
    tag = digest.replace(":", "-")
    with contextlib.suppress(NotFound):
        body, _ = repository.manifest(f"{tag}.sig")
        for layer in _entries(body, "layers"):
            with contextlib.suppress(*_MALFORMED):
                signature = layer["annotations"][_SIGNATURE]
                payload = _blob(layer, repository)
                if _is_payload_about(payload, digest):
                    yield base64.b64decode(signature, validate=True), payload
    for bundle in _bundles(digest, tag, repository):
        with contextlib.suppress(*_MALFORMED):
            envelope = json.loads(bundle)["dsseEnvelope"]
            payload = base64.b64decode(envelope["payload"], validate=True)
            if envelope["payloadType"] == _STATEMENT and _is_statement_about(payload, digest):
                for one in envelope["signatures"][:_MAX_SIGNATURES]:
                    yield base64.b64decode(one["sig"], validate=True), _pre_authentication(payload)


def _bundles(digest: str, tag: str, repository: Repository) -> Iterator[bytes]:
    try:
        index = repository.referrers(digest)
    except NotFound:  # then the registry may have a tag instead; any other error refuses the image
        try:
            index, _ = repository.manifest(tag)
        except NotFound:
            return
    for referring in _entries(index, "manifests"):
        with contextlib.suppress(*_MALFORMED):
            if str(referring.get("artifactType", "")).startswith(_BUNDLE):
                body, _ = repository.manifest(_digest(referring))
                for layer in _entries(body, "layers")[:1]:
                    yield _blob(layer, repository)


def _is_payload_about(payload: bytes, digest: str) -> bool:
    critical = json.loads(payload)["critical"]
    return bool(critical["type"] == _PAYLOAD_KIND and critical["image"]["docker-manifest-digest"] == digest)


def _is_statement_about(payload: bytes, digest: str) -> bool:
    statement = json.loads(payload)
    about = [f"sha256:{subject['digest'].get('sha256')}" for subject in statement["subject"]]
    return statement["predicateType"] == _PREDICATE and digest in about


def _pre_authentication(payload: bytes) -> bytes:
    """The bytes that DSSE signs (https://github.com/secure-systems-lab/dsse/blob/master/protocol.md)."""
    return b"DSSEv1 %d %s %d %s" % (len(_STATEMENT), _STATEMENT.encode(), len(payload), payload)


def _entries(body: bytes, name: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(body).get(name)
    except (ValueError, AttributeError, RecursionError):
        return []
    return [one for one in found if isinstance(one, dict)][:_MAX_SIGNATURES] if isinstance(found, list) else []


def _blob(layer: dict[str, Any], repository: Repository) -> bytes:
    """Raises one of _MALFORMED for a blob that cannot be a signature."""
    size = layer["size"]
    if not 0 < size <= _MAX_SIGNATURE_BYTES:
        raise ValueError("too large for a signature")
    return repository.config(Descriptor(_digest(layer), size))


def _digest(descriptor: dict[str, Any]) -> str:
    """Checks the digest, because it becomes part of a URL. Raises ValueError."""
    digest = str(descriptor["digest"])
    if not _DIGEST.fullmatch(digest):
        raise ValueError("not a digest")
    return digest
