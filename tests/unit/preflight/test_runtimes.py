import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.runtime import FakeRuntime

from virtshim.config import Settings
from virtshim.preflight import checks
from virtshim.preflight.finding import Level
from virtshim.preflight.runtimes import Runtime, ask, findings


def test_runtimes_that_answer_are_named_with_what_they_are() -> None:
    (one, other) = findings(
        [Runtime("containerd", "/c", "", "containerd 1.6.20"), Runtime("vms", "/v", "", "v 1", "systemd")]
    )
    assert (one.level, one.text) == (Level.OK, "containerd is containerd 1.6.20 on /c")
    assert (other.level, other.text) == (Level.OK, "vms is v 1 on /v, cgroup driver systemd")


def test_one_that_is_silent_and_drivers_that_differ_are_told() -> None:
    told = findings(
        [
            Runtime("a", "/a", "", "a 1", "systemd"),
            Runtime("b", "/b", "refused"),
            Runtime("c", "/c", "", "c 1", "cgroupfs"),
        ]
    )
    assert [one.level for one in told] == [Level.OK, Level.WARNING, Level.OK, Level.ERROR]
    assert told[1].text == "b does not answer on /b: refused"
    assert "(a: systemd, c: cgroupfs)" in told[3].text


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="vs-") as made:
        yield Path(made)


def test_a_runtime_is_asked_on_its_socket(place: Path) -> None:
    with FakeRuntime(f"{place}/r.sock", "fake") as runtime:
        assert ask("one", runtime.socket) == Runtime("one", runtime.socket, "", "fake 1.0.0", "cgroupfs")
    assert ask("one", f"{place}/nobody.sock").silence


def test_only_a_node_that_has_had_a_proxy_is_checked_for_it(place: Path) -> None:
    settings = Settings.model_validate(
        {
            "paths": {"run_dir": str(place)},
            "proxy": {"primary": {"name": "one", "socket": f"{place}/one.sock"}, "others": []},
        }
    )
    assert checks.proxy(settings) == []
    (place / "proxy.sock.lock").touch()
    assert [one.level for one in checks.proxy(settings)] == [Level.WARNING]
