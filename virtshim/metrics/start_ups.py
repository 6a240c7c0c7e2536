"""The phases of pods' starts: when each began, and how long it took. Only in memory, so a restart forgets them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from virtshim.metrics import observed
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.system.clock import Clock

# More pods than a node has. Beyond that the oldest are forgotten, because after a failed start nobody calls `forget`.
_MOST_PODS: Final = 1000
# For each pod, because kubelet may restart containers for ever.
_MOST_PHASES: Final = 200


@dataclass(frozen=True, slots=True)
class Phase:
    """`began_at`: nanoseconds since the epoch. `since`: the same by the monotonic clock, in seconds. `container`: None for a
    phase of the sandbox. `seconds`: None while the phase lasts. `error`: why it failed."""

    name: str
    began_at: int
    since: float
    container: ContainerId | None = None
    seconds: float | None = None
    error: str = ""

    def lasted(self, now: float) -> float:
        """The phase's seconds so far. `now`: by the monotonic clock."""
        return max(0.0, now - self.since) if self.seconds is None else self.seconds


@dataclass(frozen=True, slots=True)
class StartUp:
    """`phases` in the order in which they began."""

    sandbox: SandboxId
    phases: tuple[Phase, ...]


class StartUps:
    """Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._phases: dict[SandboxId, list[Phase]] = {}

    @contextlib.contextmanager
    def phase(self, name: str, sandbox: SandboxId, container: ContainerId | None = None) -> Iterator[None]:
        """The block is a phase."""
        self.begin(name, sandbox, container)
        try:
            yield
        except BaseException as exc:
            self.end(name, sandbox, container, error=str(exc) or type(exc).__name__)
            raise
        self.end(name, sandbox, container)

    @contextlib.contextmanager
    def step(self, which: observed.Step, sandbox: SandboxId, container: ContainerId | None = None) -> Iterator[None]:
        """The block is a phase with the step's name, and is also counted as that step."""
        with observed.step(which), self.phase(which.value, sandbox, container):
            yield

    def begin(self, name: str, sandbox: SandboxId, container: ContainerId | None = None) -> None:
        begun = Phase(name, self._clock.now_ns(), self._clock.monotonic(), container)
        with self._lock:
            phases = self._phases.setdefault(sandbox, [])
            phases.append(begun)
            del phases[:-_MOST_PHASES]
            while len(self._phases) > _MOST_PODS:
                del self._phases[next(iter(self._phases))]

    def end(self, name: str, sandbox: SandboxId, container: ContainerId | None = None, *, error: str = "") -> None:
        """Ends the newest running phase of that name, if there is one."""
        now = self._clock.monotonic()
        with self._lock:
            phases = self._phases.get(sandbox, [])
            for place in reversed(range(len(phases))):
                found = phases[place]
                if (found.name, found.container, found.seconds) == (name, container, None):
                    phases[place] = dataclasses.replace(found, seconds=found.lasted(now), error=error)
                    return

    def end_all(self, sandbox: SandboxId, container: ContainerId, error: str) -> None:
        """Ends all running phases of the container."""
        for phase in self.start_up(sandbox).phases:
            if phase.container == container:
                self.end(phase.name, sandbox, container, error=error)

    def start_up(self, sandbox: SandboxId) -> StartUp:
        with self._lock:
            return StartUp(sandbox, tuple(self._phases.get(sandbox, ())))

    def all(self) -> Sequence[StartUp]:
        """Oldest first."""
        with self._lock:
            return [StartUp(sandbox, tuple(phases)) for sandbox, phases in self._phases.items()]

    def forget(self, sandbox: SandboxId) -> None:
        with self._lock:
            self._phases.pop(sandbox, None)
