"""The certificate by which other nodes know this one: an agent asks for it, renews it, and writes it for virtshim.

Key, certificate and CA are one file, which is replaced as a whole. So no kill leaves parts that do not fit each other. The key
of a certificate that is not there yet is in memory alone.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import secrets
import threading
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

import structlog

from virtshim.cluster.api import Api, ConflictFound, GoneFound, below
from virtshim.cluster.node_ca import (
    CA_NAME,
    CA_TEXT,
    LASTS,
    RENEWED_AT,
    SIGNER,
    USAGES,
    certificates_in,
    new_request,
)
from virtshim.cluster.reading import part, parts, stamp_of, text
from virtshim.cluster.signer import CONFIG_MAPS, REQUESTS
from virtshim.model.errors import InvalidRequest, PermissionRefused, ShimError, WrongState
from virtshim.peers.certificates import OwnCertificate, PeerFiles, read_certificate
from virtshim.system.clock import Clock
from virtshim.system.files import replace_text, sync

log = structlog.get_logger(__name__)

FILE: Final = "node.pem"
# Is checked before it becomes FILE.
_CANDIDATE: Final = "candidate.pem"
# Seconds: between turns; between looks at the certificate and the CA, and after trouble; between requests; until a request counts
# as unanswered.
_TURN: Final = 2.0
_LOOK: Final = 60.0
_AGAIN: Final = 5.0
_PAUSE: Final = 300.0
_UNANSWERED: Final = 60.0
_BEGIN: Final = "-----BEGIN CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that waits. `at`: of the monotonic clock."""

    name: str
    key: str
    at: float


class NodeCertificate:
    """While the API server or the controller is away, the former certificate stays until it expires, and the log says so."""

    def __init__(self, node: str, namespace: str, directory: str, api: Api, clock: Clock) -> None:
        """`directory`: for the file; is made if it is missing."""
        self._node = node
        self._directory = directory
        self._api = api
        self._clock = clock
        self._map = below(CONFIG_MAPS, namespace, CA_NAME)
        self._asked: _Asked | None = None
        self._look_at = 0.0
        self._ask_at = 0.0
        self._told = ("", "")

    @property
    def files(self) -> PeerFiles:
        """As in virtshim's settings [peers]."""
        return _all_in(f"{self._directory}/{FILE}")

    def run(self, stopping: threading.Event) -> None:
        while not stopping.is_set():
            self.look()
            self._clock.wait(stopping, _TURN)

    def look(self) -> None:
        """Does what is due."""
        now = self._clock.monotonic()
        if self._asked is None and now < self._look_at:
            return
        try:
            self._settle(now)
            self._look_at = now + _LOOK
        except (ShimError, ConflictFound, GoneFound, OSError) as exc:
            self._tell(exc)
            self._look_at = now + _AGAIN
        except Exception:  # the next look may work
            log.exception("certificate.broken")
            self._look_at = now + _LOOK

    def _settle(self, now: float) -> None:
        ca = self._published()
        if self._asked is not None:
            self._collect(self._asked, ca, now)
        elif why := self._why_new(ca):
            if now >= self._ask_at:
                self._ask(why, now)
        else:
            self._works()

    def _published(self) -> str:
        try:
            found = self._api.get(self._map)
        except GoneFound:
            raise WrongState(f"there is no ConfigMap {CA_NAME}; run the controller with --sign-certificates") from None
        try:
            return "".join(certificates_in(text(part(found, "data"), CA_TEXT)))
        except InvalidRequest as exc:
            raise WrongState(f"ConfigMap {CA_NAME}: {exc}; the controller writes it again") from None

    def _why_new(self, ca: str) -> str:
        """Why this node needs a new certificate; "" if it does not."""
        try:
            own = read_certificate(self.files)
        except WrongState as exc:
            return str(exc)
        if own.node != self._node:
            return f"it names node {own.node}"
        if self._now() >= own.since + (own.until - own.since) * RENEWED_AT:
            return f"it is valid until {stamp_of(own.until)}"
        with open(self.files.certificate, encoding="ascii", errors="replace") as file:
            key, *texts = file.read().split(_BEGIN)
        if not texts:
            return "its file is not as the agent writes it"
        certificate, *cas = texts
        if "".join(_BEGIN + one for one in cas) != ca:
            try:
                self._write(key + _BEGIN + certificate + ca)
            except WrongState:
                return "there is a new CA"
            log.info("certificate.ca_renewed")
        return ""

    def _ask(self, why: str, now: float) -> None:
        key, request = new_request(self._node)
        name = f"virtshim-node.{self._node[:200].rstrip('.-')}.{secrets.token_hex(8)}"
        document = {
            "metadata": {"name": name},
            "spec": {
                "request": base64.b64encode(request.encode()).decode(),
                "signerName": SIGNER,
                "expirationSeconds": LASTS,
                "usages": list(USAGES),
            },
        }
        self._api.create(REQUESTS, document)
        self._asked, self._ask_at = _Asked(name, key, now), now + _PAUSE
        log.info("certificate.asked", request=name, why=why)

    def _collect(self, asked: _Asked, ca: str, now: float) -> None:
        try:
            status = part(self._api.get(f"{REQUESTS}/{quote(asked.name, safe='')}"), "status")
        except GoneFound:
            self._asked = None
            raise WrongState(f"request {asked.name} is gone, unanswered; is the controller running?") from None
        for one in parts(status, "conditions"):
            if text(one, "type") in ("Denied", "Failed"):
                self._asked = None
                why = f"{text(one, 'reason')}: {text(one, 'message')}"
                raise PermissionRefused(f"the controller has refused request {asked.name}: {why}")
        if not (encoded := text(status, "certificate")):
            if now >= asked.at + _UNANSWERED:
                raise WrongState(
                    f"request {asked.name} waits; is the controller running with --sign-certificates? Its log says why"
                )
            return
        self._asked = None
        try:
            certificate = certificates_in(base64.b64decode(encoded, validate=True).decode("ascii"))[0]
        except (binascii.Error, UnicodeDecodeError) as exc:
            raise WrongState(f"the answer to request {asked.name} is not a certificate") from exc
        own = self._write(asked.key + certificate + ca)
        log.info("certificate.renewed", until=stamp_of(own.until), request=asked.name)
        self._works()

    def _write(self, content: str) -> OwnCertificate:
        """Only what virtshim can use now becomes the file. Raises WrongState, OSError."""
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        candidate = f"{self._directory}/{_CANDIDATE}"
        try:
            replace_text(candidate, content)
            own = read_certificate(_all_in(candidate))
            if own.node != self._node:
                raise WrongState(f"the certificate names node {own.node}, and this is node {self._node}")
            os.replace(candidate, self.files.certificate)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(candidate)
        sync(self._directory)
        return own

    def _tell(self, error: Exception) -> None:
        """Logs each trouble once."""
        try:
            event, until = "certificate.not_renewed", read_certificate(self.files).until
        except WrongState:
            event, until = "certificate.missing", 0.0
        valid = (
            f"the certificate on disk is valid until {stamp_of(until)}"
            if until
            else "no VM moves to this node or away from it"
        )
        why = " ".join(str(error).split())
        if "not yet valid" in why or "has expired" in why:
            why += " (compare this node's clock with the controller's)"
        if self._told != (event, why):
            log.warning(event, error=why, meanwhile=valid)
        self._told = event, why

    def _works(self) -> None:
        if self._told != ("", ""):
            log.info("certificate.works_again")
        self._told = "", ""

    def _now(self) -> float:
        return self._clock.now_ns() / 1e9


def _all_in(path: str) -> PeerFiles:
    return PeerFiles(path, path, path)
