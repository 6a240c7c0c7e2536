"""cloud-init documents match golden files. GOLDEN_UPDATE=1 rewrites them; the diff is the review."""

import base64
import copy
import dataclasses
import json
import os
import shlex
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from virtshim.annotations.options import VmOptions
from virtshim.devices.guest_view import guest_links_command, guest_serials
from virtshim.devices.values import BlockDevice
from virtshim.guest.set_up_scripts import sysctls_command
from virtshim.model.errors import InvalidRequest
from virtshim.model.ids import ContainerId
from virtshim.model.image import DiskFormat
from virtshim.model.network import Dns, Interface, Route
from virtshim.model.sandbox import PodKey
from virtshim.seed.documents import seed_documents
from virtshim.seed.ports import SeedRequest
from virtshim.seed.sources import merged
from virtshim.volumes import empty_disks
from virtshim.volumes.empty_disks import EmptyDisk
from virtshim.volumes.mount_script import Copies, command
from virtshim.volumes.shares import SharedVolume

GOLDEN = Path(__file__).parents[2] / "golden" / "cloudinit"

ETH0 = Interface(
    name="eth0",
    mac="0A:58:0A:58:00:05",
    mtu=1500,
    addresses=("10.88.0.5/16",),
    routes=(Route("0.0.0.0/0", "10.88.0.1"), Route("10.88.0.0/16"), Route("10.96.0.0/12", "10.88.0.2")),
)
ON_LINK = Interface(
    name="eth0",
    mac="ee:ee:ee:00:00:01",
    mtu=1440,
    addresses=("192.168.5.9/32", "fd00:5::9/128"),
    routes=(
        Route("169.254.1.1/32"),
        Route("0.0.0.0/0", "169.254.1.1"),
        Route("::/0", "fe80::ecee:eeff:feee:eeee"),
        Route("fd00:6::/64", "fd00:7::1"),
    ),
)
ETH1 = Interface(
    name="net1",
    mac="0a:58:0a:59:00:05",
    mtu=9000,
    addresses=("10.89.0.5/24", "fd00:89::5/64"),
    routes=(Route("0.0.0.0/0", "10.89.0.1"), Route("::/0", "fd00:89::1")),
)
BARE = Interface(name="net2", mac="0a:58:0a:5a:00:05", mtu=0, addresses=())
DNS = Dns(
    servers=("10.96.0.10", "fd00::a"), searches=("ns.svc.cluster.local", "svc.cluster.local"), options=("ndots:5",)
)

PLAIN = SeedRequest(
    container=ContainerId("0123456789abcdef" * 4),
    pod=PodKey("ns", "pod-name", "uid", 0),
    hostname="web-0",
    options=VmOptions(),
    interfaces=(),
    dns=Dns(),
)


def with_options(**options: Any) -> SeedRequest:
    return dataclasses.replace(PLAIN, options=VmOptions(**options))


CASES = {
    "plain": PLAIN,
    "no-hostname": dataclasses.replace(PLAIN, hostname=""),
    "long-pod-name": dataclasses.replace(PLAIN, hostname="", pod=PodKey("ns", "a" * 62 + ".b" * 50, "uid", 0)),
    "ssh-keys": with_options(ssh_keys=("ssh-rsa AAAA one", "ssh-ed25519 BBBB two")),
    "meta-data": with_options(
        ssh_keys=("ssh-rsa AAAA one",), meta_data={"instance-id": "mine", "nested": {"list": [1, True, None, "é"]}}
    ),
    "user-data": with_options(
        user_data={
            "users": [{"name": "cloudy", "sudo": "ALL=(ALL) NOPASSWD:ALL"}],
            "ssh_pwauth": True,
            "runcmd": ["echo 'ünï'", ["sh", "-c", "printf '%s\\n' a"]],
            "write_files": [{"path": "/etc/x", "permissions": "0644", "content": "line 1\nline 2\n"}],
        }
    ),
    "script": with_options(user_data={"a": 1}, user_data_script="#!/bin/sh\r\n@virtlet-mount-script@\necho 'é'"),
    "network": dataclasses.replace(PLAIN, interfaces=(ETH0,), dns=DNS),
    "network-on-link": dataclasses.replace(PLAIN, interfaces=(ON_LINK,), dns=DNS),
    "kept-disk": dataclasses.replace(
        PLAIN,
        options=VmOptions(user_data={"bootcmd": ["mine"]}),
        interfaces=(ETH0,),
        kept_disk="0123456789abcdef0123",
        envs=(("GREETING", b"hello"),),
    ),
    "network-several": dataclasses.replace(PLAIN, interfaces=(BARE, ETH0, ETH1), dns=DNS),
    "network-dhcp": dataclasses.replace(
        PLAIN, interfaces=(ETH0,), dns=DNS, options=VmOptions(force_dhcp=True, user_data={"a": 1})
    ),
}


def _visible(text: str | None) -> str:
    """A file that is read as text keeps no carriage returns."""
    return "(none)" if text is None else text.replace("\r", "<CR>")


@pytest.mark.parametrize("case", CASES)
def test_documents_match_the_golden_files(case: str) -> None:
    documents = seed_documents(CASES[case])
    shown = "".join(
        f"=== {name}\n{_visible(text)}\n"
        for name, text in (
            ("meta-data", documents.files["meta-data"]),
            ("user-data", documents.files["user-data"]),
            ("network-config", documents.files.get("network-config")),
            ("vendor-data", documents.files.get("vendor-data", "")),
        )
        if text != ""
    )
    golden = GOLDEN / f"{case}.txt"
    if os.environ.get("GOLDEN_UPDATE") == "1":
        golden.write_text(shown)
    assert shown == golden.read_text()


def test_every_golden_file_has_a_case() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


def test_a_recreated_container_is_a_new_instance() -> None:
    first = json.loads(seed_documents(PLAIN).files["meta-data"])
    again = json.loads(seed_documents(dataclasses.replace(PLAIN, container=ContainerId("f" * 64))).files["meta-data"])
    assert first["instance-id"] != again["instance-id"]
    assert first["local-hostname"] == again["local-hostname"]


def test_a_recreated_container_on_a_kept_disk_is_the_same_instance() -> None:
    on_disk = dataclasses.replace(PLAIN, kept_disk="0123456789abcdef0123")
    again = dataclasses.replace(on_disk, container=ContainerId("f" * 64))
    assert seed_documents(on_disk).files["meta-data"] == seed_documents(again).files["meta-data"]
    assert yaml.safe_load(seed_documents(again).files.get("vendor-data", "")) == {
        "updates": {"network": {"when": ["boot"]}}
    }
    assert seed_documents(PLAIN).files.get("vendor-data", "") == ""


def test_on_a_kept_disk_variables_and_hosts_are_written_at_each_boot(tmp_path: Path) -> None:
    """By what cloud-init makes of bootcmd; `write_files` runs once."""
    values = tuple((f"NAME{number}", b"x" * 1000) for number in range(300))
    kept = dataclasses.replace(PLAIN, kept_disk="0123456789abcdef0123", envs=values)
    document = yaml.safe_load(seed_documents(kept, hosts=b"127.0.0.1 localhost\n").files["user-data"])
    assert "write_files" not in document
    assert document["manage_etc_hosts"] is False
    script = "\n".join(document["bootcmd"]).replace("/etc/", f"{tmp_path}/etc/")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/hosts").write_text("an earlier sandbox's")
    subprocess.run(["sh", "-eu"], input=script, text=True, check=True)
    assert (tmp_path / "etc/hosts").read_text() == "127.0.0.1 localhost\n"
    assert (tmp_path / "etc/cloud/environment").read_bytes() == b"".join(
        b"%s=%s\n" % (n.encode(), v) for n, v in values
    )
    assert (tmp_path / "etc/cloud/environment").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("network")])
def test_network_config_is_yaml_too(case: str) -> None:
    text = seed_documents(CASES[case]).files.get("network-config")
    assert text is None or yaml.safe_load(text) == json.loads(text)


def test_sysctls_are_set_at_each_boot_before_the_pods_own_commands() -> None:
    asked = dataclasses.replace(with_options(user_data={"bootcmd": ["mine"]}), sysctls={"net.core.somaxconn": "1 'a"})
    script, mine = yaml.safe_load(seed_documents(asked).files["user-data"])["bootcmd"]
    assert mine == "mine"
    assert script == list(sysctls_command(asked.sysctls))
    assert script[-3:] == ["net.core.somaxconn", "net/core/somaxconn", "1 'a"]


def test_block_volumes_are_linked_at_each_boot() -> None:
    volumes = (BlockDevice("/dev/of-the-node", "/dev/xvda"),)
    (script,) = yaml.safe_load(seed_documents(dataclasses.replace(PLAIN, blocks=volumes)).files["user-data"])["bootcmd"]
    assert script == list(guest_links_command(volumes))


def test_mounts_that_name_a_block_volume_name_it_as_udev_does() -> None:
    """Others, and what is no mount at all, stay as they are."""
    volumes = (BlockDevice("/dev/of-the-node", "/dev/disk-a"), BlockDevice("/dev/other", "//dev/a-longer-name-than-20"))
    own = [
        ["/dev/foo1", "/foo1"],
        ["/dev/disk-a", "/a", "ext4"],
        ["//dev//a-longer-name-than-20", "/b"],
        ["vdx"],
        [],
        "x",
        [1],
    ]
    request = dataclasses.replace(with_options(user_data={"mounts": own}), blocks=volumes)
    assert user_data(request)["mounts"] == [
        ["/dev/foo1", "/foo1"],
        ["/dev/disk/by-id/virtio-dev-disk-a", "/a", "ext4"],
        [f"/dev/disk/by-id/virtio-{guest_serials(volumes)[1]}", "/b"],
        ["vdx"],
        [],
        "x",
        [1],
    ]
    assert user_data(dataclasses.replace(request, options=VmOptions(user_data={"mounts": "x"})))["mounts"] == "x"


def test_the_volume_token_of_a_script_puts_all_volumes_in_their_places() -> None:
    disk = EmptyDisk("scratch", 1 << 30, DiskFormat.QCOW2, "/var/scratch")
    request = dataclasses.replace(
        with_options(user_data_script="#!/bin/sh\necho one\n@virtlet-mount-script@\necho two"),
        blocks=(BlockDevice("/dev/of-the-node", "/dev/xvda"),),
        empty_disks=(disk,),
        volumes=(SharedVolume("/srv", "/host/srv", False),),
    )
    script = seed_documents(request).files["user-data"]
    commands = (
        empty_disks.command((disk,)),
        guest_links_command(request.blocks),
        command(request.volumes, (), Copies.SEED),
    )
    put = "\n".join(shlex.join(words) for words in commands)
    assert script == f"#!/bin/sh\necho one\n#!/bin/sh\n{put}\necho two"
    alone = dataclasses.replace(request, options=with_options(user_data_script="@virtlet-mount-script@").options)
    assert seed_documents(alone).files["user-data"] == f"#!/bin/sh\n{put}"  # a script that cloud-init runs


def test_a_script_is_kept_byte_for_byte() -> None:
    script = "#!/usr/bin/env python3\r\nprint('é\\x00')\n\n"
    assert seed_documents(with_options(user_data_script=script)).files["user-data"] == script


def test_resolver_options_are_for_cloud_inits_own_module() -> None:
    request = dataclasses.replace(PLAIN, dns=Dns(("10.96.0.10",), ("svc.cluster.local",), ("ndots:5", "edns0", "x:y")))
    assert yaml.safe_load(seed_documents(request).files["user-data"]) == {
        "manage_resolv_conf": True,
        "resolv_conf": {
            "nameservers": ["10.96.0.10"],
            "searchdomains": ["svc.cluster.local"],
            "options": {"ndots": 5, "edns0": True, "x": "y"},
        },
    }


@pytest.mark.parametrize(
    "options",
    [
        {"user_data": {"manage_resolv_conf": False}},
        {"user_data": {"resolv_conf": {"options": {"ndots": 1}}}},
    ],
)
def test_a_pod_that_writes_its_own_resolver_settings_keeps_them(options: dict[str, Any]) -> None:
    request = dataclasses.replace(with_options(**options), dns=DNS)
    assert yaml.safe_load(seed_documents(request).files["user-data"]) == options["user_data"]


def user_data(request: SeedRequest, hosts: bytes = b"") -> Any:
    return yaml.safe_load(seed_documents(request, hosts).files["user-data"])


def written(document: Any) -> dict[str, bytes]:
    """Path -> content."""
    assert all(file["permissions"] == "0644" for file in document["write_files"])
    return {file["path"]: base64.b64decode(file["content"]) for file in document["write_files"]}


ENVS = (("A", b"one two"), ("KUBERNETES_SERVICE_HOST", b"10.96.0.1"), ("BYTES", b"\xff"), ("EMPTY", b""))
HOSTS = b"# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n10.88.0.5\tweb-0.db.ns.svc.cluster.local\tweb-0\n"


def test_environment_variables_are_in_virtlets_file() -> None:
    files = written(user_data(dataclasses.replace(PLAIN, envs=ENVS)))
    assert files == {"/etc/cloud/environment": b"A=one two\nKUBERNETES_SERVICE_HOST=10.96.0.1\nBYTES=\xff\nEMPTY=\n"}


def test_the_guest_gets_kubelets_hosts_file_permanently() -> None:
    document = user_data(PLAIN, HOSTS)
    assert written(document) == {"/etc/hosts": HOSTS}
    assert document["manage_etc_hosts"] is False


def test_files_of_the_pods_own_come_first() -> None:
    own = {"path": "/etc/x", "content": "x"}
    request = dataclasses.replace(with_options(user_data={"write_files": [own]}), envs=ENVS)
    first, *others = user_data(request, HOSTS)["write_files"]
    assert first == own
    assert [file["path"] for file in others] == ["/etc/cloud/environment", "/etc/hosts"]


@pytest.mark.parametrize(
    "own",
    [
        {"manage_etc_hosts": True},
        {"manage_etc_hosts": "localhost"},
        {"write_files": [{"path": "/etc/hosts", "content": "x"}]},
    ],
)
def test_a_pod_that_writes_its_own_hosts_file_keeps_it(own: dict[str, Any]) -> None:
    assert user_data(with_options(user_data=own), HOSTS) == own


def test_user_data_scripts_get_neither_hosts_file_nor_variables() -> None:
    script = dataclasses.replace(with_options(user_data_script="#!/bin/sh\n"), envs=ENVS)
    assert seed_documents(script, HOSTS).files["user-data"] == "#!/bin/sh\n"


def test_user_data_that_replaces_a_source_gets_hosts_file_and_variables() -> None:
    replaced = dataclasses.replace(with_options(user_data={"a": 1}, user_data_overwrite=True), envs=ENVS)
    assert user_data(replaced, HOSTS) == user_data(
        dataclasses.replace(with_options(user_data={"a": 1}), envs=ENVS), HOSTS
    )


def test_the_size_of_documents_is_limited() -> None:
    with pytest.raises(InvalidRequest, match="annotations, env, or"):
        seed_documents(dataclasses.replace(PLAIN, envs=(("A", b"x" * 2_000_000),)))
    with pytest.raises(InvalidRequest, match="user-data"):
        seed_documents(with_options(user_data={"a": ["x" * 1000] * 2000}))
    with pytest.raises(InvalidRequest, match="meta-data"):
        seed_documents(with_options(meta_data={"a": "x" * 2_000_000}))


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.dates() | st.binary()
trees = st.dictionaries(
    st.text(), st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)), max_size=5
)


@given(trees)
def test_the_guest_reads_the_user_data_that_the_pod_gave(tree: dict[str, Any]) -> None:
    text = seed_documents(with_options(user_data=tree)).files["user-data"]
    assert text.startswith("#cloud-config\n")
    assert yaml.safe_load(text.encode()) == tree


# --- two documents as one


@pytest.mark.parametrize(
    ("lower", "upper", "result"),
    [
        ({"a": "X"}, {"b": "Y"}, {"a": "X", "b": "Y"}),
        ({"a": "X", "b": "Y"}, {"c": "Z", "b": "Q"}, {"a": "X", "b": "Q", "c": "Z"}),
        ({"a": [1, 2]}, {"a": [2, 3]}, {"a": [1, 2, 2, 3]}),
        ({"a": {"b": {"c": [1]}, "d": 1}}, {"a": {"b": {"c": [2]}}}, {"a": {"b": {"c": [1, 2]}, "d": 1}}),
        ({"a": 3}, {"a": 0}, {"a": 0}),
        ({"a": [1]}, {"a": "x"}, {"a": "x"}),
        ({"a": {"b": 1}}, {"a": [1]}, {"a": [1]}),
        ({"a": [1]}, {"a": []}, {"a": [1]}),
        ({"a": None}, {"a": None}, {"a": None}),
        ({"a": 1}, {"a": None}, {"a": None}),
        ({}, {"a": None}, {"a": None}),
    ],
)
def test_lists_and_mappings_are_joined_and_other_values_replaced(
    lower: dict[str, Any], upper: dict[str, Any], result: dict[str, Any]
) -> None:
    assert merged(lower, upper) == result


trees = st.dictionaries(
    st.sampled_from("abc"),
    st.recursive(
        st.none() | st.integers(0, 3) | st.text(max_size=2),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
)


@given(trees)
def test_merging_an_empty_mapping_changes_nothing(tree: dict[str, Any]) -> None:
    assert merged(tree, {}) == tree == merged({}, tree)


@given(trees, trees)
def test_merging_does_not_change_its_arguments(lower: dict[str, Any], upper: dict[str, Any]) -> None:
    before = copy.deepcopy((lower, upper))
    merged(lower, upper)
    assert (lower, upper) == before


@given(trees, trees)
def test_a_merge_has_the_keys_of_both(lower: dict[str, Any], upper: dict[str, Any]) -> None:
    assert set(merged(lower, upper)) == set(lower) | set(upper)


def drive(**changes: Any) -> dict[str, Any]:
    """The documents of a config drive, read."""
    request = dataclasses.replace(PLAIN, **changes)
    options = dataclasses.replace(request.options, config_drive=True)
    found = seed_documents(dataclasses.replace(request, options=options))
    assert found.label == "config-2"
    read = {path.removeprefix("openstack/latest/"): text for path, text in found.files.items()}
    return {name: json.loads(text) if name.endswith(".json") else text for name, text in read.items()}


def test_a_config_drive_identifies_the_guest_in_openstacks_format() -> None:
    nocloud = json.loads(seed_documents(PLAIN).files["meta-data"])
    found = drive(
        options=VmOptions(ssh_keys=("ssh-ed25519 AAAA me", "ssh-ed25519 BBBB you"), meta_data={"hostname": "mine"})
    )
    assert found["meta_data.json"] == {
        "uuid": nocloud["instance-id"],
        "hostname": "mine",
        "name": nocloud["local-hostname"],
        "public_keys": {"key-0": "ssh-ed25519 AAAA me", "key-1": "ssh-ed25519 BBBB you"},
    }


def test_a_config_drive_has_the_same_user_data() -> None:
    options = VmOptions(user_data={"runcmd": ["true"]})
    assert (
        drive(options=options)["user_data"]
        == seed_documents(with_options(user_data={"runcmd": ["true"]})).files["user-data"]
    )


def test_a_config_drives_network_is_in_openstacks_format_where_possible() -> None:
    routes = (Route("0.0.0.0/0", "10.88.0.1"), Route("10.96.0.0/12", "10.88.0.2"))
    nic = Interface("eth0", "EE:EE:EE:00:00:01", 1400, ("10.88.0.5/16",), routes)
    assert drive(interfaces=(nic,), dns=Dns(("10.96.0.10",), ("svc.local",)))["network_data.json"] == {
        "links": [
            {"id": "eth0", "name": "eth0", "type": "phy", "ethernet_mac_address": "ee:ee:ee:00:00:01", "mtu": 1400}
        ],
        "networks": [
            {
                "id": "network0",
                "link": "eth0",
                "type": "ipv4",
                "ip_address": "10.88.0.5",
                "netmask": "255.255.0.0",
                "dns_nameservers": ["10.96.0.10"],
                "dns_search": ["svc.local"],
                "routes": [
                    {"network": "10.96.0.0", "netmask": "255.240.0.0", "gateway": "10.88.0.2"},
                    {"network": "0.0.0.0", "netmask": "0.0.0.0", "gateway": "10.88.0.1"},
                ],
            }
        ],
        "services": [{"type": "dns", "address": "10.96.0.10"}],
    }


def test_a_gateway_outside_of_the_subnet_is_written_in_cloud_inits_format() -> None:
    nic = Interface("eth0", "ee:ee:ee:00:00:01", 1400, ("10.0.3.7/32",), (Route("0.0.0.0/0", "169.254.1.1"),))
    (network,) = drive(interfaces=(nic,), dns=Dns())["network_data.json"]["networks"]
    assert (network["gateway"], network["pointopoint"]) == ("169.254.1.1", "169.254.1.1")
    assert [route["network"] for route in network["routes"]] == ["169.254.1.1"]


def test_a_config_drive_leaves_addresses_to_dhcp_and_marks_kept_disks() -> None:
    found = drive(options=VmOptions(force_dhcp=True), kept_disk="0123456789abcdef0123")
    assert set(found) == {"meta_data.json", "user_data", "vendor_data.json"}
    assert "updates" in found["vendor_data.json"]["cloud-init"]


def named(hostname: str, **changes: Any) -> dict[str, Any]:
    return user_data(dataclasses.replace(with_options(**changes), hostname=hostname))


def test_a_name_with_dots_is_the_hostname_as_a_whole() -> None:
    name = "web.team.svc.cluster.local"
    assert named(name) == {"hostname": name, "fqdn": name, "prefer_fqdn_over_hostname": True}
    assert named("web") == {}
    longest = f"{'a' * 40}.{'b' * 23}"  # as long as kubelet allows it
    assert named(longest)["hostname"] == longest
    script = dataclasses.replace(with_options(user_data_script="#!/bin/sh\n"), hostname=name)
    assert yaml.safe_load(seed_documents(script).files["vendor-data"])["hostname"] == name


@pytest.mark.parametrize(
    "own",
    [
        {"user_data": {"hostname": "mine"}},
        {"user_data": {"fqdn": "mine.example"}},
        {"user_data": {"preserve_hostname": True}},
        {"user_data": {"prefer_fqdn_over_hostname": False}},
        {"meta_data": {"local-hostname": "mine"}},
    ],
    ids=str,
)
def test_a_pod_that_sets_its_guests_hostname_keeps_it(own: dict[str, Any]) -> None:
    assert named("web.team", **own) == own.get("user_data", {})


FILES = {"/etc/app/a file's": b"\x00\xff", "/etc/own": b"theirs"}


def test_files_of_a_source_are_written_unless_the_pod_has_its_own_at_that_path() -> None:
    assert written(user_data(with_options(files=FILES))) == FILES
    own = {"write_files": [{"path": "/etc/own", "content": "mine"}]}
    document = user_data(with_options(files=FILES, user_data=own))
    assert document["write_files"][0] == own["write_files"][0]
    assert [file["path"] for file in document["write_files"][1:]] == ["/etc/app/a file's"]


def test_a_script_of_the_pods_does_not_replace_files_of_a_source() -> None:
    documents = seed_documents(with_options(files=FILES, user_data_script="#!/bin/sh\n")).files
    assert documents["user-data"] == "#!/bin/sh\n"
    assert written(yaml.safe_load(documents["vendor-data"])) == FILES


@pytest.mark.parametrize("script", ["", "#!/bin/sh\n"])
def test_on_a_kept_disk_files_of_a_source_are_written_at_each_boot(script: str, tmp_path: Path) -> None:
    files = {f"{tmp_path}{path}": content for path, content in FILES.items()}
    request = dataclasses.replace(with_options(files=files, user_data_script=script), kept_disk="0123456789abcdef0123")
    documents = seed_documents(request).files
    document = yaml.safe_load(documents["vendor-data" if script else "user-data"])
    assert "write_files" not in document
    for line in document["bootcmd"]:
        subprocess.run(["sh", "-c", line], check=True)
    assert {path: Path(path).read_bytes() for path in files} == files
    assert {stat.S_IMODE(Path(path).stat().st_mode) for path in files} == {0o644}


def test_a_hosts_file_of_a_source_replaces_kubelets() -> None:
    document = yaml.safe_load(
        seed_documents(with_options(files={"/etc/hosts": b"own"}), b"kubelet's").files["user-data"]
    )
    assert written(document) == {"/etc/hosts": b"own"}


def test_the_file_that_mounts_volumes_does_not_overwrite_the_pods_own() -> None:
    own = {"write_files": [{"path": "/etc/cloud/mount-volumes.sh", "content": "mine"}]}
    request = dataclasses.replace(with_options(user_data=own), volumes=(SharedVolume("/srv", "/host/srv", False),))
    assert user_data(request)["write_files"] == own["write_files"]
