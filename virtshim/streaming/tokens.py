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

from virtshim.domain.guest.streaming import StreamRequest, pod_of
from virtshim.primitives.pod_places import Places, PodPlaces

LIFETIME: Final = 60.0
MAX_PENDING: Final = 1000
# Of one pod.
MAX_OF_POD: Final = 100
_RANDOM_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class _Pending:
    request: StreamRequest
    until: float


class Tokens:
    def __init__(self, monotonic: Callable[[], float]) -> None:
        again = f"let their clients connect, or try again within {LIFETIME:.0f} s"
        self.places = PodPlaces(Places("streaming URLs that wait", MAX_PENDING, MAX_OF_POD, again, again))
        self._now = monotonic
        self._lock = threading.Lock()
        self._pending: dict[str, _Pending] = {}  # in order of their end

    def issue(self, request: StreamRequest) -> str:
        """Raises ResourceExhausted if too many wait to be used, of this pod or of all."""
        with self._lock:
            self._drop_expired()
            self.places.take(pod_of(request))
            token = secrets.token_urlsafe(_RANDOM_BYTES)
            self._pending[token] = _Pending(request, self._now() + LIFETIME)
            return token

    def redeem(self, token: str) -> StreamRequest | None:
        """The request, once. None if it is unknown, used, expired or revoked."""
        with self._lock:
            found = self._pending.pop(token, None)
            if found is None:
                return None
            self.places.give_back(pod_of(found.request))
            return found.request if found.until > self._now() else None

    def revoke(self, concerns: Callable[[StreamRequest], bool]) -> None:
        with self._lock:
            for token, pending in list(self._pending.items()):
                if concerns(pending.request):
                    self._drop(token)

    def _drop_expired(self) -> None:
        now = self._now()
        for token, pending in list(self._pending.items()):
            if pending.until > now:
                break
            self._drop(token)

    def _drop(self, token: str) -> None:
        self.places.give_back(pod_of(self._pending.pop(token).request))
