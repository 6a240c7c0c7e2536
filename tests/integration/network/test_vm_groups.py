"""A VM's cgroup is below the pod's and has its limits, and the process that fetches the taps joins it. The cgroups are
the real kernel's."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from tap_node import TapNode, sandbox, until

from tapmanager import protocol
from tapmanager.cgroups import tree as cgroups
from tapmanager.cgroups.plan import Hierarchy, RequestedLimits

pytestmark = pytest.mark.network

CONTAINER = "c" * 64
LIMITS: dict[str, object] = {
    "cpu_shares": 512,
    "cpu_quota": 50_000,
    "cpu_period": 100_000,
    "cpuset_cpus": "0",
    "cpuset_mems": "",
    "memory": 256 << 20,
    "swap": None,
    "hugepages": [],
    "unified": {},
}
# Becomes another program, as vmwrapper does, once its taps are there.
FETCH_AND_SLEEP = """
import os, sys
from tapmanager import protocol
protocol.call(sys.argv[1], "fetch", {"sandbox": sys.argv[2], "key": sys.argv[3]}, 10.0)
os.execv("/bin/sleep", ["sleep", "60"])
"""

EAT = """
import sys
data = bytearray(64 << 20)
data[::4096] = b"x" * (64 << 8)
print("full", flush=True)
sys.stdin.read()
"""


def places(path: str) -> list[Path]:
    return [Path(one.root + path) for one in cgroups.hierarchies() if os.path.isdir(one.root + path)]


def value(path: str, controller: str, v1: str, v2: str) -> str:
    home = next(one for one in cgroups.hierarchies() if controller in one.controllers)
    return Path(f"{home.root}{path}/{v2 if home.is_v2 else v1}").read_text().strip()


def quota(path: str) -> str:
    return value(path, "cpu", "cpu.cfs_quota_us", "cpu.max").split()[0]


def memory(path: str) -> str:
    return value(path, "memory", "memory.limit_in_bytes", "memory.max")


def group(node: TapNode, which: str, parent: str, score: int = 900, **changes: object) -> str:
    args = {"sandbox": which, "container": CONTAINER, "parent": parent, "limits": {**LIMITS, **changes}}
    assert node.call("group", {**args, "oom_score_adj": score}) == {"made": True}
    return f"{parent}/virtshim-{CONTAINER}"


def limit(node: TapNode, parent: str, **changes: object) -> None:
    args = {"container": CONTAINER, "parent": parent, "limits": {**LIMITS, **changes}, "oom_score_adj": 950}
    node.call("limit", args)


def ungroup(node: TapNode, parent: str) -> None:
    assert node.call("ungroup", {"container": CONTAINER, "parent": parent}) == {}


def test_the_process_that_fetches_the_taps_joins_the_vms_cgroup_first(tap_node: TapNode, pod_cgroup: str) -> None:
    which = sandbox()
    key = tap_node.attach(which)["fetch_key"]
    path = group(tap_node, which, pod_cgroup)
    assert (quota(path), memory(path)) == ("50000", str(256 << 20))
    tap_node.stop()
    tap_node.start()  # a restart in between loses nothing
    guest = subprocess.Popen([sys.executable, "-c", FETCH_AND_SLEEP, tap_node.socket, which, key])
    try:
        until(lambda: Path(f"/proc/{guest.pid}/comm").read_text() == "sleep\n", what="the exec")
        assert places(path)
        for place in places(path):
            assert place.joinpath("cgroup.procs").read_text().split() == [str(guest.pid)], place
        assert Path(f"/proc/{guest.pid}/oom_score_adj").read_text() == "900\n"
        assert value(path, "cpuset", "cpuset.cpus", "cpuset.cpus") == "0"

        limit(tap_node, pod_cgroup, cpu_quota=80_000, memory=512 << 20)
        assert (quota(path), memory(path)) == ("80000", str(512 << 20))
        assert Path(f"/proc/{guest.pid}/oom_score_adj").read_text() == "950\n"

        with pytest.raises(protocol.RemoteError, match="it still contains processes") as busy:
            ungroup(tap_node, pod_cgroup)
        assert busy.value.kind == "failed-precondition"
    finally:
        guest.kill()
        guest.wait()
    ungroup(tap_node, pod_cgroup)
    assert places(path) == []
    ungroup(tap_node, pod_cgroup)
    tap_node.release(which)


def test_a_partly_refused_change_leaves_all_limits_as_they_were(tap_node: TapNode, pod_cgroup: str) -> None:
    which = sandbox()
    tap_node.attach(which)
    path = group(tap_node, which, pod_cgroup)
    with pytest.raises(protocol.RemoteError, match="cpuset_cpus") as refused:
        limit(tap_node, pod_cgroup, cpu_quota=90_000, memory=1 << 30, cpuset_cpus="4095")
    assert refused.value.kind == "invalid"
    with pytest.raises(protocol.RemoteError, match="unified"):
        limit(tap_node, pod_cgroup, cpu_quota=90_000, unified={"memory.nothing": "1"})
    assert (quota(path), memory(path)) == ("50000", str(256 << 20))
    ungroup(tap_node, pod_cgroup)
    with pytest.raises(protocol.RemoteError) as gone:
        limit(tap_node, pod_cgroup)
    assert gone.value.kind == "not-found"
    tap_node.release(which)


def test_a_pod_without_a_cgroup_gets_one_until_its_last_vm_ends(tap_node: TapNode) -> None:
    which = sandbox()
    tap_node.attach(which)
    path = group(tap_node, which, "/virtshim")
    assert places(path)
    ungroup(tap_node, "/virtshim")
    assert places(path) == []
    tap_node.release(which)


def test_a_parent_cgroup_is_removed_with_its_last_vm_only_if_virtshim_created_it(
    tap_node: TapNode, pod_cgroup: str
) -> None:
    """critest uses such a /test.slice. A pod's cgroup belongs to kubelet, and is empty before its VM starts and after it
    ends."""
    which = sandbox()
    tap_node.attach(which)
    there = places(pod_cgroup)
    parent = f"{pod_cgroup}/made/for-it"
    path = group(tap_node, which, parent)
    assert places(path)
    ungroup(tap_node, parent)
    assert places(f"{pod_cgroup}/made") == []
    group(tap_node, which, pod_cgroup)
    ungroup(tap_node, pod_cgroup)
    assert there
    assert set(there) <= set(places(pod_cgroup))
    tap_node.release(which)


def test_less_memory_than_is_in_use_is_refused_and_nobody_is_killed(tap_node: TapNode, pod_cgroup: str) -> None:
    which = sandbox()
    tap_node.attach(which)
    path = group(tap_node, which, pod_cgroup)
    eater = subprocess.Popen(["sh", "-c", 'read _; exec "$0" -c "$1"', sys.executable, EAT], stdin=-1, stdout=-1)
    try:
        for place in places(path):
            place.joinpath("cgroup.procs").write_text(str(eater.pid))
        eater.stdin.write(b"\n")
        eater.stdin.flush()
        assert eater.stdout.readline() == b"full\n"
        with pytest.raises(protocol.RemoteError, match="in use") as refused:
            limit(tap_node, pod_cgroup, memory=16 << 20)
        assert refused.value.kind == "failed-precondition"
        assert memory(path) == str(256 << 20)
        assert eater.poll() is None
    finally:
        eater.kill()
        eater.communicate()
    ungroup(tap_node, pod_cgroup)
    tap_node.release(which)


def test_a_vm_can_be_put_into_the_unified_hierarchy_alone(tmp_path: Path) -> None:
    """Here the hierarchy has few controllers; creating, joining and removing groups is the same with all."""
    (v2,) = [one for one in cgroups.hierarchies() if one.is_v2]
    parent = f"/virtshim-test-{secrets.token_hex(4)}"
    Path(v2.root + parent).mkdir()
    path = f"{parent}/virtshim-{CONTAINER}"
    groups = cgroups.VmCgroups([Hierarchy(v2.root, v2.controllers, is_v2=True)])
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        pages = {2 << 20: 4 << 20} if "hugetlb" in v2.controllers else {}
        assert groups.make(path, RequestedLimits(hugepages=pages))
        if pages:
            assert Path(f"{v2.root}{path}/hugetlb.2MB.max").read_text() == f"{4 << 20}\n"
        groups.admit(path, 1000, cgroups.Peer(os.geteuid(), sleeper.pid))
        assert Path(f"/proc/{sleeper.pid}/cgroup").read_text().splitlines()[-1] == f"0::{path}"
    finally:
        sleeper.kill()
        sleeper.wait()
        groups.remove(path)
        Path(v2.root + parent).rmdir()
