"""virtshim reads a kubelet's configuration, on nodes of all kinds."""

from pathlib import Path

import pytest
from fakes.sysfs import FakeSysfs

from virtshim.neighbours.kubelet import CONFIG_FILE, KUBEADM_FLAGS, Given, read

pytestmark = pytest.mark.operator

KUBEADM = """
[Service]
Environment="KUBELET_KUBECONFIG_ARGS=--kubeconfig=/etc/kubernetes/kubelet.conf"
Environment="KUBELET_CONFIG_ARGS=--config=/var/lib/kubelet/config.yaml"
EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env
EnvironmentFile=-/etc/default/kubelet
ExecStart=
ExecStart=/usr/bin/kubelet $KUBELET_KUBECONFIG_ARGS $KUBELET_CONFIG_ARGS $KUBELET_KUBEADM_ARGS $KUBELET_EXTRA_ARGS
"""


@pytest.fixture
def node(tmp_path: Path) -> FakeSysfs:
    return FakeSysfs(tmp_path)


@pytest.fixture
def kubeadm(node: FakeSysfs) -> FakeSysfs:
    node.write("/usr/lib/systemd/system/kubelet.service", "[Service]\nExecStart=/usr/bin/kubelet\n")
    node.write("/usr/lib/systemd/system/kubelet.service.d/10-kubeadm.conf", KUBEADM)
    node.write(KUBEADM_FLAGS, 'KUBELET_KUBEADM_ARGS="--container-runtime-endpoint=unix:///run/c.sock --v=2"\n')
    node.write(CONFIG_FILE, "kind: KubeletConfiguration\ncgroupDriver: systemd\nmemorySwap: {swapBehavior: NoSwap}\n")
    return node


def test_a_node_without_kubelet_gives_no_kubelet(node: FakeSysfs) -> None:
    assert not read(node.files()).is_there


def test_a_kubeadm_nodes_settings_are_read_with_their_files(kubeadm: FakeSysfs) -> None:
    found = read(kubeadm.files())
    assert found.is_there
    assert found.cgroup_driver == Given("systemd", CONFIG_FILE)
    assert found.endpoint == Given("unix:///run/c.sock", KUBEADM_FLAGS)
    assert (found.config_dir, found.root_dir, found.unreadable) == ("", "/var/lib/kubelet", ())


def test_kubelet_has_joined_the_cluster_once_it_has_its_kubeconfig(kubeadm: FakeSysfs) -> None:
    assert not read(kubeadm.files()).is_in_cluster
    kubeadm.write("/etc/kubernetes/kubelet.conf", "kind: Config\n")
    assert read(kubeadm.files()).is_in_cluster


def test_extra_flags_come_last_and_their_file_wins_over_the_units(kubeadm: FakeSysfs) -> None:
    extra = '[Service]\nEnvironment="KUBELET_EXTRA_ARGS=--container-runtime-endpoint=unix:///run/unit.sock"\n'
    kubeadm.write("/etc/systemd/system/kubelet.service.d/50-extra.conf", extra)
    assert read(kubeadm.files()).endpoint == Given(
        "unix:///run/unit.sock", "/etc/systemd/system/kubelet.service.d/50-extra.conf"
    )
    kubeadm.write("/etc/default/kubelet", "KUBELET_EXTRA_ARGS=--container-runtime-endpoint=unix:///run/file.sock\n")
    assert read(kubeadm.files()).endpoint == Given("unix:///run/file.sock", "/etc/default/kubelet")


def test_drop_ins_are_merged_over_the_file_in_order_of_their_names(kubeadm: FakeSysfs) -> None:
    kubeadm.write("/etc/default/kubelet", "KUBELET_EXTRA_ARGS='--config-dir /etc/k.d --root-dir=/data/kubelet'\n")
    kubeadm.write("/etc/k.d/20.conf", "cgroupDriver: cgroupfs\n")
    kubeadm.write("/etc/k.d/10.conf", "cgroupDriver: other\nmemorySwap: {more: 1}\nfailSwapOn: false\n")
    kubeadm.write("/etc/k.d/30.yaml", "cgroupDriver: not-read\n")
    found = read(kubeadm.files())
    assert found.cgroup_driver == Given("cgroupfs", "/etc/k.d/20.conf")
    assert found.fields["memorySwap"].value == {"swapBehavior": "NoSwap", "more": 1}
    assert (found.config_dir, found.root_dir) == ("/etc/k.d", "/data/kubelet")


def test_the_running_kubelets_flags_count_unless_the_next_start_is_meant(kubeadm: FakeSysfs) -> None:
    kubeadm.write("/proc/812/cmdline", "/usr/bin/kubelet\0--cgroup-driver\0cgroupfs\0")
    kubeadm.write("/proc/813/cmdline", "/usr/bin/less\0/usr/bin/kubelet\0")
    assert read(kubeadm.files()).cgroup_driver == Given("cgroupfs", "its command line")
    assert read(kubeadm.files(), running=False).cgroup_driver == Given("systemd", CONFIG_FILE)


def test_a_kubelet_without_a_unit_is_found_by_its_process(node: FakeSysfs) -> None:
    node.write("/proc/9/cmdline", "kubelet\0--container-runtime-endpoint=unix:///run/k3s.sock\0")
    found = read(node.files(), running=False).endpoint
    assert found is not None
    assert found.value == "unix:///run/k3s.sock"


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "- a", "a: 2026-13-45"])
def test_an_unreadable_file_is_named(kubeadm: FakeSysfs, text: str) -> None:
    kubeadm.write(CONFIG_FILE, text)
    (told,) = read(kubeadm.files()).unreadable
    assert told.startswith(f"{CONFIG_FILE}: not ")


def test_a_directory_in_place_of_a_file_is_named(node: FakeSysfs) -> None:
    node.path(KUBEADM_FLAGS).mkdir(parents=True)
    assert "Is a directory" in read(node.files()).unreadable[0]
