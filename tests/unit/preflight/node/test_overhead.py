"""`virtshim check` compares RuntimeClass overhead with what QEMU takes."""

from pathlib import Path

import pytest

from virtshim.preflight import node_facts
from virtshim.preflight.finding import Level
from virtshim.preflight.overhead import QemuMemory, RuntimeClass, declared, running, runtime_class, taken

pytestmark = pytest.mark.operator

MIB = 1 << 20
SMAPS = """\
7f0000000000-7f0020000000 rw-p 00000000 00:00 0
Size:             {guest} kB
Rss:              200000 kB
Pss:              200000 kB
55d000000000-55d000100000 r-xp 00000000 fe:00 1  /usr/bin/qemu-system-x86_64
Size:               9000 kB
Rss:                8000 kB
Pss:                4000 kB
55d001000000-55d001100000 rw-p 00000000 00:00 0  [heap]
Size:              90000 kB
Rss:               61440 kB
Pss:               61440 kB
"""


def test_the_guests_memory_mapping_is_not_counted_as_qemus_overhead() -> None:
    assert taken(SMAPS.format(guest=512 << 10), 512 * MIB) == (4000 + 61440) << 10


@pytest.mark.parametrize("text", ["", SMAPS.format(guest=100 << 10), "Size: 1 kB\n"])
def test_the_overhead_is_unknown_if_the_guests_mapping_is_not_found(text: str) -> None:
    assert taken(text, 512 * MIB) is None


def test_a_process_is_read_by_its_command_line_and_its_mappings(tmp_path: Path) -> None:
    (tmp_path / "cmdline").write_bytes(b"qemu\0-m\0size=524288k,slots=16\0")
    (tmp_path / "smaps").write_text(SMAPS.format(guest=512 << 10))
    assert node_facts.memory_beside_the_guest(str(tmp_path)) == (4000 + 61440) << 10
    (tmp_path / "cmdline").write_bytes(b"qemu\0-m\0" + b"512\0")
    assert node_facts.memory_beside_the_guest(str(tmp_path)) is not None
    (tmp_path / "cmdline").write_bytes(b"qemu\0")
    assert node_facts.memory_beside_the_guest(str(tmp_path)) is None
    assert node_facts.memory_beside_the_guest(str(tmp_path / "gone")) is None


@pytest.mark.parametrize(
    ("found", "trouble", "level", "said"),
    [
        ([], "", Level.OK, "no VM runs"),
        ([QemuMemory("a/b", 256 * MIB, 90 * MIB), QemuMemory("a/c", 256 * MIB, 70 * MIB)], "", Level.OK, "70 to 90 MiB"),
        ([QemuMemory("a/b", 0, 90 * MIB)], "", Level.WARNING, "a/b: no RuntimeClass overhead"),
        ([QemuMemory("a/b", 64 * MIB, 90 * MIB)], "", Level.WARNING, "90 MiB of 64 MiB"),
        ([QemuMemory("a/b", 256 * MIB, None)], "", Level.WARNING, "cannot be read"),
        ([], "the state database cannot be read", Level.WARNING, "state database"),
    ],
)  # fmt: skip
def test_the_declared_overhead_is_compared_with_the_measured_one(
    found: list[QemuMemory], trouble: str, level: Level, said: str
) -> None:
    told = running(found, trouble)
    assert told.level is level
    assert said in told.text


def test_beyond_three_pods_only_the_number_is_given() -> None:
    told = running([QemuMemory(f"a/{name}", 0, 90 * MIB) for name in "bcdef"])
    assert "a/b, a/c, a/d and 2 more" in told.text


def test_the_projects_own_runtime_classes_are_read_and_each_is_compared_with_its_own_vms(
    pytestconfig: pytest.Config,
) -> None:
    found = node_facts.runtime_classes_of(str(pytestconfig.rootpath / "deploy/kustomize/base/runtimeclass.yaml"))
    assert [(one.handler, one.overhead) for one in found] == [
        ("virtshim", 256 * MIB), ("virtshim", 1024 * MIB), ("virtshim", 4096 * MIB), ("virtshim-pod", 320 * MIB),
    ]  # fmt: skip
    measured = [QemuMemory("a/b", 256 * MIB, 90 * MIB), QemuMemory("a/large", 1024 * MIB, 700 * MIB)]
    assert {declared(one, ("virtshim",), measured, {"virtshim-pod"}).level for one in found} == {Level.OK}
    told = declared(found[0], ("virtshim",), [QemuMemory("a/b", 256 * MIB, 300 * MIB)])
    assert told.level is Level.WARNING
    assert "runtimeclass.yaml, virtshim: overhead 256 MiB" in told.text


@pytest.mark.parametrize(
    ("found", "level"),
    [
        (RuntimeClass("f", "other", 256 * MIB), Level.ERROR),
        (RuntimeClass("f", "virtshim", 0), Level.WARNING),
        (RuntimeClass("f", "virtshim", 80 * MIB), Level.WARNING),
        (RuntimeClass("f", trouble="it is no RuntimeClass"), Level.WARNING),
    ],
)
def test_a_runtime_class_with_a_fault_is_reported_with_a_remedy(found: RuntimeClass, level: Level) -> None:
    told = declared(found, ("virtshim",), [QemuMemory("a/b", 256 * MIB, 90 * MIB)])
    assert told.level is level
    assert told.remedy


def test_a_runtime_class_for_pods_with_containers_beside_their_vm_must_have_an_overhead() -> None:
    told = declared(RuntimeClass("f", "virtshim-pod", 0), ("virtshim",), [], {"virtshim-pod"})
    assert told.level is Level.ERROR
    assert "virtshim refuses pods with the handler virtshim-pod" in told.text


@pytest.mark.parametrize("document", [None, [], {"kind": "Pod"}])
def test_a_malformed_runtime_class_is_reported(document: object) -> None:
    assert runtime_class("f", document).trouble


def test_a_malformed_amount_is_reported() -> None:
    overhead = {"podFixed": {"memory": "lots"}}
    assert "lots" in runtime_class("f", {"kind": "RuntimeClass", "overhead": overhead}).trouble


def test_a_missing_file_is_no_runtime_class(tmp_path: Path) -> None:
    assert node_facts.runtime_classes_of(str(tmp_path / "none")) == []
    for text in ("a: [", "just words", "metadata: 1"):
        (tmp_path / "bad").write_text(text)
        (found,) = node_facts.runtime_classes_of(str(tmp_path / "bad"))
        assert found.trouble
