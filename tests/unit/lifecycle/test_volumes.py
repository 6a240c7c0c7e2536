"""A container's volumes over its life: served before its VM starts, let go before its end is told, never silently gone."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.waiting import eventually
from fakes.world import World, container_config, sandbox_config

from virtshim.cri.to_proto import container_status
from virtshim.domain.annotations.parse import parse_vm_options
from virtshim.domain.container import ContainerPhase, Mount
from virtshim.domain.errors import InvalidRequest, ShimError, Unavailable, WrongState
from virtshim.domain.guest.command import CommandResult, GuestCommand
from virtshim.domain.ids import ContainerId
from virtshim.domain.vm import OffReason
from virtshim.domain.volumes.guest_script import BUSY, NO_MODULE
from virtshim.domain.volumes.memory_volumes import MemoryVolume, Tmpfs

DATA = container_config(mounts=(Mount("/data", "/srv"), Mount("/data/sub", "/srv/sub", readonly=True)))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    world.pull()
    yield world
    world.close()


def running(world: World) -> ContainerId:
    made = world.create(world.run(), config=DATA)
    world.start(made)
    return made


def mount_scripts(world: World) -> list[GuestCommand]:
    return [command for command in world.outside.guests.commands if "virtshim-volumes" in command.argv]


def test_they_are_served_before_the_vm_starts_and_its_memory_is_shared(world: World) -> None:
    made = world.create(world.run(), config=DATA)
    world.journal.calls.clear()
    world.start(made)
    assert world.journal.calls.index("shares.start") < world.journal.calls.index("vms.start")
    (spec,) = world.outside.vms.running()
    assert spec.shares_socket == f"/run/virtshim/shares/{made.short}/fs.sock"


def test_a_container_without_volumes_has_no_daemon(world: World) -> None:
    world.running()
    assert world.outside.shares.shares == {}
    (spec,) = world.outside.vms.running()
    assert spec.shares_socket == ""


def test_they_are_let_go_before_the_end_is_told(world: World) -> None:
    made = running(world)
    ended_before = []
    world.records.containers.on_change(
        lambda _before, now: (
            ended_before.append(dict(world.outside.shares.shares))
            if now is not None and now.phase is ContainerPhase.EXITED
            else None
        )
    )
    world.outside.vms.end(world.domain(made), OffReason.SHUTDOWN)
    world.deliver()
    assert ended_before == [{}]


def test_an_end_is_not_told_while_they_are_held(world: World) -> None:
    made = running(world)
    world.outside.shares.error = WrongState("process 7, which serves volumes to a VM, does not end")
    with pytest.raises(ShimError, match="does not end"):
        world.stop(made)
    assert world.container(made).is_running
    world.outside.shares.error = None
    world.stop(made)
    assert world.container(made).phase is ContainerPhase.EXITED
    assert world.outside.shares.shares == {}


def test_a_start_that_fails_leaves_none(world: World) -> None:
    made = world.create(world.run(), config=DATA)
    world.outside.shares.missing.add("/srv/sub")
    with pytest.raises(ShimError, match="/srv/sub"):
        world.start(made)
    assert world.container(made).phase is ContainerPhase.EXITED
    assert world.outside.shares.shares == {}


def test_a_daemon_that_has_ended_is_told_until_the_container_ends(world: World) -> None:
    made = running(world)
    world.app.watch.look()
    assert world.container(made).status.trouble == ""
    world.outside.shares.dead.add(made.short)
    world.app.watch.look()
    assert "virtiofsd" in world.container(made).status.trouble
    assert "restart the container" in world.container(made).status.trouble


def test_a_guest_without_virtiofs_is_told_in_the_message(world: World) -> None:
    world.outside.guests.do = lambda command, timeout, cancelled: CommandResult(
        NO_MODULE, b"", b"its kernel has no virtiofs (module virtiofs, Linux 5.4)\n"
    )
    made = running(world)
    eventually(lambda: world.app.watch.look() or world.container(made).status.trouble)
    assert "module virtiofs" in world.container(made).status.trouble
    assert list(container_status(world.container(made)).mounts) == []
    world.outside.guests.do = lambda command, timeout, cancelled: CommandResult(0, b"", b"")
    world.app.guest_set_up.changed(world.domain(made))
    eventually(lambda: len(container_status(world.container(made)).mounts) == 2)


def test_a_guest_that_is_still_mounting_them_is_asked_again_and_nothing_is_wrong(world: World) -> None:
    answers = [CommandResult(BUSY, b"", b"another run of this script goes on\n"), CommandResult(0, b"", b"")]
    world.outside.guests.do = lambda command, timeout, cancelled: answers.pop(0) if len(answers) > 1 else answers[0]
    made = running(world)
    eventually(lambda: not [one for one in threading.enumerate() if one.name.startswith("set-up-")])
    world.app.watch.look()
    assert len(mount_scripts(world)) == 2
    assert world.container(made).status.trouble == ""


def test_they_are_mounted_by_the_agent_and_again_after_the_guest_was_restarted(world: World) -> None:
    made = running(world)
    eventually(lambda: len(mount_scripts(world)) == 1)
    assert mount_scripts(world)[0].argv[-8:] == ("0", "/data", "rw", "-", "1", "/data/sub", "ro", "0")
    eventually(lambda: not [one for one in threading.enumerate() if one.name.startswith("set-up-")])
    world.app.guest_set_up.changed(world.domain(made))
    eventually(lambda: len(mount_scripts(world)) == 2)


def test_of_a_container_with_a_command_they_are_mounted_once_before_it_begins(world: World) -> None:
    made = world.create(world.run(), config=container_config(mounts=DATA.mounts, command=("serve",)))
    world.start(made)
    eventually(lambda: world.container(made).status.command_begun)
    eventually(lambda: not [one for one in threading.enumerate() if one.name.startswith("set-up-")])
    assert len(mount_scripts(world)) == 1


def test_a_guest_whose_agent_may_not_run_commands_is_left_to_cloud_init(world: World) -> None:
    def refuses(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
        raise WrongState("the agent may not run commands")

    world.outside.guests.do = refuses
    made = running(world)
    eventually(lambda: not [one for one in threading.enumerate() if one.name.startswith("set-up-")])
    world.app.watch.look()
    assert world.container(made).status.trouble == ""


def test_such_a_vm_cannot_be_checkpointed(world: World) -> None:
    made = running(world)
    with pytest.raises(WrongState, match=r"volumes .*/data"):
        world.do.checkpoint_container.checkpoint(world.container(made), "/var/x.tar", world.deadline())


def test_daemons_of_nobody_and_of_the_ended_are_ended_by_the_next_start_and_others_are_not(world: World) -> None:
    made = running(world)
    volumes = world.container(made).spec.volumes
    world.outside.shares.shares["f" * 20] = volumes
    world = world.recovered()
    try:
        assert set(world.outside.shares.shares) == {made.short}
    finally:
        world.close()


def test_a_node_whose_share_program_is_away_starts_and_ends_nothing(world: World) -> None:
    made = running(world)
    world.outside.shares.gone = True
    world = world.recovered()
    try:
        assert world.container(made).is_running
        with pytest.raises(Unavailable):
            world.create(world.run("other"), config=DATA)
    finally:
        world.close()


# --- emptyDirs that are the guest's own

CACHE = "/var/lib/kubelet/pods/uid-of-web/volumes/kubernetes.io~empty-dir/cache"
IN_MEMORY = {"virtshim.io/memory-volumes": "/dev/shm/\n"}
WITH_CACHE = container_config(mounts=(Mount("/dev/shm", CACHE),))
MADE = Tmpfs(64 << 20, 0o2777, 0, 1000)


def with_cache(world: World, annotations: dict[str, str]) -> ContainerId:
    made = world.create(world.run(config=sandbox_config(annotations=annotations)), config=WITH_CACHE)
    world.start(made)
    return made


def test_an_empty_dir_in_memory_is_shared_so_that_its_files_outlive_the_guest(world: World) -> None:
    world.outside.kubelet_volumes.tmpfs[CACHE] = MADE
    made = with_cache(world, {})
    assert [volume.guest for volume in world.container(made).spec.volumes] == ["/dev/shm"]
    assert world.outside.shares.shares[made.short]


def test_one_that_the_pod_names_is_a_tmpfs_of_the_guests_and_needs_no_daemon(world: World) -> None:
    world.outside.kubelet_volumes.tmpfs[CACHE] = MADE
    made = with_cache(world, IN_MEMORY)
    wanted = (MemoryVolume("/dev/shm", CACHE, MADE),)
    assert (world.container(made).spec.volumes, world.container(made).spec.memory_volumes) == ((), wanted)
    assert world.outside.shares.shares == {}
    (seed,) = world.outside.seeds.requests.values()
    assert seed.memory_volumes == wanted  # for cloud-init
    eventually(lambda: mount_scripts(world))
    words = mount_scripts(world)[0].argv  # for a guest without
    assert words[-4:] == ("m0", "/dev/shm", "size=67108864,mode=2777,uid=0,gid=1000,nosuid,nodev", "-")
    again = world.restarted()
    assert again.container(made).spec.memory_volumes == wanted
    again.close()


def test_its_size_is_no_more_than_the_guests_memory(world: World) -> None:
    world.outside.kubelet_volumes.tmpfs[CACHE] = dataclasses.replace(MADE, size_bytes=1 << 40)
    made = with_cache(world, IN_MEMORY)
    (volume,) = world.container(made).spec.memory_volumes
    assert volume.tmpfs.size_bytes == world.container(made).status.size.memory_bytes


def test_one_with_files_of_an_init_container_is_refused_since_they_would_be_hidden(world: World) -> None:
    world.outside.kubelet_volumes.tmpfs[CACHE] = MADE
    world.outside.kubelet_volumes.filled.add(CACHE)
    with pytest.raises(WrongState, match=r"memory-volumes: config\.mounts\[/dev/shm\]: .* has files already"):
        with_cache(world, IN_MEMORY)
    assert not world.records.containers.all()


@pytest.mark.parametrize(
    "host",
    [
        "/srv",
        CACHE,
        f"{CACHE}/sub",
        CACHE.replace("uid-of-web", "another"),
        CACHE.replace("empty-dir", "csi"),
        "/var/lib/kubelet/pods/uid-of-web/volume-subpaths/cache/vm/0",
    ],
)
def test_a_volume_that_is_no_empty_dir_in_memory_of_the_pods_is_refused_by_its_field(world: World, host: str) -> None:
    world.outside.kubelet_volumes.tmpfs["/elsewhere"] = MADE
    sandbox = world.run(config=sandbox_config(annotations=IN_MEMORY))
    with pytest.raises(InvalidRequest, match=r"memory-volumes: config\.mounts\[/dev/shm\]: .*medium: Memory"):
        world.create(sandbox, config=container_config(mounts=(Mount("/dev/shm", host),)))
    assert not world.records.containers.all()


def test_an_empty_dir_of_huge_pages_is_refused_and_nothing_is_left(world: World) -> None:
    world.outside.shares.hugetlbfs.add(CACHE)
    with pytest.raises(InvalidRequest, match="hugetlbfs; remove the volume"):
        with_cache(world, {})
    assert not world.records.containers.all()


@pytest.mark.parametrize("text", ["dev/shm", "/a/../b", "/a\n/a/", "\n".join(f"/{n}" for n in range(17))])
def test_paths_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"annotation virtshim\.io/memory-volumes: "):
        parse_vm_options({"virtshim.io/memory-volumes": text})
