"""A VM on a state volume survives kills, full disks, tenants' files, other pods, and pods that are deleted early."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.background import Background
from fakes.journal import WAIT_LIMIT, Crash
from fakes.lasting import logged, memory, vm
from fakes.state_volume import ON_VOLUME, Cluster, is_continued, saved_on_first
from fakes.world import World

from virtshim.guest.operation import Action
from virtshim.model.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ResourceExhausted,
    ShimError,
    Unavailable,
    WrongState,
)
from virtshim.model.layout import VM_RECORD
from virtshim.moves.keeping import LastingVms
from virtshim.moves.volume_child import Tasks
from virtshim.moves.volume_process import VolumePlace

WITHOUT = {key: value for key, value in ON_VOLUME.items() if key != "virtshim.io/state-volume"}


def end(world: World, cluster: Cluster) -> None:
    """Stops the pod of the running container."""
    (running,) = [one.id for one in world.records.containers.all() if one.is_running]
    cluster.stop(world, running)


def boots_and_says_so(world: World) -> bool:
    return any("virtshim: the guest boots" in line for line in logged(world))


@contextlib.contextmanager
def dying_at(world: World, name: str) -> Iterator[None]:
    """The process dies before the call of that name."""

    def on_call(called: str) -> None:
        if called == name:
            raise Crash(name)

    world.journal.on_call = on_call
    with pytest.raises(Crash):
        yield
    world.journal.on_call = lambda _: None


def expire(world: World, seconds: float) -> None:
    world.outside.clock.advance(seconds)
    world.app.watch.states.saving.expire()


def lasting_vms(world: World) -> LastingVms:
    adapters, saving = world.app.adapters, world.app.watch.states.saving
    files, hypervisor = adapters.files, adapters.vm.hypervisor
    return LastingVms(world.records, files.vms, files.disks, hypervisor, world.images, saving.locks, saving.limits)


# --- the newest disk and the memory


def test_a_full_node_whose_starts_fail_keeps_its_newest_disk(cluster: Cluster) -> None:
    world = cluster.node()
    cluster.stop(world, cluster.run(world), written="old")
    container = cluster.run(world)
    cluster.write(world, "newest")
    world.stop(container, 30)
    pod = world.container(container).sandbox_id  # kubelet restarts the container in its pod
    for attempt in (1, 2):
        again = cluster.create_in(world, pod, attempt)
        full = iter((False, True))

        def on_call(name: str, full: Iterator[bool] = full) -> None:
            if name == "saved_vms.put" and next(full, False):
                raise ResourceExhausted("the disk is full")

        world.journal.on_call = on_call
        with pytest.raises(ResourceExhausted):
            world.start(again)
        world.journal.on_call = lambda _: None
    world.start(cluster.create_in(world, pod, 3))
    assert cluster.disk(world) == "newest"
    assert not any("last copy" in line for line in logged(world))


def test_a_pod_whose_start_was_killed_is_copied_with_its_memory(cluster: Cluster) -> None:
    """The volume has the new start, the node's record has not."""
    first, second = saved_on_first(cluster)
    container = cluster.create(first)
    pod = first.container(container).sandbox_id
    counted = iter((None, Crash("before the record is written")))

    def on_call(name: str) -> None:
        if name == "saved_vms.put" and (error := next(counted, None)):
            raise error

    first.journal.on_call = on_call
    with pytest.raises(Crash):
        first.start(container)
    cluster.worlds[0] = first = first.recovered()
    first.app.watch.look()
    first.remove_sandbox(pod)
    assert is_continued(second, cluster.run(second)), logged(second)


def test_a_created_container_in_the_pod_does_not_prevent_the_copy(cluster: Cluster) -> None:
    first, second = cluster.node(), cluster.node()
    container = cluster.run(first)
    cluster.write(first, "newest")
    first.stop(container, 30)
    pod = first.container(container).sandbox_id
    cluster.create_in(first, pod, attempt=1)  # kubelet restarts it, and the pod is deleted before the start
    first.remove_sandbox(pod)
    cluster.run(second)
    assert (cluster.disk(second), boots_and_says_so(second)) == ("newest", False)


def test_a_container_that_was_removed_before_its_pod_was_stopped_is_copied(cluster: Cluster) -> None:
    first, second = cluster.node(), cluster.node()
    container = cluster.run(first)
    first.stop(container, 30)
    pod = first.container(container).sandbox_id
    first.remove(container)
    first.remove_sandbox(pod)
    assert is_continued(second, cluster.run(second)), logged(second)


def test_a_pod_that_was_only_created_elsewhere_does_not_hide_the_newest_disk(cluster: Cluster) -> None:
    first, second = saved_on_first(cluster)
    cluster.run(first)
    created = cluster.create(second)  # the first node does not answer for a moment
    second.remove_sandbox(second.container(created).sandbox_id)
    cluster.write(first, "newest")
    end(first, cluster)
    assert is_continued(second, cluster.run(second))
    assert cluster.disk(second) == "newest"


def test_a_pod_that_was_created_before_the_copy_is_not_started_from_an_older_one(cluster: Cluster) -> None:
    first, second = saved_on_first(cluster)
    cluster.run(first)
    created = cluster.create(second)
    cluster.write(first, "newest")
    end(first, cluster)
    with pytest.raises(ShimError, match="create the container again"):
        second.start(created)
    second.start(cluster.create_in(second, second.container(created).sandbox_id, attempt=1))
    assert cluster.disk(second) == "newest"


def test_a_vm_on_a_volume_does_not_run_without_it(cluster: Cluster) -> None:
    world = cluster.node()
    cluster.stop(world, cluster.run(world))
    with pytest.raises(WrongState, match=r"needs the annotation virtshim\.io/state-volume.*virtshim vms rm default/db"):
        world.create(cluster.pod(world, WITHOUT))
    lasting_vms(world).remove("default", "db", "vm")
    world.start(world.create(cluster.pod(world, WITHOUT)))


def test_memory_is_not_used_again_after_the_volume_has_lost_its_record(cluster: Cluster) -> None:
    first, second = saved_on_first(cluster)
    assert is_continued(second, cluster.run(second))
    shutil.rmtree(cluster.folder)  # as error messages advise
    again = cluster.run(first)
    assert not is_continued(first, again)
    assert any("its memory may have been used elsewhere" in line for line in logged(first))
    cluster.write(first, "of the first node")
    end(first, cluster)
    end(second, cluster)
    cluster.run(second)
    assert cluster.disk(second) == "of the first node", "although both nodes count the same number of starts"


def test_a_host_that_gets_another_name_copies_its_vm(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = cluster.node(), cluster.node()
    cluster.run(first)
    monkeypatch.setattr("socket.gethostname", lambda: "node.example.org")
    end(first, cluster)
    assert is_continued(second, cluster.run(second)), logged(second)


def test_a_key_is_needed_before_the_pod_gets_its_network(cluster: Cluster) -> None:
    _, second = saved_on_first(cluster)
    key = Path(second.settings.saved.key_file)
    key.rename(key.with_name("later"))
    with pytest.raises(WrongState, match=r"saved\.key_file"):
        cluster.pod(second)
    key.with_name("later").rename(key)
    assert is_continued(second, cluster.run(second))


def test_a_vm_that_ran_without_a_volume_gets_the_macs_of_the_cluster(cluster: Cluster) -> None:
    first, second = cluster.node(), cluster.node()
    first.start(first.create(cluster.pod(first, WITHOUT)))
    end(first, cluster)
    cluster.stop(first, cluster.run(first))
    assert is_continued(second, cluster.run(second)), logged(second)


def test_memory_does_not_go_to_another_node_with_a_disk_that_was_changed_since(cluster: Cluster) -> None:
    first, second = cluster.node(), cluster.node()
    container = cluster.run(first)
    first.stop(container, 30)
    first.outside.written[""] = 1  # the root disk is written to after the save
    first.remove_sandbox(first.container(container).sandbox_id)
    assert not is_continued(second, cluster.run(second))
    assert any("its root disk was changed after its memory was saved" in line for line in logged(second))


def test_memory_is_not_used_if_the_record_is_lost_between_create_and_start(cluster: Cluster) -> None:
    first, second = saved_on_first(cluster)
    created = cluster.create(first)
    assert is_continued(second, cluster.run(second))
    shutil.rmtree(cluster.folder)
    first.start(created)
    assert not is_continued(first, created)


def test_a_vm_whose_removal_was_killed_does_not_run_without_its_volume(cluster: Cluster) -> None:
    world = cluster.node()
    cluster.stop(world, cluster.run(world))

    with dying_at(world, "saved_vms.forget"):
        lasting_vms(world).remove("default", "db", "vm")
    cluster.worlds[0] = world = world.recovered()
    with pytest.raises(WrongState, match="virtshim vms rm"):
        world.create(cluster.pod(world, WITHOUT))


def test_memory_that_lapsed_before_the_copy_is_named_on_the_next_node(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = cluster.node(keep=60.0), cluster.node(keep=60.0)
    container = cluster.run(first)
    with monkeypatch.context() as full:
        full.setattr(VolumePlace, "free_bytes", lambda _: 0)
        with pytest.raises(ResourceExhausted):
            cluster.stop(first, container)
    expire(first, 61)
    second.outside.clock.advance(61)
    first.remove_sandbox(first.container(container).sandbox_id)
    assert not is_continued(second, cluster.run(second))
    assert boots_and_says_so(second)


def test_a_vm_whose_record_cannot_be_read_for_a_moment_is_copied_later(cluster: Cluster) -> None:
    first, second = cluster.node(), cluster.node()
    container = cluster.run(first)
    first.stop(container, 30)
    record = memory(first).parent / VM_RECORD
    record.rename(record.with_name("aside"))
    record.mkdir()
    with pytest.raises(ShimError, match="cannot be read"):
        first.remove_sandbox(first.container(container).sandbox_id)
    record.rmdir()
    record.with_name("aside").rename(record)
    first.remove_sandbox(first.container(container).sandbox_id)
    assert is_continued(second, cluster.run(second)), logged(second)


def test_a_start_that_the_full_volume_refuses_fetches_nothing_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = saved_on_first(cluster)
    created = cluster.create(second)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(VolumePlace, "write", full)
        with pytest.raises(ResourceExhausted):
            second.start(created)
    for file in cluster.folder.rglob("root.qcow2"):
        file.write_text("changed by a tenant")
    again = cluster.create_in(second, second.container(created).sandbox_id, attempt=1)
    second.start(again)
    assert is_continued(second, again)


def test_renewed_and_saved_vms_move_too(cluster: Cluster) -> None:
    first, second = cluster.node(), cluster.node()
    container = cluster.run(first)
    first.do.stop_container.save(first.container(container), 30, Action.RENEW)
    cluster.write(first, "newest")
    end(first, cluster)
    again = cluster.run(second)
    assert (is_continued(second, again), cluster.disk(second)) == (True, "newest")
    second.do.stop_container.save(second.container(again), 30)
    following = cluster.create_in(second, second.container(again).sandbox_id, attempt=1)
    second.start(following)
    assert is_continued(second, following)
    end(second, cluster)
    assert is_continued(first, cluster.run(first))


# --- kills while files are removed


def test_a_kill_while_files_are_forgotten_leaves_the_volumes_copy_in_use(cluster: Cluster) -> None:
    world = cluster.node(keep=60.0)
    cluster.stop(world, cluster.run(world), written="newest")
    directory = memory(world).parent

    def on_call(name: str) -> None:
        if name == "saved_vms.forget":
            for file in directory.iterdir():
                if file.name != VM_RECORD:
                    file.unlink()
            raise Crash(name)

    world.journal.on_call = on_call
    with pytest.raises(Crash):
        expire(world, 61)
    cluster.worlds[0] = world = world.recovered()  # kubelet's next call comes before the first look
    cluster.run(world)
    assert cluster.disk(world) == "newest"


def test_files_that_a_killed_removal_has_left_are_removed_by_the_next_look(cluster: Cluster) -> None:
    world = cluster.node(keep=60.0)
    cluster.stop(world, cluster.run(world))

    with dying_at(world, "saved_vms.forget"):
        expire(world, 61)
    cluster.worlds[0] = world = world.recovered()
    expire(world, 0)
    assert world.app.adapters.files.vms.all() == []


def test_a_kill_while_a_vm_is_removed_leaves_the_volumes_copy_in_use(cluster: Cluster) -> None:
    world = cluster.node()
    cluster.stop(world, cluster.run(world), written="newest")
    disk = Path(world.settings.layout().pod_disk(vm(world).disk))

    def on_call(name: str) -> None:
        if name == "saved_vms.forget":
            disk.unlink()
            raise Crash(name)

    world.journal.on_call = on_call
    with pytest.raises(Crash):
        lasting_vms(world).remove("default", "db", "vm")
    cluster.worlds[0] = world = world.recovered()
    cluster.run(world)
    assert cluster.disk(world) == "newest"


def test_a_killed_copy_from_the_volume_leaves_nothing_for_good(cluster: Cluster) -> None:
    _, second = saved_on_first(cluster)
    pod = cluster.pod(second)

    with dying_at(second, "saved_vms.root_fingerprint"):
        cluster.create_in(second, pod)
    cluster.worlds[1] = second = second.recovered()
    second.remove_sandbox(pod)
    expire(second, 2 * 86400)
    assert list(Path(second.settings.layout().vms).iterdir()) == []


def test_a_vm_that_was_given_up_half_is_not_copied_as_a_whole(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, second = cluster.node(), cluster.node()
    container = cluster.run(world)
    with monkeypatch.context() as full:
        full.setattr(VolumePlace, "free_bytes", lambda _: 0)
        with pytest.raises(ResourceExhausted):
            cluster.stop(world, container)
    disk = Path(world.settings.layout().pod_disk(vm(world).disk))

    def on_call(name: str) -> None:
        if name == "saved_vms.forget":
            disk.unlink(missing_ok=True)
            raise Crash(name)

    world.journal.on_call = on_call
    with pytest.raises(Crash):
        lasting_vms(world).remove("default", "db", "vm")
    world.journal.on_call = lambda _: None
    pod = world.container(container).sandbox_id
    cluster.worlds[0] = world = world.recovered()
    world.remove_sandbox(pod)
    cluster.run(second)
    assert boots_and_says_so(second)


def test_a_vm_whose_first_start_failed_is_not_copied_half_after_a_killed_removal(cluster: Cluster) -> None:
    """The volume has the first start, the node's record has not."""
    world = cluster.node()
    created = cluster.create(world)
    pod = world.container(created).sandbox_id
    counted = iter((None, ResourceExhausted("the disk is full")))

    def refuses(name: str) -> None:
        if name == "saved_vms.put" and (error := next(counted, None)):
            raise error

    world.journal.on_call = refuses
    with pytest.raises(ResourceExhausted):
        world.start(created)

    with dying_at(world, "saved_vms.forget"):
        lasting_vms(world).remove("default", "db", "vm")
    cluster.worlds[0] = world = world.recovered()
    world.remove_sandbox(pod)
    assert not list(cluster.folder.glob("state-*"))


def test_files_of_a_vm_that_was_shut_down_go_after_their_time_too(cluster: Cluster) -> None:
    world = cluster.node(keep=60.0)
    container = cluster.run(world)
    world.stop(container, 0)  # saves no memory
    world.remove_sandbox(world.container(container).sandbox_id)
    expire(world, 59)
    assert vm(world)
    expire(world, 2)
    assert world.app.adapters.files.vms.all() == []


def test_a_killed_copy_takes_no_room_from_its_repeat(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    world = cluster.node()
    cluster.stop(world, cluster.run(world), written="x" * 1000)
    container = cluster.run(world)
    world.stop(container, 30)
    (cluster.folder / "state-77").mkdir()  # of a copy that was killed before its record was written
    (cluster.folder / "state-77" / "root.qcow2").touch()
    seen = []

    def free_bytes(_: VolumePlace) -> int:
        seen.append(sorted(path.name for path in cluster.folder.glob("state-*")))
        return 1 << 40

    monkeypatch.setattr(VolumePlace, "free_bytes", free_bytes)
    world.remove_sandbox(world.container(container).sandbox_id)
    assert seen == [["state-1"]], "only the last copy was there when the room was looked at"
    assert [path.name for path in cluster.folder.glob("state-*")] == ["state-2"]


# --- other pods


@contextlib.contextmanager
def copying(cluster: Cluster, world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A large VM is being copied to its volume."""
    container = cluster.run(world)
    world.stop(container, 30)
    begun, opened = threading.Event(), threading.Event()

    def free_bytes(_: VolumePlace) -> int:
        begun.set()
        assert opened.wait(WAIT_LIMIT)
        return 1 << 40

    monkeypatch.setattr(VolumePlace, "free_bytes", free_bytes)
    stopping = Background(lambda: world.stop_sandbox(world.container(container).sandbox_id))
    assert begun.wait(WAIT_LIMIT)
    try:
        yield
    finally:
        opened.set()
        stopping.done()


def test_the_watch_over_all_pods_continues_while_one_is_copied(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = cluster.node()
    with copying(cluster, world, monkeypatch):
        world.app.watch.look()


def test_other_pods_are_created_while_the_vms_next_pod_waits_for_the_copy(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = cluster.node()
    with copying(cluster, world, monkeypatch):
        next_pod = Background(lambda: cluster.create(world))
        assert not next_pod.ended_within(0.1)
        world.create(world.run("web"))
        world.images.remove("no-such-image")
        assert not next_pod.ended_within(0)
    next_pod.done()


def test_a_repeated_stop_waits_for_the_copy_only_until_its_deadline(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = cluster.node()
    with copying(cluster, world, monkeypatch):
        (sandbox,) = world.records.sandboxes.all()
        with pytest.raises(DeadlineExceeded, match="still being copied to its state volume"):
            world.do.stop_sandbox.stop(sandbox, world.deadline(0.01))


def test_a_vm_that_cannot_be_discarded_does_not_keep_others(cluster: Cluster) -> None:
    world = cluster.node(keep=60.0)
    for name in ("db", "zz"):
        pod = cluster.pod(world, {**ON_VOLUME, "virtshim.io/vm": name})
        container = cluster.create_in(world, pod)
        world.start(container)
        world.stop(container, 30)
        world.remove_sandbox(pod)
    world.journal.fail("saved_vms.forget", ResourceExhausted("the disk is full"))
    expire(world, 61)
    assert vm(world).name == "db"


def test_a_stop_does_not_wait_for_a_start_that_waits_for_a_copy(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = cluster.node()
    container = cluster.run(world)
    world.stop(container, 30)
    created = cluster.create(world)  # the VM's next pod, before the last one has stopped
    begun, opened = threading.Event(), threading.Event()

    def free_bytes(_: VolumePlace) -> int:
        begun.set()
        assert opened.wait(WAIT_LIMIT)
        return 1 << 40

    monkeypatch.setattr(VolumePlace, "free_bytes", free_bytes)
    stopping = Background(lambda: world.stop_sandbox(world.container(container).sandbox_id))
    assert begun.wait(WAIT_LIMIT)
    with pytest.raises(Unavailable, match="such as its copy to the state volume"):
        world.start(created)
    opened.set()
    stopping.done()


# --- volumes


def test_a_pod_whose_volume_was_unmounted_by_hand_can_be_stopped(cluster: Cluster) -> None:
    world = cluster.node()
    cluster.run(world)
    cluster.volume.rename(cluster.directory / "unmounted")
    end(world, cluster)
    assert world.records.sandboxes.all() == []


@pytest.mark.parametrize("name", ["lock", "record"])
def test_no_device_that_a_tenant_has_made_is_opened(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    _, second = saved_on_first(cluster)
    (cluster.folder / name).unlink()
    try:
        os.mknod(cluster.folder / name, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("needs CAP_MKNOD")
    opened: list[object] = []
    real = os.open

    def noted(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        found = real(path, flags, mode, dir_fd=dir_fd)
        if stat.S_ISCHR(os.fstat(found).st_mode) and not flags & os.O_PATH:
            opened.append(path)
        return found

    with pytest.raises(WrongState, match=r"remove virtshim-[0-9a-f]{20} from it"):
        cluster.create(second)
    child = Tasks()  # in this process, to see what it opens
    child.volume(str(cluster.volume))
    with monkeypatch.context() as seen:
        seen.setattr(os, "open", noted)
        with pytest.raises(OSError, match="no regular file"):
            _ = child.lock(cluster.folder.name, make=False) and child.read()
    assert opened == []


def test_a_part_of_a_volume_is_refused(cluster: Cluster) -> None:
    world = cluster.node()
    part = cluster.directory / "pods" / "uid-1" / "volume-subpaths" / "scratch" / "vm" / "0"
    part.mkdir(parents=True)
    with pytest.raises(InvalidRequest, match=r"a part of a volume \(subPath\)"):
        cluster.create(world, host_path=str(part))


@pytest.mark.parametrize("what", ["lock", "record.new"])
def test_a_directory_in_the_way_is_named_with_the_remedy(cluster: Cluster, what: str) -> None:
    first, _ = saved_on_first(cluster)
    (cluster.folder / what).unlink(missing_ok=True)
    (cluster.folder / what).mkdir()
    with pytest.raises(WrongState, match=r"remove virtshim-[0-9a-f]{20} from it"):
        cluster.run(first)
