"""The files of both cgroup versions, as the kernel writes them."""

from pathlib import Path

from virtshim.tapclient import cgroup_accounts as accounts

GROUP = "/kubepods/pod1/virtshim-1"


def group(root: Path, controller: str, **files: str) -> None:
    where = root / controller / GROUP[1:]
    where.mkdir(parents=True)
    for name, text in files.items():
        (where / name.replace("__", ".")).write_text(text)


def test_version_2_tells_of_kills_and_use(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    events = "low 0\nhigh 3\nmax 12\noom 2\noom_kill 1\noom_group_kill 0\n"
    group(tmp_path, "", memory__events=events, memory__current="4096\n")
    assert accounts.oom_kills(GROUP, str(tmp_path)) == 1
    assert accounts.memory_bytes(GROUP, str(tmp_path)) == 4096


def test_version_1_tells_of_kills_and_use(tmp_path: Path) -> None:
    control = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"
    group(tmp_path, "memory", memory__oom_control=control, memory__usage_in_bytes="8192\n")
    assert accounts.oom_kills(GROUP, str(tmp_path)) == 2
    assert accounts.memory_bytes(GROUP, str(tmp_path)) == 8192


def test_a_group_that_is_gone_had_no_kills_and_uses_nothing(tmp_path: Path) -> None:
    assert accounts.oom_kills(GROUP, str(tmp_path)) == 0
    assert accounts.memory_bytes(GROUP, str(tmp_path)) is None
