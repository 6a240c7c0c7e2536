"""A VM whose state is on a volume of its pods is saved on one node and continues on another, once."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.journal import Crash, When
from fakes.lasting import logged, memory, vm
from fakes.state_volume import KEY, ON_VOLUME, Cluster, is_continued, saved_on_first
from fakes.world import World, container_config

from virtshim.config.vms import Saved
from virtshim.model.container import Mount
from virtshim.model.errors import Aborted, InvalidRequest, ResourceExhausted, Unavailable, WrongState
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.layout import VM_RECORD
from virtshim.model.vm import Power
from virtshim.moves import state_volume
from virtshim.moves.volume_process import VolumePlace


def test_a_vm_continues_on_another_node_with_its_disk(cluster: Cluster) -> None:
    first, second = saved_on_first(cluster)
    container = cluster.run(second)
    assert is_continued(second, container)
    assert cluster.disk(second) == "of the first node"
    assert vm(second).saved is None
    assert not memory(second).exists()
    assert not list(cluster.folder.rglob("memory.save")), "this memory is used up"

    cluster.stop(second, container, written="of the second node")
    back = cluster.run(first)
    assert is_continued(first, back)
    assert cluster.disk(first) == "of the second node"


def test_the_guest_does_not_see_the_volume(cluster: Cluster) -> None:
    world = cluster.node()
    assert world.container(cluster.run(world)).spec.volumes == ()


def test_a_guest_that_was_shut_down_boots_on_another_node_with_its_newest_disk(cluster: Cluster) -> None:
    first, second = saved_on_first(cluster)
    container = cluster.run(first)
    Path(first.settings.layout().pod_disk(vm(first).disk)).write_text("newest")
    first.stop(container, 0)  # saves no memory
    first.remove_sandbox(first.container(container).sandbox_id)
    again = cluster.run(second)
    assert not is_continued(second, again)
    assert cluster.disk(second) == "newest"
    assert not any("the guest boots" in line for line in logged(second)), "nothing is lost"


def test_a_restart_in_the_pod_copies_nothing(cluster: Cluster) -> None:
    world = cluster.node()
    container = cluster.run(world)
    world.stop(container, 30)
    assert not list(cluster.folder.glob("state*"))


def test_on_the_same_node_nothing_is_copied_back(cluster: Cluster) -> None:
    world = cluster.node()
    cluster.stop(world, cluster.run(world), written="kept")
    for file in cluster.folder.rglob("root.qcow2"):
        file.write_text("changed by a tenant")
    assert is_continued(world, cluster.run(world))
    assert cluster.disk(world) == "kept"


def test_a_node_that_did_not_save_the_vm_is_named_and_the_last_saved_disk_is_used(cluster: Cluster) -> None:
    first, second = saved_on_first(cluster)
    lost = cluster.run(second)
    Path(second.settings.layout().pod_disk(vm(second).disk)).write_text("lost with the second node")
    assert second.container(lost).is_running
    container = cluster.run(first)
    assert not is_continued(first, container)
    assert cluster.disk(first) == "of the first node"
    (line,) = [line for line in logged(first) if "virtshim: the guest boots" in line]
    assert f"node {os.uname().nodename}, which" in line
    assert "has not copied it to its state volume" in line

    second.stop(lost, 30)  # it comes back
    second.remove_sandbox(second.container(lost).sandbox_id)
    again = cluster.run(second)
    assert not is_continued(second, again)
    assert cluster.disk(second) == "of the first node"


def test_a_vm_whose_node_died_before_the_first_save_starts_anew_and_the_log_says_so(cluster: Cluster) -> None:
    first, second = cluster.node(), cluster.node()
    lost = cluster.run(first)
    container = cluster.run(second)
    assert second.container(container).is_running
    assert any("its memory is lost, and nothing of it was copied" in line for line in logged(second))
    cluster.stop(second, container, written="of the second node")
    cluster.stop(first, lost)  # the dead node comes back
    assert is_continued(first, cluster.run(first))
    assert cluster.disk(first) == "of the second node"


def test_a_node_that_has_lost_the_vm_copies_nothing_to_the_volume(cluster: Cluster) -> None:
    first, second = saved_on_first(cluster)
    container = cluster.run(second)
    cluster.run(first)  # the cluster has given the second node up
    before = (cluster.folder / "record").read_bytes()
    cluster.stop(second, container, written="lost")
    assert (cluster.folder / "record").read_bytes() == before


def test_a_start_on_another_node_between_create_and_start_is_noticed(cluster: Cluster) -> None:
    first, second = saved_on_first(cluster)
    container = cluster.create(second)
    cluster.run(first)
    with pytest.raises(Aborted, match="create the container again"):
        second.start(container)


def test_a_state_is_discarded_after_its_time_also_on_the_volume(cluster: Cluster) -> None:
    first, second = cluster.node(keep=60.0), cluster.node(keep=60.0)
    cluster.stop(first, cluster.run(first), written="kept")
    for world in (first, second):
        world.outside.clock.advance(61)
    assert not is_continued(second, cluster.run(second))
    assert cluster.disk(second) == "kept"
    assert any("after saved.keep" in line for line in logged(second))
    first.app.watch.states.saving.expire()
    assert first.app.adapters.files.vms.all() == [], "the volume has all of it"


TAMPERED: dict[str, Callable[[Path], Any]] = {
    "a record that was changed": lambda folder: (folder / "record").write_bytes(
        (folder / "record").read_bytes().replace(b'"is_complete":true', b'"is_complete":1e0')
    ),
    "a record that was cut": lambda folder: os.truncate(folder / "record", 100),
    "an empty record": lambda folder: os.truncate(folder / "record", 0),
    "a record without a seal": lambda folder: (folder / "record").write_bytes(
        b"\n" + (folder / "record").read_bytes().partition(b"\n")[2]
    ),
    "a link in place of the record": lambda folder: (
        (folder / "record").replace(folder.parent / "x") and (folder / "record").symlink_to(folder.parent / "x")
    ),
    "a FIFO in place of the record": lambda folder: (folder / "record").unlink() or os.mkfifo(folder / "record"),
    "a directory in place of the record": lambda folder: (folder / "record").unlink() or (folder / "record").mkdir(),
    "an endless record": lambda folder: os.truncate(folder / "record", 1 << 40),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_a_tampered_record_is_refused_and_nothing_is_made(cluster: Cluster, what: str) -> None:
    _, second = saved_on_first(cluster)
    TAMPERED[what](cluster.folder)
    with pytest.raises(WrongState, match=r"remove virtshim-[0-9a-f]{20} from it to start the VM without that state"):
        cluster.create(second)
    assert list(second.records.containers.all()) == []
    assert second.app.adapters.files.vms.all() == []


def files(folder: Path, name: str) -> Path:
    (found,) = folder.glob(f"state-*/{name}")
    return found


SPOILT: dict[str, Callable[[Path], Any]] = {
    "changed": lambda file: file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:]),
    "cut": lambda file: os.truncate(file, file.stat().st_size - 1),
    "longer": lambda file: os.truncate(file, file.stat().st_size + 1),
    "missing": lambda file: file.unlink(),
    "a link": lambda file: file.replace(file.parent.parent / "x") and file.symlink_to(file.parent.parent / "x"),
    "a FIFO": lambda file: file.unlink() or os.mkfifo(file),
    "a directory": lambda file: file.unlink() or file.mkdir(),
}


@pytest.mark.parametrize("name", ["root.qcow2", "memory.save"])
@pytest.mark.parametrize("what", SPOILT)
def test_a_file_that_is_not_the_saved_one_is_refused_and_nothing_is_made(
    cluster: Cluster, name: str, what: str
) -> None:
    _, second = saved_on_first(cluster)
    SPOILT[what](files(cluster.folder, name))
    with pytest.raises(WrongState, match=f"the file {name} on the state volume is not the one that was saved"):
        cluster.create(second)
    assert second.app.adapters.files.vms.all() == []


def test_a_folder_that_is_a_link_is_refused(cluster: Cluster) -> None:
    _, second = saved_on_first(cluster)
    (folder,) = cluster.folder.glob("state-*")
    folder.replace(cluster.directory / "elsewhere")
    folder.symlink_to(cluster.directory / "elsewhere")
    with pytest.raises(WrongState, match="is not the one that was saved"):
        cluster.create(second)


def test_a_state_of_another_cluster_is_refused(cluster: Cluster) -> None:
    saved_on_first(cluster)
    with pytest.raises(WrongState, match="sealed with another cluster's key"):
        cluster.create(cluster.node(key=b"another" * 8))


def test_the_state_of_another_vm_is_refused(cluster: Cluster) -> None:
    _, second = saved_on_first(cluster)
    other = {**ON_VOLUME, "virtshim.io/vm": "other"}
    mount = Mount("/state", str(cluster.volume), readonly=False)
    elsewhere = cluster.node()
    container = elsewhere.create(cluster.pod(elsewhere, other), config=container_config(mounts=(mount,)))
    elsewhere.start(container)
    (theirs,) = [folder for folder in cluster.volume.iterdir() if not list(folder.glob("state-*"))]
    (ours,) = [folder for folder in cluster.volume.iterdir() if folder != theirs]
    (theirs / "record").replace(ours / "record")
    with pytest.raises(WrongState, match="is that of virtual machine default/other/vm"):
        cluster.create(second)


def test_a_vm_has_the_same_macs_on_all_nodes_of_a_cluster_and_others_elsewhere(cluster: Cluster) -> None:
    nodes = [cluster.node(), cluster.node(), cluster.node(key=b"another" * 8)]
    for node in nodes:
        cluster.pod(node)
    first, second, foreign = (node.outside.networks.requests[-1].macs for node in nodes)
    assert first == second
    assert first != foreign
    assert len(set(first.values())) == len(first) >= 2
    assert all(int(mac[:2], 16) & 3 == 2 for mac in first.values()), "locally administered, unicast"


def test_memory_whose_macs_a_network_does_not_give_is_discarded_and_the_log_says_so(cluster: Cluster) -> None:
    _, second = saved_on_first(cluster)
    second.outside.networks.own_macs = True
    container = cluster.run(second)
    assert not is_continued(second, container)
    assert cluster.disk(second) == "of the first node"
    assert any("its NIC eth0 has the MAC" in line for line in logged(second))


def test_an_older_state_than_this_node_knows_is_refused(cluster: Cluster) -> None:
    first = cluster.node()
    cluster.stop(first, cluster.run(first), written="old")
    before = (cluster.folder / "record").read_bytes()
    cluster.stop(first, cluster.run(first), written="new")
    (cluster.folder / "record").write_bytes(before)
    with pytest.raises(WrongState, match="older than this node's record of it") as refused:
        cluster.create(first)
    assert "virtshim vms rm default/db" in str(refused.value)


def test_old_files_are_removed_from_the_volume_and_a_tenants_are_left_alone(cluster: Cluster) -> None:
    world = cluster.node()
    for number in range(3):
        cluster.stop(world, cluster.run(world), written=str(number))
        (cluster.folder / f"tenants-{number}").mkdir()
    assert len(list(cluster.folder.glob("state-*"))) == 1
    assert len(list(cluster.folder.glob("tenants-*"))) == 3


def test_a_folder_that_a_tenant_has_filled_stops_the_copy_and_the_vm_stays_on_its_node(cluster: Cluster) -> None:
    world = cluster.node()
    container = cluster.run(world)
    crowded = cluster.folder / "state.half"
    crowded.mkdir()
    for number in range(200):
        (crowded / str(number)).touch()
    cluster.stop(world, container)
    assert not list(cluster.folder.glob("state-*"))
    assert is_continued(world, cluster.run(world))


def test_a_pod_stays_until_its_full_volume_has_room(cluster: Cluster) -> None:
    first, second = cluster.node(), cluster.node()
    container = cluster.run(first)
    with pytest.MonkeyPatch.context() as full:
        full.setattr(VolumePlace, "free_bytes", lambda _: 0)
        with pytest.raises(ResourceExhausted, match="give it room for two copies"):
            cluster.stop(first, container, written="kept")
    first.remove_sandbox(first.container(container).sandbox_id)
    assert is_continued(second, cluster.run(second))
    assert cluster.disk(second) == "kept"


def test_two_nodes_do_not_use_the_volume_at_once(cluster: Cluster) -> None:
    _, second = saved_on_first(cluster)
    with (cluster.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match="another node uses the VM's state volume"):
            cluster.create(second)
    assert is_continued(second, cluster.run(second))


def test_nothing_is_written_where_the_volume_is_no_longer_mounted(cluster: Cluster) -> None:
    world = cluster.node()
    container = cluster.run(world)
    cluster.volume.rename(cluster.directory / "unmounted")
    cluster.volume.mkdir()
    cluster.stop(world, container)
    assert list(cluster.volume.iterdir()) == []


def test_a_full_node_refuses_the_pod(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    _, second = saved_on_first(cluster)
    monkeypatch.setattr(state_volume, "free_bytes", lambda _: 0)
    with pytest.raises(ResourceExhausted, match=r"free below paths\.state_dir"):
        cluster.create(second)


@pytest.mark.parametrize(
    ("key", "mode", "words"),
    [(None, 0, "has no key"), (b"short", 0o600, "32 to 4096 bytes"), (KEY, 0o640, "mode 0600"), (b"", 0o600, "32 to")],
)
def test_a_node_without_a_good_key_refuses_the_pod(
    cluster: Cluster, tmp_path: Path, key: bytes | None, mode: int, words: str
) -> None:
    path = tmp_path / "key"
    if key is not None:
        path.write_bytes(key)
        path.chmod(mode)
    directory = tmp_path / "node"
    directory.mkdir()
    world = World(directory, saved=Saved(key_file=str(path) if key is not None else ""))
    cluster.worlds.append(world)
    with pytest.raises(WrongState, match=words):
        cluster.create(world)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"container_path": "/other"}, "is not a mountPath of the container"),
        ({"readonly": True}, "is mounted read-only"),
        ({"host_path": "/var/lib/kubelet/pods/uid-1/volumes/kubernetes.io~empty-dir/x"}, "is no PersistentVolumeClaim"),
        ({"host_path": "/var/lib/kubelet/pods/uid-1/volumes/kubernetes.io~secret/x"}, "is no PersistentVolumeClaim"),
    ],
)
def test_a_mount_that_cannot_carry_a_state_is_refused(cluster: Cluster, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"virtshim.io/state-volume: /state {words}"):
        cluster.create(cluster.node(), **changes)


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ({"virtshim.io/on-stop": "shutdown"}, "it needs virtshim.io/on-stop: save"),
        ({"virtshim.io/state-volume": "state"}, "is not a mountPath"),
        ({"virtshim.io/tpm": "true"}, "the state of a TPM cannot be copied"),
    ],
)
def test_annotations_that_a_state_volume_contradicts_are_refused(
    cluster: Cluster, annotations: dict[str, str], words: str
) -> None:
    world = cluster.node()
    with pytest.raises(InvalidRequest, match=words):
        world.create(cluster.pod(world, ON_VOLUME | annotations))


def clusters(tmp_path: Path) -> Callable[[], Cluster]:
    numbers = iter(range(1000))

    def new() -> Cluster:
        directory = tmp_path / str(next(numbers))
        (directory / "volume").mkdir(parents=True)
        return Cluster(directory, directory / "volume")

    return new


def closed(cluster: Cluster) -> None:
    for world in cluster.worlds:
        world.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # threads die with the process
def test_a_kill_after_any_step_on_the_next_node_loses_nothing_silently(tmp_path: Path) -> None:
    new = clusters(tmp_path)

    def next_node(cluster: Cluster) -> tuple[World, SandboxId]:
        _, second = saved_on_first(cluster)
        pod = cluster.pod(second)
        second.journal.forget()
        return second, pod

    def go(cluster: Cluster, world: World, pod: SandboxId, attempt: int = 0) -> ContainerId:
        mount = Mount("/state", str(cluster.volume), readonly=False)
        container = world.create(pod, attempt=attempt, config=container_config(mounts=(mount,)))
        world.start(container)
        return container

    cluster = new()
    world, pod = next_node(cluster)
    go(cluster, world, pod)
    calls = len(world.journal.calls)
    closed(cluster)
    assert calls > 10
    for at in range(1, calls + 1):
        cluster = new()
        world, pod = next_node(cluster)
        world.journal.crash(at, When.AFTER)
        with contextlib.suppress(Crash, Exception):
            go(cluster, world, pod)
        cluster.worlds[1] = world = world.recovered()
        world.app.watch.look()
        running = [one.id for one in world.records.containers.all() if one.is_running]
        container = running[0] if running else go(cluster, world, pod, attempt=1)
        assert world.outside.vms.power(world.domain(container)).power is Power.RUNNING
        assert cluster.disk(world) == "of the first node", f"at {at}"
        said = any("virtshim: the guest boots" in line for line in logged(world))
        assert world.outside.vms.restored or said, f"at {at}: the memory is lost, and nobody says so"
        assert [path.name for path in memory(world).parent.glob("*.half")] == [], f"at {at}"
        closed(cluster)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_vm_whose_stop_was_killed_after_any_step_continues_on_another_node(tmp_path: Path) -> None:
    new = clusters(tmp_path)

    def started(cluster: Cluster) -> tuple[World, ContainerId]:
        world = cluster.node()
        container = cluster.run(world)
        Path(world.settings.layout().pod_disk(vm(world).disk)).write_text("kept")
        world.journal.forget()
        return world, container

    cluster = new()
    world, container = started(cluster)
    cluster.stop(world, container)
    calls = len(world.journal.calls)
    closed(cluster)
    for at in range(1, calls + 1):
        cluster = new()
        world, container = started(cluster)
        sandbox = world.container(container).sandbox_id
        world.journal.crash(at, When.AFTER)
        with contextlib.suppress(Crash, Exception):
            cluster.stop(world, container)
        cluster.worlds[0] = world = world.recovered()
        world.app.watch.look()
        known = world.records.containers.get(container)
        if known is not None and known.is_running:
            world.stop(container, 30)
        is_saved = at == calls or vm(world).saved is not None
        if world.records.sandboxes.get(sandbox) is not None:
            world.remove_sandbox(sandbox)
        other = cluster.node()
        again = cluster.run(other)
        assert is_continued(other, again) == is_saved, f"at {at}"
        assert cluster.disk(other) == "kept", f"at {at}"
        closed(cluster)


def test_the_record_of_the_vm_itself_is_never_taken_from_the_volume_as_a_file(cluster: Cluster) -> None:
    saved_on_first(cluster)
    assert not list(cluster.folder.rglob(VM_RECORD))
