"""Each finding about a node's surroundings says when all is well, when not, and when it cannot be determined."""

import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes.sysfs import FakeSysfs

from virtshim.config.settings import Settings
from virtshim.neighbours.kubelet import CONFIG_FILE, Given, KubeletSetup
from virtshim.neighbours.runtimes import RuntimeSetup
from virtshim.preflight import node_checks
from virtshim.preflight.access import FileStatus
from virtshim.preflight.finding import Finding, Level
from virtshim.preflight.kubelet import (
    kubelet_cgroup_driver,
    kubelet_configuration,
    kubelet_endpoint,
    kubelet_swap,
    root_socket,
)
from virtshim.preflight.machine import clock_source, clock_synchronised
from virtshim.preflight.runtimes import installed_findings
from virtshim.preflight.virtualization import ProgramOutput

pytestmark = pytest.mark.operator

OK, WARNING, ERROR = Level.OK, Level.WARNING, Level.ERROR
FILE = "/var/lib/kubelet/config.yaml"


def setup(**fields: object) -> KubeletSetup:
    return KubeletSetup(fields={name: Given(value, FILE) for name, value in fields.items()}, has_unit=True)


def test_a_finding_that_is_not_ok_has_a_remedy() -> None:
    told: list[Finding] = [
        kubelet_configuration(KubeletSetup(unreadable=("x: why",))),
        kubelet_swap(setup(), ""),
        clock_synchronised(None, "why"),
        clock_source("hpet"),
        *installed_findings([RuntimeSetup("containerd", "/s", "/f", "trouble")], "systemd", "/etc/cni/net.d", behind_proxy=True),
    ]  # fmt: skip
    assert all(one.remedy for one in told)


@pytest.mark.parametrize(
    ("found", "level", "said"),
    [
        (KubeletSetup(), OK, "not installed on this machine"),
        (setup(cgroupDriver="systemd"), OK, FILE),
        (KubeletSetup(unreadable=(f"{FILE}: not YAML: x",)), WARNING, FILE),
    ],
)
def test_a_kubelet_configuration_that_cannot_be_read_is_reported(found: KubeletSetup, level: Level, said: str) -> None:
    told = kubelet_configuration(found)
    assert told.level is level
    assert said in told.text


@pytest.mark.parametrize(
    ("found", "ours", "version", "level"),
    [
        (setup(cgroupDriver="systemd"), "systemd", "", OK),
        (setup(), "cgroupfs", "", OK),
        (setup(cgroupDriver="cgroupfs"), "systemd", "Kubernetes v1.30.4", ERROR),
        (setup(), "systemd", "Kubernetes v1.28.0", ERROR),
        (setup(cgroupDriver="cgroupfs"), "systemd", "Kubernetes v1.31.0", OK),
        (setup(cgroupDriver="cgroupfs"), "systemd", "", WARNING),
    ],
)
def test_kubelet_must_have_our_cgroup_driver_or_ask_for_it(
    found: KubeletSetup, ours: str, version: str, level: Level
) -> None:
    assert kubelet_cgroup_driver(found, ours, ProgramOutput(version)).level is level


@pytest.mark.parametrize(
    ("value", "missing", "level", "said"),
    [
        ("unix:///run/virtshim/virtshim.sock", (), OK, ""),
        ("/run/virtshim/proxy.sock", (), OK, ""),
        ("unix:///run/virtshim/proxy.sock", ("/run/virtshim/proxy.sock",), WARNING, "enable --now virtshim-proxy"),
        ("unix:///run/containerd/containerd.sock", (), WARNING, "virtshim setup"),
        (None, (), WARNING, "virtshim setup"),
    ],
)
def test_kubelet_must_call_our_socket_or_the_proxys(
    value: str | None, missing: Sequence[str], level: Level, said: str
) -> None:
    served = {"/run/virtshim/virtshim.sock": "virtshim", "/run/virtshim/proxy.sock": "virtshim-proxy"}
    told = kubelet_endpoint(setup(containerRuntimeEndpoint=value) if value else setup(), served, frozenset(missing))
    assert told.level is level
    assert said in told.remedy


HEAD = "Filename\tType\tSize\tUsed\tPriority"


@pytest.mark.parametrize(
    ("found", "swaps", "level"),
    [
        (setup(), HEAD, OK),
        (setup(), f"{HEAD}\n/dev/sda2 partition 1 0 -2", ERROR),
        (setup(failSwapOn=False), f"{HEAD}\n/dev/sda2 partition 1 0 -2", OK),
        (KubeletSetup(flags={"fail-swap-on": Given("false", "f")}), f"{HEAD}\n/swapfile file 1 0 -2", OK),
        (KubeletSetup(), f"{HEAD}\n/swapfile file 1 0 -2", OK),
        (setup(), "", WARNING),
    ],
)
def test_kubelet_refuses_swap_that_is_on(found: KubeletSetup, swaps: str, level: Level) -> None:
    assert kubelet_swap(found, swaps).level is level


def runtime(**changed: object) -> RuntimeSetup:
    facts: dict[str, object] = {"cgroup_driver": "systemd", "is_running": True, **changed}
    return RuntimeSetup("containerd", "/run/containerd/containerd.sock", "/etc/containerd/config.toml", **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "proxied", "levels"),
    [
        ([], False, [OK]),
        ([runtime()], True, [OK]),
        ([runtime(is_running=False)], True, [OK]),
        ([runtime(cgroup_driver="cgroupfs")], True, [ERROR]),
        ([runtime(cgroup_driver="cgroupfs")], False, [WARNING]),
        ([runtime(cgroup_driver="")], True, [WARNING]),
        ([runtime(cni_conf_dir="/etc/other")], True, [WARNING]),
        ([runtime(cgroup_driver="cgroupfs", cni_conf_dir="/etc/other")], True, [ERROR, WARNING]),
        ([runtime(serves_cri=False)], True, [WARNING]),
        ([runtime(trouble="/etc/containerd/config.toml: not TOML")], True, [WARNING]),
    ],
)
def test_a_runtime_beside_virtshim_must_have_our_cgroup_driver_and_network(
    found: list[RuntimeSetup], proxied: bool, levels: list[Level]
) -> None:
    told = installed_findings(found, "systemd", "/etc/cni/net.d", behind_proxy=proxied)
    assert [one.level for one in told] == levels


@pytest.mark.parametrize(("handlers", "proxied", "levels"), [
    ({}, True, [OK, WARNING]), ({}, False, [OK]), ({"virtshim-pod": {}}, True, [OK]),
])  # fmt: skip
def test_a_runtime_without_an_entry_for_pods_with_containers_beside_their_vm(
    handlers: dict[str, dict[str, str]], proxied: bool, levels: list[Level]
) -> None:
    told = installed_findings(
        [runtime(handlers=handlers, handlers_table="t")], "systemd", "/etc/cni/net.d",
        behind_proxy=proxied, pod_handlers=["virtshim-pod"],
    )  # fmt: skip
    assert [one.level for one in told] == levels
    if WARNING in levels:
        assert "containerd has no OCI runtime virtshim-pod" in told[-1].text
        assert told[-1].remedy.startswith("run virtshim setup, or copy the table")


@pytest.mark.parametrize(("handlers", "level", "said"), [
    ({}, OK, "has no OCI runtime virtshim-pod, so it refuses such pods"),
    ({"virtshim-pod": {}}, WARNING, "has the OCI runtime virtshim-pod, so it starts such pods, but the proxy refuses their VMs"),
])  # fmt: skip
def test_crio_cannot_make_pods_with_containers_beside_their_vm(
    handlers: dict[str, dict[str, str]], level: Level, said: str
) -> None:
    crio = RuntimeSetup("cri-o", "/s", "/f", cgroup_driver="systemd", handlers=handlers)
    handler = ["virtshim-pod"]
    told = installed_findings([crio], "systemd", "/etc/cni/net.d", behind_proxy=True, pod_handlers=handler)[-1]
    assert told.level is level
    assert "need containerd, because cri-o does not report a pod's handler" in told.text
    assert said in told.text
    if level is WARNING:
        assert told.remedy == "remove virtshim-pod from cri-o's configuration, and restart cri-o"


@pytest.mark.parametrize(("asked", "told"), [("virtshim.sock", "calls virtshim directly"), ("proxy.sock", "cgroupfs")])
def test_another_runtime_matters_only_where_kubelet_runs_containers(asked: str, told: str, tmp_path: Path) -> None:
    """On a node of VMs alone (`virtshim setup --vms-only`) containerd may be configured as it likes."""
    node = FakeSysfs(tmp_path)
    node.write(CONFIG_FILE, f"kind: KubeletConfiguration\ncontainerRuntimeEndpoint: unix:///run/virtshim/{asked}\n")
    node.write("/usr/bin/containerd", "")
    options = 'plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options'
    node.write("/etc/containerd/config.toml", f"version = 2\n[{options}]\nSystemdCgroup = false\n")
    found = node_checks.container_runtimes(Settings.model_validate({"cri": {"cgroup_driver": "systemd"}}), node.files())
    assert told in found[0].text


def test_a_containerd_without_a_cgroup_setting_uses_cgroupfs() -> None:
    (told,) = installed_findings([runtime(cgroup_driver="")], "cgroupfs", "/etc/cni/net.d/", behind_proxy=True)
    assert told.level is OK


@pytest.mark.parametrize(("answer", "level"), [(True, OK), (False, WARNING), (None, WARNING)])
def test_a_clock_that_is_not_synchronised_is_reported(answer: bool | None, level: Level) -> None:
    assert clock_synchronised(answer, "Operation not permitted").level is level


@pytest.mark.parametrize(("name", "level"), [("tsc", OK), ("kvm-clock", OK), ("hpet", WARNING), ("", WARNING)])
def test_a_slow_clock_source_is_reported(name: str, level: Level) -> None:
    assert clock_source(name).level is level


def file(mode: int, uid: int = 0, gid: int = 0) -> FileStatus:
    return FileStatus("/run/virtshim/virtshim.sock", mode, uid, gid)


@pytest.mark.parametrize(
    ("there", "silence", "level"),
    [
        (file(stat.S_IFSOCK | 0o600), "", OK),
        (file(stat.S_IFSOCK | 0o660), "", OK),  # root's own group
        (file(stat.S_IFSOCK | 0o660, gid=1000), "", ERROR),
        (file(stat.S_IFSOCK | 0o600), "Connection refused", WARNING),
        (None, "No such file or directory", WARNING),
        (file(stat.S_IFSOCK | 0o666), "", ERROR),
        (file(stat.S_IFSOCK | 0o600, 1000), "", ERROR),
        (file(stat.S_IFREG | 0o600), "", ERROR),
    ],
)
def test_a_finding_says_whether_a_daemon_listens_on_its_socket(
    there: FileStatus | None, silence: str, level: Level
) -> None:
    told = root_socket("virtshim", "/run/virtshim/virtshim.sock", there, silence)
    assert told.level is level
    assert level is OK or "systemctl" in told.remedy or "chmod" in told.remedy
