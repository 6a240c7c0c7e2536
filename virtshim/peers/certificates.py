"""This node's certificate, its key, and the CA of all nodes: read, checked and read again when the files change."""

from __future__ import annotations

import contextlib
import os
import ssl
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import structlog

from virtshim.model.errors import PermissionRefused, WrongState
from virtshim.model.text import is_object_name
from virtshim.system.rate_limits import TroubleLog

log = structlog.get_logger(__name__)

# The key's group must not write it, and others must not access it at all.
_OPEN_TO_OTHERS: Final = 0o137
_OF_GROUP: Final = 0o040
# ClientHello, the server's answer with both requests, the client's certificate, its verification.
_STEPS: Final = 4


@dataclass(frozen=True, slots=True)
class PeerFiles:
    """Paths of PEM files, as in the table [peers] of the settings; "" if not set. All may be one file."""

    certificate: str = ""
    key: str = ""
    ca: str = ""


@dataclass(frozen=True, slots=True)
class OwnCertificate:
    """`node`: the name that it gives this node. `since`, `until`: when it is valid, in seconds since the epoch."""

    node: str
    since: float
    until: float
    server: ssl.SSLContext
    client: ssl.SSLContext


class PeerCertificates:
    """A connection uses the content that the files have when it begins. While new files cannot be used, for example in the middle
    of their replacement, the former content applies, and the log says so."""

    def __init__(self, files: PeerFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._current: OwnCertificate | None = None
        self._seen: object = None
        self._trouble = TroubleLog(log, "peers.certificates.usable")

    def current(self) -> OwnCertificate:
        """Raises WrongState if the files have never been usable."""
        with self._lock:
            seen = [_version(path) for path in (self._files.certificate, self._files.key, self._files.ca)]
            if self._current is None or seen != self._seen:
                try:
                    self._current = read_certificate(self._files)
                except WrongState as exc:
                    if self._current is None:
                        raise
                    self._trouble.met("peers.certificates.unusable", error=str(exc))
                else:
                    self._seen = seen
                    self._trouble.over(node=self._current.node)
            return self._current

    def check(self) -> None:
        """Raises WrongState if the files cannot be used now."""
        read_certificate(self._files)


def named_node(certificate: Mapping[str, Any] | None, whose: str) -> str:
    """The node that a verified certificate names. Raises PermissionRefused, which begins with `whose`."""
    names = [value for kind, value in (certificate or {}).get("subjectAltName", ()) if kind == "DNS"]
    if len(names) != 1 or not is_object_name(names[0]):
        raise PermissionRefused(
            f"{whose}: a node's certificate must have one DNS name, the node's, in its subjectAltName, and this one has "
            f"{names[:4]}; issue a new one"
        )
    return str(names[0])


def read_certificate(files: PeerFiles) -> OwnCertificate:
    """Raises WrongState unless every node with this CA would accept the certificate now, as a server and as a client."""
    if not (files.certificate and files.key and files.ca):
        raise WrongState("this node has no certificate for other nodes; set peers.certificate, peers.key and peers.ca")
    with _opened_once(files) as (certificate, key, ca):
        _refuse_unless_private(files.key, os.fstat(key))
        contexts = []
        for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(protocol)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # `named_node` is stricter: no wildcards, and the same for both sides
            context.verify_mode = ssl.CERT_REQUIRED
            with _explained(f"peers.ca: {files.ca} has no usable certificate", "write the CA's as PEM"):
                context.load_verify_locations(f"/proc/self/fd/{ca}")
            pair = f"peers.certificate {files.certificate} and peers.key {files.key} do not fit together"
            with _explained(pair, "write a certificate and its key as PEM, the key without a password"):
                # The descriptors: what was checked is what is read. A key with a password must not ask the terminal for it.
                context.load_cert_chain(f"/proc/self/fd/{certificate}", f"/proc/self/fd/{key}", password=lambda: "")
            contexts.append(context)
    server, client = contexts
    server.num_tickets = 0  # a resumed session would not check the certificate again
    refused = f"peers.certificate: other nodes would refuse {files.certificate}"
    with _explained(refused, "renew it: the CA of peers.ca must have signed it, for clients and for servers"):
        seen = _seen_by_a_peer(server, client)
    try:
        node = named_node(seen, f"peers.certificate {files.certificate}")
    except PermissionRefused as exc:
        raise WrongState(str(exc)) from exc
    since, until = (float(ssl.cert_time_to_seconds(seen[name])) for name in ("notBefore", "notAfter"))
    return OwnCertificate(node, since, until, server, client)


def reason(error: OSError) -> str:
    """Why a handshake or connection failed, in a few words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return error.strerror or str(error)


def _seen_by_a_peer(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """Our certificate, verified in a handshake with ourselves, in memory. Raises SSLError."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(down, up)
    sides = (ours, server.wrap_bio(up, down, server_side=True))
    for step in range(_STEPS):
        with contextlib.suppress(ssl.SSLWantReadError):
            sides[step % 2].do_handshake()
    return ours.getpeercert() or {}


@contextlib.contextmanager
def _explained(what: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise WrongState(f"{what}: {reason(exc)}; {remedy}") from exc


@contextlib.contextmanager
def _opened_once(files: PeerFiles) -> Iterator[tuple[int, int, int]]:
    """A file that holds several parts is opened once, so that the parts fit each other while somebody replaces it."""
    with contextlib.ExitStack() as stack:
        opened: dict[str, int] = {}
        for setting, path in (("certificate", files.certificate), ("key", files.key), ("ca", files.ca)):
            if path not in opened:
                opened[path] = stack.enter_context(_opened(setting, path))
        yield opened[files.certificate], opened[files.key], opened[files.ca]


@contextlib.contextmanager
def _opened(setting: str, path: str) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as exc:
        raise WrongState(f"peers.{setting}: {path} cannot be read: {exc.strerror}; correct the setting") from exc
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise WrongState(f"peers.{setting}: {path} is not a regular file; correct the setting")
        yield descriptor
    finally:
        os.close(descriptor)


def _refuse_unless_private(path: str, found: os.stat_result) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid() or mode & _OPEN_TO_OTHERS or (mode & _OF_GROUP and found.st_gid != 0):
        raise WrongState(
            f"peers.key: {path} has mode {mode:04o} and belongs to user {found.st_uid}, group {found.st_gid}, so others may read "
            f"or change it; chown root:root {path} && chmod 0600 {path}, and replace the key if somebody may have read it"
        )


def _version(path: str) -> object:
    """Differs when the file was replaced or written. None while it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
