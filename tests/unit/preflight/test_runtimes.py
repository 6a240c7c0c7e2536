"""`virtshim check` reports runtimes that are silent or do not fit each other."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.cri import served
from fakes.runtime import FakeRuntime

from virtshim.config.settings import Settings
from virtshim.preflight import checks
from virtshim.preflight.finding import Level
from virtshim.preflight.runtimes import OwnStore, Runtime, ask, findings, info, watched


def test_runtimes_that_answer_are_named_with_their_versions() -> None:
    (one, other) = findings(
        [Runtime("containerd", "/c", "", "containerd 1.6.20"), Runtime("vms", "/v", "", "v 1", "systemd")]
    )
    assert (one.level, one.text) == (Level.OK, "containerd is containerd 1.6.20 on /c")
    assert (other.level, other.text) == (Level.OK, "vms is v 1 on /v, cgroup driver systemd")


def test_a_silent_runtime_and_different_cgroup_drivers_are_reported() -> None:
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
        assert ask("one", runtime.socket) == Runtime("one", runtime.socket, "", "fake 1.0.0", "cgroupfs", "/fake")
    assert ask("one", f"{place}/nobody.sock").silence


def test_virtshim_is_asked_for_what_it_says_of_itself(tmp_path: Path) -> None:
    with served(tmp_path) as (_, _, socket):
        assert info(socket)["templates"] == {"limitBytes": 0, "kept": [], "making": 0, "unfit": []}
    assert info(f"{tmp_path}/nobody.sock") == {}


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


CONTAINERD = Runtime("containerd", "/c", "", "containerd 2.1", image_store="/var/lib/containerd/snapshots")
DEVICES = {"/var/lib/containerd/snapshots": "8:1", "/var/lib/virtshim": "8:1", "/data/virtshim": "8:2", "/gone": ""}


def stores(directory: str, percent: int = 100, primary: Runtime = CONTAINERD) -> list[tuple[Level, str, str]]:
    found = watched(primary, OwnStore(directory, percent), DEVICES.__getitem__)
    return [(one.level, one.text, one.remedy) for one in found]


def test_an_image_store_on_the_file_system_that_kubelet_watches_is_ok() -> None:
    ((level, told, _),) = stores("/var/lib/virtshim")
    assert (level, told) == (
        Level.OK,
        "/var/lib/virtshim is on the file system of containerd's images, which kubelet watches",
    )


def test_an_image_store_that_kubelet_does_not_watch_is_an_error_without_image_gc() -> None:
    ((level, told, remedy),) = stores("/data/virtshim")
    assert level is Level.ERROR
    assert "/data/virtshim is on another file system, where kubelet removes no unused images" in told
    assert remedy.endswith("or set images.gc_high_percent = 85")
    ((level, told, remedy),) = stores("/data/virtshim", 90)
    assert level is Level.WARNING
    assert told.endswith("virtshim removes images at 90 %")
    assert remedy


def test_unknown_file_systems_give_no_finding() -> None:
    assert stores("/gone") == []
    assert stores("/data/virtshim", primary=Runtime("containerd", "/c", "refused")) == []


def test_the_check_of_a_proxy_compares_the_primarys_image_store_with_ours(place: Path) -> None:
    with FakeRuntime(f"{place}/one.sock", "proc") as one:  # its images are in /proc
        proxy = {
            "primary": {"name": "one", "socket": one.socket},
            "others": [{"name": "vms", "handlers": ["virtshim"]}],
        }
        settings = Settings.model_validate({"paths": {"run_dir": str(place), "state_dir": str(place)}, "proxy": proxy})
        (place / "proxy.sock.lock").touch()
        assert [(told.subject, told.level) for told in checks.proxy(settings)] == [
            ("proxy", Level.OK),
            ("proxy", Level.WARNING),
            ("image file system", Level.ERROR),
        ]
