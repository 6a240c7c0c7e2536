"""The guest's script sets rules and tables with iproute2 and with busybox, in its own network namespace."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest

from virtshim.guest.set_up_scripts import (
    NO_IP_COMMAND,
    POLICY_ROUTES_NOT_SET,
    POLICY_ROUTES_NOT_YET,
    policy_routes_command,
)
from virtshim.model.network import Interface, PolicyRule, TableRoute

pytestmark = [
    pytest.mark.guest,
    pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root can set routes"),
]

NIC = Interface(
    "net1",
    "0a:58:00:00:00:02",
    1500,
    ("10.90.9.2/32", "fd00:90::2/128"),
    rules=(PolicyRule(4, 32765, 1000, "10.90.9.2/32", "10.0.0.0/8"), PolicyRule(6, 9, 1000, "fd00:90::2/128")),
    table_routes=(
        TableRoute(1000, "0.0.0.0/0", "10.90.9.1"),
        TableRoute(1000, "10.90.9.0/24", "", "10.90.9.2", 5, 1400),
        TableRoute(1000, "::/0", "fd00:90::1", metric=1024),
        TableRoute(1000, "fd00:90::/64", "", "", 256),
    ),
)
SCRIPT = shlex.join(policy_routes_command((NIC,)))
LINK = f"""
ip link add eth7 type veth peer name other
ip link set eth7 address {NIC.mac} up
ip link set other up
ip link add over type bridge
ip link set over address {NIC.mac}
ip link set other master over
sysctl -qw net.ipv6.conf.eth7.accept_dad=0
"""
ADDRESSES = "ip address add 10.90.9.2/32 dev eth7; ip address add fd00:90::2/128 dev eth7 nodad"
LOOK = """ip rule | grep -v 'lookup [mld]'
ip -6 rule | grep -v 'lookup [mld]'
(ip route show table 1000; ip -6 route show table 1000) 2>/dev/null"""
# Makes a directory in which `ip` is busybox's.
BUSYBOX = "mkdir /run/bb; ln -s $(command -v busybox) /run/bb/ip; PATH=/run/bb:$PATH"
# Makes an `ip` that knows only routes.
KNOWS_NO_RULES = (
    'mkdir /run/bb; printf \'#!/bin/sh\\n[ "$2" != rule ] || { echo "what is rule?"; exit 1; }\\nexec %s "$@"\\n\' '
    "$(command -v ip) >/run/bb/ip; chmod +x /run/bb/ip; PATH=/run/bb:$PATH"
)


def run(script: str) -> subprocess.CompletedProcess[str]:
    words = ["unshare", "--net", "--mount", "sh", "-c", f"mount -t sysfs none /sys; mount -t tmpfs none /run; {script}"]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def there(printed: str) -> list[str]:
    """The output of LOOK without the parts that `ip` adds."""
    lines = [
        " ".join(word for word in line.split() if word not in ("proto", "kernel")) for line in printed.splitlines()
    ]
    return [line.removesuffix(" pref medium") for line in lines]


WHOLE = [
    "32765: from 10.90.9.2 to 10.0.0.0/8 lookup 1000",
    "9: from fd00:90::2 lookup 1000",
    "default via 10.90.9.1 dev eth7",
    "10.90.9.0/24 dev eth7 scope link src 10.90.9.2 metric 5 mtu 1400",
    "fd00:90::/64 dev eth7 metric 256",
    "default via fd00:90::1 dev eth7 metric 1024",
]


@pytest.mark.parametrize("whose", ["true", BUSYBOX], ids=["iproute2", "busybox"])
def test_policy_routes_can_be_set_repeatedly(whose: str) -> None:
    done = run(f"{LINK}{ADDRESSES}; ({whose}; {SCRIPT} && {SCRIPT}) && {LOOK}")
    assert (done.returncode, done.stderr) == (0, "")
    assert there(done.stdout) == WHOLE


def test_lost_policy_routes_are_restored() -> None:
    lost = "ip rule del priority 32765; ip -6 rule del priority 9; ip route flush table 1000"
    done = run(f"{LINK}{ADDRESSES}; {SCRIPT} && {lost} && {SCRIPT} && {LOOK}")
    assert (done.returncode, done.stderr) == (0, "")
    assert there(done.stdout) == WHOLE


def test_systemd_networkd_leaves_policy_routes_alone() -> None:
    done = run(f"{LINK}{ADDRESSES}; {SCRIPT}; ip -d rule; ip -N route show table 1000")
    assert "from 10.90.9.2 to 10.0.0.0/8 lookup 1000 proto kernel" in " ".join(done.stdout.split())
    assert done.stdout.count("proto 2") == 2


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("true", "no interface has the MAC 0a:58:00:00:00:02"),
        (f"{LINK}true", "eth7 does not have the address 10.90.9.2"),
        (f"{LINK}ip address add 10.90.9.20/24 dev eth7", "eth7 does not have the address 10.90.9.2"),
        (f"{LINK}ip address add 10.90.9.2/24 dev eth7", "eth7 does not have the address fd00:90::2"),
    ],
)
def test_a_guest_without_its_network_gets_no_rule_and_an_error(before: str, why: str) -> None:
    done = run(f"{before}; {SCRIPT}; code=$?; {LOOK}; exit $code")
    assert (done.returncode, done.stderr.strip()) == (POLICY_ROUTES_NOT_YET, why)
    assert "lookup" not in done.stdout


def test_an_image_without_the_ip_command_is_reported() -> None:
    done = run(
        f"mkdir /run/none; mount --bind /run/none /usr/sbin; mount --bind /run/none /usr/local/sbin; PATH=/run/none {SCRIPT}"
    )
    assert (done.returncode, done.stderr.strip()) == (NO_IP_COMMAND, "the image has no command ip")


def test_an_ip_command_without_rules_is_reported_with_its_error() -> None:
    done = run(f"{LINK}{ADDRESSES}; {KNOWS_NO_RULES}; {SCRIPT}")
    assert done.returncode == POLICY_ROUTES_NOT_SET
    assert done.stderr.strip() == "rule from 10.90.9.2/32 to 10.0.0.0/8 priority 32765 table 1000: what is rule?"
