"""Who may look: a token that is good once, and the sessions that tokens were exchanged for. In memory alone; no I/O.

Only digests are kept, and compared as a whole, so that how long an answer takes tells nothing of the secret.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Final

# Browsers at once. One more ends the oldest session.
_SESSIONS: Final = 16
_BYTES: Final = 32
# What nobody's secret is longer than: a request with more is not worth a digest.
_LONGEST: Final = 128


class Sessions:
    def __init__(self) -> None:
        self._token: bytes | None = None
        self._known: dict[bytes, None] = {}

    def new_token(self) -> str:
        """One that nobody has used becomes void."""
        token = secrets.token_urlsafe(_BYTES)
        self._token = _digest(token)
        return token

    def exchange(self, token: str) -> str | None:
        """A new session's secret; None if the token is not the one, or was used."""
        if self._token is None or len(token) > _LONGEST or not secrets.compare_digest(_digest(token), self._token):
            return None
        self._token = None
        secret = secrets.token_urlsafe(_BYTES)
        self._known[_digest(secret)] = None
        while len(self._known) > _SESSIONS:
            del self._known[next(iter(self._known))]
        return secret

    def knows(self, secret: str) -> bool:
        return len(secret) <= _LONGEST and _digest(secret) in self._known

    def end(self, secret: str) -> None:
        self._known.pop(_digest(secret), None)


def _digest(secret: str) -> bytes:
    """Of anything that a header may hold: bytes that are no UTF-8 come as surrogates."""
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()
