"""The database gives a device one holder, with container records or without them."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.changed import changed

from virtshim.model.container import Container, ContainerConfig, ContainerName, ContainerSpec, ContainerStatus
from virtshim.model.errors import WrongState
from virtshim.model.ids import ContainerId, ImageDigest, SandboxId
from virtshim.store.records import SqliteRecords

VF, GPU = "pci:0000:3b:00.1", "pci:0000:65:00.0"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.fixture
def records(path: Path) -> Iterator[SqliteRecords]:
    records = SqliteRecords(str(path))
    yield records
    records.close()


def container(digit: str, *claims: str) -> Container:
    return Container(
        ContainerSpec(
            id=ContainerId(digit * 64),
            sandbox_id=SandboxId(digit * 64),
            name=ContainerName("vm", 0),
            config=ContainerConfig("img"),
            image=ImageDigest(f"sha256:{'1' * 64}"),
            image_ref="",
            domain_uuid="",
            created_at=1,
        ),
        ContainerStatus(
            claims=claims,
        ),
    )


def held(path: Path) -> dict[str, str]:
    with sqlite3.connect(path) as database:
        found = dict(database.execute("select claim, substr(container_id, 1, 1) from claims").fetchall())
    database.close()
    return found


def test_a_claim_is_written_and_deleted_with_its_container(records: SqliteRecords, path: Path) -> None:
    records.containers.add(container("a", VF, GPU))
    assert held(path) == {VF: "a", GPU: "a"}
    records.containers.delete(ContainerId("a" * 64))
    assert held(path) == {}


def test_a_container_can_release_some_of_its_claims(records: SqliteRecords, path: Path) -> None:
    records.containers.add(container("a", VF, GPU))
    records.containers.replace(container("a", GPU))
    records.containers.add(container("b", VF))
    assert held(path) == {VF: "b", GPU: "a"}


@pytest.mark.parametrize("write", ["add", "put"])
def test_a_second_holder_is_refused_and_leaves_no_row(records: SqliteRecords, path: Path, write: str) -> None:
    records.containers.add(container("a", VF))
    with pytest.raises(WrongState, match=f"{VF} is held by container {'a' * 64}"):
        getattr(records.containers, write)(container("b", GPU, VF))
    assert held(path) == {VF: "a"}
    assert records.containers.get(ContainerId("b" * 64)) is None
    records.close()
    again = SqliteRecords(str(path))
    assert [c.id for c in again.containers.all()] == [ContainerId("a" * 64)]
    again.close()


def test_a_change_that_would_take_another_containers_claim_changes_nothing(records: SqliteRecords, path: Path) -> None:
    records.containers.add(container("a", VF))
    records.containers.add(container("b", GPU))
    with pytest.raises(WrongState):
        records.containers.replace(changed(container("b", GPU, VF), log_file="/changed"))
    assert held(path) == {VF: "a", GPU: "b"}
    assert records.containers.all()[1].spec.log_file == ""


def test_a_claim_still_excludes_other_containers_after_a_restart(records: SqliteRecords, path: Path) -> None:
    records.containers.add(container("a", VF))
    records.close()
    again = SqliteRecords(str(path))
    with pytest.raises(WrongState):
        again.containers.add(container("b", VF))
    again.close()


def test_a_claim_without_a_container_is_dropped_at_the_start(records: SqliteRecords, path: Path) -> None:
    records.containers.add(container("a", GPU))
    records.close()
    with sqlite3.connect(path) as edited:
        edited.execute("insert into claims values (?, ?)", (VF, "f" * 64))
    edited.close()
    again = SqliteRecords(str(path))
    again.containers.add(container("b", VF))
    assert held(path) == {VF: "b", GPU: "a"}
    again.close()
