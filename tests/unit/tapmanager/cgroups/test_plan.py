"""Each cgroup file gets the right value, on machines with cgroup v1, v2 and both."""

import pytest

from tapmanager.cgroups.plan import Hierarchy, RequestedLimits, cgroup_path, parse_mountinfo, settings, weight
from tapmanager.errors import TapmanagerError
from tapmanager.fields import BadField

V2 = [Hierarchy("/cg", frozenset({"cpu", "cpuset", "memory", "hugetlb", "pids"}), is_v2=True)]
V1 = [
    Hierarchy("/cg/cpu,cpuacct", frozenset({"cpu", "cpuacct"}), is_v2=False),
    Hierarchy("/cg/cpuset", frozenset({"cpuset"}), is_v2=False),
    Hierarchy("/cg/memory", frozenset({"memory"}), is_v2=False),
    Hierarchy("/cg/unified", frozenset({"hugetlb"}), is_v2=True),
]
ALL = RequestedLimits(
    shares=512,
    quota=150_000,
    period=100_000,
    cpus="0-1",
    mems="0",
    memory=1 << 30,
    swap=1 << 20,
    hugepages={2 << 20: 64 << 20, 1 << 30: 1 << 30},
)


def files(limits: RequestedLimits, hierarchies: list[Hierarchy]) -> list[str]:
    return [f"{one.root}/{setting.file}={setting.value}" for one, setting in settings(limits, hierarchies)]


def test_version_2_gets_weights_and_pairs() -> None:
    assert files(ALL, V2) == [
        "/cg/cpu.weight=20",
        "/cg/cpu.max=150000 100000",
        "/cg/cpuset.cpus=0-1",
        "/cg/cpuset.mems=0",
        "/cg/memory.max=1073741824",
        "/cg/memory.swap.max=1048576",
        "/cg/hugetlb.2MB.max=67108864",
        "/cg/hugetlb.1GB.max=1073741824",
        "/cg/pids.max=1024",
    ]


def test_version_1_gets_each_value_in_an_order_in_which_no_step_is_refused() -> None:
    assert files(ALL, V1) == [
        "/cg/cpu,cpuacct/cpu.shares=512",
        "/cg/cpu,cpuacct/cpu.cfs_quota_us=-1",
        "/cg/cpu,cpuacct/cpu.cfs_period_us=100000",
        "/cg/cpu,cpuacct/cpu.cfs_quota_us=150000",
        "/cg/cpuset/cpuset.cpus=0-1",
        "/cg/cpuset/cpuset.mems=0",
        "/cg/memory/memory.memsw.limit_in_bytes=-1",
        "/cg/memory/memory.limit_in_bytes=1073741824",
        "/cg/memory/memory.memsw.limit_in_bytes=1074790400",
        "/cg/unified/hugetlb.2MB.max=67108864",
        "/cg/unified/hugetlb.1GB.max=1073741824",
    ]


def test_empty_limits_reset_earlier_limits() -> None:
    assert files(RequestedLimits(), V2) == ["/cg/cpu.max=max", "/cg/memory.max=max", "/cg/pids.max=1024"]
    assert files(RequestedLimits(), V1) == [
        "/cg/cpu,cpuacct/cpu.cfs_quota_us=-1",
        "/cg/memory/memory.limit_in_bytes=-1",
    ]


def test_unified_keys_go_to_their_controller_and_have_no_file_in_version_1() -> None:
    limits = RequestedLimits(unified={"memory.high": "4096"})
    assert "/cg/memory.high=4096" in files(limits, V2)
    assert "/cg/memory/=4096" in files(limits, V1)


def test_every_vm_has_a_limit_of_threads_where_the_machine_can_count_them() -> None:
    with_pids = [*V1, Hierarchy("/cg/pids", frozenset({"pids"}), is_v2=False)]
    assert files(RequestedLimits(), with_pids)[-1] == "/cg/pids/pids.max=1024"
    assert not [file for file in files(RequestedLimits(), V1) if "pids" in file]


def test_a_limit_without_its_controller_is_refused_by_name() -> None:
    with pytest.raises(TapmanagerError, match=r"hugepages.*no cgroup controller hugetlb"):
        settings(ALL, V1[:3])
    assert settings(RequestedLimits(), []) == []


@pytest.mark.parametrize(("shares", "expected"), [(2, 1), (1024, 39), (262_144, 10_000), (1 << 30, 10_000), (0, 1)])
def test_shares_become_the_weight_that_kubelet_gives_other_containers(shares: int, expected: int) -> None:
    assert weight(shares) == expected


def test_mounts_are_found_and_the_uppermost_counts() -> None:
    text = (
        "25 1 0:22 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n"
        "26 25 0:23 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
        "27 25 0:24 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n"
        "28 25 0:25 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate\n"
        "29 25 0:23 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    )
    assert parse_mountinfo(text) == [
        ("/sys/fs/cgroup/cpu,cpuacct", frozenset({"cpu", "cpuacct"}), False),
        ("/sys/fs/cgroup/systemd", frozenset({"name=systemd"}), False),
        ("/sys/fs/cgroup/unified", frozenset(), True),
    ]


def test_a_cgroup_is_always_below_its_parent() -> None:
    container = "ab" * 32
    assert cgroup_path("/kubepods/pod1", container, "args") == f"/kubepods/pod1/virtshim-{container}"
    assert cgroup_path("/", container, "args") == f"/virtshim-{container}"
    for bad in ("", "kubepods", "/a/../b", "/a//b", "/a/", "/a\n"):
        with pytest.raises(BadField, match=r"args\.parent"):
            cgroup_path(bad, container, "args")
    with pytest.raises(BadField, match=r"args\.container"):
        cgroup_path("/a", "../x", "args")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cpu_quota": -5}, "cpu_quota"),
        ({"cpuset_cpus": "0\n"}, "cpuset_cpus"),
        ({"memory": "1"}, "memory"),
        ({"unified": {"../x": "1"}}, "unified"),
        ({"unified": {"memory.high": "1\n2"}}, "unified"),
        ({"hugepages": [{"page_size": 1, "limit": 1}]}, "page_size"),
        ({"more": 1}, "more"),
    ],
)
def test_malformed_limits_are_refused_by_the_name_of_their_field(change: dict[str, object], words: str) -> None:
    whole = {"cpu_shares": 0, "cpu_quota": 0, "cpu_period": 0, "cpuset_cpus": "", "cpuset_mems": "", "memory": 0}
    assert RequestedLimits.from_json(whole, "l") == RequestedLimits()
    with pytest.raises(BadField, match=words):
        RequestedLimits.from_json({**whole, **change}, "l")
