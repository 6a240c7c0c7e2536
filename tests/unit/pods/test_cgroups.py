"""tapmanager reads the requests for VM cgroups as virtshim sends them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tapmanager import server
from tapmanager.cgroups.plan import RequestedLimits
from tapmanager.errors import TapmanagerError
from tapmanager.fields import Json, as_object
from tapmanager.peer import Peer
from tapmanager.server import Answer
from virtshim.model.cgroup import CgroupLimits, VmCgroup
from virtshim.model.errors import InvalidRequest, WrongState
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.pods.cgroups import VmCgroupClient, oom_kills
from virtshim.pods.tapmanager_connection import TapmanagerConnection

LIMITS = CgroupLimits(512, 50_000, 100_000, "0-1", "0", 1 << 30, 0, {2 << 20: 4 << 20}, {"memory.high": "max"})
GROUP = VmCgroup(SandboxId("a" * 64), ContainerId("b" * 64), "kubepods-pod1.slice", LIMITS, -998)


class Tapmanager:
    """A real server whose verbs write down what they are asked."""

    def __init__(self, path: str) -> None:
        self.asked: list[tuple[str, Json]] = []
        self.fails: TapmanagerError | None = None
        self.unknown = ""
        self.path = path
        self.server = server.Server(server.listen(path, os.getegid()), self._perform, os.geteuid())
        self.server.start()

    def _perform(self, request: Json, peer: Peer, until: float) -> Answer:
        if self.fails:
            raise self.fails
        if self.unknown in as_object(request["args"], "args"):
            raise TapmanagerError("invalid", f"args.{self.unknown}: unknown field")
        self.asked.append((str(request["verb"]), request["args"]))  # type: ignore[arg-type]
        return Answer({})


@pytest.fixture
def tapmanager(tmp_path: Path) -> Iterator[Tapmanager]:
    running = Tapmanager(str(tmp_path / "t.sock"))
    yield running
    running.server.stop(5.0)


def client(tapmanager: Tapmanager, *, own: bool = True) -> VmCgroupClient:
    return VmCgroupClient(TapmanagerConnection(tapmanager.path), own=own)


def test_a_cgroup_is_requested_below_the_slices_of_its_parent(tapmanager: Tapmanager) -> None:
    client(tapmanager).make(GROUP, 5.0)
    ((verb, args),) = tapmanager.asked
    assert verb == "group"
    assert (args["sandbox"], args["container"]) == ("a" * 64, "b" * 64)
    assert args["queues"] == 1
    assert (args["parent"], args["oom_score_adj"]) == ("/kubepods.slice/kubepods-pod1.slice", -998)


def test_arguments_that_an_earlier_tapmanager_does_not_know_are_left_out(tapmanager: Tapmanager) -> None:
    tapmanager.unknown = "queues"
    client(tapmanager).make(dataclasses.replace(GROUP, nic_queues=4), 5.0)
    ((_, args),) = tapmanager.asked
    assert "queues" not in args
    assert args["uid"] == 0


def test_another_unknown_argument_is_an_error(tapmanager: Tapmanager) -> None:
    tapmanager.unknown = "uid"
    with pytest.raises(InvalidRequest, match=r"args\.uid: unknown field"):
        client(tapmanager).make(GROUP, 5.0)


def test_every_limit_arrives(tapmanager: Tapmanager) -> None:
    client(tapmanager).limit(GROUP, 5.0)
    ((verb, args),) = tapmanager.asked
    assert verb == "limit"
    read = RequestedLimits.from_json(args["limits"], "limits")  # type: ignore[arg-type]
    expected = RequestedLimits(512, 50_000, 100_000, "0-1", "0", 1 << 30, 0, {2 << 20: 4 << 20}, {"memory.high": "max"})
    assert read == expected


def test_removal_needs_ids_alone_and_a_pod_without_a_parent_has_ours(tapmanager: Tapmanager) -> None:
    client(tapmanager).remove(GROUP.container, "", 5.0)
    assert tapmanager.asked == [("ungroup", {"container": "b" * 64, "parent": "/virtshim"})]


def test_tapmanager_gets_no_parent_if_libvirt_makes_the_cgroups(tapmanager: Tapmanager) -> None:
    client(tapmanager, own=False).make(GROUP, 5.0)
    assert tapmanager.asked[0][1]["parent"] == ""


def test_a_refusal_keeps_its_kind_and_words(tapmanager: Tapmanager) -> None:
    tapmanager.fails = TapmanagerError("failed-precondition", "memory: 9 bytes are in use")
    with pytest.raises(WrongState, match="9 bytes are in use"):
        client(tapmanager).limit(GROUP, 5.0)


def test_our_own_parent_has_one_name() -> None:
    from tapmanager.cgroups.plan import OWN_PARENT
    from virtshim.model.cgroup import DEFAULT_PARENT

    assert OWN_PARENT == DEFAULT_PARENT


# The files of both cgroup versions, as the kernel writes them.

PATH = "/kubepods/pod1/virtshim-1"


def group_files(root: Path, controller: str, **files: str) -> None:
    where = root / controller / PATH[1:]
    where.mkdir(parents=True)
    for name, text in files.items():
        (where / name.replace("__", ".")).write_text(text)


def test_memory_kills_are_read_in_version_2(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    events = "low 0\nhigh 3\nmax 12\noom 2\noom_kill 1\noom_group_kill 0\n"
    group_files(tmp_path, "", memory__events=events)
    assert oom_kills(PATH, str(tmp_path)) == 1


def test_memory_kills_are_read_in_version_1(tmp_path: Path) -> None:
    control = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"
    group_files(tmp_path, "memory", memory__oom_control=control)
    assert oom_kills(PATH, str(tmp_path)) == 2


def test_a_cgroup_that_is_gone_had_no_kills(tmp_path: Path) -> None:
    assert oom_kills(PATH, str(tmp_path)) == 0
