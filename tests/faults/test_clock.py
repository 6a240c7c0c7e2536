"""When the wall clock jumps by hours under a running virtshim, the order of objects stays, and no wait ends too early
or too late. libfaketime stands between the daemon and its C library."""

from __future__ import annotations

import glob
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from mortal_node import MortalNode
from podclient import wait_for_log
from work import Work

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.faults]

HOUR = 3600 * 10**9
LIBRARY = "/usr/lib/*/faketime/libfaketimeMT.so.1"


def answers(url: str) -> int:
    """The HTTP status of a request without an upgrade, which uses the token up."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


class Clock:
    """The daemon's wall clock; the monotonic clock is unaffected, as with settimeofday(2)."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def set(self, offset: str) -> None:
        self.file.write_text(f"{offset}\n")


def shared_by_faketime() -> set[Path]:
    return set(Path("/dev/shm").glob("*faketime_*"))


@pytest.fixture(scope="module")
def clock(mortal: MortalNode) -> Iterator[Clock]:
    found = glob.glob(LIBRARY)
    if not found:
        pytest.skip("NOT TESTED: libfaketime is not installed; run make setup")
    before = shared_by_faketime()
    clock = Clock(Path(f"{mortal.directory}.clock"))
    clock.set("+0")
    mortal.environment["virtshim"] = {
        "LD_PRELOAD": found[0],
        "FAKETIME_TIMESTAMP_FILE": str(clock.file),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    mortal.restart("virtshim")
    yield clock
    mortal.environment["virtshim"] = {}
    mortal.restart("virtshim")
    for left in shared_by_faketime() - before:  # of processes that were killed
        left.unlink()


@pytest.mark.parametrize("jump", [pytest.param("+2h", marks=pytest.mark.full), "-2h"])
def test_objects_created_after_a_clock_jump_are_newer_than_older_objects(
    mortal: MortalNode, clock: Clock, work: Work, jump: str
) -> None:
    clock.set("+0")
    work.run()
    work.create()
    work.start()
    before = work.cri.status(work.container)
    clock.set(jump)
    later = Work(mortal, work.cri, work.image)
    later.run()
    later.create()
    stamps = [work.cri.pod_status(pod).created_at for pod in (work.pod, later.pod)]
    assert stamps == sorted(set(stamps))
    assert work.cri.status(later.container).created_at > before.created_at
    assert (abs(stamps[1] - stamps[0]) > HOUR) == (jump == "+2h"), "the daemon's clock has not jumped"
    work.stop()
    ended = work.cri.status(work.container)
    assert ended.created_at <= ended.started_at <= ended.finished_at
    mortal.restart("virtshim")
    again = Work(mortal, work.cri, work.image)
    again.run()
    assert work.cri.pod_status(again.pod).created_at > stamps[1]


@pytest.mark.parametrize("jump", ["+2h", pytest.param("-2h", marks=pytest.mark.full)])
def test_a_grace_period_is_not_changed_by_a_clock_jump(mortal: MortalNode, clock: Clock, work: Work, jump: str) -> None:
    """The null guest ignores its power button."""
    clock.set("+0")
    for step in (work.run, work.create, work.start):
        step()
    wait_for_log(work.cri.status(work.container).log_path, "null guest", 60)  # before that it would be ended at once
    started = time.monotonic()
    stopping = threading.Thread(target=lambda: work.cri.stop(work.container, 4))
    stopping.start()
    clock.set(jump)
    stopping.join(60)
    assert not stopping.is_alive(), "it waits for two hours more"
    assert time.monotonic() - started >= 4
    status = work.cri.status(work.container)
    assert (status.state, status.exit_code) == (pb.CONTAINER_EXITED, 137)


def test_a_deadline_and_a_streaming_token_do_not_expire_early(mortal: MortalNode, clock: Clock, work: Work) -> None:
    clock.set("+0")
    assert mortal.bystander is not None
    request = pb.ExecRequest(container_id=mortal.bystander.container, cmd=["true"], stdout=True)
    url = work.cri.runtime.Exec(request, timeout=10).url
    clock.set("+2h")
    assert answers(url) != 404, "the token of a minute was not used yet"
    assert answers(url) == 404, "it was now"
    code = work.cri.exec_sync(mortal.bystander.container, "true", timeout=20).exit_code
    assert code == 0
    with pytest.raises(grpc.RpcError) as caught:
        work.cri.exec_sync(mortal.bystander.container, "sleep", "600", timeout=2)
    assert "2 s" in caught.value.details(), "the command's time is over, not the caller's"
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
