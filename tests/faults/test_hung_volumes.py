"""A volume whose server no longer answers, such as a dead NFS server, affects only its own pod, which can be ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from guest import BOOT, READY
from mortal_node import MortalNode
from podclient import container_config, wait_for_log, wait_until
from slow_fuse import SlowFuse
from work import Work, working

from criproto.runtime_v1 import api_pb2 as pb

# In `make test`, tests/integration/volumes/test_share_daemons.py samples these tests without a node.
pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.volumes, pytest.mark.full]


@pytest.fixture
def slow(mortal: MortalNode) -> Iterator[tuple[SlowFuse, Path]]:
    directory = Path(f"{mortal.volume}/slow")
    directory.mkdir()
    try:
        with SlowFuse(directory) as server:
            yield server, directory
    except OSError as exc:
        pytest.skip(f"NOT TO BE HAD HERE: {exc.strerror}")
    finally:
        directory.rmdir()


def test_a_hung_volume_blocks_only_its_own_pod_which_can_be_removed(
    mortal: MortalNode, work: Work, slow: tuple[SlowFuse, Path]
) -> None:
    server, directory = slow
    cri = work.cri
    work.run()
    wanted = container_config(cri.pull(f"{mortal.image_url}/guest.qcow2"))
    wanted.mounts.add(container_path="/slow", host_path=str(directory))
    work.container = cri.create(work.pod, wanted, work.config)
    cri.start(work.container)
    wait_for_log(cri.status(work.container).log_path, READY, BOOT)
    wait_until(lambda: cri.exec_sync(work.container, "ls", "/slow/.").exit_code == 0, BOOT, "it is there")
    server.hang()
    cri.exec_sync(work.container, "sh", "-c", "ls /slow >/dev/null 2>&1 & ls /slow/x >/dev/null 2>&1 &")

    second = Work(mortal, cri, work.image)
    second.run()
    config = container_config(work.image, 64 << 20)
    config.mounts.add(container_path="/slow", host_path=f"{directory}/volume")
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(cri.create, second.pod, config, second.config)
        other = Work(mortal, cri, work.image)
        for step in (other.run, other.create, other.start, other.stop, other.remove_pod):
            step()
        mortal.check_bystander(cri)
        assert not late.done()
        with pytest.raises(grpc.RpcError, match=f"{directory}/volume does not answer in time") as refused:
            late.result()
    assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    second.remove_pod()

    cri.stop(work.container, 0)
    assert cri.status(work.container).state == pb.CONTAINER_EXITED
    work.remove_pod()
    assert not mortal.virtiofsd_pids()


@pytest.fixture
def lasting(mortal: MortalNode) -> Iterator[Work]:
    """A running VM whose state is on a volume."""
    prepare = (Work.pull, Work.run_with_state_volume, Work.create, Work.start, Work.boot)
    with working(mortal, *prepare) as work:
        yield work


def test_a_hung_state_volume_fails_only_calls_of_its_own_pod_and_loses_nothing(
    mortal: MortalNode, lasting: Work
) -> None:
    cri = lasting.cri
    with contextlib.ExitStack() as hung:
        try:
            hung.enter_context(SlowFuse(mortal.state_volume, answers=False))
        except OSError as exc:
            pytest.skip(f"NOT TO BE HAD HERE: {exc.strerror}")
        lasting.save()
        assert cri.status(lasting.container).reason == "Saved"
        with ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(cri.stop_pod, lasting.pod)
            other = Work(mortal, cri, lasting.image)
            for step in (other.run, other.create, other.start, other.stop, other.remove_pod):
                step()
            mortal.check_bystander(cri)
            with pytest.raises(grpc.RpcError, match="has not answered for 30 s") as refused:
                stopping.result()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        mortal.kill("virtshim")
        mortal.up()  # the recovery does not wait for the volume
    lasting.stop_pod()
    wait_until(lasting.is_published, 20, "the volume has all of the VM")
