"""A cluster's CA, and the certificates that it gives to nodes."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from virtshim.peers.certificates import PeerFiles

CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
DAY = 86400.0

_numbers = itertools.count(1)


class ClusterCa:
    """Each certificate is a directory with the files `certificate`, `key` and `ca`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"nodes {next(_numbers)}")])
        self.pem = (
            self._built(self._name, self._key, DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, SHA256())
            .public_bytes(Encoding.PEM)
        )

    def node(
        self,
        *names: str,
        lasts: float = DAY,
        usages: Sequence[ObjectIdentifier] = (CLIENT, SERVER),
        into: Path | None = None,
    ) -> PeerFiles:
        """`names`: the certificate's DNS names. `lasts`: seconds from now; negative if it has expired. `into`: replaces the
        files there."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a node")])
        builder = self._built(subject, key, lasts)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        if names:
            dns = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
            builder = builder.add_extension(dns, critical=False)
        place = into or self._directory / f"node-{next(_numbers)}"
        place.mkdir(exist_ok=True)
        files = {
            "certificate": builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM),
            "key": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
            "ca": self.pem,
        }
        for name, content in files.items():
            (place / f"{name}.new").touch(mode=0o600)
            (place / f"{name}.new").write_bytes(content)
            (place / f"{name}.new").rename(place / name)
        return PeerFiles(*(str(place / name) for name in files))

    def _built(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, lasts: float) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=30))
            .not_valid_after(now + dt.timedelta(seconds=lasts))
        )
