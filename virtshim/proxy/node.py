"""What kubelet learns about the node: the primary's answers, and the other runtimes' conditions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Final

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.errors import WrongState
from virtshim.proxy.backend import Answer, Asked, Backend, CallFailed, Outcome, ask_all
from virtshim.proxy.last_known import LastKnown
from virtshim.proxy.lists import refuse
from virtshim.proxy.pending import PendingConfigs
from virtshim.proxy.wire import RUNTIME_CONFIG

# kubelet asks for the status every five seconds, and must not wait for other runtimes than the primary. A slow runtime is
# not down, because lists may take much longer.
_OTHERS_PATIENCE: Final = 2.0


class Node:
    def __init__(
        self, backends: Sequence[Backend], pending: PendingConfigs, last_known: LastKnown, patience: float
    ) -> None:
        """`backends`: the primary first."""
        self._backends = backends
        self._pending = pending
        self._last_known = last_known
        self._patience = patience

    async def version(self, asked: Asked) -> Answer:
        """The primary's version. Fails while lists fail, because kubelet asks for the version first when it starts. If it
        got a version, it would read failing lists as empty ones, and would fail pods with devices permanently. Raises
        CallFailed."""
        primary, *others = self._backends
        needed = [one for one in others if not self._last_known.stands_in(one.name)]
        own, outcomes = await asyncio.gather(primary.pass_on(asked), ask_all(needed, asked, self._patience))
        refuse([one for one in outcomes if isinstance(one, CallFailed)])
        return own

    async def status(self, asked: Asked) -> Answer:
        """The primary's status, with the other runtimes' handlers, and their conditions under prefixed names: a runtime
        that is down or not ready does not make the node so. Raises CallFailed."""
        primary, *others = self._backends
        own, outcomes = await asyncio.gather(primary.pass_on(asked), self._soon(others, asked))
        status = pb.StatusResponse.FromString(own.body)
        handlers = {handler.name: primary.name for handler in status.runtime_handlers}
        for backend, outcome in zip(others, outcomes, strict=True):
            _add(status, backend, outcome, handlers)
        if pb.StatusRequest.FromString(asked.request).verbose:
            status.info["proxy"] = _info(self._backends, handlers)
        return Answer(status.SerializeToString(), own.initial, own.trailing)

    async def runtime_config(self, asked: Asked) -> Answer:
        """The primary's answer. Raises CallFailed; WrongState if the cgroup drivers differ, because kubelet has only one."""
        primary, *others = self._backends
        own, outcomes = await asyncio.gather(primary.pass_on(asked), self._soon(others, asked))
        self._refuse_other_drivers([own.body, *outcomes])
        return own

    async def check_drivers(self) -> None:
        """Called at the start. Runtimes that do not answer are checked when kubelet asks. Raises WrongState."""
        asked = Asked(RUNTIME_CONFIG, b"", None)
        self._refuse_other_drivers(await self._soon(self._backends, asked))

    async def _soon(self, backends: Sequence[Backend], asked: Asked) -> list[Outcome]:
        seconds = min(_OTHERS_PATIENCE, self._patience)
        return await ask_all(backends, asked, seconds, is_full=seconds >= self._patience)

    def _refuse_other_drivers(self, outcomes: Sequence[Outcome]) -> None:
        drivers = {
            backend.name: driver
            for backend, outcome in zip(self._backends, outcomes, strict=True)
            if (driver := _driver(outcome))
        }
        if len(set(drivers.values())) > 1:
            listed = ", ".join(f"{name}: {driver}" for name, driver in drivers.items())
            raise WrongState(
                f"the runtimes of this node use different cgroup drivers ({listed}); set them to the same one"
            )

    async def update(self, asked: Asked) -> Answer:
        """Updates all runtimes, even if one refuses, and those that may be down when they are back. Raises CallFailed."""
        failures: list[CallFailed] = []
        for backend, outcome in zip(self._backends, await ask_all(self._backends, asked, self._patience), strict=True):
            if not isinstance(outcome, CallFailed):
                await self._pending.forget(backend)
            elif outcome.is_down and backend.runtime.degraded:
                self._pending.add(backend, asked.request)
            else:
                failures.append(outcome)
        refuse(failures)
        return Answer(b"")


def _driver(outcome: Outcome) -> str:
    """ "" if the runtime does not name it."""
    if isinstance(outcome, CallFailed):
        return ""
    answer = pb.RuntimeConfigResponse.FromString(outcome)
    return pb.CgroupDriver.Name(answer.linux.cgroup_driver).lower() if answer.HasField("linux") else ""


def _add(status: pb.StatusResponse, backend: Backend, outcome: Outcome, handlers: dict[str, str]) -> None:
    conditions = status.status.conditions
    if isinstance(outcome, CallFailed):
        conditions.add(type=f"{backend.name}/RuntimeReady", status=False, reason="Unavailable", message=outcome.details)
        theirs = pb.StatusResponse()
    else:
        theirs = pb.StatusResponse.FromString(outcome)
    for condition in theirs.status.conditions:
        condition.type = f"{backend.name}/{condition.type}"
        conditions.append(condition)
    described = {handler.name: handler for handler in theirs.runtime_handlers}
    # "" belongs to the primary. A handler that its runtime does not describe is listed without features.
    for name in [*backend.runtime.handlers, *described]:
        if name and name not in handlers:
            handlers[name] = backend.name
            status.runtime_handlers.append(described.get(name) or pb.RuntimeHandler(name=name))


def _info(backends: Sequence[Backend], handlers: dict[str, str]) -> str:
    runtimes = [{"name": one.name, "socket": one.runtime.socket, "up": not one.is_down} for one in backends]
    return json.dumps({"runtimes": runtimes, "handlers": handlers})
