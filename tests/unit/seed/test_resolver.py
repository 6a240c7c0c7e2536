"""The guest's script writes /etc/resolv.conf. This machine's shell runs it on files of the test."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from virtshim.annotations.options import VmOptions
from virtshim.model.ids import ContainerId
from virtshim.model.network import Dns, Interface
from virtshim.model.sandbox import PodKey
from virtshim.seed.documents import seed_documents
from virtshim.seed.network_config import resolver_command
from virtshim.seed.ports import SeedRequest

DNS = Dns(("10.96.0.10", "fd00::a"), ("ns.svc.cluster.local", "svc.cluster.local"), ("ndots:5", "edns0"))
TEXT = """nameserver 10.96.0.10
nameserver fd00::a
search ns.svc.cluster.local svc.cluster.local
options ndots:5 edns0
"""


class Guest:
    def __init__(self, root: Path) -> None:
        self.file = root / "resolv.conf"
        self.resolved = root / "systemd-resolved"
        self.elsewhere = root / "stub-resolv.conf"

    def boots(self, dns: Dns = DNS) -> None:
        *program, _file, _resolved, text = resolver_command(dns)
        done = subprocess.run([*program, self.file, self.resolved, text], capture_output=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.fixture
def guest(tmp_path: Path) -> Guest:
    return Guest(tmp_path)


@pytest.mark.parametrize("old", [None, "", "nameserver 10.96.0.100\n"], ids=["none", "empty", "of the image"])
def test_resolv_conf_gets_the_pods_name_servers_if_nothing_else_wrote_them(guest: Guest, old: str | None) -> None:
    if old is not None:
        guest.file.write_text(old)
    guest.boots()
    guest.boots()
    assert guest.file.read_text() == TEXT


def test_a_resolv_conf_that_already_has_the_name_servers_stays(guest: Guest) -> None:
    guest.file.write_text(theirs := "# by NetworkManager\nsearch a.b\nnameserver 10.96.0.10\n")
    guest.boots()
    assert guest.file.read_text() == theirs


def test_a_link_with_name_servers_stays(guest: Guest) -> None:
    guest.elsewhere.write_text("nameserver 127.0.0.53\n")
    guest.file.symlink_to(guest.elsewhere)
    guest.boots()
    assert guest.file.is_symlink()
    assert guest.elsewhere.read_text() == "nameserver 127.0.0.53\n"


def test_a_link_that_systemd_resolved_has_not_filled_yet_stays(guest: Guest) -> None:
    guest.file.symlink_to(guest.elsewhere)
    guest.resolved.touch()
    guest.boots()
    assert guest.file.is_symlink()
    assert not guest.elsewhere.exists()


def test_a_link_into_nothing_is_replaced(guest: Guest) -> None:
    guest.file.symlink_to(guest.elsewhere)
    guest.boots()
    assert guest.file.read_text() == TEXT
    assert not guest.file.is_symlink()


def test_options_that_the_pod_does_not_set_are_left_out(guest: Guest) -> None:
    guest.boots(Dns(("10.96.0.10",)))
    assert guest.file.read_text() == "nameserver 10.96.0.10\n"


NIC = Interface("eth0", "0a:58:0a:58:00:05", 1500, ("10.88.0.5/16",))


def commands(dns: Dns = DNS, nics: tuple[Interface, ...] = (NIC,), **options: object) -> list[object]:
    """What the guest runs at each boot."""
    pod = PodKey("ns", "pod", "uid", 0)
    container = ContainerId("0123456789abcdef" * 4)
    request = SeedRequest(container, pod, "web-0", VmOptions(**options), interfaces=nics, dns=dns)
    return yaml.safe_load(seed_documents(request).files["user-data"]).get("bootcmd", [])


def test_the_script_runs_at_each_boot_before_the_pods_own_commands() -> None:
    assert commands(user_data={"bootcmd": ["mine"]}) == [list(resolver_command(DNS)), "mine"]


@pytest.mark.parametrize(
    "user_data",
    [
        {"manage_resolv_conf": False},
        {"resolv_conf": {"nameservers": ["192.0.2.1"]}},
        {"write_files": [{"path": "/etc/resolv.conf", "content": "nameserver 192.0.2.1"}]},
    ],
)
def test_a_resolv_conf_that_the_pod_writes_itself_is_kept(user_data: dict[str, object]) -> None:
    assert commands(user_data=user_data) == []


def test_no_resolv_conf_is_written_without_name_servers_or_nics_or_with_dhcp() -> None:
    assert commands(dns=Dns((), ("a.b",))) == commands(nics=()) == commands(force_dhcp=True) == []
