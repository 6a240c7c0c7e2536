"""virtshim reads what the machine has from the kernel's files."""

import os
from pathlib import Path

from virtshim.system import machine


def test_a_user_is_in_use_while_a_process_or_a_disk_has_it(tmp_path: Path) -> None:
    (tmp_path / "proc" / "17").mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir()
    (tmp_path / "disks" / "one").mkdir(parents=True)
    (tmp_path / "disks" / "one" / "root.qcow2").touch()
    assert machine.uids_in_use(str(tmp_path / "none"), proc=str(tmp_path / "none")) == frozenset()
    for found in (
        machine.uids_in_use(proc=str(tmp_path / "proc")),
        machine.uids_in_use(str(tmp_path / "disks"), proc=str(tmp_path / "none")),
        machine.uids_in_use(),
    ):
        assert os.geteuid() in found


def test_this_machine_has_cpus_and_memory() -> None:
    assert machine.cpus() >= (os.cpu_count() or 1)
    assert machine.memory_nodes() >= 1
    assert machine.memory() >= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_ram_and_swap(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:  100 kB\nMemFree:  50 kB\nSwapTotal:  20 kB\nHugePages_Total:  0\n")
    assert machine.memory(str(file)) == 120 << 10


def test_numa_nodes_with_memory_are_listed_even_without_cpus(tmp_path: Path) -> None:
    for node, cpus in ((0, "0-1,4\n"), (1, "2-3\n"), (5, "\n"), (6, "5\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}/cpulist").write_text(cpus)
    (tmp_path / "online").write_text("0-1,5-6\n")
    (tmp_path / "has_memory").write_text("0-1,5\n")
    assert machine.numa_nodes(str(tmp_path)) == {0: {0, 1, 4}, 1: {2, 3}, 5: set()}
    assert machine.numa_nodes(str(tmp_path / "absent")) == {}


def test_memory_nodes_are_counted_up_to_the_highest_number(tmp_path: Path) -> None:
    for name in ("node0", "node3", "possible"):
        (tmp_path / name).mkdir()
    assert machine.memory_nodes(str(tmp_path)) == 4
    assert machine.memory_nodes(str(tmp_path / "absent")) == 1


def test_free_huge_pages_are_given_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "hugepages-2048kB").mkdir()
    (tmp_path / "hugepages-2048kB/free_hugepages").write_text("3\n")
    assert machine.free_hugepages(2 << 20, str(tmp_path)) == 6 << 20
    assert machine.free_hugepages(1 << 30, str(tmp_path)) == 0
