"""Files of the ledger are complete, and an unreadable file never counts as absent."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapmanager.cni.conf import NO_CNI, NetworkConf
from tapmanager.errors import TapmanagerError
from tapmanager.fields import BadField
from tapmanager.ledger import Entry, Ledger, Phase, Placement, from_json, to_json
from tapmanager.links.policy_routes import PolicyRule, TableRoute
from tapmanager.network_values import Dns, Existing
from tapmanager.pod import Nic, NicFunction, Pod, PortMapping, Route, SharedNic
from tapmanager.sriov.vf_settings import VfSettings

SANDBOX = "0123456789abcdef" * 4
MAC = "0a:58:0a:01:00:07"
ENTRY = Entry(
    phase=Phase.ATTACHED,
    pod=Pod(SANDBOX, "default", "web", "uid-1", Dns(("10.96.0.10",)), (PortMapping("tcp", 80, 8080, "127.0.0.1"),)),
    netns="/run/netns/virtshim-0123456789abcdef0123",
    conf=NetworkConf("net", "1.0.0", ({"type": "bridge", "ipam": {"type": "host-local"}},)),
    bin_dirs=("/opt/cni/bin",),
    fetch_key="c0ffee" * 10 + "abcd",
    result={"ips": [{"address": "10.88.0.5/16"}]},
    nics=(
        Nic("eth0", "0a:58:00:00:00:01", "02:00:00:00:00:01", "br0", "02:00:00:00:00:02", "tap0", 1500,
            ("10.88.0.5/16",), (Route("0.0.0.0/0", "10.88.0.1"),), ("10.88.0.5/16",), (Route("10.88.0.0/16"),)),
    ),
    ips=("10.88.0.5",),
    dns=Dns(("10.96.0.10",), ("cluster.local",), ("ndots:5",)),
)  # fmt: skip

# As earlier versions, and this one, wrote ENTRY: `<version>.json`, `<version>-<what>.json`.
FIXTURES = sorted((Path(__file__).resolve().parents[2] / "fixtures" / "ledger").glob("*.json"))


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    made = Ledger(str(tmp_path / "ledger"), str(tmp_path / "run"))
    made.prepare()
    return made


def test_an_entry_is_read_as_it_was_written(ledger: Ledger) -> None:
    ledger.write(ENTRY)
    assert ledger.read(SANDBOX) == ENTRY
    assert ledger.sandboxes() == [SANDBOX]


def test_files_hold_secrets_so_only_root_reads_them(ledger: Ledger) -> None:
    ledger.write(ENTRY)
    path = ledger.path(SANDBOX)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    assert ENTRY.fetch_key not in repr(ENTRY)


@pytest.mark.parametrize("before", list(Phase))
@pytest.mark.parametrize("after", list(Phase))
def test_marking_a_record_only_changes_its_phase(ledger: Ledger, before: Phase, after: Phase) -> None:
    written = dataclasses.replace(ENTRY, phase=before)
    ledger.write(written)
    file = os.stat(ledger.path(SANDBOX)).st_ino
    assert ledger.mark(written, after) == ledger.read(SANDBOX) == dataclasses.replace(ENTRY, phase=after)
    assert os.stat(ledger.path(SANDBOX)).st_ino == file, "written anew, for which a sync would be needed"


def test_queues_are_read_as_they_were_written_and_earlier_records_have_none(ledger: Ledger) -> None:
    many = dataclasses.replace(
        ENTRY,
        pod=dataclasses.replace(ENTRY.pod, multi_queue=True),
        nics=(dataclasses.replace(ENTRY.nics[0], multi_queue=True),),
        placement=Placement(queues=4),
    )
    ledger.write(many)
    ledger.place(SANDBOX, many.placement)
    assert ledger.read(SANDBOX) == many
    earlier = json.loads(json.dumps(to_json(many)))
    for where in (earlier["pod"], earlier["nics"][0]):
        del where["multi_queue"]
    assert from_json({**earlier, "placement": {"group": ""}}) == ENTRY


def test_a_pod_in_another_runtimes_namespace_is_read_as_it_was_written(ledger: Ledger) -> None:
    shared = dataclasses.replace(
        ENTRY,
        pod=dataclasses.replace(ENTRY.pod, existing=Existing("/run/netns/cni-1", ("10.88.0.5",))),
        netns="/run/netns/cni-1",
        conf=NO_CNI,
        result=None,
        nics=(),
        placement=Placement(stream="/run/virtshim/shares/x/net/sock"),
        shared=SharedNic("eth0", MAC, 4026532401, ("10.88.0.5/16",)),
    )
    ledger.write(shared)
    ledger.place(SANDBOX, shared.placement)
    assert ledger.read(SANDBOX) == shared
    assert not {"shared", "existing"} & {*to_json(ENTRY), *to_json(ENTRY)["pod"]}, "an earlier version reads the others"


def test_the_placement_of_an_earlier_version_holds_until_the_next(ledger: Ledger) -> None:
    """Its VM keeps running while tapmanager is upgraded."""
    earlier = {**json.loads(json.dumps(to_json(ENTRY))), "placement": {"group": "/virtshim/x", "uid": 4711}}
    Path(ledger.path(SANDBOX)).write_text(json.dumps(earlier))
    assert ledger.read(SANDBOX) == dataclasses.replace(ENTRY, placement=Placement("/virtshim/x", uid=4711))
    ledger.place(SANDBOX, Placement("/virtshim/y"))
    assert ledger.read(SANDBOX) == dataclasses.replace(ENTRY, placement=Placement("/virtshim/y"))


@pytest.mark.parametrize("left", [b"", b"{", b'{"group": 5}', None], ids=["empty", "half", "wrong", "lost"])
def test_a_power_cut_may_take_the_placement_but_not_the_record(
    ledger: Ledger, tmp_path: Path, left: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    ledger.write(ENTRY)
    ledger.place(SANDBOX, Placement("/virtshim/x", open_until=99))
    (file,) = (tmp_path / "run").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.unlink() if left is None else file.write_bytes(left)
    assert ledger.read(SANDBOX) == ENTRY
    assert (left is None) == (caplog.text == "")
    ledger.place(SANDBOX, Placement("/virtshim/z"))
    assert ledger.read(SANDBOX) == dataclasses.replace(ENTRY, placement=Placement("/virtshim/z"))
    ledger.delete(SANDBOX)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_placement_is_written_without_a_sync(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.write(ENTRY)
    monkeypatch.setattr(os, "fsync", lambda _fd: pytest.fail("a start waits for the disk"))
    ledger.place(SANDBOX, Placement("/virtshim/x"))


def test_rules_and_tables_are_read_as_they_were_written_and_earlier_records_have_none(ledger: Ledger) -> None:
    rules, routes = (PolicyRule(4, 9, 100, "10.88.0.5/32"),), (TableRoute(100, "0.0.0.0/0", "10.88.0.1"),)
    routed = dataclasses.replace(
        ENTRY,
        pod=dataclasses.replace(ENTRY.pod, policy_routes=True),
        nics=(dataclasses.replace(ENTRY.nics[0], rules=rules, table_routes=routes),),
    )
    ledger.write(routed)
    assert ledger.read(SANDBOX) == routed
    earlier = json.loads(json.dumps(to_json(routed)))
    for where, name in (
        (earlier["pod"], "policy_routes"),
        *((earlier["nics"][0], one) for one in ("rules", "table_routes")),
    ):
        del where[name]
    assert from_json(earlier) == ENTRY


@pytest.mark.parametrize("written", FIXTURES, ids=lambda path: path.name)
def test_a_record_of_an_earlier_version_is_marked_too(ledger: Ledger, written: Path) -> None:
    Path(ledger.path(SANDBOX)).write_bytes(written.read_bytes())
    entry = ledger.read(SANDBOX)
    assert entry is not None
    ledger.mark(entry, Phase.RELEASING)
    assert ledger.read(SANDBOX) == dataclasses.replace(entry, phase=Phase.RELEASING)


def test_a_missing_record_cannot_be_marked(ledger: Ledger) -> None:
    with pytest.raises(TapmanagerError, match="cannot be written"):
        ledger.mark(ENTRY, Phase.RELEASING)
    assert ledger.read(SANDBOX) is None


def test_deleting_twice_is_no_error(ledger: Ledger) -> None:
    ledger.write(ENTRY)
    ledger.delete(SANDBOX)
    ledger.delete(SANDBOX)
    assert ledger.read(SANDBOX) is None
    assert ledger.sandboxes() == []


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000])
def test_an_unreadable_file_is_listed_and_kept_and_reading_it_fails(ledger: Ledger, data: bytes) -> None:
    path = Path(ledger.path(SANDBOX))
    path.write_bytes(data)
    with pytest.raises(TapmanagerError, match=str(path)) as caught:
        ledger.read(SANDBOX)
    assert caught.value.kind == "internal"
    assert ledger.sandboxes() == [SANDBOX]
    assert path.read_bytes() == data


def test_a_file_under_another_sandboxs_name_is_refused(ledger: Ledger) -> None:
    ledger.write(ENTRY)
    other = "f" * 64
    os.rename(ledger.path(SANDBOX), ledger.path(other))
    with pytest.raises(TapmanagerError, match="not the sandbox"):
        ledger.read(other)


def test_files_half_written_by_a_killed_process_are_removed_at_start_and_never_listed(ledger: Ledger) -> None:
    folder = Path(ledger.path(SANDBOX)).parent
    (folder / ".new-abc").write_text("{")
    (folder / "lock").write_text("1")
    assert ledger.sandboxes() == []
    ledger.prepare()
    assert sorted(path.name for path in folder.iterdir()) == ["lock"]


@pytest.mark.parametrize("file", FIXTURES, ids=lambda file: file.stem)
def test_files_of_earlier_versions_are_read(ledger: Ledger, file: Path) -> None:
    Path(ledger.path(SANDBOX)).write_text(file.read_text())
    assert ledger.read(SANDBOX) == ENTRY


def test_a_functions_record_of_an_earlier_version_has_only_its_mac() -> None:
    function = NicFunction(
        "net1", "0000:3b:02.1", "iavf", MAC, 1500, (), (), (), VfSettings(mac="02:00:00:00:00:07", vlan=100)
    )
    now = json.loads(json.dumps(function.to_json()))
    assert now["is_back"] is False
    assert NicFunction.from_json({**now, "is_back": True}, "x") == dataclasses.replace(function, is_back=True)
    assert NicFunction.from_json(now, "x") == function
    early = {**{name: value for name, value in now.items() if name != "settings"}, "admin_mac": "02:00:00:00:00:07"}
    assert NicFunction.from_json(early, "x").settings == VfSettings(mac="02:00:00:00:00:07")
    assert NicFunction.from_json({**early, "admin_mac": ""}, "x").settings is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vlan", 4096),
        ("vlan", "100"),
        ("protocol", "802.1X"),
        ("trust", 1),
        ("mac", "0"),
        ("link_state", "up"),
        ("x", 1),
    ],
)
def test_settings_that_no_card_can_have_are_refused(field: str, value: object) -> None:
    with pytest.raises(BadField, match=rf"x\.{field}"):
        VfSettings.from_json({field: value}, "x")


def test_there_is_a_file_of_every_version() -> None:
    assert {int(file.stem.split("-")[0]) for file in FIXTURES} == set(range(1, to_json(ENTRY)["version"] + 1))


def test_a_newer_versions_file_is_refused_and_stays(ledger: Ledger) -> None:
    """Whatever else is new in it."""
    raw = json.dumps({**to_json(ENTRY), "version": 99, "phase": "sleeping", "invented": {}})
    Path(ledger.path(SANDBOX)).write_text(raw)
    with pytest.raises(TapmanagerError, match="version: 99, written by a newer tapmanager; this one supports 1"):
        ledger.read(SANDBOX)
    assert ledger.sandboxes() == [SANDBOX]
    assert Path(ledger.path(SANDBOX)).read_text() == raw


@given(
    name=st.sampled_from([field.name for field in dataclasses.fields(Entry)]),
    value=st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), min_size=1, max_size=2),
)
def test_a_wrong_field_is_a_bad_field_or_harmless(name: str, value: object) -> None:
    raw = json.loads(json.dumps({**to_json(ENTRY), name: value}))
    with contextlib.suppress(BadField):
        from_json(raw)


def test_a_full_disk_is_resource_exhausted_and_leaves_the_old_file(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file system to fill would need a mount."""
    ledger.write(ENTRY)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TapmanagerError) as caught:
        ledger.write(dataclasses.replace(ENTRY, phase=Phase.RELEASING))
    assert caught.value.kind == "exhausted"
    assert ledger.read(SANDBOX) == ENTRY
    assert len(os.listdir(os.path.dirname(ledger.path(SANDBOX)))) == 1
