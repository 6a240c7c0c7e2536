"""The certificate by which the API server knows the webhook. Each controller makes its own, and tells the API server about it."""

from __future__ import annotations

import datetime as dt
import secrets
import ssl
import tempfile
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAYS: Final = 90
# The clocks of machines differ.
SKEW: Final = dt.timedelta(minutes=5)
_BEGIN: Final = "-----BEGIN CERTIFICATE-----"
# How many certificates of other controllers stay trusted, so that two controllers at once do no harm.
_OTHERS: Final = 2


@dataclass(frozen=True, slots=True)
class ServingCertificate:
    """`text`: PEM. `renew_at`: when two thirds of its time are over, in seconds since the epoch."""

    text: str
    tls: ssl.SSLContext
    renew_at: float


def serving_certificate(host: str, now: float) -> ServingCertificate:
    """Signs itself. `now`: seconds since the epoch."""
    key = ec.generate_private_key(ec.SECP256R1())
    # Unique, as a bundle has several: a verifier looks for the signer by its name.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"virtshim-webhook-{secrets.token_hex(8)}")])
    begin = dt.datetime.fromtimestamp(now, dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin - SKEW)
        .not_valid_after(begin + dt.timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    text = certificate.public_bytes(serialization.Encoding.PEM).decode()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.minimum_version = ssl.TLSVersion.TLSv1_2
    with tempfile.NamedTemporaryFile(suffix=".pem") as file:  # only its owner may read it
        file.write(key_text(key) + text.encode())
        file.flush()
        tls.load_cert_chain(file.name)
    return ServingCertificate(text, tls, now + _DAYS * 86400 * 2 / 3)


def key_text(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def trusted(bundle: str, own: str) -> str:
    """The API server's bundle with this certificate, and with the newest others that it had."""
    others = [_BEGIN + one for one in bundle.split(_BEGIN)[1:] if (_BEGIN + one).strip() != own.strip()]
    return "".join([*(one.strip() + "\n" for one in others[-_OTHERS:]), own.strip() + "\n"])
