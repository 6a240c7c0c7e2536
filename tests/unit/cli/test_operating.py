"""Tables, logs, rates and options of the commands for operators."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import pty
import re
import signal
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.background import Background

from virtshim.cli import terminal
from virtshim.cli.operating import acting, events, logs, run, tables, top
from virtshim.cli.operating.acting import summary
from virtshim.cli.operating.events import Event, line
from virtshim.cli.operating.pulling import pull
from virtshim.cli.operating.run import wanted_vm
from virtshim.cri.client import PodSummary, VmSummary
from virtshim.cri.operator.client import Taken, operating
from virtshim.cri.operator.node_work import Happened, PodUsage
from virtshim.domain.errors import InvalidRequest, Unavailable, WrongState

NOW = 1_800_000_000.0
LOG = (
    b"2027-01-15T08:00:00.000000000Z stdout F first\n"
    b"2027-01-15T08:00:01.000000000Z stdout P sec\n"
    b"2027-01-15T08:00:01.000000000Z stdout F ond\n"
    b"no line of a log\n"
    b"2027-01-15T08:00:02.000000000Z stderr F third\n"
)


def pieces(found) -> list[bytes]:
    return [one.text for one in found]


def lines_of(chunks) -> list[logs.Line]:
    made = logs.Lines()
    return [line for chunk in chunks for line in made.of(chunk)]


def test_a_log_is_read_line_by_line_however_it_is_cut() -> None:
    whole = pieces(lines_of([LOG]))
    assert whole == [b"first", b"sec", b"ond", b"third"]
    assert pieces(lines_of(LOG[i : i + 7] for i in range(0, len(LOG), 7))) == whole


@pytest.mark.parametrize(
    ("count", "kept"),
    [
        (0, []),
        (1, [b"third"]),
        (2, [b"sec", b"ond", b"third"]),
        (9, [b"first", b"sec", b"ond", b"third"]),
        (10**30, [b"first", b"sec", b"ond", b"third"]),
    ],
)
def test_the_last_lines_are_whole_ones(count: int, kept: list[bytes]) -> None:
    assert pieces(logs.last(lines_of([LOG]), count)) == kept


def test_a_time_is_ago_or_on_the_clock() -> None:
    assert logs.parse_since("", NOW) == ""
    assert logs.parse_since("1.5m", NOW) == "2027-01-15T07:58:30.000000"
    assert logs.parse_since("2027-01-15T09:00:00+01:00", NOW) == "2027-01-15T08:00:00.000000"


@pytest.mark.parametrize("text", ["yesterday", "9999999d", "9" * 400 + "s", "0001-01-01T00:00:00+14:00"])
def test_a_time_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--since"):
        logs.parse_since(text, NOW)


def line_of(text: bytes) -> bytes:
    return b"2027-01-15T08:00:00.000000000Z stdout F " + text + b"\n"


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_a_log_that_is_followed_goes_on_where_reading_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "vm.log"
    path.write_bytes(line_of(b"first") + line_of(b"second")[:-4])
    with contextlib.closing(logs.Log(str(path))) as log:
        assert pieces(log.written()) == [b"first"]
        append(path, b"ond\n" + line_of(b"third"))
        assert pieces(log.followed(lambda: True)) == [b"second", b"third"]


def test_a_log_that_is_followed_goes_on_in_the_file_that_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what was written between the last look and the rotation is told."""
    path, old, is_other = tmp_path / "vm.log", tmp_path / "vm.log.1", logs._is_other
    path.write_bytes(line_of(b"old"))

    def rotated(log: str, descriptor: int) -> bool:
        if not old.exists():
            append(path, line_of(b"rest"))
            path.rename(old)
            path.write_bytes(line_of(b"new"))
        return is_other(log, descriptor)

    monkeypatch.setattr(logs, "_is_other", rotated)
    looks = iter([False, True])
    with contextlib.closing(logs.Log(str(path))) as log:
        assert pieces(log.written()) == [b"old"]
        assert pieces(log.followed(lambda: next(looks))) == [b"rest", b"new"]


@pytest.mark.parametrize("put", ["link", "pipe", "device"])
def test_what_a_pod_puts_in_its_logs_place_is_not_read(put: str, tmp_path: Path) -> None:
    path = tmp_path / "vm.log"
    if put == "link":
        (tmp_path / "shadow").write_bytes(line_of(b"secret"))
        path.symlink_to(tmp_path / "shadow")
    elif put == "pipe":
        os.mkfifo(path)
    else:
        path = Path("/dev/zero")
    with pytest.raises(WrongState, match="regular file"):
        logs.Log(str(path))


def test_a_line_without_end_is_not_kept() -> None:
    made = logs.Lines()
    for _ in range(40):
        assert pieces(made.of(b"x" * (1 << 16))) == []
    assert len(made._rest) <= 1 << 20
    assert pieces(made.of(b"\n" + line_of(b"next"))) == [b"next"]


def usage(pod: str, at: float, cpu: float, received: int = 0) -> PodUsage:
    return PodUsage(pod, at, cpu, 100, 10, received, 0)


def test_rates_are_between_two_looks_and_never_negative() -> None:
    pods = [PodSummary(name, "default", name, True, 0.0) for name in ("a", "b", "new", "off")]
    before = {"a": usage("a", 10, 5, 1000), "b": usage("b", 10, 9)}
    now = {"a": usage("a", 12, 8, 3000), "b": usage("b", 12, 1), "new": usage("new", 12, 7)}
    rows = top.rates(pods, before, now)
    assert [(row.pod, row.cpu, row.received) for row in rows] == [
        ("default/a", 1.5, 1000.0), ("default/b", 0.0, 0.0), ("default/new", 0.0, 0.0),
    ]  # fmt: skip
    assert next(row.id for row in top.ordered(rows, "cpu")) == "a"
    assert [row.id for row in top.ordered(list(reversed(rows)), "name")] == ["a", "b", "new"]
    assert top.cells(rows[0]) == ("default/a", "150%", "100B", "10B", "1000B", "0B")


@pytest.mark.parametrize(
    ("sort", "interval", "says"),
    [
        ("colour", 1, "--sort"),
        ("cpu", 0.01, "--interval"),
        ("cpu", math.nan, "--interval nan"),
        ("cpu", math.inf, "--interval inf"),
    ],
)
def test_what_top_cannot_do_is_refused_before_anybody_is_asked(sort: str, interval: float, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        top.top("/nowhere", sort=sort, interval=interval, once=True, as_json=False)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0B"), (1023, "1023B"), (1536, "1.5K"), (20 << 20, "20M"), (3 << 40, "3.0T")]
)
def test_sizes_are_short(count: int, text: str) -> None:
    assert tables.size(count) == text


def test_without_a_terminal_tables_are_plain_columns_and_harmless(capsys) -> None:
    tables.show(("NAME", "X"), [("a\x1b[31m", "1")])
    assert "\x1b" not in capsys.readouterr().out
    tables.show_json({"a": 1})
    assert json.loads(capsys.readouterr().out) == {"a": 1}


@pytest.mark.parametrize("columns", [1, 20, 80, 400])
def test_on_a_narrow_terminal_a_table_leaves_nothing_out(columns: int, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    cells = ("default/web", "10.88.0.15", "/var/lib/" + "x" * 90, "host/" + "y" * 60)
    tables.show(("POD", "IP", "DISK", "IMAGE"), [cells])
    _, row = capsys.readouterr().out.splitlines()
    assert tuple(re.sub(r"\x1b\[[0-9;]*m", "", row).split()) == cells


def test_an_event_is_one_line() -> None:
    assert line(Event(NOW, "pause", "f" * 64, "default/web", "paused\n")).count("\n") == 0


class _Quiet:
    """A node that tells nothing more, until it is stopped in order."""

    def __init__(self, *, stops: bool) -> None:
        self._over = threading.Event()
        if stops:
            self._over.set()

    def events(self) -> Iterator[Happened]:
        yield Happened(NOW, "pod created", "a" * 64, "default/web")
        self._over.wait()

    def actions(self, _since: float) -> Iterator[Taken]:
        yield Taken(NOW, "pause", "f" * 64, "default/web", "paused")
        self._over.wait()


@pytest.mark.parametrize("stops", ["vms", "operators"])
def test_events_end_when_the_node_ends_them(
    stops: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node, operator = _Quiet(stops=stops == "vms"), _Quiet(stops=stops == "operators")
    monkeypatch.setattr(events, "working", lambda _socket: contextlib.nullcontext(node))
    monkeypatch.setattr(events, "operating", lambda _path: contextlib.nullcontext(operator))
    watching = Background(lambda: events.events("", "", as_json=True))
    with pytest.raises(Unavailable, match="the node has ended its events"):
        watching.done()
    node._over.set()
    operator._over.set()
    assert capsys.readouterr().out


def test_a_vm_by_hand_is_what_its_options_say() -> None:
    wanted = wanted_vm("host/disk.qcow2", "web", "1.5Gi", 2, ["virtshim.io/vnc=true"], ["A=b=c"])
    assert (wanted.name, wanted.memory, wanted.cpus) == ("web", 3 << 29, 2)
    assert (wanted.annotations, wanted.env) == ({"virtshim.io/vnc": "true"}, (("A", "b=c"),))
    assert wanted_vm("i", "", "", 0, (), ()).name.startswith("run-")
    assert wanted_vm("i", "", "512M", 0, (), ()).memory == 512_000_000, "as in a pod's limits"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "A b"}, "--name"),
        ({"memory": "much"}, "--memory"),
        ({"memory": "99999999T"}, "--memory"),
        ({"memory": "9" * 400}, "--memory"),
        ({"cpus": -1}, "--cpu"),
        ({"cpus": math.nan}, "--cpu"),
        ({"annotations": ["x"]}, "--annotation"),
        ({"env": ["=x"]}, "--env"),
    ],
)
def test_a_wrong_option_is_named(options: dict, says: str) -> None:
    given = {"name": "", "memory": "", "cpus": 0, "annotations": (), "env": ()} | options
    with pytest.raises(InvalidRequest, match=says):
        wanted_vm("image", **given)


def test_credentials_without_a_colon_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="--creds"):
        pull(f"{tmp_path}/s", f"{tmp_path}/a", "image", login="me")


def test_a_node_without_admin_socket_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"admin\.sock"), operating(f"{tmp_path}/admin.sock"):
        pass
    assert not os.listdir(tmp_path)


def test_a_pod_without_a_vm_has_a_summary() -> None:
    pod = {"namespace": "default", "name": "web", "id": "a" * 64, "phase": "ready", "netns": "/run/netns/x"}
    told = dict(summary({"pod": pod, "container": None, "vm": None, "addresses": ["10.0.0.2"], "phases": []}))
    assert (told["addresses"], told["VM"], told["container"]) == ("10.0.0.2", "", "")


class _Picture:
    def screenshot(self, _vm: str) -> bytes:
        return b"picture"


@pytest.fixture
def with_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    vm = VmSummary("f" * 64, "a" * 64, "web", 0, "running", "image", NOW)
    monkeypatch.setattr(acting, "_running", lambda *_: vm)
    monkeypatch.setattr(acting, "operating", lambda _path: contextlib.nullcontext(_Picture()))


@pytest.mark.usefixtures("with_screen")
def test_a_picture_takes_the_place_of_a_file_and_of_nothing_else(tmp_path: Path) -> None:
    file, pipe = tmp_path / "web.png", tmp_path / "pipe"
    file.write_bytes(b"older")
    os.mkfifo(pipe)
    acting.screenshot("", "", "web", str(file))
    assert file.read_bytes() == b"picture"
    with pytest.raises(InvalidRequest, match="no regular file"):
        acting.screenshot("", "", "web", str(pipe))
    assert pipe.is_fifo()


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in run._SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_a_terminal_that_hung_up_leaves_no_handler_behind() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    ours, its = pty.openpty()
    with contextlib.suppress(termios.error), terminal.raw(its):
        assert callable(signal.getsignal(signal.SIGHUP))
        os.close(ours)
    os.close(its)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.mark.usefixtures("handlers")
def test_a_vm_by_hand_is_removed_when_its_terminal_hangs_up_and_the_shell_says_so_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    removed = []

    class Work:
        def has_image(self, _image: str) -> bool:
            return True

        def make_pod(self, *_: Any) -> str:
            return "pod"

        def start_vm(self, *_: Any) -> str:
            return "vm"

        def remove_marked(self, mark: str) -> None:
            os.kill(os.getpid(), signal.SIGHUP)
            removed.append(mark)

    def attached(*_: Any, **__: Any) -> int:
        ours, its = pty.openpty()
        try:
            with terminal.raw(its):
                os.close(ours)
                os.kill(os.getpid(), signal.SIGHUP)
                return 0
        finally:
            os.close(its)

    monkeypatch.setattr(run, "working", lambda _socket: contextlib.nullcontext(Work()))
    monkeypatch.setattr(run, "_attached", attached)
    with pytest.raises(SystemExit) as end:
        run.run("", "", wanted_vm("image", "", "", 0, (), ()))
    assert end.value.code == 128 + signal.SIGHUP
    assert len(removed) == 1


class _Away:
    """A node that is restarted: so many calls fail."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.removed: list[str] = []

    def remove_marked(self, mark: str) -> None:
        if self.failures:
            self.failures -= 1
            raise Unavailable("no answer")
        self.removed.append(mark)


def test_a_vm_by_hand_is_removed_when_virtshim_is_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_AGAIN", 0.0)
    work = _Away(3)
    run._remove(work, "mark", run._Signals())  # type: ignore[arg-type]
    assert work.removed == ["mark"]
    assert capsys.readouterr().err.count("virtshim does not answer") == 1


class _HungUp(io.StringIO):
    def write(self, _text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_a_vm_by_hand_is_removed_though_nobody_hears_that_virtshim_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_AGAIN", 0.0)
    monkeypatch.setattr(sys, "stderr", _HungUp())
    work = _Away(1)
    run._remove(work, "mark", run._Signals())  # type: ignore[arg-type]
    assert work.removed == ["mark"]


def test_a_vm_by_hand_that_nobody_can_remove_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_AWAY", 0.0)
    run._remove(_Away(9), "mark", run._Signals())  # type: ignore[arg-type]
    assert "virtshim.io/run=mark" in capsys.readouterr().err
