"""If the state database is lost while VMs run, virtshim rebuilds their records and the VMs keep running."""

from __future__ import annotations

import dataclasses
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.adopted import ADOPTION, SANDBOX, adopt, running
from fakes.changed import changed
from fakes.world import IMAGE, World, container_config, sandbox_config

from virtshim.devices.values import CriDevice
from virtshim.model.container import Container, ContainerPhase
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.image import UNKNOWN_IMAGE, ImageConfig
from virtshim.model.sandbox import SandboxPhase
from virtshim.model.vm import OffReason, Power

LABELS = {"io.kubernetes.pod.uid": "uid-of-web", "io.kubernetes.pod.name": "web"}


@pytest.fixture
def later() -> Iterator[list[World]]:
    made: list[World] = []
    yield made
    for world in made:
        world.close()


def database_lost(world: World, later: list[World]) -> World:
    """The next daemon finds none, and has started."""
    for path in world.directory.glob("state.db*"):
        path.unlink()
    after = world.restarted()
    later.append(after)
    after.app.recover()
    return after


def spoilt(world: World, later: list[World], table: str, record: SandboxId | ContainerId) -> World:
    """The next daemon cannot read that record, and has started."""
    world.close()
    with sqlite3.connect(world.directory / "state.db") as database:
        database.execute(f"update {table} set document = '[{{}}]' where id = ?", (record.value,))
        database.execute("insert or replace into node values ('boot', (select coalesce(max(value), '') from node))")
    database.close()
    after = world.restarted()
    later.append(after)
    after.app.recovery.recover.run(rebooted=False)
    return after


def labelled(world: World) -> tuple[SandboxId, ContainerId]:
    sandbox = world.run(config=sandbox_config(labels=LABELS, annotations={"a": "b"}))
    container = world.create(sandbox, config=container_config(labels={"io.kubernetes.container.name": "vm"}))
    world.start(container)
    return sandbox, container


def test_a_running_pod_is_listed_as_it_was(world: World, later: list[World]) -> None:
    sandbox, container = labelled(world)
    before = world.sandbox(sandbox), world.container(container)
    after = database_lost(world, later)
    assert after.sandbox(sandbox) == before[0]
    found = after.container(container)
    assert found.phase is ContainerPhase.RUNNING
    assert changed(found, started_at=before[1].status.started_at) == before[1]
    assert len(after.outside.vms.running()) == 1
    assert after.outside.vms.domains[after.domain(container)].boots == 1


def test_a_rebuilt_pod_can_be_stopped_and_removed(world: World, later: list[World]) -> None:
    sandbox, container = world.running()
    after = database_lost(world, later)
    assert after.outside.consoles.following != {}
    after.stop(container, 30)
    assert after.container(container).phase is ContainerPhase.EXITED
    after.remove(container)
    after.remove_sandbox(sandbox)
    assert after.everything() == []


def test_a_vm_that_ended_meanwhile_has_its_exit_code(world: World, later: list[World]) -> None:
    _, container = world.running()
    world.outside.vms.end(world.domain(container), OffReason.CRASHED)
    ended = database_lost(world, later).container(container)
    assert ended.exit is not None
    assert ended.exit.code == 137


def test_a_rebuilt_vm_that_was_never_started_can_be_started(world: World, later: list[World]) -> None:
    container = world.create(world.run())
    after = database_lost(world, later)
    assert after.container(container).phase is ContainerPhase.CREATED
    after.start(container)
    assert after.container(container).phase is ContainerPhase.RUNNING


def test_a_rebuilt_pod_without_its_network_is_not_ready_and_its_vm_is_left_alone(
    world: World, later: list[World]
) -> None:
    sandbox, container = world.running()
    world.outside.networks.lose()
    after = database_lost(world, later)
    assert after.sandbox(sandbox).phase is SandboxPhase.NOT_READY
    assert after.container(container).phase is ContainerPhase.RUNNING


def test_every_attempt_of_a_pod_is_rebuilt(world: World, later: list[World]) -> None:
    sandbox, first = world.running()
    world.stop(first)
    second = world.create(sandbox, attempt=1)
    world.start(second)
    after = database_lost(world, later)
    assert after.container(first).phase is ContainerPhase.EXITED
    assert after.container(second).phase is ContainerPhase.RUNNING
    assert [c.id for c in after.records.containers.all()] == [first, second]


def notes(world: World) -> Path:
    return Path(world.settings.layout().images) / "records"


def test_images_are_rebuilt_unchanged(world: World, later: list[World]) -> None:
    """Of OCI images and plain disks, used and not, by all their names; and nobody is asked for them."""
    said = ImageConfig(user="app", env=("A=b",), entrypoint=("/bin/x",))
    world.outside.files.publish(IMAGE, b"a disk", config=said)
    world.pull()
    world.running()
    world.pull("registry.test/vm/other:2", b"another disk")
    world.pull("registry.test/vm/other:3", b"another disk")
    gone = world.pull("registry.test/vm/gone:1", b"one more")
    world.images.remove(gone.value)
    before, asked = list(world.records.images.all()), len(world.outside.files.fetched)
    after = database_lost(world, later)
    assert list(after.records.images.all()) == before
    assert len(after.outside.files.fetched) == asked
    assert after.restarted().records.images.all() == before


@pytest.mark.parametrize("note", ["", "[{", "[{}]", "null", "\0"])
def test_a_damaged_note_of_an_image_is_skipped(world: World, later: list[World], note: str) -> None:
    world.running()
    other = world.pull("registry.test/vm/other:2", b"another disk")
    (notes(world) / f"{other.hex}.json").write_text(note)
    after = database_lost(world, later)
    assert after.images.find(IMAGE) is not None
    assert after.images.find("registry.test/vm/other:2") is None
    assert after.images.find(other.value) is not None


def test_a_note_whose_disk_is_gone_or_different_is_ignored(world: World, later: list[World]) -> None:
    gone = world.pull("registry.test/vm/gone:1", b"one")
    other = world.pull("registry.test/vm/other:1", b"another")
    del world.outside.files.files[gone]
    world.outside.files.files[other] += 1
    after = database_lost(world, later)
    assert after.images.find("registry.test/vm/gone:1") is None
    assert after.images.find("registry.test/vm/other:1") is None
    assert not (notes(after) / f"{gone.hex}.json").exists()


def test_images_of_an_earlier_version_are_noted_at_the_next_start(world: World, later: list[World]) -> None:
    """And what was removed while nothing could be written is forgotten."""
    other = world.pull("registry.test/vm/other:2", b"another disk")
    stale = notes(world) / f"{'7' * 64}.json"
    stale.write_text((notes(world) / f"{other.hex}.json").read_text().replace(other.hex, "7" * 64, 1))
    (notes(world) / f"{other.hex}.json").unlink()
    after = world.recovered()
    later.append(after)
    noted = {f"sha256:{path.stem}" for path in notes(after).iterdir()}
    assert noted == {image.id.value for image in after.records.images.all()}
    assert [path.stat().st_mode & 0o777 for path in (notes(after), next(notes(after).iterdir()))] == [0o700, 0o600]


def test_images_without_notes_keep_their_files_and_the_names_that_containers_know(
    world: World, later: list[World]
) -> None:
    world.running()
    other = world.pull("registry.test/vm/other:2", b"another disk")
    before = {image.digest: image for image in world.records.images.all()}
    shutil.rmtree(notes(world))
    after = database_lost(world, later)
    found = {image.digest: image for image in after.records.images.all()}
    assert set(found) == set(before)
    used = after.images.find(IMAGE)
    assert used is not None
    assert used == dataclasses.replace(before[used.digest], pulled_at=used.pulled_at)
    assert found[other].tags == ()
    assert after.outside.files.files.keys() == before.keys()


def test_without_a_note_a_name_of_an_oci_image_is_not_given_to_its_disk(world: World, later: list[World]) -> None:
    """Which would run without the user and the entrypoint that the image says. The next pull finds the disk here."""
    said = ImageConfig(user="app", entrypoint=("/bin/x",))
    world.outside.files.publish(IMAGE, b"a disk", config=said)
    world.pull()
    world.running()
    world.images.remove(f"registry.test/vm/guest@{world.outside.files.published[IMAGE].digest}")
    shutil.rmtree(notes(world))
    after = database_lost(world, later)
    assert after.images.find(IMAGE) is None
    assert len(after.outside.files.files) == 1
    after.pull()
    found = after.images.find(IMAGE)
    assert found is not None
    assert found.config == said
    assert len(after.outside.files.files) == 1


def test_networks_and_disks_without_a_vm_are_kept_by_the_rebuild(world: World, later: list[World]) -> None:
    """kubelet has had no time yet to ask for it again."""
    world.run("without-a-vm")
    world.outside.disks.directories[ContainerId("9" * 64)] = {"root.qcow2"}
    world.outside.disks.pod_disks["f" * 64 + "/x"] = next(iter(world.outside.files.files))
    before = dict(world.outside.networks.networks)
    after = database_lost(world, later)
    assert after.outside.networks.networks == before
    assert ContainerId("9" * 64) in after.outside.disks.directories
    assert after.outside.disks.pod_disks


def test_a_start_that_dies_during_the_rebuild_is_completed_by_the_next(world: World, later: list[World]) -> None:
    sandbox, container = world.running()
    other_sandbox, other = world.running("other")
    for path in world.directory.glob("state.db*"):
        path.unlink()
    half = world.restarted()
    half.records.node_id()
    half.journal.crash(7)
    with pytest.raises(BaseException, match=r"vms\.domain_metadata"):
        half.app.recover()
    after = half.restarted()
    later.append(after)
    after.app.recover()
    assert {s.id for s in after.records.sandboxes.all()} == {sandbox, other_sandbox}
    assert {c.id for c in after.records.containers.all()} == {container, other}
    assert len(after.outside.vms.running()) == 2


def test_a_vm_of_an_earlier_version_is_found_by_its_name_and_its_network(world: World, later: list[World]) -> None:
    sandbox, container = world.running()
    forget_record(world, container)
    network = world.sandbox(sandbox).network
    after = database_lost(world, later)
    there = after.sandbox(sandbox)
    assert (there.phase, there.network) == (SandboxPhase.READY, network)
    assert (there.key.namespace, there.key.name, there.key.uid) == ("default", "web", "uid-of-web")
    assert there.config.labels["io.kubernetes.pod.uid"] == "uid-of-web"
    found = after.container(container)
    assert (found.phase, found.name.name, found.image) == (ContainerPhase.RUNNING, "vm", UNKNOWN_IMAGE)
    after.stop(container)
    after.remove_sandbox(sandbox)
    assert after.everything() == []


def test_a_vm_that_outlives_its_pods_keeps_its_disk_if_all_records_of_its_pod_are_lost(
    world: World, later: list[World]
) -> None:
    world.pull()
    sandbox = world.run(config=sandbox_config(annotations={"virtshim.io/vm": "db"}))
    container = world.create(sandbox)
    world.start(container)
    disk = world.container(container).spec.pod_disk
    world.outside.disks.directories[container].discard("record.json")
    after = database_lost(world, later)
    rebuilt = after.container(container)
    assert (rebuilt.spec.vm, rebuilt.spec.pod_disk, rebuilt.image) == (
        "db",
        disk,
        after.app.adapters.files.vms.all()[0].image,
    )
    after.stop(container)
    after.remove_sandbox(rebuilt.sandbox_id)
    assert disk in after.outside.disks.pod_disks
    again = after.create(after.run("other", config=sandbox_config(annotations={"virtshim.io/vm": "db"})))
    after.start(again)
    assert after.container(again).spec.pod_disk == disk


def test_a_vm_with_records_in_its_definition_is_rebuilt_and_the_records_moved_out(
    world: World, later: list[World]
) -> None:
    """The version before wrote them where every local user could read them."""
    sandbox, container = labelled(world)
    before = world.sandbox(sandbox), world.container(container)
    world.outside.vms.carried[world.domain(container)] = world.outside.copies.read(container)
    forget_record(world, container)
    after = database_lost(world, later)
    assert after.sandbox(sandbox) == before[0]
    assert changed(after.container(container), started_at=before[1].status.started_at) == before[1]
    assert after.outside.vms.carried == {}
    again = database_lost(after, later)
    assert again.sandbox(sandbox) == before[0]


def test_an_image_that_such_a_vm_may_need_is_kept_while_the_vm_exists(world: World, later: list[World]) -> None:
    sandbox, container = world.running()
    forget_record(world, container)
    after = database_lost(world, later)
    (image,) = after.records.images.all()
    after.images.remove(image.digest.value)
    assert image.digest in after.outside.files.files
    after.remove_sandbox(sandbox)
    after.app.images.collect(image.digest)
    assert after.outside.files.files == {}


@pytest.mark.parametrize("table", ["sandboxes", "containers"])
def test_an_unreadable_record_is_rebuilt_from_its_vm(world: World, later: list[World], table: str) -> None:
    sandbox, container = labelled(world)
    before = world.sandbox(sandbox), world.container(container)
    after = spoilt(world, later, table, sandbox if table == "sandboxes" else container)
    found = after.container(container)
    assert after.sandbox(sandbox) == before[0]
    assert changed(found, started_at=before[1].status.started_at) == before[1]
    assert after.records.unreadable() == {}


def test_a_record_that_stays_unreadable_is_listed_and_its_vm_left_alone(world: World, later: list[World]) -> None:
    sandbox, container = world.running()
    other = world.running("other")[1]
    hide(world, container)
    after = spoilt(world, later, "containers", container)
    assert after.container(container).phase is ContainerPhase.UNKNOWN
    assert "unreadable" in after.container(container).status.trouble
    assert after.container(other).phase is ContainerPhase.RUNNING
    assert container.value in str(after.do.node.facts()["unreadable"])
    after.app.recovery.reconcile.look()
    after.outside.clock.advance(3600)
    after.app.recovery.reconcile.look()
    assert len(after.outside.vms.running()) == 2
    assert container in after.outside.disks.directories
    after.outside.vms.unreadable.clear()
    after.stop(container, 10)
    assert [spec.container_id for spec in after.outside.vms.running()] == [other]
    after.remove_sandbox(sandbox)
    assert after.records.containers.get(container) is None
    assert container not in after.outside.disks.directories


def test_while_a_record_is_unreadable_nothing_counts_as_stray(world: World, later: list[World]) -> None:
    """The id of the unreadable one may be what is damaged."""
    _, container = world.running()
    world.outside.disks.directories[ContainerId("9" * 64)] = {"root.qcow2"}
    hide(world, container)
    after = spoilt(world, later, "containers", container)
    assert ContainerId("9" * 64) in after.outside.disks.directories


def test_nothing_that_vms_of_another_node_name_is_stray(world: World) -> None:
    """Two nodes of one libvirt, or the same node under another id."""
    container, sandbox = ContainerId("9" * 64), world.run("strange")
    world.records.sandboxes.delete(sandbox)
    world.outside.disks.directories[container] = {"root.qcow2"}
    world.outside.vms.other_nodes = {container: "another"}
    world.outside.vms.other_sandboxes = frozenset({sandbox})
    after = world.recovered()
    assert container in after.outside.disks.directories
    assert sandbox in after.outside.networks.networks
    after.close()


def test_a_new_node_finds_nothing_and_starts(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    world = World(tmp_path / "new")
    world.app.recover()
    assert world.everything() == []
    world.close()


def forget_record(world: World, container: ContainerId) -> None:
    """As if a version had defined it that kept no copy of it anywhere."""
    world.outside.disks.directories[container].discard("record.json")


def hide(world: World, container: ContainerId) -> None:
    """libvirt cannot read its definition."""
    record: Container = world.container(container)
    world.outside.vms.unreadable.add(world.outside.vms.domains[world.domain(record.id)].name)


def test_a_vm_that_runs_has_its_devices_and_an_ended_attempt_has_none(world: World, later: list[World]) -> None:
    world.outside.devices.add_function("/dev/vfio/7", "0000:3b:00.1")
    config = container_config(devices=(CriDevice("/dev/vfio/7", "/dev/vfio/7"),))
    sandbox = world.run()
    ended, runs = [], []
    for attempt, into in enumerate((ended, runs)):
        into.append(world.create(sandbox, attempt=attempt, config=config))
        world.start(into[0])
        if into is ended:
            world.stop(into[0])
    after = database_lost(world, later)
    assert {c.id: c.claims for c in after.records.containers.all()} == {ended[0]: (), runs[0]: ("pci:0000:3b:00.1",)}
    assert after.outside.vms.power(after.domain(runs[0])).power is Power.RUNNING


def test_a_vm_in_an_adopted_sandbox_is_rebuilt_and_its_sandbox_stays_hidden(world: World, later: list[World]) -> None:
    container = running(world)
    before = world.sandbox(SANDBOX)
    after = database_lost(world, later)
    assert after.sandbox(SANDBOX) == before
    assert after.container(container).is_running
    adopt(after)


def test_an_adopted_sandbox_is_known_by_its_namespace_if_the_copy_of_its_record_is_lost_too(
    world: World, later: list[World]
) -> None:
    container = running(world)
    forget_record(world, container)
    after = database_lost(world, later)
    assert after.sandbox(SANDBOX).adopted == ADOPTION
    assert not after.sandbox(SANDBOX).is_visible
    assert after.container(container).is_running
