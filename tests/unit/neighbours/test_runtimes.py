"""virtshim reads the configuration of containerd and CRI-O, on nodes of all kinds."""

from pathlib import Path

import pytest
from fakes.sysfs import FakeSysfs

from virtshim.neighbours.runtimes import RuntimeSetup, read

pytestmark = pytest.mark.operator

VERSION_2 = """
version = 2
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "/etc/cni/other.d"
[plugins."io.containerd.grpc.v1.cri".registry]
config_path = "/etc/certs.d:/etc/docker/certs.d"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = true
"""
VERSION_3 = """
version = 3
imports = ["/etc/containerd/conf.d/*.toml"]
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["/usr/lib/cni", "/opt/cni/bin"]
[plugins.'io.containerd.cri.v1.images'.registry]
config_path = "/etc/certs.d"
"""


@pytest.fixture
def node(tmp_path: Path) -> FakeSysfs:
    node = FakeSysfs(tmp_path)
    node.write("/usr/bin/containerd", "")
    return node


def only(node: FakeSysfs) -> RuntimeSetup:
    (found,) = read(node.files())
    return found


def test_a_node_without_other_runtimes_gives_none(tmp_path: Path) -> None:
    assert read(FakeSysfs(tmp_path).files()) == []


def test_without_a_file_containerds_defaults_apply(node: FakeSysfs) -> None:
    assert only(node) == RuntimeSetup(
        "containerd", "/run/containerd/containerd.sock", "/etc/containerd/config.toml",
        driver_table='[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]',
        default_runtime="runc", handlers_table='plugins."io.containerd.grpc.v1.cri".containerd.runtimes',
    )  # fmt: skip


def test_containerds_file_of_version_2(node: FakeSysfs) -> None:
    node.write("/etc/containerd/config.toml", VERSION_2)
    node.write("/run/containerd/containerd.sock", "")
    found = only(node)
    assert (found.cgroup_driver, found.cni_conf_dir, found.cni_bin_dirs) == (
        "systemd",
        "/etc/cni/other.d",
        ("/usr/lib/cni",),
    )
    assert (found.registry_hosts_dir, found.is_running, found.serves_cri) == ("/etc/certs.d", True, True)


def test_containerds_file_of_version_3_with_what_it_imports(node: FakeSysfs) -> None:
    node.write("/etc/containerd/config.toml", VERSION_3)
    table = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]\nSystemdCgroup = false\n"
    node.write("/etc/containerd/conf.d/one.toml", table)
    found = only(node)
    assert (found.cgroup_driver, found.cni_bin_dirs) == ("cgroupfs", ("/usr/lib/cni", "/opt/cni/bin"))
    assert found.registry_hosts_dir == "/etc/certs.d"
    assert found.driver_table == '[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]'
    assert found.handlers == {"runc": {"options": {"SystemdCgroup": False}}}
    assert found.elsewhere == "/etc/containerd/conf.d/one.toml"


def test_the_cgroup_driver_is_that_of_containerds_default_runtime(node: FakeSysfs) -> None:
    runtime = "plugins.'io.containerd.cri.v1.runtime'.containerd"
    texts = [
        f"version = 3\n[{runtime}]\ndefault_runtime_name = 'nvidia'",
        f"[{runtime}.runtimes.runc.options]\nSystemdCgroup = false",
        f"[{runtime}.runtimes.nvidia.options]\nSystemdCgroup = true\n",
    ]
    node.write("/etc/containerd/config.toml", "\n".join(texts))
    assert only(node).cgroup_driver == "systemd"
    assert only(node).driver_table.endswith(".containerd.runtimes.nvidia.options]")


def test_dockers_containerd_serves_no_cri(node: FakeSysfs) -> None:
    node.write("/etc/containerd/config.toml", 'disabled_plugins = ["cri"]\n')
    assert not only(node).serves_cri


def test_a_file_that_is_no_toml_is_trouble(node: FakeSysfs) -> None:
    node.write("/etc/containerd/config.toml", "[")
    assert only(node).trouble.startswith("/etc/containerd/config.toml: ")
    node.path("/etc/containerd/config.toml").unlink()
    node.path("/etc/containerd/config.toml").mkdir()
    assert "Is a directory" in only(node).trouble


def test_crio_with_a_drop_in(tmp_path: Path) -> None:
    node = FakeSysfs(tmp_path)
    node.write("/run/crio/crio.sock", "")
    node.write(
        "/etc/crio/crio.conf", '[crio.network]\nnetwork_dir = "/etc/cni/net.d/"\nplugin_dirs = ["/opt/cni/bin/"]\n'
    )
    node.write("/etc/crio/crio.conf.d/10.conf", '[crio.runtime]\ncgroup_manager = "cgroupfs"\n')
    found = only(node)
    assert (found.name, found.socket, found.cgroup_driver) == ("cri-o", "/run/crio/crio.sock", "cgroupfs")
    assert (found.cni_conf_dir, found.cni_bin_dirs) == ("/etc/cni/net.d", ("/opt/cni/bin",))


def test_crios_oci_runtimes(tmp_path: Path) -> None:
    node = FakeSysfs(tmp_path)
    node.write("/usr/bin/crio", "")
    assert only(node).handlers == {}
    node.write("/etc/crio/crio.conf.d/10-crio.conf", "[crio.runtime.runtimes.crun]\nruntime_path = '/usr/bin/crun'\n")
    assert only(node).handlers == {"crun": {"runtime_path": "/usr/bin/crun"}}
