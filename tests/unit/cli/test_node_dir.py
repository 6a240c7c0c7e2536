"""`virtshim up` writes its files only below its directory, and locks the directory."""

import json
import math
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from virtshim.cli.down import down_command
from virtshim.cli.node_dir import (
    NodeDir,
    NodeOptions,
    bridge_network,
    drop_path_variables,
    make_directory,
    refuse_routed,
    remove_parts,
    to_toml,
    write_node,
)
from virtshim.cli.up import take_lock
from virtshim.config.settings import load_settings
from virtshim.model.errors import InvalidRequest, NotFound, WrongState
from virtshim.system.files import lock_holder

pytestmark = [pytest.mark.operator, pytest.mark.usefixtures("clean_environment")]


@pytest.fixture
def short() -> Iterator[Path]:
    """A short path: a node's directory has to leave room for sockets."""
    with tempfile.TemporaryDirectory(prefix="n-") as directory:
        yield Path(directory)


def absolute(tmp_path: Path) -> NodeDir:
    return NodeDir.at(str(tmp_path))


def test_everything_of_a_node_lies_below_its_directory() -> None:
    node = NodeDir.at("/srv/node")
    paths = (node.config_file, node.state, node.run, node.libvirt, node.cni, node.vmwrapper, node.lock)
    assert all(path.startswith("/srv/node/") for path in paths)


def test_two_directories_have_two_bridges_and_names_that_fit() -> None:
    one, two = NodeDir.at("/srv/one"), NodeDir.at("/srv/two")
    assert one.bridge != two.bridge
    assert one.bridge == NodeDir.at("/srv/one/../one/").bridge
    assert len(one.bridge) <= 15


def test_the_bridge_network_is_a_cni_configuration_with_host_ports() -> None:
    network = bridge_network(NodeDir.at("/srv/one"), "10.99.0.0/16")
    bridge, ports = network["plugins"]
    assert (network["cniVersion"], bridge["type"], ports["type"]) == ("1.0.0", "bridge", "portmap")
    assert bridge["ipam"]["ranges"] == [[{"subnet": "10.99.0.0/16"}]]
    assert bridge["ipam"]["routes"] == [{"dst": "0.0.0.0/0"}]
    json.dumps(network)


def test_an_ipv6_network_gets_an_ipv6_route() -> None:
    (bridge, _) = bridge_network(NodeDir.at("/srv/one"), "fd00:99::/64")["plugins"]
    assert bridge["ipam"]["routes"] == [{"dst": "::/0"}]


@pytest.mark.parametrize("cidr", ["10.88.0.1/16", "banana", "10.0.0.0/30", "", "10.0.0.0/33"])
def test_an_impossible_pod_network_is_refused_and_the_error_names_the_flag(cidr: str) -> None:
    with pytest.raises(InvalidRequest, match="--pod-cidr"):
        bridge_network(NodeDir.at("/srv/one"), cidr)


def test_the_lock_names_its_holder_and_is_free_after_it(tmp_path: Path) -> None:
    node = absolute(tmp_path)
    os.makedirs(node.run)
    assert lock_holder(node.lock) == 0
    held = take_lock(node)
    assert lock_holder(node.lock) == os.getpid()
    with pytest.raises(WrongState, match=f"pid {os.getpid()}"):
        take_lock(node)
    os.close(held)
    os.close(take_lock(node))


@pytest.mark.parametrize(
    "value",
    [
        "/a b", 'q"uote', "back\\slash", "ünï", "😀\x7f\n", 3, True, ["a", "b"], [], 1.5, 1e300, math.inf, date(2026, 1, 31),
        {"a": {"b": ["c"]}}, [{"a": 1}], {"virtshim.io/firmware": "uefi", "": 1, 'q"': 2},
    ],
)  # fmt: skip
def test_plain_values_survive_conversion_to_toml(value: object) -> None:
    assert tomllib.loads(to_toml({"t": {"k": value}})) == {"t": {"k": value}}


def test_a_profile_of_an_overlay_may_have_virtshims_own_annotations(short: Path) -> None:
    overlay = short / "overlay.toml"
    overlay.write_text('[[vm.profiles]]\nname = "u"\nannotations = { "virtshim.io/firmware" = "uefi" }\n')
    settings = write_node(absolute(short / "n"), NodeOptions(str(short / "n"), config=str(overlay)))
    assert dict(settings.vm.profiles[0].annotations) == {"virtshim.io/firmware": "uefi"}


def test_an_unknown_setting_is_reported_by_its_name(short: Path) -> None:
    overlay = short / "overlay.toml"
    overlay.write_text('[vm]\n"odd/name" = 2026-01-31\n')
    with pytest.raises(InvalidRequest, match=r"vm\.odd/name: there is no such setting"):
        write_node(absolute(short / "n"), NodeOptions(str(short / "n"), config=str(overlay)))


def test_a_value_outside_a_table_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="must be a table"):
        to_toml({"vm": 3})


def test_options_and_an_overlay_reach_the_settings(short: Path) -> None:
    overlay = short / "overlay.toml"
    overlay.write_text('[vm]\nmax_vcpus = 3\n[log]\nlevel = "debug"\n')
    node = absolute(short / "n")
    chosen = NodeOptions(node.path, config=str(overlay), cni_bin_dir="/opt/bin", domain_type="qemu")
    settings = write_node(node, chosen)
    assert (settings.vm.max_vcpus, settings.log.level) == (3, "debug")
    assert (settings.libvirt.domain_type, settings.tapmanager.cni_bin_dir) == ("qemu", ("/opt/bin",))
    assert settings.libvirt.uri == f"qemu:///embed?root={node.libvirt}"
    assert settings.paths.state_dir == node.state
    assert settings.cri_socket == f"{node.run}/virtshim.sock"
    (conflist,) = Path(settings.tapmanager.cni_conf_dir).iterdir()
    assert json.loads(conflist.read_text())["plugins"][0]["bridge"] == node.bridge


def test_a_users_own_cni_configuration_is_not_replaced(short: Path) -> None:
    node = absolute(short / "n")
    settings = write_node(node, NodeOptions(node.path, cni_conf_dir="/etc/cni/mine"))
    assert settings.tapmanager.cni_conf_dir == "/etc/cni/mine"
    assert not (Path(node.cni) / "net.d").exists()


def test_writing_a_node_twice_gives_the_same_files(short: Path) -> None:
    node = absolute(short / "n")
    first = write_node(node, NodeOptions(node.path))
    assert write_node(node, NodeOptions(node.path)) == first
    assert not list(Path(node.path).rglob("*.new"))


@pytest.mark.parametrize("content", [None, "[vm\n", "[vm]\nmax_vcpu = 1\n", "vm = 1\n"])
def test_an_unusable_overlay_is_an_error_that_names_it(short: Path, content: str | None) -> None:
    overlay = short / "overlay.toml"
    if content is not None:
        overlay.write_text(content)
    node = absolute(short / "n")
    with pytest.raises(InvalidRequest, match=r"overlay\.toml|--config|config\.toml"):
        write_node(node, NodeOptions(node.path, config=str(overlay)))


def test_a_directory_too_long_for_sockets_is_refused_with_the_reason(tmp_path: Path) -> None:
    node = absolute(tmp_path / ("n" * 80))
    with pytest.raises(InvalidRequest, match="Unix sockets"):
        write_node(node, NodeOptions(node.path))


@pytest.mark.parametrize("route", ["10.88.0.0/16", "10.88.7.0/24", "10.88.0.9"])
def test_a_pod_network_that_is_routed_elsewhere_is_refused_with_the_route(short: Path, route: str) -> None:
    node = absolute(short / "n")
    with pytest.raises(InvalidRequest, match=rf"{re.escape(route)} to cni0.*--pod-cidr"):
        refuse_routed(node, "10.88.0.0/16", [("default", "eth0"), (route, "cni0")])


def test_wider_routes_other_families_and_the_nodes_own_bridge_do_not_matter(short: Path) -> None:
    node = absolute(short / "n")
    routes = [("default", "eth0"), ("10.0.0.0/8", "wg0"), ("10.88.0.0/16", node.bridge), ("fe80::/64", "eth0")]
    refuse_routed(node, "10.88.0.0/16", routes)


def test_an_empty_directory_name_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="--dir is empty"):
        NodeDir.at("")


def test_a_directory_that_cannot_be_created_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match=f"{tmp_path}/file/run cannot be made: Not a directory"):
        make_directory(f"{tmp_path}/file/run")


def test_up_reports_that_the_node_was_removed_meanwhile(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="has just removed the node"):
        take_lock(NodeDir.at(f"{tmp_path}/gone"))


def test_the_environment_cannot_move_a_node_out_of_its_directory(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = {
        "VIRTSHIM_CRI__SOCKET": "/run/virtshim/virtshim.sock",
        "virtshim_paths__state_dir": "/var/lib/virtshim",
        "VIRTSHIM_LIBVIRT__URI": "qemu:///system",
        "VIRTSHIM_TAPMANAGER__SOCKET": "/run/virtshim/tapmanager.sock",
        "VIRTSHIM_PROXY__SOCKET": "/run/virtshim/proxy.sock",
        "VIRTSHIM_CRI": '{"socket": "/run/virtshim/virtshim.sock"}',
    }
    for name, value in {**elsewhere, "VIRTSHIM_VM__MAX_VCPUS": "3"}.items():
        monkeypatch.setenv(name, value)
    assert drop_path_variables() == sorted(elsewhere)
    node = NodeDir.at(f"{short}/n")
    settings = write_node(node, NodeOptions(node.path))
    assert settings.cri_socket == f"{node.run}/virtshim.sock"
    assert settings.paths.state_dir == node.state
    assert settings.libvirt.uri == f"qemu:///embed?root={node.libvirt}"
    assert settings.tapmanager.socket == f"{node.run}/tapmanager.sock"
    assert settings.vm.max_vcpus == 3, "what is no path is heeded as ever"


@pytest.mark.parametrize("everything", [False, True])
def test_down_removes_what_an_up_with_bad_settings_left(short: Path, everything: bool) -> None:
    node = NodeDir.at(f"{short}/n")
    make_directory(node.run)
    os.close(take_lock(node))
    with pytest.raises(InvalidRequest, match="domain_type"):
        write_node(node, NodeOptions(node.path, domain_type="nonsense"))
    down_command(node.path, everything=everything)
    assert os.path.isdir(node.path) is not everything
    assert everything or os.listdir(node.path) == []


@pytest.mark.parametrize("everything", [False, True])
def test_down_removes_vms_that_outlived_their_pods_and_leaves_images(short: Path, everything: bool) -> None:
    node = NodeDir.at(f"{short}/n")
    write_node(node, NodeOptions(node.path, domain_type="qemu"))
    vms, image = Path(load_settings(node.config_file).layout().vms, "f" * 64), Path(node.state, "images", "disk")
    for file in (vms / "vm.json", vms / "root.qcow2", vms / "memory.save", image):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x")
    remove_parts(node, everything=everything)
    assert not vms.parent.exists()
    assert image.exists() is not everything
    assert os.path.isdir(node.path) is not everything


def test_down_leaves_a_directory_that_is_not_a_node_alone(short: Path) -> None:
    """Also if it looks like one."""
    for name in ("state", "run"):
        (short / name).mkdir()
    (short / "state" / "theses.txt").write_text("mine")
    with pytest.raises(InvalidRequest, match="no node was ever started in this directory"):
        down_command(str(short), everything=True)
    assert (short / "state" / "theses.txt").read_text() == "mine"


def test_unusable_settings_leave_the_earlier_settings_in_place(short: Path) -> None:
    node = NodeDir.at(f"{short}/n")
    bad = NodeOptions(node.path, domain_type="nonsense")
    with pytest.raises(InvalidRequest, match="domain_type"):
        write_node(node, bad)
    assert not os.path.exists(node.config_file)
    good = write_node(node, NodeOptions(node.path, domain_type="qemu"))
    with pytest.raises(InvalidRequest, match="domain_type"):
        write_node(node, bad)
    assert load_settings(node.config_file) == good
