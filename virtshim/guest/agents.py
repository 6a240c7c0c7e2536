"""Commands and requests to the guests of all VMs. Implements `virtshim.guest.ports.GuestAgents`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Final, TypeVar

from virtshim.guest.agent_channel import ABSENT
from virtshim.guest.agent_questions import AgentOperations, ask_guest_info
from virtshim.guest.command import CommandResult, EntrypointProgress, GuestCommand, OutputPosition, too_late
from virtshim.guest.entrypoint import Entrypoint, EntrypointInput
from virtshim.guest.exec_collector import Collector, OutputMemory
from virtshim.guest.guest_exec import CommandStreams, GuestVm, RunningCommand
from virtshim.guest.live_session import LiveSession
from virtshim.guest.wait import USUAL, CancellableDeadline, ExecLimits
from virtshim.model.container import ProcessUser
from virtshim.model.errors import DeadlineExceeded, ResourceExhausted, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout
from virtshim.streaming.ports import Streams, StreamSession
from virtshim.system.threads import Workers

# Threads that wait for guests on behalf of sessions. Each VM gets a few, so that a silent guest delays no other.

R = TypeVar("R")

# Concurrent threads of one VM (its agent serves one caller at a time anyway); waiting requests; threads of all VMs.
OF_VM: Final = 8
WAITING: Final = 256
_OF_NODE: Final = 4096


class VmWorkers:
    """Threads are made on demand and reused."""

    def __init__(self) -> None:
        self._executor = Workers(_OF_NODE, "guest-exec")
        self._lock = threading.Lock()
        self._busy: dict[ContainerId, int] = {}
        self._waiting: dict[ContainerId, deque[Callable[[], None]]] = {}

    def submit(self, container: ContainerId, call: Callable[..., R], *args: Any) -> Future[R]:
        """Runs the calls of one VM in order. Raises ResourceExhausted if too many wait."""
        future: Future[R] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(*args))
                except BaseException as exc:  # noqa: BLE001  passed on to the caller that waits
                    future.set_exception(exc)

        with self._lock:
            if self._busy.get(container, 0) >= OF_VM:
                waiting = self._waiting.setdefault(container, deque())
                if len(waiting) >= WAITING:
                    raise ResourceExhausted(
                        f"{WAITING} requests wait for the guest of container {container.short}; wait for some to end, and check "
                        "whether its guest agent answers"
                    )
                waiting.append(work)
                return future
            self._busy[container] = self._busy.get(container, 0) + 1
        self._executor.submit(self._run, container, work)
        return future

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _run(self, container: ContainerId, work: Callable[[], None]) -> None:
        """Runs calls of this VM until none waits."""
        while True:
            work()
            with self._lock:
                waiting = self._waiting.get(container)
                if not waiting:
                    self._waiting.pop(container, None)
                    self._busy[container] -= 1
                    if not self._busy[container]:
                        del self._busy[container]
                    return
                work = waiting.popleft()


# Seconds that the guest gets to boot, because kubectl and critest run a command right after the start.
_BOOT_SECONDS = 60.0
# For an agent that has its port open but may be busy.
_BUSY_SECONDS = 10.0
_FOR_EVER = 10 * 365 * 86400.0
# Commands of all VMs that are being ended. Those of guests that do not answer take minutes.
_SETTLED_AT_ONCE = 4096
# Bytes of each stream, as other runtimes keep: an endless output must not end the node.
OUTPUT_LIMIT = 16 << 20
# Bytes of all running commands' output together.
_OUTPUT_MEMORY = 256 << 20
_KILL_SECONDS = 5.0


class AgentClients:
    def __init__(
        self,
        layout: Layout,
        plug: Callable[[ContainerId, int], None],
        listens: Callable[[ContainerId], bool] = lambda _container: True,
        answers: Callable[[ContainerId], None] = lambda _container: None,
        limits: ExecLimits = USUAL,
        known_as: Callable[[ContainerId], ContainerId] = lambda container: container,
    ) -> None:
        """`plug` adds a serial port, by number, to a running VM, and raises ShimError. `listens`: whether the guest has
        the agent's port open. `answers`: called when an agent has answered on a new connection; it must not wait.
        `known_as`: the container that the guest knows, which is an earlier one if the VM was restored."""
        self._answers = answers
        self._known_as = known_as
        self._limits = limits
        self._layout = layout
        self._plug = plug
        self._listens = listens
        self._lock = threading.Lock()
        self._vms: dict[ContainerId, GuestVm] = {}
        self._workers = VmWorkers()
        self._settling = Workers(_SETTLED_AT_ONCE, "exec-settle")
        self._output_memory = OutputMemory(_OUTPUT_MEMORY)
        self.operations = AgentOperations(self._vm)
        self.entrypoint_input = EntrypointInput(self.open, self._vm, known_as)

    def close(self) -> None:
        with self._lock:
            vms, self._vms = list(self._vms.values()), {}
        for vm in vms:
            vm.close()
        self._workers.close()
        self._settling.shutdown(wait=False)

    def run(
        self,
        container: ContainerId,
        command: GuestCommand,
        timeout: float,
        cancelled: threading.Event,
        agent_within: float = _BOOT_SECONDS,
    ) -> CommandResult:
        vm = self._vm(container)
        whole, began = CancellableDeadline.after(timeout or _FOR_EVER, cancelled), time.monotonic()
        wanted = CommandStreams(stdin=bool(command.input))
        if timeout:
            running = vm.start(command, wanted, whole)
        elif agent_within or self._listens(container):
            within = CancellableDeadline.after(max(agent_within, _BUSY_SECONDS), cancelled)
            running = _started(vm, command, wanted, within)
        else:
            raise WrongState(f"nothing in the guest listens on the port of {ABSENT}")
        waited = time.monotonic() - began
        try:
            running.feed(command.input)
            result = Collector(vm, running, OUTPUT_LIMIT, self._output_memory).result(whole)
        except DeadlineExceeded:
            wait((vm.reap(running, "all"),), _KILL_SECONDS)
            raise DeadlineExceeded(too_late(timeout, waited)) from None
        except BaseException:
            wait((vm.reap(running, "all"),), _KILL_SECONDS)
            raise
        vm.reap(running, "" if running.output.complete else "relays")
        return result

    async def open(self, container: ContainerId, command: GuestCommand, streams: Streams) -> StreamSession:
        """A terminal always gets an input: without one its programs would read end of file at once."""
        vm = self._vm(container)
        wanted = CommandStreams(stdin=streams.stdin or streams.tty, tty=streams.tty)
        cancelled = threading.Event()
        deadline = CancellableDeadline.after(_BOOT_SECONDS, cancelled, patient=True)
        submit = partial(self._workers.submit, container)
        starting = asyncio.wrap_future(submit(_started, vm, command, wanted, deadline))
        try:
            running = await asyncio.shield(starting)
        except asyncio.CancelledError:
            cancelled.set()
            starting.add_done_callback(lambda done: done.exception() or vm.reap(done.result(), "all"))
            raise
        return LiveSession(vm, running, submit)

    def start_entrypoint(
        self, container: ContainerId, command: GuestCommand, timeout: float, cancelled: threading.Event
    ) -> None:
        self._entrypoint(container).start_entrypoint(command, CancellableDeadline.after(timeout, cancelled))

    def progress(self, container: ContainerId, read_to: OutputPosition) -> EntrypointProgress:
        return self._entrypoint(container).progress(read_to)

    def entrypoint_user(self, container: ContainerId) -> ProcessUser | None:
        return self._entrypoint(container).user()

    def entrypoint_exists(self, container: ContainerId) -> bool:
        return self._entrypoint(container).entrypoint_exists()

    def signal_entrypoint(
        self, container: ContainerId, number: int, timeout: float, cancelled: threading.Event
    ) -> bool:
        return self._entrypoint(container).signal(number, CancellableDeadline.after(timeout, cancelled))

    def guest_info(self, container: ContainerId, timeout: float) -> Mapping[str, object]:
        return ask_guest_info(self._vm(container).channel, CancellableDeadline.after(timeout))

    def connect(self, container: ContainerId) -> None:
        self._vm(container).channel.connect()

    def forget(self, container: ContainerId) -> None:
        with self._lock:
            vm = self._vms.pop(container, None)
        if vm is not None:
            vm.close()

    def _entrypoint(self, container: ContainerId) -> Entrypoint:
        return Entrypoint(self._known_as(container), self._vm(container))

    def _vm(self, container: ContainerId) -> GuestVm:
        with self._lock:
            vm = self._vms.get(container)
            if vm is None:
                vm = GuestVm(
                    self._layout.agent_socket(container),
                    self._layout.socket_dir(container),
                    partial(self._plug, container),
                    self._settling,
                    partial(self._answers, container),
                    self._limits,
                )
                self._vms[container] = vm
            return vm


def _started(
    vm: GuestVm, command: GuestCommand, wanted: CommandStreams, deadline: CancellableDeadline
) -> RunningCommand:
    """For callers without a time limit. Raises WrongState if the guest has had time to boot and no agent answers."""
    try:
        return vm.start(command, wanted, deadline)
    except DeadlineExceeded as exc:
        raise WrongState(str(exc)) from exc
