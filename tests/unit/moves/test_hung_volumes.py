"""If the server of a state volume, or of a disk on a volume, is gone, only the calls of its own pod fail. They fail in
limited time, with a clear error, and at once if the pod is being stopped."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.background import Background
from fakes.journal import WAIT_LIMIT
from fakes.lasting import vm
from fakes.state_volume import Cluster, is_continued, saved_on_first
from fakes.waiting import eventually
from slow_fuse import dead_directory

from virtshim.model.container import ContainerPhase
from virtshim.model.errors import Aborted, InternalError, Unavailable
from virtshim.moves import volume_process
from virtshim.moves.volume_process import opened_volume, volume_fingerprint

HUNG = r"has not answered for [0-9.]+ s; its server may be gone, so check the node's mounts"


@pytest.fixture
def dead(tmp_path: Path) -> Iterator[Path]:
    yield from dead_directory(tmp_path / "dead")


class Hang:
    """From its call on the cluster's volume does not answer. Only then is the patience short: a busy machine also delays a
    volume that answers."""

    def __init__(self, cluster: Cluster, dead: Path, patched: pytest.MonkeyPatch) -> None:
        self._cluster, self._dead, self._patched = cluster, dead, patched
        self._aside = cluster.directory / "aside"

    def __call__(self, patience: float = 0.5) -> None:
        self._cluster.volume.rename(self._aside)
        self._cluster.volume.symlink_to(self._dead)
        self._patched.setattr(volume_process, "PATIENCE", patience)

    def is_over(self) -> None:
        self._cluster.volume.unlink()
        self._aside.rename(self._cluster.volume)
        self._patched.setattr(volume_process, "PATIENCE", WAIT_LIMIT)


@pytest.fixture
def hung(cluster: Cluster, dead: Path, monkeypatch: pytest.MonkeyPatch) -> Hang:
    return Hang(cluster, dead, monkeypatch)


def all_children() -> set[int]:
    """Of all threads of this process."""
    return {int(pid) for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()}


@pytest.fixture
def children() -> Callable[[], set[int]]:
    """This process may have others, of tests before."""
    earlier = all_children()
    return lambda: all_children() - earlier


# --- the calls of the pod


def test_a_container_whose_volume_hangs_is_created_once_it_answers(cluster: Cluster, hung: Hang) -> None:
    _, second = saved_on_first(cluster)
    pod = cluster.pod(second)
    hung()
    with pytest.raises(Unavailable, match=HUNG):
        cluster.create_in(second, pod)
    hung.is_over()
    again = cluster.create_in(second, pod)
    second.start(again)
    assert is_continued(second, again)


def test_a_start_on_a_hung_volume_fails_and_is_repeated(cluster: Cluster, hung: Hang) -> None:
    first, _ = saved_on_first(cluster)
    created = cluster.create(first)
    hung()
    with pytest.raises(Unavailable, match=HUNG):
        first.start(created)
    failed = first.container(created)
    assert failed.phase is ContainerPhase.EXITED
    assert failed.exit is not None
    assert "has not answered" in failed.exit.message
    hung.is_over()
    again = cluster.create_in(first, failed.sandbox_id, attempt=1)
    first.start(again)
    assert is_continued(first, again), "its memory is not lost"


def test_a_stop_with_a_hung_volume_saves_on_the_node_and_copies_once_it_answers(cluster: Cluster, hung: Hang) -> None:
    first, second = cluster.node(), cluster.node()
    container = cluster.run(first)
    hung()
    first.stop(container, 30)
    exited = first.container(container)
    assert exited.exit is not None
    assert exited.exit.reason.value == "Saved"
    with pytest.raises(Unavailable, match=HUNG):
        first.stop_sandbox(exited.sandbox_id)
    hung.is_over()
    first.remove_sandbox(exited.sandbox_id)
    assert is_continued(second, cluster.run(second))


def test_other_pods_and_recovery_go_on_while_a_volume_hangs(
    cluster: Cluster, hung: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = cluster.node()
    container = cluster.run(world)
    world.stop(container, 30)
    hung(WAIT_LIMIT)
    looks = threading.Event()
    real = volume_process.VolumeProcess.ask

    def ask(*order: object) -> object:
        looks.set()
        return real(*order)

    with monkeypatch.context() as seen:
        seen.setattr(volume_process.VolumeProcess, "ask", ask)
        copying = Background(lambda: world.stop_sandbox(world.container(container).sandbox_id))
        assert looks.wait(WAIT_LIMIT)
    other = world.run("web")
    world.start(world.create(other))
    world.remove_sandbox(other)
    world.app.watch.look()
    restarted = world.recovered()
    cluster.worlds[0] = restarted
    assert vm(restarted).saved is not None
    assert not copying.ended_within(0)


# --- stops of the pod meanwhile


def test_a_stop_ends_a_start_that_waits_for_a_hung_volume(
    cluster: Cluster, hung: Hang, children: Callable[[], set[int]]
) -> None:
    first, _ = saved_on_first(cluster)
    created = cluster.create(first)
    hung(WAIT_LIMIT)
    starting = Background(lambda: first.start(created))
    eventually(lambda: bool(children()))
    began = time.monotonic()
    first.stop(created, 30)
    assert time.monotonic() - began < WAIT_LIMIT / 2
    with pytest.raises(Aborted, match="is being stopped, so its start was given up"):
        starting.done()


def test_a_stop_of_the_pod_ends_a_create_that_waits_for_a_hung_volume(
    cluster: Cluster, hung: Hang, children: Callable[[], set[int]]
) -> None:
    _, second = saved_on_first(cluster)
    pod = cluster.pod(second)
    hung(WAIT_LIMIT)
    creating = Background(lambda: cluster.create_in(second, pod))
    eventually(lambda: bool(children()))
    began = time.monotonic()
    second.remove_sandbox(pod)
    assert time.monotonic() - began < WAIT_LIMIT / 2
    with pytest.raises(Aborted, match="is being stopped"):
        creating.done()


# --- disks on other volumes


def test_a_disk_on_a_hung_volume_cannot_be_looked_at(dead: Path) -> None:
    with pytest.raises(Unavailable, match=HUNG):
        volume_fingerprint(f"{dead}/disk.img", 0.5, threading.Event(), is_file=True)


def test_a_guest_whose_disk_hangs_is_shut_down_instead_of_saved_and_the_message_says_why(
    cluster: Cluster, dead: Path
) -> None:
    world = cluster.node()
    container = cluster.run(world)
    with pytest.raises(Unavailable) as hangs:
        volume_fingerprint(f"{dead}/disk.img", 0.2, threading.Event(), is_file=True)
    world.journal.fail("saved_vms.fingerprints", hangs.value)
    world.stop(container, 30)
    exited = world.container(container).exit
    assert exited is not None
    assert exited.reason.value != "Saved"
    assert (
        f"the guest's memory was not saved: the volume at {dead}/disk.img has not answered for 0.2 s" in exited.message
    )
    assert vm(world).saved is None


def test_a_start_whose_disk_hangs_keeps_the_memory_for_the_next_attempt(cluster: Cluster, dead: Path) -> None:
    first, _ = saved_on_first(cluster)
    created = cluster.create(first)
    with pytest.raises(Unavailable) as hangs:
        volume_fingerprint(f"{dead}/disk.img", 0.2, threading.Event(), is_file=True)
    first.journal.fail("saved_vms.fingerprints", hangs.value)
    with pytest.raises(Unavailable, match="has not answered"):
        first.start(created)
    again = cluster.create_in(first, first.container(created).sandbox_id, attempt=1)
    first.start(again)
    assert is_continued(first, again)


# --- the process


def test_nothing_of_a_hung_process_is_left(
    dead: Path, monkeypatch: pytest.MonkeyPatch, children: Callable[[], set[int]]
) -> None:
    monkeypatch.setattr(volume_process, "PATIENCE", 0.5)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Unavailable, match=HUNG), opened_volume(str(dead), threading.Event()):
        pass
    assert not children()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_copy_that_goes_on_may_take_longer_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "volume").mkdir()
    source = tmp_path / "disk"
    os.truncate(os.open(source, os.O_CREAT | os.O_WRONLY), 2 << 30)
    with opened_volume(str(tmp_path / "volume"), threading.Event()) as place:
        place.enter("vm", make=True)
        place.make_room(0)
        place.begin()
        monkeypatch.setattr(volume_process, "PATIENCE", 1.0)
        began = time.monotonic()
        assert place.add("disk", source).bytes == 2 << 30
        assert time.monotonic() - began > 1.0, "it was no long copy"


def test_a_process_that_is_killed_is_an_error_and_not_an_endless_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: Callable[[], set[int]]
) -> None:
    monkeypatch.setattr(volume_process, "PATIENCE", WAIT_LIMIT)
    with opened_volume(str(tmp_path), threading.Event()) as place:
        (child,) = children()
        os.kill(child, 9)
        with pytest.raises(InternalError, match="has ended: killed by signal 9"):
            place.enter("vm", make=True)


@pytest.mark.parametrize("odd", ["with space", "line\nbreak", "\udcff"])
def test_volumes_of_any_name_are_opened(tmp_path: Path, odd: str) -> None:
    (tmp_path / odd).mkdir()
    with opened_volume(str(tmp_path / odd), threading.Event()) as place:
        place.enter("vm", make=True)
        place.write(b"\0\xff" * 100_000)
        assert place.read() == b"\0\xff" * 100_000
