"""Settings that a reload changes in the use cases: `reload=True` beside the setting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from virtshim.config import Settings
from virtshim.domain.annotations.profiles import Profile
from virtshim.domain.sizing import NodeLimits
from virtshim.primitives.live import Live
from virtshim.primitives.pod_places import Places, PodPlaces
from virtshim.recovery.image_gc import Watermarks


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """One for the node; whoever uses a value holds the same `Live`."""

    sizes: Live[NodeLimits]
    agent_timeout: Live[float]
    run_commands: Live[bool]
    must_confirm: Live[bool]
    reconcile_interval: Live[float]
    profiles: Live[Sequence[Profile]]
    require_overhead: Live[bool]
    commands: PodPlaces
    pulls: PodPlaces
    pinned_images: Live[Sequence[str]]
    image_watermarks: Live[Watermarks]
    others: list[Callable[[Settings], None]] = field(default_factory=list)
    """Of parts that hold settings of their own."""

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(
            Live(settings.sizes()),
            Live(settings.vm.agent_timeout),
            Live(settings.vm.command == "run"),
            Live(settings.volumes.unconfirmed == "fail"),
            Live(settings.cri.reconcile_interval),
            Live(_profiles(settings)),
            Live(settings.vm.require_overhead),
            PodPlaces(_commands(settings)),
            PodPlaces(_pulls(settings)),
            Live(settings.images.pinned),
            Live(_watermarks(settings)),
        )

    def use(self, settings: Settings) -> None:
        self.sizes.now = settings.sizes()
        self.agent_timeout.now = settings.vm.agent_timeout
        self.run_commands.now = settings.vm.command == "run"
        self.must_confirm.now = settings.volumes.unconfirmed == "fail"
        self.reconcile_interval.now = settings.cri.reconcile_interval
        self.profiles.now = _profiles(settings)
        self.require_overhead.now = settings.vm.require_overhead
        self.commands.allow(_commands(settings))
        self.pulls.allow(_pulls(settings))
        self.pinned_images.now = settings.images.pinned
        self.image_watermarks.now = _watermarks(settings)
        for use in self.others:
            use(settings)


def _profiles(settings: Settings) -> Sequence[Profile]:
    return [Profile(one.name, one.annotations, one.handlers) for one in settings.vm.profiles]


def _watermarks(settings: Settings) -> Watermarks:
    return Watermarks(settings.images.gc_high_percent, settings.images.gc_low_percent)


def _commands(settings: Settings) -> Places:
    return Places(
        what="commands running",
        total=max(1, settings.cri.max_calls // 2),
        each=settings.cri.pod_commands,
        remedy="wait for some to end, or raise cri.pod_commands",
        remedy_of_node="wait for some to end, or raise cri.max_calls",
    )


def _pulls(settings: Settings) -> Places:
    return Places(
        what="pulls under way",
        total=settings.images.pulls,
        each=min(settings.images.namespace_pulls, settings.images.pulls),
        remedy="wait for some to end, or raise images.namespace_pulls",
        remedy_of_node="wait for some to end, or raise images.pulls",
        holder="namespace",
    )
