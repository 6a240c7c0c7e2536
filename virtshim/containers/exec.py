"""Commands in a running container: ExecSync waits for the command's end, Exec streams."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from virtshim.guest.command import CommandResult, agent_may_take, in_container
from virtshim.guest.ports import GuestAgents
from virtshim.guest.set_up import GuestSetUp
from virtshim.model.container import Container
from virtshim.model.errors import ShimError, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout
from virtshim.pods.lookup import existing_container, pod_of
from virtshim.store.ports import Records
from virtshim.streaming.portforward import dial_command
from virtshim.streaming.ports import ExecRequest, Streams, StreamSession
from virtshim.system.clock import Clock
from virtshim.system.live import Live
from virtshim.system.pod_places import PodPlaces
from virtshim.vm.ports import VmPlugging

# Serial ports of a running container's VM: plugging in one more for commands, and whether the agent has its own open.


@dataclass(frozen=True, slots=True)
class PlugExecPort:
    records: Records
    vms: VmPlugging
    layout: Layout

    def plug(self, container: ContainerId, number: int) -> None:
        """Plugs in port `number` of the container's VM. Errors: NotFound, and those of `VmPlugging`."""
        found = existing_container(self.records, container)
        socket = self.layout.exec_socket(container, number)
        self.vms.plug_in(found.domain_uuid, container, number, socket)


@dataclass(frozen=True, slots=True)
class AgentPort:
    records: Records
    vms: VmPlugging

    def is_open(self, container: ContainerId) -> bool:
        """Whether something in the guest listens on the agent's port. In doubt the answer is True, and asking the agent
        decides."""
        found = self.records.containers.get(container)
        if found is None:
            return True
        try:
            return self.vms.agent_listens(found.domain_uuid, container)
        except ShimError:
            return True


# `crictl inspect` should not wait longer.
_FACTS_SECONDS = 1.0
# A session starts after this time even if the set-up has not finished: its user may be looking for what hangs in the
# guest.
_SET_UP_SECONDS = 70.0


@dataclass(frozen=True, slots=True)
class ExecCommand:
    """Implements `virtshim.streaming.ports.Execs`. A call that waits for its command holds one of the server's threads,
    and a command may hang. There are therefore fewer `places` than threads, and each pod gets only some of them.
    `agent_timeout`: seconds that the agent gets from the container's start to its first answer."""

    records: Records
    guests: GuestAgents
    places: PodPlaces
    clock: Clock
    agent_timeout: Live[float]
    guest_set_up: GuestSetUp

    def run(
        self, container: Container, argv: tuple[str, ...], timeout: float, cancelled: threading.Event
    ) -> CommandResult:
        """`timeout`: seconds from now to the command's end, 0 for no limit. Errors: WrongState, ResourceExhausted, and
        those of `GuestAgents.run`."""
        _refuse_unless_running(container)
        command = in_container(container, argv)
        with self.places.held(pod_of(self.records, container)):
            age = (self.clock.now_ns() - container.status.started_at) / 1e9
            within = agent_may_take(container.config.annotations, argv, age, self.agent_timeout.now)
            left = self.guest_set_up.before_command(container, timeout, cancelled, within)
            return self.guests.run(container.id, command, left, cancelled, within)

    async def start(self, request: ExecRequest) -> StreamSession:
        container = existing_container(self.records, request.container)
        _refuse_unless_running(container)
        command = in_container(container, request.command, tty=request.streams.tty)
        set_up = asyncio.wrap_future(self.guest_set_up.before_session(container))
        done, _ = await asyncio.wait({set_up}, timeout=_SET_UP_SECONDS)
        if done and (error := set_up.result()) is not None:
            raise error
        return await self.guests.open(container.id, command, request.streams)

    async def dial(self, container: ContainerId, port: int) -> StreamSession:
        found = existing_container(self.records, container)
        _refuse_unless_running(found)
        return await self.guests.open(container, dial_command(port), Streams(stdin=True, stdout=True, stderr=True))

    def guest_info(self, container: Container) -> Mapping[str, object]:
        """What the guest agent reports about the guest. Empty if the container does not run, or if no agent answers at
        once."""
        if not container.is_running:
            return {}
        return self.guests.guest_info(container.id, _FACTS_SECONDS)


def _refuse_unless_running(container: Container) -> None:
    if not container.is_running:
        raise WrongState(
            f"container {container.id} is {container.phase.value}: commands run in a running container only"
        )
    if container.status.paused:  # kubelet ignores a probe that gets this error, but counts a timeout as a failed probe
        raise WrongState(f"container {container.id.short} is paused by an operator; `virtshim resume` resumes it")
    if container.unusable:
        raise WrongState(f"the guest of container {container.id.short} {container.unusable}")
    if container.status.frozen and not container.status.checkpointing:
        raise WrongState(f"the file systems of container {container.id.short} are frozen; `virtshim thaw` thaws them")
