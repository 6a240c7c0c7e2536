"""The parts of `virtshim diag` fail independently, and the archive is complete or absent."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import sqlite3
import subprocess
import sys
import tarfile
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from virtshim.cli.diag import command, daemons, machine, records, vms
from virtshim.cli.diag.command import diag_command, look_at
from virtshim.cli.diag.gather import Gathered, Node, Room
from virtshim.config.vms import Libvirt
from virtshim.model.errors import InvalidRequest, WrongState
from virtshim.system.files import lock_file


def content(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as opened:
        return {
            member.name.partition("/")[2]: opened.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in opened.getmembers()
        }


def good(_node: Node) -> Iterator[tuple[str, str]]:
    yield "one.txt", "all is well\n"


def broken(_node: Node) -> Iterator[tuple[str, str]]:
    yield "first.txt", "before it broke\n"
    raise RuntimeError("password=planted-in-an-error")


def hanging(_node: Node) -> Iterator[tuple[str, str]]:
    yield "first.txt", "before it hung\n"
    threading.Event().wait(30)


def floods(_node: Node) -> Iterator[tuple[str, str]]:
    for number in range(1000):
        yield f"{number}.txt", "x" * (1 << 18)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_part_that_fails_hangs_or_floods_is_reported_and_stops_no_other_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {"broken": broken, "hanging": hanging, "floods": floods, "good": good}
    out, room = tmp_path / "out", Room(1 << 18, 1 << 20)
    assert diag_command(str(out), None, str(tmp_path), as_json=True, collectors=parts, limit=1.0, room=room) == 0
    summary = json.loads(capsys.readouterr().out)
    (archive,) = out.iterdir()
    assert summary["archive"] == str(archive)
    assert archive.stat().st_mode & 0o777 == 0o600
    files = content(archive)
    assert files["good/one.txt"] == "all is well\n"
    assert files["broken/first.txt"] == "before it broke\n"
    assert "RuntimeError" in files["broken/error.txt"]
    assert files["hanging/first.txt"] == "before it hung\n"
    assert "did not end within 1 s" in files["hanging/error.txt"]
    assert "1 MiB" in files["floods/error.txt"]
    assert "planted" not in json.dumps(summary) + json.dumps(files)
    assert [name for name, part in summary["parts"].items() if not part["trouble"]] == ["good"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_an_archive_that_cannot_be_written_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No file of this process may have more than a few bytes meanwhile; what it prints goes into memory."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(InvalidRequest, match="cannot be written: File too large; name a directory with room"):
            diag_command(str(tmp_path / "out"), None, str(tmp_path), as_json=False, collectors={"good": good})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "out").iterdir()) == []
    assert capsys.readouterr().out == ""


def test_unreadable_settings_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text("[paths]\nstat_dir = 1\n")
    node = look_at(None, str(tmp_path))
    assert "stat_dir" in node.trouble
    assert node.settings.paths.state_dir == f"{tmp_path}/state"
    if os.geteuid() != 0:
        return
    only = {"settings": records.settings}
    assert diag_command(str(tmp_path / "out"), None, str(tmp_path), as_json=False, collectors=only) == 0
    said = capsys.readouterr().err
    assert "stat_dir: there is no such setting" in said
    assert "made with the default settings" in said
    (archive,) = (tmp_path / "out").iterdir()
    assert "stat_dir" in content(archive)["settings/error.txt"]
    absent = str(tmp_path / "absent.toml")
    assert diag_command(str(tmp_path / "more"), absent, None, as_json=False, collectors=only) == 0
    assert f"{absent}: cannot be read" in capsys.readouterr().err


def test_a_missing_node_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="does not exist"):
        look_at(None, str(tmp_path / "none"))
    with pytest.raises(InvalidRequest, match="exclude each other"):
        look_at("/x.toml", str(tmp_path))


def test_a_relative_settings_file_is_found_by_every_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert look_at("own.toml", None).config_file == str(tmp_path / "own.toml")


def test_the_node_of_the_socket_in_the_environment_is_examined_and_another_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").write_text("")
    monkeypatch.setenv("CONTAINER_RUNTIME_ENDPOINT", f"unix://{tmp_path}/run/virtshim.sock")
    assert look_at(None, None).directory == str(tmp_path)
    monkeypatch.setenv("CONTAINER_RUNTIME_ENDPOINT", "unix:///run/containerd/containerd.sock")
    with pytest.raises(InvalidRequest, match=r"names /run/containerd/containerd.sock.*--config or --dir"):
        look_at(None, None)
    monkeypatch.setenv("CONTAINER_RUNTIME_ENDPOINT", "unix:///run/virtshim/virtshim.sock")
    assert look_at(None, None).directory == ""


def test_a_long_file_is_cut_at_a_line() -> None:
    """Half of a line may be half of a secret."""
    gathered = Gathered("x", room=Room(file=20))
    gathered.add("log", "password: planted-secret\nlast line\n")
    assert gathered.files["log"].endswith(":\nlast line\n")
    assert "secret" not in gathered.files["log"]


def test_a_damaged_database_is_reported_and_all_other_parts_are_collected(tmp_path: Path) -> None:
    node = look_at(None, str(tmp_path))
    (tmp_path / "state").mkdir()
    Path(node.settings.layout().database).write_bytes(b"SQLite format 3\0" + b"garbage" * 1000)
    parts = records.store(node)
    path, text = next(parts)
    assert path == "database.txt"
    assert "damaged" in text
    with pytest.raises(WrongState, match="cannot be read"):
        next(parts)


def test_a_table_of_another_version_shows_only_known_columns(tmp_path: Path) -> None:
    node = look_at(None, str(tmp_path))
    (tmp_path / "state").mkdir()
    with sqlite3.connect(node.settings.layout().database) as database:
        database.execute("create table later (id text, credential text, document text)")
        database.execute('insert into later values (\'1\', \'planted-1\', \'{"phase": "ready", "more": "planted-2"}\')')
    database.close()
    text = dict(records.store(node))["later.jsonl"]
    assert json.loads(text)["document"]["phase"] == "ready"
    assert "planted" not in text


def test_foreign_domains_are_not_inspected(tmp_path: Path) -> None:
    node = look_at(None, str(tmp_path))
    directory = tmp_path / "libvirt/etc/qemu"
    directory.mkdir(parents=True)
    (directory / "theirs.xml").write_text("<domain><name>theirs</name></domain>")
    (directory / "ours.xml").write_text(
        "<domain><metadata><v:owner xmlns:v='https://virtshim.io/domain/1' node='n'/></metadata></domain>"
    )
    found = dict(vms.domains(node))
    assert set(found) == {"ours/definition.xml", "states.txt"}
    assert "shut off" in found["states.txt"]
    assert "1 files of domains that are not virtshim's" in found["states.txt"]


def test_only_the_names_of_foreign_processes_are_collected(tmp_path: Path) -> None:
    """Also of another's QEMU and virtiofsd, which run the same programs as ours."""
    node = look_at(None, str(tmp_path))
    ours = str(uuid.uuid4())
    directory = Path(vms.libvirt_files(node).status)
    directory.mkdir(parents=True)
    mark = "<metadata><v:owner xmlns:v='https://virtshim.io/domain/1' node='n'/></metadata>"
    (directory / "ours.xml").write_text(f"<domstatus><domain><uuid>{ours}</uuid>{mark}</domain></domstatus>")
    (directory / "theirs.xml").write_text(f"<domstatus><domain><uuid>{uuid.uuid4()}</uuid></domain></domstatus>")
    sleep = ["-c", "import time; print(flush=True); time.sleep(600)"]
    lines = {
        "own VM": ["qemu-system-x86_64", *sleep, "-uuid", ours],
        "own share": ["virtiofsd", *sleep, f"source={node.settings.paths.run_dir}/shares/x/root"],
        "own daemon": ["virtshim-proxy", *sleep, "--config", "/own.toml"],
        "own command": ["virtshim", *sleep, "exec", "vm", "--", "mysql", "-pplanted"],
        "foreign VM": ["qemu-system-x86_64", *sleep, "-uuid", str(uuid.uuid4()), "-append", "planted-line"],
        "foreign share": ["virtiofsd", *sleep, "source=/planted/root"],
        "foreign runtime": ["containerd", *sleep, "--planted"],
        "foreign script": ["python3", *sleep, "virtshim", "--planted"],
    }
    with contextlib.ExitStack() as running:
        pids = {}
        for name, words in lines.items():
            process = subprocess.Popen(words, executable=sys.executable, stdout=subprocess.PIPE)
            running.callback(process.wait)
            running.callback(process.kill)
            assert process.stdout is not None
            running.enter_context(process.stdout).read(1)
            pids[name] = process.pid
        text = dict(machine.processes(node))["all.txt"]
    shown = {int(line.split()[0]): line for line in text.splitlines()[1:]}
    assert "planted" not in text
    for name, pid in pids.items():
        if name == "own command":
            assert shown[pid].endswith("exec [removed]")
        elif name.startswith("own"):
            assert lines[name][-1] in shown[pid], name
        else:
            assert re.fullmatch(rf" *{pid} +[A-Z] +\[python[^ ]*\]", shown[pid]), name


def test_libvirt_is_not_asked_for_foreign_domains(tmp_path: Path) -> None:
    uri, asked = "qemu:///system", []
    node = look_at(None, str(tmp_path))
    node = replace(node, settings=node.settings.model_copy(update={"libvirt": Libvirt(uri=uri)}))
    ours = str(uuid.uuid4())
    mark = "<metadata><v:owner xmlns:v='https://virtshim.io/domain/1' node='n'/></metadata>"
    (tmp_path / "ours.xml").write_text(f"<domain><uuid>{ours}</uuid>{mark}</domain>")
    (tmp_path / "theirs.xml").write_text(f"<domain><uuid>{uuid.uuid4()}</uuid></domain>")

    def ask(*words: str) -> str:
        assert words[:2] == ("-c", uri)
        asked.append(words[2:])
        return "answer"

    files = vms.LibvirtFiles(str(tmp_path), f"{tmp_path}/none", "")
    assert set(dict(vms.libvirt(node, files, ask))) == {"answers.txt", "capabilities.xml", "domstats/ours.txt"}
    about_domains = [words for words in asked if words[0] not in ("version", "nodeinfo", "capabilities")]
    assert about_domains == [("domstats", "--state", "--vcpu", "--balloon", "--block", ours)]


def test_a_truncated_or_missing_definition_hides_no_other_definition(tmp_path: Path) -> None:
    node = look_at(None, str(tmp_path))
    directory = tmp_path / "libvirt/etc/qemu"
    directory.mkdir(parents=True)
    ours = "<domain><metadata><v:owner xmlns:v='https://virtshim.io/domain/1' node='n'/></metadata></domain>"
    (directory / "a-cut.xml").write_text(ours[:-12])
    (directory / "b-gone.xml").symlink_to(tmp_path / "nowhere")
    (directory / "c-whole.xml").write_text(ours)
    found = dict(vms.domains(node))
    assert set(found) == {"a-cut/definition.txt", "c-whole/definition.xml", "states.txt"}
    assert "not XML" in found["a-cut/definition.txt"]


# Three daemons: one reports its threads, one hangs where no Python runs, one does not know the request.
_TELLS = "from tapmanager import thread_dump; thread_dump.write_when_asked({socket!r})\n"
_LOCK = (
    "from virtshim.system.files import lock_file; lock = lock_file({socket!r} + '.lock'); print('ready', flush=True)\n"
)
_NAMED = (
    "import threading; threading.Thread(target=threading.Event().wait, name='busy-with-a-pod', daemon=True).start()\n"
)
_WAITS = "import threading; threading.Event().wait()\n"
_HANGS = (
    "import ctypes\nlibc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)\n"
    "while True: libc.pthread_mutex_lock(mutex)\n"
)


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (_TELLS + _NAMED + _LOCK + _WAITS, "busy-with-a-pod"),
        (_TELLS + _LOCK + _HANGS, "no answer within 1 s"),
        (_LOCK + _WAITS, "version does not report its threads"),
    ],
)
def test_a_daemon_reports_its_threads_and_keeps_running(tmp_path: Path, program: str, told: str) -> None:
    socket = str(tmp_path / "s.sock")
    process = subprocess.Popen(
        [sys.executable, "-c", program.format(socket=socket)],
        stdout=subprocess.PIPE, cwd=Path(command.__file__).parents[3],
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        # One that hangs may be asked just before it does.
        asked = (daemons.python_threads(process.pid, socket, 1.0 if "no answer" in told else 60.0) for _ in range(20))
        text = next((text for text in asked if told in text), "")
        assert told in text
        assert process.poll() is None
        if told == "busy-with-a-pod":
            assert "MainThread" in text
            assert os.stat(f"{socket}.threads").st_mode & 0o777 == 0o600
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_process_that_does_not_hold_the_lock_gets_no_signal(tmp_path: Path) -> None:
    """A number in a file may be old."""
    socket = str(tmp_path / "s.sock")
    os.close(lock_file(f"{socket}.lock"))
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        assert "does not report its threads" in daemons.python_threads(os.getpid(), socket)
    finally:
        signal.signal(signal.SIGUSR1, before)
