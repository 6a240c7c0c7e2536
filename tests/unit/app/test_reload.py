"""SIGHUP: virtshim applies all reloadable settings or none, and each part of the node uses the new value."""

from __future__ import annotations

import dataclasses
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from fakes.world import World, container_config
from structlog.testing import capture_logs

from virtshim.app.adapters import image_settings, stream_limits
from virtshim.app.reload import LiveSettings, Reload, changed, is_reloaded, with_reloaded
from virtshim.app.serve import OWN
from virtshim.config.faults import dotted, keys_of, table_in
from virtshim.config.settings import Settings, load_settings
from virtshim.images.filestore import ImageFileStore
from virtshim.model.errors import InvalidRequest, ResourceExhausted
from virtshim.streaming.room import StreamLimits, StreamRoom
from virtshim.system.live import Live

pytestmark = pytest.mark.operator

MIB = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text("[vm]\nmax_vcpus = 2\n")
    return tmp_path / "config.toml"


@pytest.fixture
def used() -> list[Settings]:
    return []


@pytest.fixture
def reload(file: Path, used: list[Settings]) -> Reload:
    return Reload(str(file), load_settings(str(file)), used.append, OWN)


@pytest.fixture
def systemd(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What it hears."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind("")  # an abstract name of the kernel's choice
        heard.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + heard.getsockname().decode().lstrip("\0"))
        yield heard


def test_a_reload_applies_what_can_change_and_names_what_cannot(
    file: Path, reload: Reload, used: list[Settings]
) -> None:
    file.write_text('[vm]\nmax_vcpus = 3\n[cri]\nsocket = "/elsewhere"\n[tapmanager]\ncni_timeout = 3\n')
    with capture_logs() as logs:
        assert reload.again()
        assert reload.again()
    assert [(one.vm.max_vcpus, one.cri.socket) for one in used] == [(3, "")] * 2
    assert [(one["event"], one.get("changed", one.get("settings"))) for one in logs] == [
        ("settings.reloaded", ["vm.max_vcpus"]),
        ("settings.need_restart", ["cri.socket"]),
        ("settings.reloaded", []),
        ("settings.need_restart", ["cri.socket"]),  # until the reload is done
    ]


def test_bad_settings_are_all_reported_and_the_old_ones_stay_in_force(
    file: Path, reload: Reload, used: list[Settings]
) -> None:
    file.write_text('[vm]\nmax_vcpus = 3\nmax_memory = 1\n[log]\nlevel = "loud"\n')
    with capture_logs() as logs:
        assert not reload.again()
    (said,) = logs
    assert (said["event"], said["log_level"]) == ("settings.refused", "error")
    assert [fault.split(": ")[:2] for fault in said["faults"]] == [
        [f"{file}:3", "vm.max_memory"],
        [f"{file}:5", "log.level"],
    ]
    assert (used, reload.in_force.vm.max_vcpus) == ([], 2)


def test_each_signal_is_one_reload_and_a_failed_reload_does_not_stop_later_ones(
    file: Path, systemd: socket.socket
) -> None:
    seen: queue.SimpleQueue[int] = queue.SimpleQueue()

    def use(settings: Settings) -> None:
        seen.put(settings.vm.max_vcpus)
        if settings.vm.max_vcpus == 3:
            raise RuntimeError("broken")

    asked: queue.SimpleQueue[None] = queue.SimpleQueue()
    Reload(str(file), load_settings(str(file)), use, OWN).start(asked)
    for vcpus in (3, 4):
        file.write_text(f"[vm]\nmax_vcpus = {vcpus}\n")
        asked.put(None)
        assert seen.get(timeout=60) == vcpus
        assert systemd.recv(4096).startswith(b"RELOADING=1")
        assert systemd.recv(4096).startswith(b"READY=1")


def test_systemd_is_notified_of_a_reload_and_of_a_refused_reload(
    file: Path, reload: Reload, systemd: socket.socket
) -> None:
    for content, status in (
        ("", "STATUS=serving"),
        ("nonsense", "STATUS=serving with the former settings: the new ones"),
    ):
        file.write_text(content)
        reload.serve()
        began, over = systemd.recv(4096).decode().split("\n"), systemd.recv(4096).decode().split("\n")
        assert (began[0], began[1].startswith("MONOTONIC_USEC=")) == ("RELOADING=1", True)
        assert (over[0], over[1].startswith(status)) == ("READY=1", True)


def other(settings: Settings, key: tuple[str, ...]) -> Any:
    """A value that the setting has not."""
    table = getattr(settings, key[0])
    field, now = type(table).model_fields[key[1]], getattr(table, key[1])
    if choices := [one for one in get_args(field.annotation) if one != now and isinstance(one, str)]:
        return choices[0]
    if inner := table_in(type(table), key[1]):
        return [{name: "x" for name, one in inner.model_fields.items() if one.is_required()}]
    match now:
        case int() | float():
            return {"gc_high_percent": 90}.get(key[1], now + 1)
        case tuple():
            return {"forbidden_networks": ["10.0.0.0/8"], "pinned": ["registry.test/vm"]}.get(key[1], ["/elsewhere"])
        case dict():
            return {"node7": "10.0.0.7"}
        case _:
            return "/elsewhere"


RELOADED = [key for key in keys_of(Settings) if is_reloaded(Settings, key) and key[0] in OWN and key[0] != "log"]


@pytest.mark.parametrize("key", RELOADED, ids=dotted)
def test_each_reloadable_setting_reaches_the_code_that_uses_it(key: tuple[str, ...]) -> None:
    old = Settings()
    new = Settings.model_validate({key[0]: {key[1]: other(old, key)}})
    assert list(changed(old, new)) == [(dotted(key), True)]
    assert with_reloaded(old, new) == new

    def held(live: LiveSettings, given: Settings) -> list[Any]:
        values = [getattr(live, one.name) for one in dataclasses.fields(live)]
        own = [one.now for one in values if isinstance(one, Live)] + [live.commands.allowed, live.pulls.allowed]
        return [*own, image_settings(given), stream_limits(given), given.peers.addresses]

    live, given = LiveSettings.from_settings(old), [old]
    live.others.append(given.append)
    before = held(live, given[-1])
    live.use(new)
    assert held(live, given[-1]) != before


def test_a_setting_that_takes_a_restart_stays_as_it_is() -> None:
    new = Settings.model_validate({"cri": {"socket": "/x", "pod_commands": 3}})
    assert with_reloaded(Settings(), new) == Settings.model_validate({"cri": {"pod_commands": 3}})


def test_new_limits_apply_to_containers_created_later(world: World) -> None:
    small = world.create(world.run())
    world.app.live.use(Settings.model_validate({"vm": {"default_memory": 128 * MIB, "min_memory": 100 * MIB}}))
    assert world.outside.vms.spec(world.domain(small)).size.memory_bytes == 1024 * MIB
    later = world.create(world.run("later"))
    assert world.outside.vms.spec(world.domain(later)).size.memory_bytes == 128 * MIB


def test_pods_keep_sessions_beyond_a_lowered_limit() -> None:
    room = StreamRoom(StreamLimits(pod_sessions=2))
    with room.session("a/b"), room.session("a/b"):
        room.allow(StreamLimits(pod_sessions=1))
        with pytest.raises(ResourceExhausted, match="the limit for one pod"), room.session("a/b"):
            pass


def test_no_image_is_pulled_from_a_newly_forbidden_network(tmp_path: Path) -> None:
    store = ImageFileStore(str(tmp_path), image_settings(Settings()))
    store.change(image_settings(Settings.model_validate({"images": {"forbidden_networks": ["127.0.0.0/8"]}})))
    with pytest.raises(InvalidRequest, match=r"127\.0\.0\.1"):
        store.fetch("127.0.0.1:9/disk.img", None, threading.Event())


def test_a_reload_makes_no_call_for_any_container(world: World) -> None:
    world.create(world.run(), config=container_config())
    before = len(world.journal.calls)
    world.app.live.use(Settings.model_validate({"vm": {"max_vcpus": 1}}))
    assert len(world.journal.calls) == before
