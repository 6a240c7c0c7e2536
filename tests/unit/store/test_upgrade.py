"""Databases of earlier versions load; a database of a newer version is refused and left unchanged."""

import json
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

from virtshim.model.container import ContainerPhase
from virtshim.model.ids import ImageDigest, ImageId
from virtshim.model.image import ImageConfig
from virtshim.model.sandbox import SandboxPhase
from virtshim.model.troubles import Trouble, TroubleKind
from virtshim.model.vm import DiskBus
from virtshim.store import migrate
from virtshim.store.opening import open_records
from virtshim.store.records import SqliteRecords

# One database of each schema version, as that version wrote it: `<schema>.sql`, `<schema>-<what>.sql`. A pod that runs, one
# whose container has ended, and one without containers.
FIXTURES = sorted((Path(__file__).resolve().parents[2] / "fixtures" / "databases").glob("*.sql"))


@pytest.fixture(params=FIXTURES, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return restored(request.param, tmp_path)


def restored(dump: Path, directory: Path) -> Path:
    made = directory / "state.db"
    database = sqlite3.connect(made)
    database.executescript(dump.read_text())
    database.execute("pragma journal_mode = wal")
    database.close()
    return made


def test_there_is_a_database_of_every_schema_version() -> None:
    config = Config()
    config.set_main_option("script_location", migrate.SCRIPTS)
    config.set_main_option("path_separator", "os")
    versions = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    assert {fixture.stem.split("-")[0] for fixture in FIXTURES} == versions


def test_pods_of_earlier_schemas_load_unchanged(path: Path) -> None:
    records = SqliteRecords(str(path))
    assert records.unreadable() == {}
    running, ended, empty = records.sandboxes.all()
    assert [s.key.name for s in (running, ended, empty)] == ["web", "done", "empty"]
    assert {s.phase for s in (running, ended, empty)} == {SandboxPhase.READY}
    assert running.config.labels["app"] == "wéb"
    assert {s.disk_bus for s in (running, ended, empty)} == {DiskBus.SCSI}
    assert running.network is not None
    assert running.network.ips[0] == "10.88.0.2"
    vm, done = records.containers.all()
    assert (vm.phase, vm.sandbox_id) == (ContainerPhase.RUNNING, running.id)
    assert vm.config.envs == (("TOKEN", b"\xff\x00secret"),)
    assert (vm.config.command, vm.config.args) == (("/bin/app",), ("-v",))
    assert vm.domain_uuid == vm.id.domain_uuid()
    assert done.exit is not None
    assert (done.phase, done.exit.code) == (ContainerPhase.EXITED, 137)
    (image,) = records.images.all()
    assert image.digest == vm.image
    assert records.node_fact("boot") is not None
    records.close()


def test_an_earlier_versions_note_of_a_pods_container_is_dropped(path: Path) -> None:
    with sqlite3.connect(path) as database:
        rows = database.execute("select id, document from sandboxes").fetchall()
        for own, document in rows:
            (fields,) = json.loads(document)
            database.execute(
                "update sandboxes set document = ? where id = ?",
                [json.dumps([{**fields, "sole_container": "init"}]), own],
            )
    database.close()
    records = SqliteRecords(str(path))
    assert records.unreadable() == {}
    running, *_ = records.sandboxes.all()
    records.sandboxes.replace(running.with_root_disk("vm", ImageDigest("sha256:" + "0" * 64)))
    records.close()
    with sqlite3.connect(path) as database:
        ((document,),) = database.execute("select document from sandboxes where id = ?", [running.id.value]).fetchall()
    database.close()
    assert "sole_container" not in document


def test_a_container_of_an_earlier_schema_belongs_to_the_image_of_its_disk(tmp_path: Path) -> None:
    records = SqliteRecords(str(restored(FIXTURES[0].with_name("0003.sql"), tmp_path)))
    vm, _ = records.containers.all()
    (image,) = records.images.all()
    assert vm.image_id == image.id == ImageId(vm.image.value)
    assert records.images.get(image.id) == image
    records.close()


def with_configs(dump: Path, directory: Path, configs: dict[str, object]) -> Path:
    """What those names said is in the image's record; each had a name of its own."""
    path = restored(dump, directory)
    with sqlite3.connect(path) as database:
        ((document,),) = database.execute("select document from images").fetchall()
        (fields,) = json.loads(document)
        fields |= {"tags": ["a:1", "b:1"], "repo_digests": ["c@sha256:1"], "configs": configs}
        database.execute("update images set document = ?", [json.dumps([fields])])
    database.close()
    return path


def test_names_of_one_disk_with_different_configs_become_separate_images(tmp_path: Path) -> None:
    configs: dict[str, object] = {"a:1": {"user": "a"}, "b:1": {"entrypoint": ["/b"]}}
    path = with_configs(FIXTURES[0].with_name("0003.sql"), tmp_path, configs)
    records = SqliteRecords(str(path))
    images = {(*image.tags, *image.repo_digests): image for image in records.images.all()}
    assert {names: image.config for names, image in images.items()} == {
        ("a:1",): ImageConfig(user="a"),
        ("b:1",): ImageConfig(entrypoint=("/b",)),
        ("c@sha256:1",): ImageConfig(),
    }
    plain = images["c@sha256:1",]
    assert plain.id == ImageId(plain.digest.value)
    assert {image.digest for image in images.values()} == {plain.digest}
    assert len({image.id for image in images.values()}) == 3
    records.close()


def test_names_of_one_disk_with_the_same_config_stay_one_image(tmp_path: Path) -> None:
    said = {"user": "a", "env": ["A=b"]}
    configs: dict[str, object] = {"a:1": said, "b:1": said, "c@sha256:1": said}
    records = SqliteRecords(str(with_configs(FIXTURES[0].with_name("0003.sql"), tmp_path, configs)))
    (image,) = records.images.all()
    assert (image.id.value, image.config) == (image.digest.value, ImageConfig(user="a", env=("A=b",)))
    records.close()


def test_an_unreadable_image_record_stays_unreadable_after_the_upgrade(tmp_path: Path) -> None:
    path = restored(FIXTURES[0].with_name("0003.sql"), tmp_path)
    with sqlite3.connect(path) as database:
        database.execute("update images set document = '[{]'")
        ((digest,),) = database.execute("select digest from images").fetchall()
    database.close()
    records = SqliteRecords(str(path))
    assert list(records.unreadable()) == [digest]
    records.close()


def test_images_of_a_damaged_database_of_an_earlier_version_are_salvaged(tmp_path: Path) -> None:
    path = with_configs(FIXTURES[0].with_name("0003.sql"), tmp_path, {"a:1": {"user": "a"}})
    with sqlite3.connect(path) as database:
        ((page, size),) = database.execute(
            "select rootpage, page_size from sqlite_master, pragma_page_size where name = 'sandboxes'"
        ).fetchall()
        database.execute("pragma wal_checkpoint(truncate)")
    database.close()
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    records = open_records(str(path))
    assert records.sandboxes.all() == []
    assert sorted(image.tags for image in records.images.all()) == [("a:1",), ("b:1",)]
    records.close()


def test_upgraded_records_can_be_changed_and_read_back(path: Path) -> None:
    records = SqliteRecords(str(path))
    vm, _ = records.containers.all()
    seen = vm.with_troubles((Trouble(TroubleKind.PAUSED, "seen"),))
    records.containers.replace(seen)
    node = records.node_id()
    records.close()
    again = SqliteRecords(str(path))
    assert again.containers.get(vm.id) == seen
    assert again.node_id() == node
    again.close()


def test_fields_that_a_later_version_added_are_ignored_after_a_rollback(path: Path) -> None:
    """docs/install.md promises this as long as the schema is the same."""
    records = SqliteRecords(str(path))
    before = (records.sandboxes.all(), records.containers.all())
    records.close()
    database = sqlite3.connect(path)
    for table in ("sandboxes", "containers"):
        for row, document in database.execute(f"select id, document from {table}").fetchall():
            (fields,) = json.loads(document)
            later = json.dumps([{**fields, "config": {**fields["config"], "later": [1]}, "later": {"a": 1}}])
            database.execute(f"update {table} set document = ? where id = ?", (later, row))
    database.commit()
    database.close()
    again = SqliteRecords(str(path))
    assert again.unreadable() == {}
    assert (again.sandboxes.all(), again.containers.all()) == before
    again.close()


def test_the_daemon_refuses_a_newer_schema_with_both_versions_and_a_remedy_and_changes_nothing(tmp_path: Path) -> None:
    path = restored(FIXTURES[-1], tmp_path)
    with sqlite3.connect(path) as database:
        database.execute("update alembic_version set version_num = '9999'")
    database.close()
    before = path.read_bytes()
    settings = path.with_name("config.toml")
    with tempfile.TemporaryDirectory(prefix="vs-") as run:  # a socket's path must be short
        settings.write_text(f'[paths]\nstate_dir = "{path.parent}"\nrun_dir = "{run}"\n')
        done = subprocess.run(
            [sys.executable, "-m", "virtshim", "serve", "--config", str(settings)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 75
    told = done.stdout + done.stderr
    assert "'9999'" in told
    assert f"'{migrate.HEAD}'" in told
    assert "Install that newer version again" in told
    assert path.read_bytes() == before
    assert not list(path.parent.glob("*.corrupt-*"))
