"""Pod cycles and their statistics."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from mortal_node import MortalNode
from podclient import wait_until
from work import Work

# Ways through a pod's life; each ends with RemovePodSandbox, which must cope with whatever is there.
_WAYS: tuple[tuple[Callable[[Work], None], ...], ...] = (
    (Work.run, Work.create, Work.start, Work.stop, Work.remove, Work.stop_pod),
    (Work.run, Work.create, Work.start, Work.stop_pod),
    (Work.run, Work.create, Work.start),
    (Work.run, Work.create),
    (Work.run,),
)
_KILL_CHANCE = 0.06  # for each call
_LATEST_KILL = 0.5  # seconds after the call began


@dataclass
class Soak:
    """`run` takes the fraction of the soak that is over, 0 to 1."""

    node: MortalNode
    dice: random.Random
    cycles: int = 0
    kills: int = 0
    failures: list[str] = field(default_factory=list)
    sizes: list[dict[str, tuple[int, int]]] = field(default_factory=list)

    def run(self, share: Callable[[], float]) -> None:
        with self.node.client() as cri:
            image = cri.pull(f"{self.node.image_url}/null.qcow2")
            self.before = self.node.left()
            while (over := share()) < 1.0:
                self._cycle(Work(self.node, cri, image), killing=over >= 0.5)
                self.cycles += 1
                if over < 0.5:
                    self.sizes.append(self.node.sizes())
                if self.cycles % 20 == 0:
                    print(f"soak: {self.cycles} cycles, {self.kills} kills, {len(self.failures)} failures", flush=True)
            self.node.up()
            self.node.check_bystander(cri)

    def _cycle(self, work: Work, *, killing: bool) -> None:
        way = (*self.dice.choice(_WAYS), Work.remove_pod)
        for call in way:
            kill = self._planned_kill() if killing else None
            error = self._attempt(call, work)
            if kill is not None:
                kill.join()
                self.node.up()
            for _ in range(2):
                if error is not None:
                    self.node.up()
                    error = self._attempt(call, work)
            if error is not None:
                self.failures.append(f"cycle {self.cycles}: {call.__name__}: {error.code()}: {error.details()}")
                if call is not Work.remove_pod:
                    self._attempt(Work.remove_pod, work)
                return

    def _attempt(self, call: Callable[[Work], None], work: Work) -> grpc.RpcError | None:
        try:
            call(work)
        except grpc.RpcError as error:
            return error
        return None

    def _planned_kill(self) -> threading.Timer | None:
        if self.dice.random() >= _KILL_CHANCE:
            return None
        name = self.dice.choice(("virtshim", "virtshim", "tapmanager", "shares"))
        timer = threading.Timer(self.dice.uniform(0, _LATEST_KILL), lambda: self.node.kill(name))
        timer.start()
        self.kills += 1
        return timer

    def report(self) -> dict[str, Any]:
        """The report. Growth is from the first tenth of the quiet half to its end: RSS in KiB, open descriptors."""
        leaks: list[str] = []
        try:
            wait_until(lambda: self.node.left() <= self.before, 20, "nothing is left")
        except TimeoutError:
            leaks = sorted(self.node.left() - self.before)
        growth = {}
        if len(self.sizes) >= 10:
            early, late = self.sizes[len(self.sizes) // 10], self.sizes[-1]
            for name in late:
                growth[name] = {
                    "rss_kib": late[name][0],
                    "rss_growth_kib": late[name][0] - early[name][0],
                    "descriptors": late[name][1],
                    "descriptor_growth": late[name][1] - early[name][1],
                }
        return {
            "cycles": self.cycles,
            "kills": self.kills,
            "failures": self.failures,
            "leaks": leaks,
            "daemons": growth,
        }
