"""virtshim copies volumes that kubelet writes into the seed and the guest, and again when they change."""

from __future__ import annotations

import io
import os
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.waiting import eventually
from fakes.world import World, container_config, pod_key, sandbox_config

from virtshim.cri.to_proto import container_status
from virtshim.guest.command import CommandResult, GuestCommand
from virtshim.model.container import Mount
from virtshim.model.errors import DeadlineExceeded, InvalidRequest, NotFound, Unavailable, WrongState
from virtshim.model.ids import ContainerId
from virtshim.volumes.copies import MAX_ALL_BYTES
from virtshim.volumes.mount_script import NO_COPY, NOT_MOUNTED

POD = f"/data/kubelet/pods/{pod_key('web', 0).uid}"
TEXTS = f"{POD}/volumes/kubernetes.io~configmap/texts"
TOKEN = f"{POD}/volumes/kubernetes.io~projected/kube-api-access-x"
PART = f"{POD}/volume-subpaths/texts/vm/0"
MOUNTS = (Mount("/etc/texts", TEXTS, readonly=True), Mount("/token", TOKEN, readonly=True))


class CopyingGuest:
    """What the script does in a guest: remembers the volumes that it is given."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.runs: list[str] = []
        self.unwritten = b""

    def do(self, command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
        if "virtshim-volumes" not in command.argv:
            return CommandResult(0, b"", b"")
        source, names = command.argv[4], command.argv[6::4]
        self.runs.append(source)
        if source == "input":
            with tarfile.open(fileobj=io.BytesIO(command.input)) as tar:
                for member in tar.getmembers():
                    if member.isfile() and (content := tar.extractfile(member)) is not None:
                        self.files[member.name] = content.read()
        told = b"".join(f"{name} ".encode() + self.files[name] for name in self.files if name.endswith(".digest"))
        told += self.unwritten
        missing = [name for name in names if name.startswith("c") and f"{name}.digest" not in self.files]
        return CommandResult(NO_COPY if missing else 0, told, b"no copy yet")

    def reboot(self) -> None:
        self.files.clear()

    def read(self, name: str) -> bytes:
        """The newest of them."""
        return [content for path, content in self.files.items() if path.endswith(f"/{name}")][-1]


@pytest.fixture
def guest() -> CopyingGuest:
    return CopyingGuest()


@pytest.fixture
def world(tmp_path: Path, guest: CopyingGuest) -> Iterator[World]:
    world = World(tmp_path)
    world.pull()
    world.outside.guests.do = guest.do
    world.outside.kubelet_volumes.write(TEXTS, {"a": b"one"})
    world.outside.kubelet_volumes.write(TOKEN, {"token": b"first"})
    yield world
    world.close()


def created(world: World, *more: Mount, command: tuple[str, ...] = ()) -> ContainerId:
    return world.create(world.run(), config=container_config(mounts=(*MOUNTS, *more), command=command))


def running(world: World) -> ContainerId:
    made = created(world)
    world.start(made)
    is_quiet()
    return made


def is_quiet() -> None:
    eventually(lambda: not [one for one in threading.enumerate() if one.name.startswith("set-up-")])


def looked(world: World) -> None:
    """The watch has looked, and what it began is done."""
    world.app.copy_watch.look(0.0)
    is_quiet()


def test_copied_volumes_are_in_the_seed_and_not_shared(world: World) -> None:
    made = created(world)
    request = world.outside.seeds.requests[made]
    with tarfile.open(fileobj=io.BytesIO(request.copied)) as tar:
        assert {os.path.basename(name) for name in tar.getnames()} >= {"a", "token", "c0.digest", "c1.digest"}
    assert [volume.guest for volume in request.copies] == ["/etc/texts", "/token"]
    world.start(made)
    assert world.outside.shares.shares == {}
    (spec,) = world.outside.vms.running()
    assert spec.shares_socket == ""


def test_a_guest_gets_copies_once_and_then_only_changes(world: World, guest: CopyingGuest) -> None:
    running(world)
    assert guest.runs == ["there", "input"]
    assert (guest.read("a"), guest.read("token")) == (b"one", b"first")
    for _ in range(3):
        looked(world)
    assert guest.runs == ["there", "input"]
    world.outside.kubelet_volumes.write(TOKEN, {"token": b"second"}, "2")
    looked(world)
    assert guest.runs == ["there", "input", "input"]
    assert guest.read("token") == b"second"


def test_a_change_takes_one_command_whatever_else_was_set_up(world: World, guest: CopyingGuest) -> None:
    made = world.create(
        world.run(config=sandbox_config(sysctls={"net.core.somaxconn": "321"})), config=container_config(mounts=MOUNTS)
    )
    world.start(made)
    is_quiet()
    world.outside.guests.commands.clear()
    world.outside.kubelet_volumes.write(TOKEN, {"token": b"second"}, "2")
    looked(world)
    assert guest.read("token") == b"second"
    assert len(world.outside.guests.commands) == 1


def test_copies_written_by_cloud_init_are_not_sent_again(world: World, guest: CopyingGuest) -> None:
    made = created(world)
    with tarfile.open(fileobj=io.BytesIO(world.outside.seeds.requests[made].copied)) as tar:
        for name in ("c0.digest", "c1.digest"):
            read = tar.extractfile(name)
            assert read is not None
            guest.files[name] = read.read()
    world.start(made)
    is_quiet()
    assert guest.runs == ["there"]


def test_a_token_rotated_while_virtshim_was_down_reaches_the_guest(world: World, guest: CopyingGuest) -> None:
    made = running(world)
    world.outside.kubelet_volumes.write(TOKEN, {"token": b"second"}, "2")
    world = world.recovered()
    try:
        is_quiet()
        looked(world)
        assert world.container(made).is_running
        assert guest.read("token") == b"second"
    finally:
        world.close()


def test_a_restarted_guest_gets_copies_again(world: World, guest: CopyingGuest) -> None:
    made = running(world)
    guest.reboot()
    world.app.guest_set_up.changed(world.domain(made))
    is_quiet()
    assert (guest.read("a"), guest.read("token")) == (b"one", b"first")


def test_a_guest_that_lost_its_copies_gets_all_with_the_next_change(world: World, guest: CopyingGuest) -> None:
    running(world)
    guest.reboot()
    world.outside.kubelet_volumes.write(TOKEN, {"token": b"second"}, "2")
    looked(world)
    assert (guest.read("a"), guest.read("token")) == (b"one", b"second")


def test_a_command_begins_after_the_copies_and_gets_later_changes(world: World, guest: CopyingGuest) -> None:
    made = created(world, command=("serve",))
    world.start(made)
    eventually(lambda: world.container(made).status.command_begun)
    assert guest.read("token") == b"first"
    world.outside.kubelet_volumes.write(TOKEN, {"token": b"second"}, "2")
    looked(world)
    assert guest.read("token") == b"second"


def test_a_sub_path_of_a_volume_is_not_updated(world: World, guest: CopyingGuest) -> None:
    volumes = world.outside.kubelet_volumes
    volumes.parts.add(PART)
    volumes.write(PART, {"a": b"one"})
    made = created(world, Mount("/etc/a.conf", PART))
    world.start(made)
    is_quiet()
    volumes.write(PART, {"a": b"two"}, "2")
    looked(world)
    assert guest.runs == ["there", "input"]


def test_a_missing_or_too_large_volume_is_refused_and_nothing_is_made(world: World) -> None:
    sandbox = world.run()
    before = world.everything()
    gone = container_config(mounts=(Mount("/x", f"{POD}/volumes/kubernetes.io~secret/gone"),))
    with pytest.raises(NotFound, match="secret/gone does not exist"):
        world.create(sandbox, config=gone)
    hosts = [f"{POD}/volumes/kubernetes.io~secret/{number}" for number in range(9)]
    for host in hosts:
        world.outside.kubelet_volumes.write(host, {"a": bytes(MAX_ALL_BYTES // 9 - 4096)})
    mounts = tuple(Mount(f"/s{number}", host) for number, host in enumerate(hosts))
    with pytest.raises(InvalidRequest, match="copies of 8388608 bytes at most"):
        world.create(sandbox, config=container_config(mounts=mounts))
    assert world.everything() == before


def test_an_annotation_shares_the_volumes_instead_of_copying(world: World, guest: CopyingGuest) -> None:
    sandbox = world.run(config=sandbox_config(annotations={"virtshim.io/kubelet-volumes": "shared"}))
    made = world.create(sandbox, config=container_config(mounts=MOUNTS))
    world.start(made)
    is_quiet()
    spec = world.container(made).spec
    assert {(volume.guest, volume.host) for volume in spec.volumes} == {("/etc/texts", TEXTS), ("/token", TOKEN)}
    assert (spec.copies, world.outside.seeds.requests[made].copied, guest.runs) == ((), b"", [""])
    assert set(world.outside.shares.shares) == {made.short}


def test_an_agent_that_may_not_run_commands_is_reported_in_the_message(world: World, guest: CopyingGuest) -> None:
    def refuses(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
        raise WrongState("the agent may not run commands")

    world.outside.guests.do = refuses
    made = running(world)
    world.app.watch.look()
    trouble = world.container(made).status.trouble
    assert trouble.endswith("virtiofs): the agent may not run commands")
    assert mounted(world, made) == []
    world.outside.guests.do = guest.do
    world.outside.kubelet_volumes.write(TOKEN, {"token": b"second"}, "2")
    looked(world)
    world.app.watch.look()
    assert world.container(made).status.trouble == ""


HOSTS = Mount("/etc/hosts", f"{POD}/etc-hosts")


def write_hosts(world: World, text: bytes) -> None:
    world.outside.kubelet_volumes.put(HOSTS.host_path, text)


def test_kubelets_hosts_file_and_its_changes_reach_a_guest_without_cloud_init(
    world: World, guest: CopyingGuest
) -> None:
    write_hosts(world, b"10.0.0.1 web")
    made = created(world, HOSTS)
    world.start(made)
    is_quiet()
    assert guest.files["c2"] == b"10.0.0.1 web"
    assert " c2 /etc/hosts written" in " ".join(world.outside.guests.commands[0].argv)
    assert mounted(world, made) == ["/etc/texts", "/token", "/etc/hosts"]
    write_hosts(world, b"10.0.0.2 web")
    looked(world)
    assert guest.files["c2"] == b"10.0.0.2 web"


def test_a_guest_that_cannot_write_the_hosts_file_keeps_running(world: World, guest: CopyingGuest) -> None:
    write_hosts(world, b"10.0.0.1 web")
    guest.unwritten = b"c2 unwritten\n"
    made = created(world, HOSTS, command=("serve",))
    world.start(made)
    eventually(lambda: world.container(made).status.command_begun)
    world.app.watch.look()
    assert mounted(world, made) == ["/etc/texts", "/token"]
    assert world.container(made).status.trouble == ""


def test_a_pod_with_only_a_hosts_file_starts_in_a_guest_that_cannot_copy(world: World) -> None:
    write_hosts(world, b"10.0.0.1 web")
    ran = []

    def has_no_tar(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
        ran.append(command.argv[4])
        return CommandResult(NOT_MOUNTED, b"", b"tar: not found")

    world.outside.guests.do = has_no_tar
    made = world.create(world.run(), config=container_config(mounts=(HOSTS,), command=("serve",)))
    assert world.outside.seeds.requests[made].copied == b"", "cloud-init has its own way"
    world.start(made)
    eventually(lambda: world.container(made).status.command_begun)
    for _ in range(2):
        looked(world)
    assert (ran, mounted(world, made)) == (["input", "input"], [])


@pytest.mark.parametrize("says", ["manage_etc_hosts: true", "write_files: [{path: /etc/hosts, content: x}]"])
def test_a_pod_whose_user_data_writes_the_hosts_file_keeps_that_file(
    world: World, guest: CopyingGuest, says: str
) -> None:
    write_hosts(world, b"10.0.0.1 web")
    pod = world.run(config=sandbox_config(annotations={"VirtletCloudInitUserData": says}))
    made = world.create(pod, config=container_config(mounts=(HOSTS,)))
    assert world.container(made).spec.copies == ()


def test_a_missing_hosts_file_is_left_out(world: World) -> None:
    made = world.create(world.run(), config=container_config(mounts=(HOSTS,)))
    assert world.container(made).spec.copies == ()


def mounted(world: World, made: ContainerId) -> list[str]:
    """What the container's status says."""
    return [mount.container_path for mount in container_status(world.container(made)).mounts]


def test_reported_mounts_are_those_that_the_guest_has_confirmed(world: World, guest: CopyingGuest) -> None:
    made = created(world)
    assert mounted(world, made) == []
    world.start(made)
    is_quiet()
    assert mounted(world, made) == ["/etc/texts", "/token"]
    guest.reboot()
    world.outside.guests.do = lambda command, timeout, cancelled: CommandResult(NO_COPY, b"", b"no memory")
    world.app.guest_set_up.changed(world.domain(made))
    is_quiet()
    assert mounted(world, made) == []


def test_a_missing_agent_is_reported_in_the_message_and_no_mounts_are_listed(world: World, guest: CopyingGuest) -> None:
    def is_silent(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
        world.outside.clock.advance(timeout)
        raise DeadlineExceeded("timed out waiting for the guest agent")

    world.outside.guests.do = is_silent
    made = running(world)
    world.app.watch.look()
    trouble = world.container(made).status.trouble
    assert "no guest agent has answered: its configMap" in trouble
    assert "only if its image has cloud-init" in trouble
    assert mounted(world, made) == []
    world.outside.guests.do = guest.do
    world.do.exec_command.run(world.container(made), ("true",), 60.0, threading.Event())
    world.app.watch.look()
    assert (world.container(made).status.trouble, mounted(world, made)) == ("", ["/etc/texts", "/token"])


def test_a_guest_whose_agent_ended_keeps_its_mounts_and_is_reported_as_outdated(
    world: World, guest: CopyingGuest
) -> None:
    made = running(world)

    def has_ended(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
        world.outside.clock.advance(timeout)
        raise DeadlineExceeded("timed out waiting for the guest agent")

    world.outside.guests.do = has_ended
    world.outside.kubelet_volumes.write(TOKEN, {"token": b"second"}, "2")
    looked(world)
    world.app.watch.look()
    trouble = world.container(made).status.trouble
    assert trouble.endswith("are in the guest, but are not renewed: timed out waiting for the guest agent")
    assert mounted(world, made) == ["/etc/texts", "/token"]


def test_a_briefly_unreachable_guest_gets_a_change_later(world: World, guest: CopyingGuest) -> None:
    running(world)
    away = iter([Unavailable("the agent was restarted")])

    def do(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
        for error in away:
            raise error
        return guest.do(command, timeout, cancelled)

    world.outside.guests.do = do
    world.outside.kubelet_volumes.write(TOKEN, {"token": b"second"}, "2")
    looked(world)
    assert guest.read("token") == b"second"


def test_an_unreadable_volume_stays_unchanged_in_the_guest_and_others_are_updated(
    world: World, guest: CopyingGuest, capsys: pytest.CaptureFixture[str]
) -> None:
    running(world)
    del world.outside.kubelet_volumes.volumes[TEXTS]
    world.outside.kubelet_volumes.write(TOKEN, {"token": b"second"}, "2")
    for _ in range(2):
        looked(world)
    assert (guest.read("a"), guest.read("token")) == (b"one", b"second")
    assert capsys.readouterr().out.count("volumes.copy.unreadable") == 1


def test_an_ended_containers_volumes_are_neither_read_nor_remembered(world: World, guest: CopyingGuest) -> None:
    made = running(world)
    world.stop(made)
    world.outside.kubelet_volumes.write(TOKEN, {"token": b"second"}, "2")
    looked(world)
    assert guest.runs == ["there", "input"]
    assert world.outside.kubelet_volumes.asked == frozenset()
