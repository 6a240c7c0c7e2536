"""A container's volumes are served before its VM starts and released before its end is reported, and every loss is
reported."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
from fakes.guests import Run
from fakes.waiting import eventually
from fakes.world import World, container_config, sandbox_config

from virtshim.annotations.parse import parse_vm_options
from virtshim.config.settings import Volumes
from virtshim.cri.to_proto import container_status
from virtshim.guest.command import CommandResult, GuestCommand
from virtshim.model.container import ContainerConfig, ContainerPhase, Exit, ExitReason, Mount
from virtshim.model.errors import Aborted, DeadlineExceeded, InvalidRequest, ShimError, Unavailable, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.vm import OffReason
from virtshim.volumes import empty_disks
from virtshim.volumes.memory_volumes import MemoryVolume, Tmpfs
from virtshim.volumes.mount_script import BUSY, NO_MODULE, NOT_MOUNTED

READ_ONLY = container_config(mounts=(Mount("/a", "/srv/a", readonly=True), Mount("/b", "/srv/b", readonly=True)))
DATA = container_config(mounts=(Mount("/data", "/srv"), Mount("/data/sub", "/srv/sub", readonly=True)))


def running(world: World, config: ContainerConfig = DATA) -> ContainerId:
    made = world.create(world.run(), config=config)
    world.start(made)
    return made


def mount_scripts(world: World) -> list[GuestCommand]:
    return [command for command in world.outside.guests.commands if "virtshim-volumes" in command.argv]


def test_volumes_are_served_before_the_vm_starts_and_its_memory_is_shared(world: World) -> None:
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


def test_volumes_are_released_before_the_end_is_reported(world: World) -> None:
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


def test_an_end_is_not_reported_while_volumes_are_held(world: World) -> None:
    made = running(world)
    world.outside.shares.error = WrongState("process 7, which serves volumes to a VM, does not end")
    with pytest.raises(ShimError, match="does not end"):
        world.stop(made)
    assert world.container(made).is_running
    world.outside.shares.error = None
    world.stop(made)
    assert world.container(made).phase is ContainerPhase.EXITED
    assert world.outside.shares.shares == {}


def test_a_failed_start_leaves_no_daemon(world: World) -> None:
    made = world.create(world.run(), config=DATA)
    world.outside.shares.missing.add("/srv/sub")
    with pytest.raises(ShimError, match="/srv/sub"):
        world.start(made)
    assert world.container(made).phase is ContainerPhase.EXITED
    assert world.outside.shares.shares == {}


def test_a_daemon_that_has_ended_is_reported_until_the_container_ends(world: World) -> None:
    made = running(world)
    world.app.watch.look()
    assert world.container(made).status.trouble == ""
    world.outside.shares.dead.add(made.short)
    world.app.watch.look()
    assert "virtiofsd" in world.container(made).status.trouble
    assert "restart the container" in world.container(made).status.trouble


def test_a_guest_without_virtiofs_runs_without_read_only_volumes_and_that_is_reported(world: World) -> None:
    world.outside.guests.do = lambda command, timeout, cancelled: CommandResult(
        NO_MODULE, b"", b"its kernel has no virtiofs (module virtiofs, Linux 5.4)\n"
    )
    made = running(world, READ_ONLY)
    eventually(lambda: world.app.watch.look() or world.container(made).status.trouble)
    assert "module virtiofs" in world.container(made).status.trouble
    assert list(container_status(world.container(made)).mounts) == []
    world.outside.guests.do = lambda command, timeout, cancelled: CommandResult(0, b"", b"")
    world.app.guest_set_up.changed(world.domain(made))
    eventually(lambda: len(container_status(world.container(made)).mounts) == 2)


def test_a_guest_that_is_still_mounting_is_asked_again_without_a_trouble(world: World) -> None:
    answers = [CommandResult(BUSY, b"", b"another run of this script has not ended\n"), CommandResult(0, b"", b"")]
    world.outside.guests.do = lambda command, timeout, cancelled: answers.pop(0) if len(answers) > 1 else answers[0]
    made = running(world)
    eventually(lambda: not [one for one in threading.enumerate() if one.name.startswith("set-up-")])
    world.app.watch.look()
    assert len(mount_scripts(world)) == 2
    assert world.container(made).status.trouble == ""


def test_the_agent_mounts_volumes_and_again_after_a_guest_restart(world: World) -> None:
    made = running(world)
    eventually(lambda: len(mount_scripts(world)) == 1)
    assert mount_scripts(world)[0].argv[-8:] == ("0", "/data", "rw", "-", "1", "/data/sub", "ro", "0")
    eventually(lambda: not [one for one in threading.enumerate() if one.name.startswith("set-up-")])
    world.app.guest_set_up.changed(world.domain(made))
    eventually(lambda: len(mount_scripts(world)) == 2)


def test_volumes_are_mounted_once_before_the_containers_command_begins(world: World) -> None:
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


def test_a_vm_with_shared_volumes_cannot_be_checkpointed(world: World) -> None:
    made = running(world)
    with pytest.raises(WrongState, match=r"volumes .*/data"):
        world.do.checkpoint_container.checkpoint(world.container(made), "/var/x.tar", world.deadline())


def test_the_next_start_ends_only_daemons_without_a_running_container(world: World) -> None:
    made = running(world)
    volumes = world.container(made).spec.volumes
    world.outside.shares.shares["f" * 20] = volumes
    world = world.recovered()
    try:
        assert set(world.outside.shares.shares) == {made.short}
    finally:
        world.close()


def test_without_the_share_program_virtshim_starts_and_ends_no_daemons(world: World) -> None:
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


def test_an_empty_dir_that_the_pod_names_is_a_tmpfs_in_the_guest(world: World) -> None:
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


def test_the_tmpfs_is_no_larger_than_the_guests_memory(world: World) -> None:
    world.outside.kubelet_volumes.tmpfs[CACHE] = dataclasses.replace(MADE, size_bytes=1 << 40)
    made = with_cache(world, IN_MEMORY)
    (volume,) = world.container(made).spec.memory_volumes
    assert volume.tmpfs.size_bytes == world.container(made).status.size.memory_bytes


def test_a_tmpfs_that_would_hide_an_init_containers_files_is_refused(world: World) -> None:
    world.outside.kubelet_volumes.tmpfs[CACHE] = MADE
    world.outside.kubelet_volumes.filled.add(CACHE)
    with pytest.raises(WrongState, match=r"memory-volumes: config\.mounts\[/dev/shm\]: .* already has files"):
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
def test_a_tmpfs_for_any_other_volume_than_a_memory_empty_dir_is_refused(world: World, host: str) -> None:
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
def test_impossible_paths_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"annotation virtshim\.io/memory-volumes: "):
        parse_vm_options({"virtshim.io/memory-volumes": text})


# --- a writable volume that the guest does not have

NOWHERE = b"/data: mount: mounting /run/virtshim-volumes/0 on /data failed: Not a directory\n"


def fails(stdout: bytes = b"", code: int = NOT_MOUNTED) -> Run:
    def do(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
        return (
            CommandResult(code, stdout, NOWHERE) if "virtshim-volumes" in command.argv else CommandResult(0, b"", b"")
        )

    return do


def works(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
    return CommandResult(0, b"", b"")


def is_silent(world: World) -> Run:
    """No agent answers for as long as somebody waits."""

    def do(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
        world.outside.clock.advance(timeout)
        raise DeadlineExceeded("timed out waiting for the guest agent")

    return do


def settled() -> bool:
    return not [one for one in threading.enumerate() if one.name.startswith("set-up-")]


def ended(world: World, made: ContainerId) -> Exit:
    eventually(lambda: world.container(made).exit)
    how = world.container(made).exit
    assert how is not None
    return how


def runs_on(world: World, made: ContainerId) -> bool:
    eventually(settled)
    status = world.container(made).status
    return status.phase is ContainerPhase.RUNNING and status.ending is None


def strict(tmp_path: Path) -> World:
    world = World(tmp_path, volumes=Volumes(unconfirmed="fail"))
    world.pull()
    return world


def test_a_container_whose_writable_volume_is_not_mounted_ends_and_says_why(world: World) -> None:
    world.outside.guests.do = fails()
    made = running(world)
    how = ended(world, made)
    assert (how.code, how.reason) == (128, ExitReason.ERROR)
    assert how.message.startswith("the volumes cannot be mounted in the guest: /data: mount: ")
    log = world.outside.consoles.logs[world.container(made).spec.log_file]
    assert log[0].startswith(
        "stderr virtshim: volumes_not_mounted: the volumes cannot be mounted in the guest: /data: "
    )
    assert [one.reason for one in world.outside.pod_events.told] == ["VolumesNotMounted"]


def test_a_read_only_volume_that_is_not_mounted_does_not_end_the_container(world: World) -> None:
    world.outside.guests.do = fails(b"0 mounted\ncopies mounted\nlock mounted\n")
    made = running(world)
    assert runs_on(world, made)
    world.app.watch.look()
    assert "cannot be mounted" in world.container(made).status.trouble


def test_kubelets_next_attempt_has_a_vm_of_its_own_and_succeeds_once_the_volume_can_be_mounted(world: World) -> None:
    world.outside.guests.do = fails()
    made = running(world)
    ended(world, made)
    world.outside.guests.do = works
    again = world.create(world.container(made).sandbox_id, attempt=1, config=DATA)
    world.remove(made)
    world.start(again)
    assert runs_on(world, again)
    world.app.watch.look()
    assert world.container(again).status.troubles == ()


def test_a_guest_that_loses_a_volume_by_a_reboot_ends_the_container(world: World) -> None:
    made = running(world)
    assert runs_on(world, made)
    world.outside.guests.do = fails()
    world.app.guest_set_up.changed(world.domain(made))
    assert "/data" in ended(world, made).message


def test_a_volume_found_missing_by_an_exec_ends_the_container(world: World) -> None:
    world.outside.guests.do = is_silent(world)
    made = running(world)
    assert runs_on(world, made)
    world.outside.guests.do = fails()
    world.do.exec_command.run(world.container(made), ("true",), 60.0, threading.Event())
    assert "/data" in ended(world, made).message


def test_a_container_that_is_being_stopped_ends_as_one_that_was_stopped(world: World) -> None:
    world.outside.guests.do = is_silent(world)
    made = running(world)
    assert runs_on(world, made)
    world.outside.guests.do = fails()
    world.records.containers.replace(world.container(made).asked_to_stop())
    world.do.exec_command.run(world.container(made), ("true",), 60.0, threading.Event())
    assert world.container(made).status.ending is None


def test_a_copy_that_cannot_be_renewed_does_not_end_a_container_that_has_its_volumes(world: World) -> None:
    world.outside.guests.do = fails(b"0 mounted\n1 mounted\n")
    made = running(world)
    assert runs_on(world, made)


def test_an_empty_disk_that_is_not_mounted_ends_the_container(world: World) -> None:
    def lacks_mkfs(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
        return CommandResult(empty_disks.NOT_MOUNTED, b"", b"/scratch: mke2fs: not found\n")

    world.outside.guests.do = lacks_mkfs
    annotations = {"virtshim.io/disks": "scratch: {size: 1Gi, mountPath: /scratch}"}
    made = world.create(world.run(config=sandbox_config(annotations=annotations)))
    world.start(made)
    assert ended(world, made).message.startswith("the empty disks cannot be mounted in the guest: /scratch: mke2fs")


@pytest.mark.parametrize("how_it_is_silent", ["no agent", "an agent that refuses"])
def test_unconfirmed_volumes_end_a_container_only_if_the_operator_says_so(
    world: World, tmp_path: Path, how_it_is_silent: str
) -> None:
    def silent(world: World) -> Run:
        def refuses(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
            raise WrongState("the agent may not run commands")

        return refuses if how_it_is_silent == "an agent that refuses" else is_silent(world)

    world.outside.guests.do = silent(world)
    assert runs_on(world, running(world))
    (tmp_path / "strict").mkdir()
    other = strict(tmp_path / "strict")
    try:
        other.outside.guests.do = silent(other)
        how = ended(other, running(other))
        assert (how.code, how.reason) == (128, ExitReason.ERROR)
        assert "has not confirmed that its writable volumes are mounted" in how.message
        assert "volumes.unconfirmed" in how.message
        (container,) = other.records.containers.all()
        own = [one for one in other.outside.consoles.logs[container.spec.log_file] if " virtshim: " in one]
        assert [one[:45] for one in own] == ["stderr virtshim: volumes_unconfirmed: the gue"]
    finally:
        other.close()


def test_read_only_volumes_need_not_be_confirmed(tmp_path: Path) -> None:
    world = strict(tmp_path)
    try:
        world.outside.guests.do = is_silent(world)
        assert runs_on(world, running(world, READ_ONLY))
    finally:
        world.close()


def test_a_guest_that_has_confirmed_them_once_may_lose_its_agent(tmp_path: Path) -> None:
    world = strict(tmp_path)
    made = running(world)
    eventually(settled)
    world.outside.guests.do = is_silent(world)
    world = world.recovered()
    try:
        assert runs_on(world, made)
        world.app.watch.look()
        assert "no guest agent has answered" in world.container(made).status.trouble
    finally:
        world.close()


def test_a_paused_guest_gets_its_mount_time_after_the_resume(tmp_path: Path) -> None:
    world = strict(tmp_path)
    try:
        is_paused = threading.Event()

        def is_silent_then(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
            assert is_paused.wait(60)
            return is_silent(world)(command, timeout, cancelled)

        world.outside.guests.do = is_silent_then
        actions = world.app.operator.services.actions
        made = running(world)
        actions.pause(world.container(made))
        is_paused.set()
        at = world.outside.clock.monotonic()
        eventually(lambda: world.outside.clock.monotonic() > at + 3600)
        assert world.container(made).status.ending is None
        world.outside.guests.do = works
        actions.resume(world.container(made))
        assert runs_on(world, made)
    finally:
        world.close()


def test_a_stop_of_virtshim_while_it_waits_for_an_agent_ends_no_container(tmp_path: Path) -> None:
    world = strict(tmp_path)
    waits = threading.Event()

    def waits_for_the_agent(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
        waits.set()
        assert cancelled.wait(60)
        raise Aborted("virtshim stops")

    world.outside.guests.do = waits_for_the_agent
    made = running(world)
    assert waits.wait(60)
    world.outside.clock.advance(3600)
    world.close()
    again = World(tmp_path, world.outside, volumes=Volumes(unconfirmed="fail"))
    try:
        assert again.container(made).status.ending is None
    finally:
        again.close()
