"""Records in real SQLite are read back completely, and an unreadable record does not count as absent."""

import dataclasses
import json
import os
import sqlite3
import stat
import threading
from pathlib import Path

import pytest
from fakes.changed import changed
from fakes.full_records import BORROWED, CONDITION, CONTAINER, IMAGE, SANDBOX, fill, sandbox
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from virtshim.model.container import ContainerPhase, ContainerSpec, ContainerStatus, Resources, RunAs
from virtshim.model.errors import AlreadyExists, InternalError, NotFound, ResourceExhausted, ShimError
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.image import ImageConfig
from virtshim.model.sandbox import PodKey, SandboxPhase
from virtshim.model.vm import DiskBus
from virtshim.store import rows
from virtshim.store.records import SqliteRecords, open_engine


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.fixture
def records(path: Path):
    records = SqliteRecords(str(path))
    yield records
    records.close()


def opened(path: Path) -> SqliteRecords:
    """Opens and closes; what was read stays readable."""
    records = SqliteRecords(str(path))
    records.close()
    return records


# --- round trips


def has_no_default_left(record: object) -> list[str]:
    """Fields of a record that hold their default: a test that forgets a new field is found here."""
    left = []
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        if isinstance(value, Resources):
            left += [field.name] if value == Resources() else []
        elif dataclasses.is_dataclass(value):
            left += [f"{field.name}.{name}" for name in has_no_default_left(value)]
        elif field.default is not dataclasses.MISSING and value == field.default:
            left.append(field.name)
    return left


@pytest.mark.parametrize("record", [SANDBOX, CONTAINER, IMAGE], ids=lambda record: type(record).__name__)
def test_the_records_of_this_test_fill_every_field(record: object) -> None:
    ignored = {"network.dns.searches", "network.dns.options"}
    assert set(has_no_default_left(record)) - ignored == set()


def test_every_field_of_every_record_survives_a_restart(records: SqliteRecords, path: Path) -> None:
    fill(records)
    records.close()
    again = opened(path)
    assert again.sandboxes.all() == [SANDBOX]
    assert again.containers.all() == [CONTAINER]
    assert again.images.all() == [IMAGE]
    assert again.borrowed.all() == [BORROWED]
    assert again.device_conditions.all() == [CONDITION]


def test_environment_values_are_bytes_and_survive_unchanged(records: SqliteRecords, path: Path) -> None:
    fill(records)
    records.close()
    envs = opened(path).containers.all()[0].config.envs
    assert envs == CONTAINER.config.envs
    assert all(type(value) is bytes for _, value in envs)


FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LABELS = st.dictionaries(TEXT, TEXT, max_size=3)


@given(
    labels=LABELS,
    annotations=LABELS,
    envs=st.lists(st.tuples(TEXT, st.binary(max_size=20)), max_size=3),
    texts=st.tuples(TEXT, TEXT, TEXT),
    number=st.integers(-(2**63), 2**63 - 1),
    size=st.integers(0, 2**64 - 1),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_text_bytes_and_numbers_of_a_request_survive(
    labels: dict[str, str],
    annotations: dict[str, str],
    envs: list[tuple[str, bytes]],
    texts: tuple[str, str, str],
    number: int,
    size: int,
) -> None:
    config = dataclasses.replace(
        CONTAINER.config,
        labels=labels,
        annotations=annotations,
        envs=tuple(envs),
        args=texts,
        working_dir=texts[0],
        resources=Resources(cpu_quota=number, memory_limit_bytes=number, hugepage_limits={texts[1]: size}),
    )
    container = changed(CONTAINER, config=config)
    assert rows.container_from(rows.container_document(container)) == container
    made = dataclasses.replace(SANDBOX, config=dataclasses.replace(SANDBOX.config, labels=labels, hostname=texts[2]))
    assert rows.SANDBOX.parse(rows.SANDBOX.text(made)) == made


# --- the table


def test_a_list_is_in_order_of_creation_also_after_a_restart(records: SqliteRecords, path: Path) -> None:
    made = [sandbox(n) for n in (5, 9, 200)]
    for one in made:
        records.sandboxes.add(one)
    assert records.sandboxes.all() == made
    records.sandboxes.replace(dataclasses.replace(made[0], reason="changed"))
    records.close()
    assert [s.created_at for s in opened(path).sandboxes.all()] == [5, 9, 200]


def test_a_taken_id_is_refused(records: SqliteRecords) -> None:
    records.sandboxes.add(SANDBOX)
    with pytest.raises(AlreadyExists):
        records.sandboxes.add(dataclasses.replace(SANDBOX, key=PodKey("other", "pod", "uid", 0)))
    assert records.sandboxes.all() == [SANDBOX]


def test_a_taken_pod_key_is_refused(records: SqliteRecords) -> None:
    records.sandboxes.add(SANDBOX)
    with pytest.raises(AlreadyExists):
        records.sandboxes.add(dataclasses.replace(SANDBOX, id=SandboxId("b" * 64)))
    records.sandboxes.add(
        dataclasses.replace(SANDBOX, id=SandboxId("b" * 64), key=dataclasses.replace(SANDBOX.key, attempt=0))
    )


def test_a_taken_container_name_is_refused_within_one_sandbox_only(records: SqliteRecords) -> None:
    records.containers.add(CONTAINER)
    twin = changed(CONTAINER, id=ContainerId("d" * 64), claims=())
    with pytest.raises(AlreadyExists):
        records.containers.add(twin)
    records.containers.add(changed(twin, sandbox_id=SandboxId("b" * 64)))


def test_replacing_a_row_that_is_gone_is_not_found_and_does_not_bring_it_back(records: SqliteRecords) -> None:
    with pytest.raises(NotFound):
        records.sandboxes.replace(SANDBOX)
    assert records.sandboxes.all() == []
    assert records.sandboxes.get(SANDBOX.id) is None


def test_deleting_what_is_gone_is_no_error(records: SqliteRecords) -> None:
    fill(records)
    for _ in range(2):
        records.sandboxes.delete(SANDBOX.id)
        records.containers.delete(CONTAINER.id)
        records.images.delete(IMAGE.id)
    assert records.sandboxes.all() == records.containers.all() == records.images.all() == []


def test_each_change_of_a_table_shows_in_its_generation_and_a_refused_one_does_not(records: SqliteRecords) -> None:
    seen = [records.sandboxes.generation]

    def is_new() -> bool:
        seen.append(records.sandboxes.generation)
        return seen[-1] > seen[-2]

    records.sandboxes.add(SANDBOX)
    assert is_new()
    records.sandboxes.replace(dataclasses.replace(SANDBOX, reason="changed"), survives_power_cuts=False)
    assert is_new()
    records.sandboxes.put(SANDBOX)
    assert is_new()
    with pytest.raises(AlreadyExists):
        records.sandboxes.add(SANDBOX)
    assert not is_new()
    records.sandboxes.delete(SANDBOX.id)
    assert is_new()
    records.sandboxes.delete(SANDBOX.id)
    assert not is_new()


def test_records_that_are_read_after_a_generation_are_at_least_as_new(records: SqliteRecords) -> None:
    told: list[tuple[int, int]] = []
    records.sandboxes.on_change(
        lambda _before, _after: told.append((records.sandboxes.generation, len(records.sandboxes.all())))
    )
    before = records.sandboxes.generation
    records.sandboxes.add(SANDBOX)
    assert told == [(before + 1, 1)]


def test_put_adds_or_replaces(records: SqliteRecords, path: Path) -> None:
    records.images.put(IMAGE)
    other = dataclasses.replace(IMAGE, tags=(), pulled_at=9)
    records.images.put(other)
    records.close()
    assert opened(path).images.all() == [other]


def test_a_change_is_on_disk_when_the_call_returns(records: SqliteRecords, path: Path) -> None:
    """Another connection sees each change at once: it was committed."""
    fill(records)
    with sqlite3.connect(path) as other:
        assert other.execute("select phase, created_at from sandboxes").fetchall() == [("not-ready", 2**62)]
        assert other.execute("select name, attempt from containers").fetchall() == [("vm", 3)]
        assert other.execute("pragma journal_mode").fetchall() == [("wal",)]
    other.close()


def test_a_write_that_fails_changes_neither_disk_nor_memory(path: Path) -> None:
    engine = open_engine(str(path))
    records = SqliteRecords(str(path), lambda _path: engine)
    records.sandboxes.add(SANDBOX)
    # A full disk, as SQLite sees it: no page may be added to the file.
    with engine.connect() as connection:
        connection.exec_driver_sql("pragma max_page_count=1")
    big = dataclasses.replace(SANDBOX, reason="x" * 100_000)
    with pytest.raises(ResourceExhausted, match="disk is full"):
        records.sandboxes.replace(big)
    with pytest.raises(ResourceExhausted):
        records.sandboxes.add(sandbox(1, reason="x" * 100_000))
    assert records.sandboxes.all() == [SANDBOX]
    with engine.connect() as connection:
        connection.exec_driver_sql("pragma max_page_count=100000")
    records.sandboxes.replace(big)
    assert records.sandboxes.all() == [big]
    records.close()
    assert opened(path).sandboxes.all() == [big]


def test_many_threads_may_write_at_once(records: SqliteRecords, path: Path) -> None:
    def work(base: int) -> None:
        for n in range(base, base + 20):
            records.sandboxes.add(sandbox(n))
            records.sandboxes.replace(sandbox(n, reason="again"))
            if n % 2:
                records.sandboxes.delete(SandboxId(f"{n:064x}"))
            records.sandboxes.all()

    threads = [threading.Thread(target=work, args=(base,)) for base in range(0, 160, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(records.sandboxes.all()) == 80
    before = sorted(records.sandboxes.all(), key=lambda s: s.created_at)
    records.close()
    assert opened(path).sandboxes.all() == before


# --- facts of the node


def test_the_newest_stamp_is_the_maximum_over_all_records(records: SqliteRecords) -> None:
    assert records.newest_stamp() == 0
    records.containers.add(CONTAINER)
    assert records.newest_stamp() == 5
    records.sandboxes.add(SANDBOX)
    assert records.newest_stamp() == 2**62


def test_node_facts_are_kept_and_can_be_changed(records: SqliteRecords, path: Path) -> None:
    assert records.node_fact("boot") is None
    records.set_node_fact("boot", "one")
    records.set_node_fact("boot", "two")
    node_id = records.node_id()
    records.close()
    again = SqliteRecords(str(path))
    assert (again.node_fact("boot"), again.node_id()) == ("two", node_id)
    again.close()


# --- the file


def test_only_the_owner_may_read_the_database_and_sqlites_side_files(records: SqliteRecords, path: Path) -> None:
    fill(records)
    files = sorted(path.parent.iterdir())
    assert path in files
    assert len(files) == 4  # the database, its write-ahead log, the log's index, and what keeps room for it
    assert {oct(stat.S_IMODE(file.stat().st_mode)) for file in files} == {"0o600"}


def test_a_link_at_the_databases_path_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises((ShimError, OSError)):
        SqliteRecords(str(tmp_path / "link"))
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    "content", [b"this is not a database, and it is longer than a header" * 10, b"SQLite format 3\0"]
)
def test_a_file_that_is_no_database_is_named_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(InternalError, match=r"state\.db"):
        SqliteRecords(str(path))
    assert path.read_bytes() == content


def test_a_damaged_database_is_an_error_and_not_an_empty_node(records: SqliteRecords, path: Path) -> None:
    for n in range(1, 200):
        records.sandboxes.add(sandbox(n))
    records.close()
    data = bytearray(path.read_bytes())
    data[4096 : len(data)] = os.urandom(len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(ShimError):
        SqliteRecords(str(path))


@pytest.mark.parametrize(
    ("table", "change", "where"),
    [
        ("sandboxes", "'not json'", "JSON"),
        ("sandboxes", "json_remove(document, '$[0].key')", "key"),
        ("sandboxes", "json_set(document, '$[0].phase', 'dancing')", "phase"),
        ("sandboxes", "json_set(document, '$[0].id.value', hex(zeroblob(32)))", "different id"),
        ("containers", "json_set(document, '$[0].created_at', 'late')", "created_at"),
        ("containers", "json_set(document, '$[0].id.value', 'short')", "id"),
        ("containers", "x'ff00'", "not text"),
        ("containers", "cast(x'22ff22' as text)", "unreadable"),
        ("images", "'[]'", "image"),
        ("borrowed", "json_remove(document, '$[0].driver')", "driver"),
        ("device_conditions", "json_remove(document, '$[0].address')", "address"),
    ],
)
def test_an_unreadable_record_is_reported_by_its_place_and_without_its_content(
    records: SqliteRecords, path: Path, table: str, change: str, where: str
) -> None:
    fill(records)
    records.close()
    with sqlite3.connect(path) as broken:
        broken.execute(f"update {table} set document = {change}")
    broken.close()
    (why,) = opened(path).unreadable().values()
    assert where in why
    assert table.rstrip("es").replace("_", " ") in why
    assert "secret" not in why


def test_pods_with_unreadable_records_are_listed_with_what_is_known(records: SqliteRecords, path: Path) -> None:
    fill(records)
    (before,) = records.containers.all()
    records.close()
    with sqlite3.connect(path) as broken:
        for table in ("sandboxes", "containers"):
            broken.execute(f"update {table} set document = '[]'")
    broken.close()
    after = opened(path)
    (sandbox,) = after.sandboxes.all()
    assert (sandbox.id, sandbox.key, sandbox.created_at) == (SANDBOX.id, SANDBOX.key, SANDBOX.created_at)
    assert sandbox.phase is SandboxPhase.NOT_READY
    assert "unreadable" in sandbox.reason
    (container,) = after.containers.all()
    assert (container.id, container.sandbox_id, container.name) == (before.id, before.sandbox_id, before.name)
    assert container.phase is ContainerPhase.UNKNOWN


def test_an_unreadable_record_that_is_rewritten_is_readable_again(records: SqliteRecords, path: Path) -> None:
    fill(records)
    records.close()
    with sqlite3.connect(path) as broken:
        broken.execute("update sandboxes set document = '[]'")
    broken.close()
    after = opened(path)
    assert list(after.unreadable()) == [SANDBOX.id.value]
    after.sandboxes.put(SANDBOX)
    assert after.unreadable() == {}
    after.close()
    assert opened(path).sandboxes.all() == [SANDBOX]


def test_a_pod_is_restored_from_its_vms_record_without_secrets(records: SqliteRecords) -> None:
    fill(records)
    (sandbox,), (container,) = records.sandboxes.all(), records.containers.all()
    text = records.to_text(sandbox, container)
    assert text.isascii()
    assert "secret" not in text
    again = records.from_text(text)
    assert sandbox.network is not None
    assert again == (
        dataclasses.replace(sandbox, network=dataclasses.replace(sandbox.network, fetch_key="")),
        changed(
            container,
            config=dataclasses.replace(container.config, envs=()),
            image_config=dataclasses.replace(container.spec.image_config, env=()),
        ),
    )


def test_a_vms_record_has_the_format_from_before_the_split_and_both_formats_are_read(records: SqliteRecords) -> None:
    """VMs that run through an upgrade carry what the version before wrote, and an older version reads what this one writes."""
    assert SANDBOX.network is not None
    before = (FIXTURES / "records" / "0003-flat.json").read_text()
    pod, vm = json.loads(records.to_text(SANDBOX, CONTAINER))
    assert pod.pop("disk_bus") == "virtio"  # came later: read as what disks were on until then
    assert pod.pop("profile")  # came later: read as none
    assert pod.pop("adopted")  # came later: read as virtshim's own
    assert pod["config"].pop("sysctls")  # came later: read as none
    for name in ("rules", "table_routes"):
        assert [len(nic.pop(name)) for nic in pod["network"]["interfaces"]] == [1]  # came later: read as none
    assert vm.pop("uid") == CONTAINER.spec.uid  # came later: read as the user that all VMs had in common
    assert vm.pop("passt_uid")  # came later: read as a VM with taps
    assert pod["network"].pop("inode")  # came later: read as a namespace of tapmanager's
    assert len(vm.pop("volumes")) == 1  # came later: read as none
    assert len(vm.pop("copies")) == 1  # came later: read as none
    assert len(vm.pop("memory_volumes")) == 1  # came later: read as none
    assert len(vm.pop("empty_disks")) == 1  # came later: read as none
    assert vm.pop("copied")  # came later: read as none that the guest is known to have
    assert vm.pop("resizing")  # came later: read as none under way
    assert vm.pop("paused")  # came later: read as not paused
    assert vm.pop("unmounted")  # came later: read as mounted, as far as is known
    assert vm.pop("mounts_confirmed")  # came later: read as never said by the guest
    assert vm.pop("troubles")  # came later: read as none, so that those there are are told
    assert [mount.pop("follows") for mount in vm["config"]["mounts"]] == [False, False]  # came later
    assert [mount.pop("recursive_read_only") for mount in vm["config"]["mounts"]] == [True, False]  # came later
    images = [(mount.pop("image"), mount.pop("image_sub_path")) for mount in vm["config"]["mounts"]]
    assert images == [("", ""), ("registry.test/files", "etc")]  # came later: read as paths of the node
    assert vm.pop("image_config")["stop_signal"] == "SIGQUIT"  # came later: read as an image that says nothing
    assert vm.pop("beside_pod")  # came later: read as below the pod, where all were
    assert vm.pop("vm")  # came later: read as one that ends with its pod
    for name in (
        "save_on_stop",
        "state_volume",
        "saving",
        "renewing",
        "known_as",
        "arriving",
        "restore_from",
        "moved_to",
    ):
        assert vm.pop(name)  # came later: read as neither saved nor restored nor moved
    for name in ("warm_start", "warm_started"):
        assert vm.pop(name)  # came later: read as one that boots
    assert vm.pop("image_id")  # came later: read as the disk's digest, by which images were known
    assert vm.pop("stop_asked")  # came later: read as not asked
    assert vm.pop("user")  # came later: read as not known
    assert vm["config"].pop("readonly_root")  # came later: read as writable
    for limit in ("dropped", "added", "no_new_privs"):
        assert vm["config"]["user"].pop(limit)  # came later: read as nothing that commands must not have
    assert len(vm["granted"].pop("not_given")) == 1  # came later: read as nothing left out
    assert [block.pop("is_file") for block in vm["granted"]["blocks"]] == [True]  # came later: read as a device
    assert [block.pop("identity") for block in vm["granted"]["blocks"]] == ["7:0"]  # came later: read as not known
    assert [pod, vm] == json.loads(before)
    (nic,) = SANDBOX.network.interfaces
    nic = dataclasses.replace(nic, rules=(), table_routes=())
    network = dataclasses.replace(SANDBOX.network, fetch_key="", interfaces=(nic,), inode=0)
    config = dataclasses.replace(SANDBOX.config, sysctls={})
    mounts = tuple(
        dataclasses.replace(mount, recursive_read_only=False, image="", image_sub_path="")
        for mount in CONTAINER.config.mounts
    )
    blocks = tuple(dataclasses.replace(block, is_file=False) for block in CONTAINER.granted.blocks)
    assert records.from_text(before) == (
        dataclasses.replace(SANDBOX, config=config, network=network, disk_bus=DiskBus.SCSI, profile={}, adopted=None),
        changed(
            CONTAINER,
            config=dataclasses.replace(
                CONTAINER.config,
                envs=(),
                mounts=mounts,
                readonly_root=False,
                user=RunAs("app", 7, (8, 9), own_groups=False),
            ),
            uid=0,
            passt_uid=0,
            volumes=(),
            copies=(),
            memory_volumes=(),
            empty_disks=(),
            granted=dataclasses.replace(CONTAINER.granted, blocks=blocks, not_given=()),
            image_config=ImageConfig(),
            beside_pod=False,
            vm="",
            save_on_stop=False,
            state_volume="",
            saving=False,
            renewing=False,
            known_as=None,
            arriving=False,
            restore_from="",
            moved_to="",
            warm_start=False,
            warm_started=False,
            image_id=None,
            stop_asked=False,
            user=None,
            copied=(),
            unmounted=False,
            mounts_confirmed=False,
            troubles=(),
            resizing=None,
            paused=False,
        ),
    )


def test_spec_and_status_share_no_field() -> None:
    """Their fields lie side by side in one document."""
    spec, status = ({field.name for field in dataclasses.fields(kind)} for kind in (ContainerSpec, ContainerStatus))
    assert spec & status == set()


@pytest.mark.parametrize("text", ["", "nonsense", "[]", '[{"id":1},{}]'])
def test_malformed_text_of_a_pod_is_an_error(records: SqliteRecords, text: str) -> None:
    with pytest.raises(InternalError):
        records.from_text(text)


def test_a_record_written_before_a_field_existed_gets_its_default(records: SqliteRecords, path: Path) -> None:
    fill(records)
    records.close()
    with sqlite3.connect(path) as older:
        older.execute("update images set document = json_remove(document, '$[0].pinned', '$[0].taken')")
    older.close()
    assert opened(path).images.all() == [dataclasses.replace(IMAGE, pinned=False, taken=0)]


def test_two_processes_do_not_share_a_database_silently(records: SqliteRecords, path: Path) -> None:
    """A second one can read; its writes wait for the first one's transactions and are seen by neither memory."""
    fill(records)
    second = SqliteRecords(str(path))
    assert second.sandboxes.all() == [SANDBOX]
    second.close()
