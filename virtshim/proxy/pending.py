"""The runtime configuration that a runtime which was down has not heard, though its caller was answered: it is told when it is
back. On disk too, for a proxy that is started anew meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import grpc
import structlog

from virtshim.model.errors import InvalidRequest
from virtshim.proxy.backend import Backend, CallFailed, Patience
from virtshim.proxy.wire import METHODS_UPDATE_RUNTIME_CONFIG
from virtshim.system.files import replace_bytes

log = structlog.get_logger(__name__)

_AGAIN: Final = 1.0


class PendingConfigs:
    def __init__(self, directory: str, patience: float) -> None:
        """`directory` is there."""
        self._directory = directory
        self._patience = patience
        self._requests: dict[Backend, bytes] = {}
        self._telling: dict[Backend, asyncio.Task[None]] = {}

    def resume(self, backends: Iterable[Backend]) -> None:
        """What an earlier proxy has left to be told. Raises InvalidRequest for a file that cannot be read."""
        for backend in backends:
            path = self._path(backend)
            try:
                self._tell_when_back(backend, path.read_bytes())
            except FileNotFoundError:
                continue
            except OSError as exc:
                raise InvalidRequest(
                    f"{path}, what {backend.name} is to be told, cannot be read: {exc}; remove it"
                ) from exc

    def add(self, backend: Backend, request: bytes) -> None:
        """In the place of what was pending before. Rare enough to be written while everybody waits."""
        try:
            replace_bytes(str(self._path(backend)), request)
        except OSError as exc:
            log.warning("proxy.pending.not-saved", runtime=backend.name, error=str(exc))
        self._tell_when_back(backend, request)

    async def forget(self, backend: Backend) -> None:
        """It has been told something newer."""
        if task := self._telling.pop(backend, None):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._told(backend)

    async def close(self) -> None:
        """What is still pending stays on disk."""
        tasks = list(self._telling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _tell_when_back(self, backend: Backend, request: bytes) -> None:
        self._requests[backend] = request
        if backend not in self._telling:
            self._telling[backend] = asyncio.create_task(self._tell(backend))

    async def _tell(self, backend: Backend) -> None:
        while True:
            await backend.wait_until_back()
            request = self._requests[backend]
            try:
                await backend.ask(METHODS_UPDATE_RUNTIME_CONFIG, request, Patience(self._patience))
            except CallFailed as failed:
                if failed.code is grpc.StatusCode.UNAVAILABLE:
                    # Of one that is there, too: containerd says so while it starts.
                    await asyncio.sleep(_AGAIN)
                    continue
                log.warning("proxy.pending.refused", runtime=backend.name, error=failed.details)
            if self._requests[backend] is request:
                break
        self._telling.pop(backend, None)
        self._told(backend)

    def _told(self, backend: Backend) -> None:
        self._requests.pop(backend, None)
        self._path(backend).unlink(missing_ok=True)

    def _path(self, backend: Backend) -> Path:
        return Path(f"{self._directory}/{backend.name}.config")
