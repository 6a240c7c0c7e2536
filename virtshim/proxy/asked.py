"""One call that has come in, and all runtimes asked the same."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from virtshim.proxy.backend import Backend, CallFailed, Metadata, Patience

Outcome = bytes | CallFailed


@dataclass(frozen=True, slots=True)
class Asked:
    method: str
    request: bytes
    remaining: float | None
    """Seconds until the caller gives up; None: never."""
    metadata: Metadata = ()


async def ask_all(backends: Sequence[Backend], asked: Asked, seconds: float, *, is_full: bool = True) -> list[Outcome]:
    """The answers in the order of `backends`; none takes longer than `seconds`, or than its caller has time. `is_full`: whoever
    takes as long as that is down."""
    patience = Patience.of(seconds, asked.remaining, is_full=is_full)
    return await asyncio.gather(*(_ask(backend, asked, patience) for backend in backends))


async def _ask(backend: Backend, asked: Asked, patience: Patience) -> Outcome:
    try:
        return await backend.ask(asked.method, asked.request, patience, asked.metadata)
    except CallFailed as failed:
        return failed
