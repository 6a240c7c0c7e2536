"""The script that copies volumes into a guest shows a reader one version at each of its steps. It runs with private
mounts."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from itertools import dropwhile
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from virtshim.volumes.copies import CopiedVolume, Entry, EntryKind, archive, packed
from virtshim.volumes.mount_script import NO_COPY, SEED_FILE, Copies, command, digests, had

pytestmark = [
    pytest.mark.volumes,
    pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root can mount"),
]

Files = Mapping[str, bytes]
# The programs by which the script changes something. Between any two of them the guest may lose its power, the script
# may be killed, and somebody may read.
_STEPS = ("mv", "rm", "ln", "mkdir", "tar", "chown", "chmod", "mount")
_STEP = """#!/bin/sh
number=$(($(cat {here}/steps) + 1))
echo $number > {here}/steps
look() {{ ( cd {place}/..data 2>/dev/null || {{ echo -n none; exit; }}; for name in * .[!.]*; do
  [ ! -f "$name" ] || {{ printf '%s:' "$name" && cat "./$name"; }}
done ) | od -An -v -tx1 | tr -d ' \\n' >> {here}/seen; echo >> {here}/seen; }}
look
[ $number != "$KILL_AT" ] || {{ kill -9 $PPID; exit; }}
PATH=/usr/sbin:/usr/bin:/sbin:/bin {name} "$@"
code=$?
look
exit $code
"""


class Guest:
    """`place`: the path of the volume in the guest."""

    def __init__(self, directory: Path) -> None:
        self.here = directory
        self.place = directory / "place"
        self.seen_file = directory / "seen"
        programs = directory / "bin"
        programs.mkdir()
        for name in _STEPS:
            (programs / name).write_text(_STEP.format(here=shlex.quote(str(directory)), place=self.place, name=name))
        (programs / "sleep").write_text("#!/bin/sh\nexit 0\n")
        for program in programs.iterdir():
            program.chmod(0o755)
        self._lines = ["mount -t tmpfs none /run", f"PATH={programs}:$PATH"]
        self._archives = 0

    def takes(self, entries: list[Entry], kill_at: int = 0) -> None:
        """Runs the update as the agent does; the script is killed before that step."""
        given_file = self.here / f"{self._archives}.tar"
        self._archives += 1
        given_file.write_bytes(archive([packed("c0", entries)]))
        script = shlex.join(command([], [CopiedVolume(str(self.place), "/")], Copies.INPUT))
        kill = f"KILL_AT={kill_at}" if kill_at else "KILL_AT="
        steps = f"echo 0 > {self.here}/steps"
        self._lines.append(f"{steps}; {kill} {script} <{given_file} {'2>&1 || :' if kill_at else '|| exit $?'}")

    def does(self, line: str) -> None:
        """Runs shell code."""
        self._lines.append(line)

    def run(self, after: str = ":") -> subprocess.CompletedProcess[str]:
        """Runs the whole script; `after`: shell code."""
        whole = "\n".join(("export KILL_AT=", *self._lines, "PATH=/usr/sbin:/usr/bin:/sbin:/bin", after))
        words = ["unshare", "--mount", "sh", "-c", whole]
        return subprocess.run(words, capture_output=True, text=True, timeout=250, check=False)

    def seen(self) -> set[str]:
        """All versions that a reader has seen since there was one, in hexadecimal digits; b"none" for none."""
        return set(dropwhile(b"none".hex().__eq__, self.seen_file.read_text().split("\n")[:-1]))


def volume(files: Files, version: str, mode: int = 0o640) -> list[Entry]:
    """The volume as kubelet writes it."""
    data = f"..2026_{version}"
    entries = [Entry("", EntryKind.DIRECTORY, 0o1777, 0, 0), Entry(data, EntryKind.DIRECTORY, 0o755, 0, 0)]
    entries.append(Entry("..data", EntryKind.LINK, 0o777, 0, 0, target=data))
    for name, content in files.items():
        entries.append(Entry(f"{data}/{name}", EntryKind.FILE, mode, 7, 8, content=content))
        entries.append(Entry(name, EntryKind.LINK, 0o777, 0, 0, target=f"..data/{name}"))
    return entries


def look(files: Files) -> str:
    """A reader's view of all files, in the byte order of a shell's pattern."""
    names = sorted(files, key=lambda name: (name.startswith("."), name.encode()))
    return b"".join(name.encode() + b":" + files[name] for name in names).hex()


NAMES = st.from_regex(r"[a-z.][a-z_-]{0,3}", fullmatch=True).filter(lambda name: not name.startswith(".."))
NAMES = NAMES.filter(lambda name: name != ".")
VERSIONS = st.dictionaries(NAMES, st.binary(min_size=1, max_size=8), max_size=4)


def test_a_reader_sees_either_the_old_version_or_the_new_one(request: pytest.FixtureRequest) -> None:
    examples = 12 if request.config.getoption("--all") else 4
    settings(max_examples=examples, deadline=None, phases=[Phase.generate])(
        given(VERSIONS, VERSIONS)(an_update_is_whole)
    )()


def an_update_is_whole(old: Files, new: Files) -> None:
    with tempfile.TemporaryDirectory() as directory:
        guest = Guest(Path(directory))
        guest.takes(volume(old, "1"))
        guest.takes(volume(new, "2", mode=0o600))
        names = " ".join(shlex.quote(name) for name in new)
        after = f"cd {guest.place} && ls -A && readlink ..data && for name in {names}; do stat -L -c '%a %u %g' -- $name; done"
        done = guest.run(after)
        assert done.returncode == 0, done.stderr
        assert guest.seen() <= {look(old), look(new)}
        *_, there = done.stdout.rpartition("c0.digest ")
        assert sorted(there.split("\n")[1:-1]) == sorted(
            [*new, "..data", "..2026_2", "..2026_2", *(["600 7 8"] * len(new))]
        )


def test_an_update_of_many_files_runs_few_programs(tmp_path: Path) -> None:
    """Each program takes its time in a guest on a busy node, and kubelet's update must arrive within seconds."""
    names = [f"key-{number}" for number in range(30)]
    guest = Guest(tmp_path)
    for name in (*_STEPS, "umount", "grep", "stat", "readlink", "cat"):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\necho {name} >>{tmp_path}/ran\nPATH=/usr/sbin:/usr/bin:/sbin:/bin {name} "$@"\n')
        program.chmod(0o755)
    guest.takes(volume(dict.fromkeys(names, b"1"), "1"))
    guest.does(f": >{tmp_path}/ran")
    guest.takes(volume(dict.fromkeys(names, b"2"), "2"))
    done = guest.run(f"cat {guest.place}/*")
    assert done.stdout.endswith("2" * len(names)), done
    ran = (tmp_path / "ran").read_text().split()
    assert len(ran) <= 12, ran


def test_a_changed_volume_mode_and_a_changed_file_arrive(tmp_path: Path) -> None:
    old, new = volume({"a": b"1"}, "1"), volume({"a": b"2"}, "2")
    new[0] = Entry("", EntryKind.DIRECTORY, 0o2775, 7, 8)
    link = new.index(Entry("a", EntryKind.LINK, 0o777, 0, 0, target="..data/a"))
    new[link] = Entry("a", EntryKind.LINK, 0o777, 0, 0, target="elsewhere")
    guest = Guest(tmp_path)
    guest.takes(old)
    guest.takes(new)
    done = guest.run(f"stat -c '%u:%g %a' {guest.place}; readlink {guest.place}/a; cat {guest.place}/..data/a")
    assert done.stdout.endswith("\n7:8 2775\nelsewhere\n2"), done


def test_the_next_run_finishes_a_script_killed_at_any_step(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """`make test` tries each third step."""
    old, new = {"a": b"1", "b": b"1"}, {"a": b"2", "c": b"2"}
    kill_at, was_killed = 0, True
    while was_killed:
        kill_at += 1 if request.config.getoption("--all") else 3
        directory = tmp_path / str(kill_at)
        directory.mkdir()
        guest = Guest(directory)
        guest.takes(volume(old, "1"))
        guest.takes(volume(new, "2"), kill_at)
        guest.takes(volume(new, "2"))
        done = guest.run(f"cd {guest.place} && cat a c; ls; ls /run/virtshim-copies -A")
        assert done.returncode == 0, (kill_at, done.stderr)
        assert guest.seen() <= {look(old), look(new)}, kill_at
        assert done.stdout.endswith("\n22a\nc\nc0\nc0.digest\n"), (kill_at, done.stdout)
        was_killed = "Killed" in done.stdout + done.stderr
    assert kill_at > 10


def test_an_empty_volume_gets_files_that_kubelet_writes_later(tmp_path: Path) -> None:
    guest = Guest(tmp_path)
    guest.takes([Entry("", EntryKind.DIRECTORY, 0o1777, 0, 0)])
    guest.takes(volume({"a": b"1"}, "1"))
    done = guest.run(f"cat {guest.place}/a")
    assert done.stdout.endswith("1"), done
    assert len(digests(done.stdout.encode())) == 1


def test_copies_come_from_the_seed_at_boot_but_never_replace_newer_ones(tmp_path: Path) -> None:
    guest = Guest(tmp_path)
    old, new = packed("c0", volume({"a": b"old"}, "1")), packed("c0", volume({"a": b"new"}, "2"))
    (tmp_path / "seed").mkdir()
    (tmp_path / "seed" / SEED_FILE).write_bytes(archive([old]))
    copies = [CopiedVolume(str(guest.place), "/")]
    (tmp_path / "new.tar").write_bytes(archive([new]))
    (tmp_path / "bin" / "mount").write_text(
        f'#!/bin/sh\n[ "$2" != iso9660 ] || set -- -o bind {tmp_path}/seed "$6"\nexec /bin/mount "$@"\n'
    )
    script = {source: shlex.join(command([], copies, source)) for source in Copies}
    from_seed, from_agent = script[Copies.SEED], f"{script[Copies.INPUT]} <{tmp_path}/new.tar"
    look_here = f"cat {guest.place}/a; ls -A /run/virtshim-copies; grep -c virtshim-copies /proc/mounts"
    guest.does("\n".join((from_seed, look_here, f"{from_agent} >/dev/null", from_seed, look_here)))
    done = guest.run()
    assert done.stdout.split() == ["old.seed", "c0", "c0.digest", "2", "new.seed", "c0", "c0.digest", "2"]


def test_the_hosts_file_is_written_if_it_differs_and_a_failure_is_reported(tmp_path: Path) -> None:
    guest = Guest(tmp_path)
    (tmp_path / "hosts").write_text("the guest's own\n")
    (tmp_path / "new.tar").write_bytes(
        archive([packed("c0", [Entry("", EntryKind.FILE, 0o644, 0, 0, content=b"new\n")])])
    )
    (tmp_path / "newer.tar").write_bytes(
        archive([packed("c0", [Entry("", EntryKind.FILE, 0o644, 0, 0, content=b"newer\n")])])
    )
    hosts = CopiedVolume(f"{tmp_path}/hosts", "/", written=True)
    script = {source: shlex.join(command([], [hosts], source)) for source in Copies}
    look_here = f"cat {tmp_path}/hosts; grep -c hosts /proc/mounts"
    guest.does(f"{script[Copies.SEED]}; {look_here}")
    guest.does(f"{script[Copies.AS_THEY_ARE]}; {look_here}")
    guest.does(f"{script[Copies.INPUT]} <{tmp_path}/new.tar; {look_here}")
    guest.does(f"touch -d @1 {tmp_path}/hosts; {script[Copies.AS_THEY_ARE]}; stat -c %Y {tmp_path}/hosts")
    guest.does(f"{script[Copies.INPUT]} <{tmp_path}/newer.tar; {look_here}")
    guest.does(f"echo mine >{tmp_path}/hosts; mount -o bind,ro {tmp_path}/hosts {tmp_path}/hosts")
    guest.does(f"{script[Copies.AS_THEY_ARE]}; echo $?; cat {tmp_path}/hosts")
    done = guest.run()
    said = [line for line in done.stdout.splitlines() if not line.startswith("c0.digest ")]
    unchanged = ["the guest's own", "0"]
    assert said == [*unchanged, *unchanged, "new", "0", "1", "newer", "0", "c0 unwritten", "0", "mine"], done
    assert had(done.stdout.encode()) == frozenset()


def test_without_a_copy_nothing_is_mounted_and_the_failure_is_reported(tmp_path: Path) -> None:
    guest = Guest(tmp_path)
    guest.does(shlex.join(command([], [CopiedVolume(str(guest.place), "/")])) + "; exit $?")
    done = guest.run()
    assert not guest.place.exists()
    assert (done.returncode, done.stdout) == (NO_COPY, "")
    assert "there is no copy yet" in done.stderr


@pytest.mark.parametrize("data", [b"", b"no archive" * 100])
def test_a_copy_that_cannot_be_unpacked_is_reported_and_changes_nothing(tmp_path: Path, data: bytes) -> None:
    guest = Guest(tmp_path)
    guest.takes(volume({"a": b"1"}, "1"))
    (tmp_path / "bad.tar").write_bytes(data)
    script = shlex.join(command([], [CopiedVolume(str(guest.place), "/")], Copies.INPUT))
    guest.does(f"{script} <{tmp_path}/bad.tar >/dev/null; echo $?; cat {guest.place}/a; ls -A /run/virtshim-copies")
    done = guest.run()
    assert done.stdout.endswith("\n82\n1c0\nc0.digest\n"), done
    assert "cannot be unpacked" in done.stderr
