"""Keeps the configuration for runtimes that are down, and sends it when they are back. The caller has been answered
already. It is on disk too, for a proxy that restarts meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import grpc
import structlog

from virtshim.model.errors import InvalidRequest
from virtshim.proxy.backend import Backend, CallFailed, Patience
from virtshim.proxy.wire import UPDATE_RUNTIME_CONFIG
from virtshim.system.files import replace_bytes

log = structlog.get_logger(__name__)

_AGAIN: Final = 1.0


class PendingConfigs:
    def __init__(self, directory: str, patience: float) -> None:
        """`directory` must exist."""
        self._directory = directory
        self._patience = patience
        self._requests: dict[Backend, bytes] = {}
        self._sending: dict[Backend, asyncio.Task[None]] = {}

    def resume(self, backends: Iterable[Backend]) -> None:
        """Loads what an earlier proxy could not send. Raises InvalidRequest for a file that cannot be read."""
        for backend in backends:
            path = self._path(backend)
            try:
                self._send_when_back(backend, path.read_bytes())
            except FileNotFoundError:
                continue
            except OSError as exc:
                raise InvalidRequest(
                    f"{path}, the pending configuration of {backend.name}, cannot be read: {exc}; remove it"
                ) from exc

    def add(self, backend: Backend, request: bytes) -> None:
        """Replaces an earlier pending configuration. Writes on the event loop, because this is rare."""
        try:
            replace_bytes(str(self._path(backend)), request)
        except OSError as exc:
            log.warning("proxy.pending.not-saved", runtime=backend.name, error=str(exc))
        self._send_when_back(backend, request)

    async def forget(self, backend: Backend) -> None:
        """Called when the runtime has got a newer configuration."""
        if task := self._sending.pop(backend, None):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._forget_sent(backend)

    async def close(self) -> None:
        """Pending configurations stay on disk."""
        tasks = list(self._sending.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _send_when_back(self, backend: Backend, request: bytes) -> None:
        self._requests[backend] = request
        if backend not in self._sending:
            self._sending[backend] = asyncio.create_task(self._send(backend))

    async def _send(self, backend: Backend) -> None:
        while True:
            await backend.wait_until_back()
            request = self._requests[backend]
            try:
                await backend.ask(UPDATE_RUNTIME_CONFIG, request, Patience(self._patience))
            except CallFailed as failed:
                if failed.code is grpc.StatusCode.UNAVAILABLE:
                    # containerd also answers this while it starts.
                    await asyncio.sleep(_AGAIN)
                    continue
                log.warning("proxy.pending.refused", runtime=backend.name, error=failed.details)
            if self._requests[backend] is request:
                break
        self._sending.pop(backend, None)
        self._forget_sent(backend)

    def _forget_sent(self, backend: Backend) -> None:
        self._requests.pop(backend, None)
        self._path(backend).unlink(missing_ok=True)

    def _path(self, backend: Backend) -> Path:
        return Path(f"{self._directory}/{backend.name}.config")
