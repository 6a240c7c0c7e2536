"""Virtlet's 20 cloud-init cases give the same documents; docs/from-virtlet.md lists the differences."""

import base64
import json
import shlex
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from fakes.virtlet_seeds import BLOCKS, CASES, CONTAINER, DISKS, KEPT_DISK, KEYS, SHARED

from virtshim.devices.guest_view import guest_links_command
from virtshim.seed.documents import seed_documents
from virtshim.volumes import empty_disks
from virtshim.volumes.mount_script import Copies, command

HEADER = "#cloud-config\n"
IDENTITY = {"instance-id": f"i-{CONTAINER.short}", "local-hostname": "foo"}
OF_DRIVE = {"uuid": f"i-{CONTAINER.short}", "hostname": "foo", "name": "foo"}
ENVIRONMENT = {
    "path": "/etc/cloud/environment",
    "permissions": "0644",
    "encoding": "b64",
    "content": base64.b64encode(b"GREETING=hello\nWORDS=two words\n").decode(),
}
USERS = {"users": [{"name": "cloudy"}]}
DEFAULT = {"network": "0.0.0.0", "netmask": "0.0.0.0", "gateway": "10.2.3.4"}
ETH0 = {
    "type": "physical",
    "name": "eth0",
    "mac_address": "02:00:00:00:00:01",
    "mtu": 1500,
    "subnets": [
        {
            "type": "static",
            "address": "10.1.1.1/8",
            "gateway": "10.2.3.4",
            "routes": [{"network": "10.2.0.0/16", "gateway": "10.2.3.4"}],
            "dns_nameservers": ["192.0.2.53"],
            "dns_search": ["some.example", "example"],
        }
    ],
}
# The second default route could not work: it is left out.
NET1 = {
    "type": "physical",
    "name": "net1",
    "mac_address": "02:00:00:00:ab:cd",
    "mtu": 9000,
    "subnets": [{"type": "static", "address": "192.168.100.42/24"}],
}
LINK = {"id": "eth0", "name": "eth0", "type": "phy", "ethernet_mac_address": "02:00:00:00:00:01", "mtu": 1500}
LINK2 = {"id": "net1", "name": "net1", "type": "phy", "ethernet_mac_address": "02:00:00:00:ab:cd", "mtu": 9000}
NETWORK = {
    "id": "network0",
    "link": "eth0",
    "type": "ipv4",
    "ip_address": "10.1.1.1",
    "netmask": "255.0.0.0",
    "dns_nameservers": ["192.0.2.53"],
    "dns_search": ["some.example", "example"],
    "routes": [{"network": "10.2.0.0", "netmask": "255.255.0.0", "gateway": "10.2.3.4"}, DEFAULT],
}
NETWORK2 = {
    "id": "network1",
    "link": "net1",
    "type": "ipv4",
    "ip_address": "192.168.100.42",
    "netmask": "255.255.255.0",
}
SERVICES = [{"type": "dns", "address": "192.0.2.53"}]


def documents(case: str) -> Mapping[str, Any]:
    """By their names without a directory; user-data as it is, and what else is read as JSON."""
    files = {path.rpartition("/")[2]: text for path, text in seed_documents(CASES[case]).files.items()}
    return {
        name: text if name.startswith("user") or text.startswith("#") else json.loads(text)
        for name, text in files.items()
    }


def cloud_config(case: str) -> Any:
    text = documents(case)["user-data"]
    assert text.startswith(HEADER)
    return yaml.safe_load(text)


def test_there_are_20_cases() -> None:
    assert len(CASES) == 20


def test_a_plain_pods_documents_only_identify_the_guest() -> None:
    assert documents("plain") == {"meta-data": IDENTITY, "user-data": f"{HEADER}{{}}\n"}


def test_a_config_drive_has_the_same_content_by_openstacks_names() -> None:
    seed = seed_documents(CASES["config drive's meta-data"])
    assert seed.label == "config-2"
    assert sorted(seed.files) == ["openstack/latest/meta_data.json", "openstack/latest/user_data"]
    assert documents("config drive's meta-data")["meta_data.json"] == OF_DRIVE


@pytest.mark.parametrize("case", ["SSH keys", "user-data", "script"])
def test_keys_are_in_meta_data_whatever_the_user_data_are(case: str) -> None:
    assert documents(case)["meta-data"] == {**IDENTITY, "public-keys": list(KEYS)}


def test_the_pods_own_meta_data_win() -> None:
    told = documents("SSH keys, and meta-data of its own")["meta-data"]
    assert told == {**IDENTITY, "instance-id": "mine", "public-keys": list(KEYS)}


def test_user_data_come_from_the_pod() -> None:
    assert cloud_config("user-data") == USERS


def test_variables_are_written_to_a_file_after_the_pods_own_files() -> None:
    assert cloud_config("variables") == {"write_files": [ENVIRONMENT]}
    own = {"path": "/etc/own", "content": "mine"}
    assert cloud_config("variables and user-data") == {**USERS, "write_files": [own, ENVIRONMENT]}


def test_a_script_is_all_of_the_user_data() -> None:
    assert documents("script")["user-data"] == "#!/bin/sh\necho hi\n"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("disks to mount", empty_disks.command(DISKS)),
        ("shared directory", command(SHARED, (), Copies.SEED)),
        ("block volumes", guest_links_command(BLOCKS)),
    ],
)
def test_volumes_are_put_in_their_places_at_each_boot(case: str, words: tuple[str, ...]) -> None:
    told = cloud_config(case)
    assert told["bootcmd"] == [list(words)]
    # Virtlet's file for scripts of the pod's that call it.
    assert told["write_files"] == [mount_volumes(words)]


def mount_volumes(*commands: tuple[str, ...]) -> dict[str, str]:
    script = "\n".join(["#!/bin/sh", *map(shlex.join, commands), ""])
    content = base64.b64encode(script.encode()).decode()
    return {"path": "/etc/cloud/mount-volumes.sh", "permissions": "0755", "encoding": "b64", "content": content}


def test_mounts_of_the_pods_own_find_its_block_volumes() -> None:
    assert cloud_config("block volumes, and disks to mount") == {
        "mounts": [
            ["/dev/other", "/a"],
            ["/dev/disk/by-id/virtio-dev-disk-a", "/b"],
            ["/dev/disk/by-id/virtio-dev-disk-b", "/c", "auto"],
        ],
        "write_files": [mount_volumes(empty_disks.command(DISKS[2:]), guest_links_command(BLOCKS[:2]))],
        "bootcmd": [list(empty_disks.command(DISKS[2:])), list(guest_links_command(BLOCKS[:2]))],
    }


def test_a_kept_disk_is_the_same_instance_with_the_current_network() -> None:
    told = documents("persistent root disk")
    assert told["meta-data"] == {**IDENTITY, "instance-id": f"i-{KEPT_DISK}"}
    assert told["network-config"] == {"version": 1, "config": [ETH0]}
    assert yaml.safe_load(told["vendor-data"]) == {"updates": {"network": {"when": ["boot"]}}}


def test_with_dhcp_there_is_no_network_document() -> None:
    assert documents("DHCP") == {"meta-data": IDENTITY, "user-data": f"{HEADER}{{}}\n"}


def test_the_token_of_a_script_is_replaced_by_all_its_volumes() -> None:
    disk, link = empty_disks.command(DISKS[:1]), guest_links_command(BLOCKS[1:2])
    assert documents("mounts in a script")["user-data"] == f"#!/bin/sh\necho hi\n#!/bin/sh\n{shlex.join(disk)}"
    both = f"{shlex.join(disk)}\n{shlex.join(link)}"
    assert documents("mounts and block volumes in a script")["user-data"] == f"#!/bin/sh\necho hi\n#!/bin/sh\n{both}"


def test_each_interface_has_its_addresses_and_the_first_one_the_default_route() -> None:
    assert documents("network")["network-config"] == {"version": 1, "config": [ETH0]}
    assert documents("several networks")["network-config"] == {"version": 1, "config": [ETH0, NET1]}


def test_a_config_drive_has_addresses_and_the_default_route() -> None:
    one, several = (
        documents(case)["network_data.json"]
        for case in ("network on a config drive", "several networks on a config drive")
    )
    assert one == {"links": [LINK], "networks": [NETWORK], "services": SERVICES}
    assert several == {"links": [LINK, LINK2], "networks": [NETWORK, NETWORK2], "services": SERVICES}
