"""SIGHUP: reads the settings again. If all are valid, those that a reload can change take effect; otherwise none
does."""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar

import structlog
from pydantic import BaseModel

from virtshim.annotations.profiles import Profile
from virtshim.config.faults import dotted, keys_of, table_in
from virtshim.config.settings import BadConfiguration, Settings, load_settings
from virtshim.model.image import Watermarks
from virtshim.model.sizing import NodeLimits
from virtshim.moves.values import SavedLimits
from virtshim.system import machine
from virtshim.system.daemon import notify_systemd
from virtshim.system.live import Live
from virtshim.system.logsetup import set_log_level
from virtshim.system.pod_places import Places, PodPlaces
from virtshim.system.threads import lasting

# The use cases' settings that a reload changes. Their declarations have `reload=True`.


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """The settings that a reload changes. There is one object for the node, and all users of a setting share its
    `Live`."""

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
    saved: Live[SavedLimits]
    template_bytes: Live[int]
    others: list[Callable[[Settings], None]] = field(default_factory=list)
    """Called with the new settings, for parts that hold settings of their own."""

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        return cls(
            Live(_sizes(settings)),
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
            Live(_saved(settings)),
            Live(int(settings.templates.max_bytes)),
        )

    def use(self, settings: Settings) -> None:
        new = self.from_settings(settings)
        for one in dataclasses.fields(self):
            mine, its = getattr(self, one.name), getattr(new, one.name)
            if isinstance(mine, Live):
                mine.now = its.now
            elif isinstance(mine, PodPlaces):
                mine.allow(its.allowed)
        for use in self.others:
            use(settings)


def _profiles(settings: Settings) -> Sequence[Profile]:
    return [Profile(one.name, one.annotations, one.handlers) for one in settings.vm.profiles]


def _watermarks(settings: Settings) -> Watermarks:
    return Watermarks(settings.images.gc_high_percent, settings.images.gc_low_percent)


def _saved(settings: Settings) -> SavedLimits:
    return SavedLimits(settings.saved.keep, settings.saved.max_bytes, settings.saved.key_file)


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


# Compares two versions of the settings: which settings differ, and which of those a running daemon takes over.

S = TypeVar("S", bound=BaseModel)


def changed(old: BaseModel, new: BaseModel) -> Iterator[tuple[str, bool]]:
    """(setting, whether a reload changes it) of each setting that differs."""
    for key in keys_of(type(old)):
        if _value(old, key) != _value(new, key):
            yield dotted(key), is_reloaded(type(old), key)


def with_reloaded(old: S, new: S) -> S:
    """Returns `old` with the values of `new` for all settings that a reload changes."""
    changes: dict[str, Any] = {}
    for name in type(old).model_fields:
        here, there = getattr(old, name), getattr(new, name)
        if table_in(type(old), name) is type(here):
            changes[name] = with_reloaded(here, there)
        elif is_reloaded(type(old), (name,)):
            changes[name] = there
    return old.model_copy(update=changes)


def is_reloaded(model: type[BaseModel], key: Sequence[str | int]) -> bool:
    """Whether a reload changes the setting, as its declaration says."""
    *tables, name = (str(part) for part in key)
    for table in tables:
        model = table_in(model, table) or model
    extra = model.model_fields[name].json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("reload"))


def _value(settings: BaseModel, key: Sequence[str | int]) -> Any:
    found: Any = settings
    for part in key:
        found = getattr(found, str(part))
    return found


log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Reload:
    """`file` as for `load_settings`; `use` brings into force what its program can change, and must not fail; `own`: tables and
    settings that the program reads at all."""

    file: str | None
    in_force: Settings
    use: Callable[[Settings], None]
    own: Collection[str]

    def start(self, asked: queue.SimpleQueue[None]) -> None:
        """Starts the thread that reloads the settings once for each entry of `asked`."""
        lasting(partial(self._run, asked), "reload")

    def _run(self, asked: queue.SimpleQueue[None]) -> None:
        while True:
            asked.get()
            self.serve()

    def serve(self) -> None:
        """Handles one signal and notifies systemd. Never raises."""
        notify_systemd("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        status = "serving"
        try:
            if not self.again():
                status = "serving with the former settings: the new ones are refused, see the log"
        except Exception:
            log.exception("settings.broken")  # the edge of a thread: the next signal must be heard
        notify_systemd("READY=1", f"STATUS={status}")

    def again(self) -> bool:
        """Reloads the settings. Returns whether the new ones are in force."""
        try:
            new = load_settings(self.file)
        except BadConfiguration as exc:
            refused = exc.faults
        else:
            self._take(new)
            return True
        remedy = "the former settings stay in force; correct all faults, and reload again"
        log.error("settings.refused", faults=list(refused), remedy=remedy)
        return False

    def _take(self, new: Settings) -> None:
        found = [(name, now) for name, now in changed(self.in_force, new) if self._is_mine(name)]
        held = with_reloaded(self.in_force, new)
        set_log_level(held.log.level)
        self.use(held)
        self.in_force = held
        log.info("settings.reloaded", changed=[name for name, now in found if now])
        if later := [name for name, now in found if not now]:
            log.warning("settings.need_restart", settings=later)

    def _is_mine(self, name: str) -> bool:
        return name in self.own or name.partition(".")[0] in self.own


def _sizes(settings: Settings) -> NodeLimits:
    return dataclasses.replace(settings.sizes(), memory=machine.memory())
