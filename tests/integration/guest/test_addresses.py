"""The script that gives a restored guest the addresses of its new pod works with iproute2 and with busybox, in its own
network namespace."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest

from virtshim.guest.set_up_scripts import ADDRESSES_NOT_SET, NO_IP_COMMAND, addresses_command
from virtshim.model.network import Interface, Route

pytestmark = [
    pytest.mark.guest,
    pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root can set addresses"),
]

NIC = Interface(
    "eth0",
    "0a:58:00:00:00:02",
    1500,
    ("10.90.0.7/16", "fd00:90::7/64"),
    (Route("169.254.1.1/32"), Route("0.0.0.0/0", "10.90.0.1"), Route("::/0", "fd00:90::1")),
)
SCRIPT = shlex.join(addresses_command((NIC,)))
# The guest as it was saved, with other addresses and the routes of its former pod.
SAVED = f"""
ip link add eth7 type veth peer name other
ip link set eth7 address {NIC.mac} up
ip link set other up
sysctl -qw net.ipv6.conf.eth7.accept_dad=0
ip address add 10.88.0.5/16 dev eth7
ip address add fd00:88::5/64 dev eth7 nodad
ip route add default via 10.88.0.1 dev eth7
"""
LOOK = """ip -o address show dev eth7 | grep -v 'scope link' | awk '{print $4}'
ip route show default; ip -6 route show default"""
BUSYBOX = "mkdir /run/bb; ln -s $(command -v busybox) /run/bb/ip; PATH=/run/bb:$PATH"


def run(script: str) -> subprocess.CompletedProcess[str]:
    words = ["unshare", "--net", "--mount", "sh", "-c", f"mount -t sysfs none /sys; mount -t tmpfs none /run; {script}"]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("ip", ["true", BUSYBOX], ids=["iproute2", "busybox"])
def test_the_guest_has_the_new_pods_addresses_and_routes_and_no_others(ip: str) -> None:
    done = run(f"{SAVED} {ip}; {SCRIPT}; echo code $?; {SCRIPT}; echo code $?; PATH=${{PATH#/run/bb:}}; {LOOK}")
    words = done.stdout.split()
    assert words[:4] == ["code", "0", "code", "0"], done.stdout + done.stderr
    assert "10.90.0.7/16" in words
    assert "fd00:90::7/64" in words
    assert "10.88.0.5/16" not in words
    assert "fd00:88::5/64" not in words
    assert "default via 10.90.0.1 dev eth7" in done.stdout
    assert "default via fd00:90::1 dev eth7" in done.stdout


def test_a_guest_without_the_nic_says_so() -> None:
    done = run(f"ip link add eth7 type veth peer name other; {SCRIPT}")
    assert done.returncode == ADDRESSES_NOT_SET
    assert f"no interface has the MAC {NIC.mac}" in done.stderr


def test_an_image_without_the_command_ip_says_so() -> None:
    without = SCRIPT.replace("/usr/local/sbin:/usr/sbin:/sbin", "/nowhere")
    tools = "mkdir /run/none; for one in sh cat; do ln -s $(command -v $one) /run/none; done; export PATH=/run/none"
    done = run(f"{tools}; exec {without}")
    assert done.returncode == NO_IP_COMMAND, done.stderr
