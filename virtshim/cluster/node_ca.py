"""Certificates of nodes: what an agent asks for, which requests are right, and the CA that signs them. No I/O."""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import secrets
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from virtshim.cluster.reading import Document, number, part, text, words
from virtshim.cluster.serving_certificate import SKEW, key_text
from virtshim.model.errors import InvalidRequest
from virtshim.model.text import is_object_name

SIGNER: Final = "virtshim.io/node"
# The name of the Secret with the CA, and of the ConfigMap with its certificate alone.
CA_NAME: Final = "virtshim-node-ca"
CA_TEXT: Final = "ca.crt"
# Seconds that a node's certificate lasts, at most.
LASTS: Final = 86400
USAGES: Final = ("client auth", "digital signature", "server auth")
# When this part of a certificate's time is over, it is renewed.
RENEWED_AT: Final = 2 / 3
# The API server writes it into a request: the node that the requester's token is bound to.
_NODE: Final = "authentication.kubernetes.io/node-name"
_CA_LASTS: Final = dt.timedelta(days=365)
_LONGEST: Final = 8 << 10
_CERTIFICATE, _KEY = "tls.crt", "tls.key"
_NOT_READABLE: Final = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)


class NotRight(Exception):
    """Why the controller does not sign a request. `reason` is in CamelCase."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """A request that is right. `seconds`: how long the certificate may last."""

    node: str
    key: ec.EllipticCurvePublicKey
    seconds: int


def new_request(node: str) -> tuple[str, str]:
    """A new key, and a request for a certificate of it, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.SubjectAlternativeName([x509.DNSName(node)])
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).add_extension(name, critical=True)
    signed = request.sign(key, hashes.SHA256())
    return key_text(key).decode(), signed.public_bytes(serialization.Encoding.PEM).decode()


def read_request(spec: Document, agent: str) -> NodeRequest:
    """`spec`: of a CertificateSigningRequest. `agent`: the user that may ask. Raises NotRight."""
    if text(spec, "username") != agent:
        raise NotRight("NoAgent", f"only {agent} may ask for certificates of nodes, not {text(spec, 'username')}")
    nodes = words(part(spec, "extra"), _NODE)
    if len(nodes) != 1 or not is_object_name(nodes[0]):
        raise NotRight(
            "NoNode", "the agent's token names no node: it must be the token of a pod, or one that is bound to a node"
        )
    if sorted(words(spec, "usages")) != list(USAGES):
        raise NotRight("WrongUsages", f"usages: must be {', '.join(USAGES)}, and nothing else")
    seconds = number(spec, "expirationSeconds") if "expirationSeconds" in spec else LASTS
    if not 0 < seconds <= LASTS:
        raise NotRight("LastsTooLong", f"expirationSeconds: must be at most {LASTS}")
    return NodeRequest(nodes[0], _key_for(nodes[0], text(spec, "request")), int(seconds))


def _key_for(node: str, encoded: str) -> ec.EllipticCurvePublicKey:
    """The key of a request that asks for this node's name and nothing else. Raises NotRight."""
    if len(encoded) > _LONGEST:
        raise NotRight("Unreadable", f"request: must have at most {_LONGEST} bytes")
    try:
        request = x509.load_pem_x509_csr(base64.b64decode(encoded, validate=True))
        key, is_signed, is_nameless = request.public_key(), request.is_signature_valid, not list(request.subject)
        names = [list(one.value) for one in request.extensions if isinstance(one.value, x509.SubjectAlternativeName)]
        count = len(request.extensions)
    except _NOT_READABLE as exc:
        raise NotRight("Unreadable", f"request: is not a usable PKCS #10 request: {str(exc)[:200]}") from exc
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise NotRight("WrongKey", "request: the key must be of the curve P-256")
    if not is_signed:
        raise NotRight("WrongKey", "request: it is not signed by its own key")
    if not is_nameless or count != 1 or names != [[x509.DNSName(node)]]:
        raise NotRight(
            "WrongName",
            f"request: must have no subject, and one DNS name, {node}: an agent gets its own node's certificate",
        )
    return key


@dataclass(frozen=True, slots=True)
class NodeCa:
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def new(cls, now: float) -> NodeCa:
        """`now`: in seconds since the epoch, here and below."""
        # Unique: a node must not take another CA of the same name for this one.
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"virtshim-nodes-{secrets.token_hex(8)}")])
        key = ec.generate_private_key(ec.SECP256R1())
        return cls(key, _signed_by_itself(key, name, now))

    @classmethod
    def of(cls, secret: Document) -> NodeCa:
        """Raises InvalidRequest if the Secret has no CA."""
        data = part(secret, "data")
        try:
            key = serialization.load_pem_private_key(base64.b64decode(text(data, _KEY), validate=True), None)
            certificate = x509.load_pem_x509_certificate(base64.b64decode(text(data, _CERTIFICATE), validate=True))
            is_pair = isinstance(key, ec.EllipticCurvePrivateKey) and certificate.public_key() == key.public_key()
            constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        except (*_NOT_READABLE, binascii.Error, x509.ExtensionNotFound) as exc:
            raise InvalidRequest(f"Secret {CA_NAME} has no usable CA: {str(exc)[:200]}; {_REMEDY}") from exc
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not is_pair or not constraints.ca:
            raise InvalidRequest(f"Secret {CA_NAME} has no CA's certificate with its key; {_REMEDY}")
        return cls(key, certificate)

    @property
    def data(self) -> dict[str, str]:
        """For the Secret."""
        found = {_CERTIFICATE: self.text.encode(), _KEY: key_text(self.key)}
        return {name: base64.b64encode(content).decode() for name, content in found.items()}

    @property
    def text(self) -> str:
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()

    def is_old(self, now: float) -> bool:
        begin, end = self.certificate.not_valid_before_utc.timestamp(), self.certificate.not_valid_after_utc.timestamp()
        return now > begin + (end - begin) * RENEWED_AT

    def renewed(self, now: float) -> NodeCa:
        """With the same name and key, so that each of both certificates verifies all that the CA has signed."""
        return NodeCa(self.key, _signed_by_itself(self.key, self.certificate.subject, now))

    def signed(self, request: NodeRequest, now: float) -> str:
        """The node's certificate, as PEM."""
        begin = dt.datetime.fromtimestamp(now, dt.UTC) - SKEW
        end = min(begin + dt.timedelta(seconds=request.seconds), self.certificate.not_valid_after_utc)
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
        made = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self.certificate.subject)
            .public_key(request.key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(request.node)]), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(usages, critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return made.public_bytes(serialization.Encoding.PEM).decode()


_REMEDY: Final = "delete it, and a new CA is made"


def certificates_in(pem: str) -> list[str]:
    """Each as PEM of its own, without anything else that the text may have. Raises InvalidRequest if there is none."""
    try:
        found = x509.load_pem_x509_certificates(pem.encode())
    except ValueError as exc:
        raise InvalidRequest(f"there is no usable certificate: {str(exc)[:200]}") from exc
    return [one.public_bytes(serialization.Encoding.PEM).decode() for one in found]


def _signed_by_itself(key: ec.EllipticCurvePrivateKey, name: x509.Name, now: float) -> x509.Certificate:
    begin = dt.datetime.fromtimestamp(now, dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin - SKEW)
        .not_valid_after(begin + _CA_LASTS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
