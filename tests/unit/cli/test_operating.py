"""The operators' commands show tables, logs and rates, and understand their options."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import math
import os
import pty
import re
import signal
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.background import Background

from virtshim.cli import acting, events, logs, run, terminal, top, vms
from virtshim.cli.acting import summary
from virtshim.cli.events import line
from virtshim.cli.main import app
from virtshim.cli.pulling import image_name, pull
from virtshim.cli.run import wanted_vm
from virtshim.cli.tables import print_json, print_table, size_text
from virtshim.cri.client import NodeEvent, PodSummary, PodUsage
from virtshim.cri.operator_client import LastingVm, SavedMemory, Taken, operating
from virtshim.model.errors import InvalidRequest, NotFound, Unavailable, WrongState

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
    return [line for chunk in chunks for line in made.lines(chunk)]


def test_a_log_is_read_line_by_line_wherever_reads_split_it() -> None:
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
def test_tail_gives_whole_lines(count: int, kept: list[bytes]) -> None:
    assert pieces(logs.last(lines_of([LOG]), count)) == kept


def test_since_takes_a_duration_or_a_time() -> None:
    assert logs.parse_since("", NOW) == ""
    assert logs.parse_since("1.5m", NOW) == "2027-01-15T07:58:30.000000"
    assert logs.parse_since("2027-01-15T09:00:00+01:00", NOW) == "2027-01-15T08:00:00.000000"


@pytest.mark.parametrize("text", ["yesterday", "9999999d", "9" * 400 + "s", "0001-01-01T00:00:00+14:00"])
def test_since_refuses_what_is_not_a_time(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--since"):
        logs.parse_since(text, NOW)


def line_of(text: bytes) -> bytes:
    return b"2027-01-15T08:00:00.000000000Z stdout F " + text + b"\n"


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_following_a_log_continues_where_reading_ended(tmp_path: Path) -> None:
    path = tmp_path / "vm.log"
    path.write_bytes(line_of(b"first") + line_of(b"second")[:-4])
    with contextlib.closing(logs.Log(str(path))) as log:
        assert pieces(log.written()) == [b"first"]
        append(path, b"ond\n" + line_of(b"third"))
        assert pieces(log.followed(lambda: True)) == [b"second", b"third"]


def test_following_a_log_continues_in_the_file_that_replaces_it(tmp_path: Path) -> None:
    """Also what was written between the last look and the rotation is told."""
    path, old = tmp_path / "vm.log", tmp_path / "vm.log.1"
    path.write_bytes(line_of(b"old"))

    class Rotated(logs.Log):
        def is_replaced(self, file: io.FileIO) -> bool:
            if not old.exists():
                append(path, line_of(b"rest"))
                path.rename(old)
                path.write_bytes(line_of(b"new"))
            return super().is_replaced(file)

    looks = iter([False, True])
    with contextlib.closing(Rotated(str(path))) as log:
        assert pieces(log.written()) == [b"old"]
        assert pieces(log.followed(lambda: next(looks))) == [b"rest", b"new"]


@pytest.mark.parametrize("put", ["link", "pipe", "device"])
def test_a_log_that_is_not_a_regular_file_is_not_read(put: str, tmp_path: Path) -> None:
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
    assert pieces(made.lines(line_of(b"begun")[:-1])) == []
    for _ in range(40):
        assert pieces(made.lines(b"x" * (1 << 16))) == []
    assert pieces(made.lines(b"\n" + line_of(b"next"))) == [b"next"]


def usage(pod: str, at: float, cpu: float, received: int = 0) -> PodUsage:
    return PodUsage(pod, at, cpu, 100, 10, received, 0)


def test_rates_are_between_two_readings_and_never_negative() -> None:
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
def test_top_refuses_bad_options_before_any_request(sort: str, interval: float, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        top.top("/nowhere", sort=sort, interval=interval, once=True, as_json=False)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0B"), (1023, "1023B"), (1536, "1.5K"), (20 << 20, "20M"), (3 << 40, "3.0T")]
)
def test_sizes_are_short(count: int, text: str) -> None:
    assert size_text(count) == text


def test_without_a_terminal_tables_are_plain_columns_and_harmless(capsys) -> None:
    print_table(("NAME", "X"), [("a\x1b[31m", "1")])
    assert "\x1b" not in capsys.readouterr().out
    print_json({"a": 1})
    assert json.loads(capsys.readouterr().out) == {"a": 1}


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [1, 20, 80, 400])
def test_on_a_narrow_terminal_a_table_leaves_nothing_out(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    cells = ("default/web", "10.88.0.15", "/var/lib/" + "x" * 90, "host/" + "y" * 60)
    with contextlib.redirect_stdout(_Terminal()) as shown:
        print_table(("POD", "IP", "DISK", "IMAGE"), [cells])
    _, row = shown.getvalue().splitlines()
    assert tuple(re.sub(r"\x1b\[[0-9;]*m", "", row).split()) == cells


def test_an_event_is_one_line() -> None:
    assert line(NodeEvent(NOW, "pause", "f" * 64, "default/web", "paused\n")).count("\n") == 0


class _Quiet:
    """A node that tells nothing more, until it is stopped in order."""

    def __init__(self, *, stops: bool) -> None:
        self.over = threading.Event()
        if stops:
            self.over.set()

    def events(self) -> Iterator[NodeEvent]:
        yield NodeEvent(NOW, "pod created", "a" * 64, "default/web")
        self.over.wait()

    def actions(self, _since: float) -> Iterator[Taken]:
        yield Taken(NOW, "pause", "f" * 64, "a" * 64, "default/web", "paused")
        self.over.wait()


@pytest.mark.parametrize("stops", ["vms", "operators"])
def test_the_event_stream_ends_when_the_node_ends_it(stops: str, capsys: pytest.CaptureFixture[str]) -> None:
    node, operator = _Quiet(stops=stops == "vms"), _Quiet(stops=stops == "operators")
    sources: Any = contextlib.nullcontext(node), contextlib.nullcontext(operator)
    watching = Background(lambda: events.show_events(*sources, as_json=True))
    with pytest.raises(Unavailable, match="the node closed its event stream"):
        watching.done()
    node.over.set()
    operator.over.set()
    assert capsys.readouterr().out


def test_run_makes_the_vm_that_its_options_describe() -> None:
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


def test_the_error_for_a_missing_admin_socket_names_its_path(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"admin\.sock"), operating(f"{tmp_path}/admin.sock"):
        pass
    assert not os.listdir(tmp_path)


def test_a_pod_without_a_vm_has_a_summary() -> None:
    pod = {"namespace": "default", "name": "web", "id": "a" * 64, "phase": "ready", "netns": "/run/netns/x"}
    told = dict(summary({"pod": pod, "container": None, "vm": None, "addresses": ["10.0.0.2"], "phases": []}))
    assert (told["addresses"], told["VM"], told["container"]) == ("10.0.0.2", "", "")


def test_a_screenshot_replaces_a_regular_file_only(tmp_path: Path) -> None:
    file, pipe = tmp_path / "web.png", tmp_path / "pipe"
    file.write_bytes(b"older")
    os.mkfifo(pipe)
    acting.keep_picture(lambda: b"picture", str(file))
    assert file.read_bytes() == b"picture"
    with pytest.raises(InvalidRequest, match="not a regular file"):
        acting.keep_picture(lambda: pytest.fail("it was taken for nothing"), str(pipe))
    assert pipe.is_fifo()


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class _Node:
    """`failures`: so many calls to remove the VM fail, as while virtshim is restarted."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.made = ""
        self.removed: list[str] = []

    def make_pod(self, _wanted: object, mark: str) -> str:
        self.made = mark
        return "pod"

    def start_vm(self, pod: str, _wanted: object, mark: str) -> str:
        assert (pod, mark) == ("pod", self.made)
        return "vm"

    def remove_marked(self, mark: str) -> None:
        if self.failures:
            self.failures -= 1
            raise Unavailable("no answer")
        self.removed.append(mark)


def by_hand(
    node: Any, use: Callable[[str], int], signals: run.Signals | None = None, patience: run.Patience | None = None
) -> int:
    wanted = wanted_vm("image", "", "", 0, (), ())
    return run.use_vm(node, wanted, use, signals or run.Signals(), patience or run.Patience())


@pytest.mark.usefixtures("handlers")
def test_no_signal_handler_is_left_after_the_terminal_hung_up() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    ours, its = pty.openpty()
    with contextlib.suppress(termios.error), terminal.raw(its):
        assert callable(signal.getsignal(signal.SIGHUP))
        os.close(ours)
    os.close(its)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.mark.usefixtures("handlers")
def test_run_removes_its_vm_after_hangups_from_both_terminal_and_shell() -> None:
    class HungUpAgain(_Node):
        def remove_marked(self, mark: str) -> None:
            os.kill(os.getpid(), signal.SIGHUP)
            super().remove_marked(mark)

    def attached(_vm: str) -> int:
        ours, its = pty.openpty()
        try:
            with terminal.raw(its):
                os.close(ours)
                os.kill(os.getpid(), signal.SIGHUP)
                return 0
        finally:
            os.close(its)

    node, signals = HungUpAgain(), run.Signals()
    with pytest.raises(SystemExit) as end, signals.caught():
        by_hand(node, attached, signals)
    assert end.value.code == 128 + signal.SIGHUP
    assert node.removed == [node.made]


def test_run_removes_its_vm_when_virtshim_is_back(capsys: pytest.CaptureFixture[str]) -> None:
    node = _Node(failures=3)
    assert by_hand(node, lambda _vm: 7, patience=run.Patience(again=0.0)) == 7
    assert node.removed == [node.made]
    assert capsys.readouterr().err.count("virtshim does not answer") == 1


class _HungUp(io.StringIO):
    def write(self, _text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_run_removes_its_vm_even_if_its_warning_cannot_be_printed() -> None:
    node = _Node(failures=1)
    with contextlib.redirect_stderr(_HungUp()):
        by_hand(node, lambda _vm: 0, patience=run.Patience(again=0.0))
    assert node.removed == [node.made]


def test_run_names_the_vm_that_it_could_not_remove(capsys: pytest.CaptureFixture[str]) -> None:
    node = _Node(failures=9)
    by_hand(node, lambda _vm: 0, patience=run.Patience(away=0.0))
    assert f"virtshim.io/run={node.made}" in capsys.readouterr().err


def lasting(name: str = "db", container: str = "vm", saved: SavedMemory | None = None, pod: str = "") -> LastingVm:
    return LastingVm("default", name, container, NOW - 100, 3 << 20, pod, "", "", saved)


def test_vms_that_outlive_their_pods_are_rows() -> None:
    saved = SavedMemory(512 << 20, NOW - 3600, NOW + 86400, taken=False)
    found = [
        lasting(saved=saved),
        lasting("web", saved=dataclasses.replace(saved, taken=True), pod="default/web-0"),
        dataclasses.replace(lasting("new"), disk=0),
    ]
    assert list(vms.rows(found, NOW)) == [
        ("default/db", "vm", "3.0M", "-", "512M", "60m", "24h"),
        ("default/web", "vm", "3.0M", "default/web-0", "taken", "60m", "-"),
        ("default/new", "vm", "-", "-", "-", "-", "-"),
    ]


@pytest.mark.parametrize("wanted", ["db", "default/db", "default/db/vm"])
def test_a_vm_that_outlives_its_pods_has_three_names(wanted: str) -> None:
    assert vms.named(wanted, [lasting("web"), lasting()]) == lasting()


def test_a_name_of_several_vms_or_of_none_is_refused() -> None:
    both = [lasting(), lasting(container="side")]
    assert vms.named("default/db/side", both) == both[1]
    with pytest.raises(InvalidRequest, match="default/db/vm, default/db/side; be more specific"):
        vms.named("default/db", both)
    with pytest.raises(NotFound, match="virtshim vms"):
        vms.named("default/d", both)
    with pytest.raises(InvalidRequest, match="empty"):
        vms.named("", both)


def test_options_before_a_subcommand_are_refused_rather_than_ignored(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="options for `vms rm` go after it"):
        app(["vms", "--socket", f"{tmp_path}/virtshim.sock", "rm", "db"])
    with pytest.raises(Unavailable, match=str(tmp_path)):
        app(["vms", "rm", "--socket", f"{tmp_path}/virtshim.sock", "db"])


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("./disk.qcow2", "file:///images/disk.qcow2"),
        ("../disk.qcow2", "file:///disk.qcow2"),
        ("/srv/./disk.qcow2", "file:///srv/disk.qcow2"),
        ("disk.qcow2", "disk.qcow2"),
        ("example.com/disk.qcow2", "example.com/disk.qcow2"),
        ("http://example.com/disk.qcow2", "http://example.com/disk.qcow2"),
    ],
)
def test_a_path_becomes_the_files_url_and_other_names_stay_unchanged(
    word: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getcwd", lambda: "/images")
    assert image_name(word) == name
