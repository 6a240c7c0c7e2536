"""Single-use tokens: each stands for one request that was allowed. Any thread.

Local processes can reach the streaming port; the token is all that keeps them out. So it is 128 random bits, serves once,
also if that fails, lives a minute, and says what it is for.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from virtshim.domain.errors import ResourceExhausted
from virtshim.domain.guest.streaming import StreamRequest

LIFETIME: Final = 60.0
MAX_PENDING: Final = 1000
_RANDOM_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class _Pending:
    request: StreamRequest
    until: float


class Tokens:
    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._now = monotonic
        self._lock = threading.Lock()
        self._pending: dict[str, _Pending] = {}  # in order of their end

    def issue(self, request: StreamRequest) -> str:
        """Raises ResourceExhausted if too many wait to be used."""
        with self._lock:
            self._drop_expired()
            if len(self._pending) >= MAX_PENDING:
                raise ResourceExhausted(
                    f"{MAX_PENDING} streaming requests wait for their clients; try again within {LIFETIME:.0f} s"
                )
            token = secrets.token_urlsafe(_RANDOM_BYTES)
            self._pending[token] = _Pending(request, self._now() + LIFETIME)
            return token

    def redeem(self, token: str) -> StreamRequest | None:
        """The request, once. None if it is unknown, used, expired or revoked."""
        with self._lock:
            found = self._pending.pop(token, None)
            if found is None or found.until <= self._now():
                return None
            return found.request

    def revoke(self, concerns: Callable[[StreamRequest], bool]) -> None:
        with self._lock:
            self._pending = {token: p for token, p in self._pending.items() if not concerns(p.request)}

    def _drop_expired(self) -> None:
        now = self._now()
        for token, pending in list(self._pending.items()):
            if pending.until > now:
                break
            del self._pending[token]
