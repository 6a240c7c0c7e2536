"""Through the real passt in another runtime's namespace, guest and containers reach what they should, and nothing
stays."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from others_namespace import PEER, PEER_IPV6, OthersNamespace, others_namespace
from passt_guest import PasstGuest, listener
from podclient import wait_until

from tapmanager.cgroups.tree import VmCgroups, hierarchies
from tapmanager.errors import TapmanagerError
from tapmanager.links import netns, stream
from tapmanager.network_values import Dns
from tapmanager.shares.daemons import Place, ShareDaemons
from tapmanager.shares.passt import Network
from virtshim.model.network import Dns as GuestDns
from virtshim.model.network import Interface, Route
from virtshim.seed.network_config import network_config

PASST = os.environ.get("VIRTSHIM_TEST_PASST", shutil.which("passt") or "")
pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(not PASST or os.geteuid() != 0, reason="NOT TESTED: no passt, or not root"),
]
PROJECT = Path(__file__).resolve().parents[3]
NAME = "0123456789abcdef0123"
UID = 2130706433
IPV4, IPV6, MAC = "10.90.7.5", "fd00:90::5", "02:00:00:00:07:05"
GATEWAY = "169.254.7.1"


def soon() -> float:
    return time.monotonic() + 60


@pytest.fixture
def daemons() -> ShareDaemons:
    return ShareDaemons(VmCgroups(hierarchies()), passt=PASST)


@pytest.fixture
def place(daemons: ShareDaemons, tmp_path: Path) -> Iterator[Place]:
    made = Place(f"{tmp_path}/shares/{NAME}")
    yield made
    daemons.end(made, soon())


@pytest.fixture
def others() -> Iterator[OthersNamespace]:
    with others_namespace(f"{IPV4}/24", f"{IPV6}/64") as made:
        yield made


def network(others: OthersNamespace, *, tcp: tuple[int, ...] = (), udp: tuple[int, ...] = ()) -> Network:
    dns = Dns(("10.96.0.10",), ("default.svc.cluster.local", "cluster.local"))
    return Network(others.path, others.inode, UID, "eth0", (f"{IPV4}/24", f"{IPV6}/64"), tcp, udp, dns)


def started(daemons: ShareDaemons, place: Place, wanted: Network, group: str = "") -> int:
    daemons.start(place, 0, [], soon(), group, wanted)
    (pid,) = [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit() and is_passt(one, place)]
    return pid


def is_passt(process: Path, place: Place) -> bool:
    try:
        return (process / "cmdline").read_bytes().startswith(f"{place.directory}/passt\0".encode())
    except OSError:
        return False


def connect(place: Place) -> int:
    return stream.connect(f"{place.network}/sock", MAC, soon())


def guest_of(place: Place) -> PasstGuest:
    return PasstGuest(connect(place), MAC)


def configured(guest: PasstGuest) -> PasstGuest:
    """With what the seed tells it."""
    routes = (Route(f"{GATEWAY}/32"), Route("0.0.0.0/0", GATEWAY), Route("::/0", "fe80::7:1"))
    nic = Interface("nic0", MAC, 65520, (f"{IPV4}/24", f"{IPV6}/64"), routes)
    document = network_config([nic], GuestDns())
    assert document is not None
    guest.configure(document)
    return guest


def exchange(client: socket.socket, server: socket.socket) -> str:
    """Sends a word there and back; returns the address from which it came. The client speaks first, as passt until 2024-08-21
    needs."""
    client.sendall(b"hello")
    with client, server.accept()[0] as served:
        served.settimeout(20)
        assert served.recv(16) == b"hello"
        served.sendall(b"world")
        assert client.recv(16) == b"world"
        return str(served.getpeername()[0])


def dial(path: str, address: str, port: int) -> socket.socket:
    return netns.run_inside(path, lambda: socket.create_connection((address, port), 20))


def ask(path: str, address: str, port: int, server: socket.socket) -> str:
    """The same by UDP."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with netns.run_inside(path, lambda: socket.socket(family, socket.SOCK_DGRAM)) as client:
        client.settimeout(20)
        client.sendto(b"hello", (address, port))
        data, sender = server.recvfrom(16)
        server.sendto(data.upper(), sender)
        assert client.recv(16) == b"HELLO"
        return str(sender[0])


def test_passt_has_no_right_and_nobody_but_root_reaches_its_socket(
    daemons: ShareDaemons, place: Place, others: OthersNamespace
) -> None:
    pid = started(daemons, place, network(others, tcp=(22,)))
    status = Path(f"/proc/{pid}/status").read_text()
    assert re.findall(r"^[UG]id:\t(\d+)\t", status, re.MULTILINE) == [str(UID), str(UID)]
    assert re.findall(r"^Cap(?:Prm|Eff|Inh|Amb):\t0*(\w+)$", status, re.MULTILINE) == ["0"] * 4
    assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE)
    assert re.search(r"^Groups:\t *$", status, re.MULTILINE)
    assert os.stat(f"/proc/{pid}/ns/net").st_ino == others.inode
    folder = os.stat(place.network)
    assert (folder.st_uid, folder.st_mode & 0o777) == (0, 0o700)


def test_passt_runs_until_its_share_ends_whatever_becomes_of_the_program(
    daemons: ShareDaemons, place: Place, others: OthersNamespace
) -> None:
    parent = os.path.dirname(place.directory)
    started(daemons, place, network(others))
    next_one = ShareDaemons(VmCgroups(hierarchies()), passt=PASST)
    assert next_one.networks(parent) == {NAME: True}
    pid = started(next_one, place, network(others))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not next_one.networks(parent)[NAME], 20, "its end is noticed")
    started(next_one, place, network(others))
    next_one.end(place, soon())
    next_one.end(place, soon())
    assert next_one.networks(parent) == {}
    assert not os.path.lexists(place.directory)
    assert others.run("ss", "-Hlntu") == ""


def test_a_passt_whose_start_was_cut_off_is_ended(daemons: ShareDaemons, place: Place, others: OthersNamespace) -> None:
    """By a kill of the program, which then had not yet taken the folder from passt."""
    started(daemons, place, network(others, tcp=(80,)))
    os.chown(place.network, UID, -1)
    started(daemons, place, network(others, tcp=(80,)))
    daemons.end(place, soon())
    os.makedirs(place.network)
    os.chown(place.network, UID, -1)
    assert daemons.networks(os.path.dirname(place.directory)) == {NAME: False}
    started(daemons, place, network(others, tcp=(80,)))


@pytest.mark.hostile
def test_a_process_of_another_user_with_passts_name_is_neither_taken_for_it_nor_ended(
    daemons: ShareDaemons, place: Place, others: OthersNamespace
) -> None:
    os.kill(started(daemons, place, network(others)), signal.SIGKILL)
    words = [place.passt, "-c", "read _"]
    with subprocess.Popen(words, executable="/bin/sh", stdin=subprocess.PIPE, user=65534) as stranger:
        wait_until(lambda: not daemons.networks(os.path.dirname(place.directory))[NAME], 20, "passt has ended")
        daemons.end(place, soon())
        assert stranger.poll() is None


def test_passt_is_in_the_shares_cgroup(daemons: ShareDaemons, place: Place, others: OthersNamespace) -> None:
    group = f"/virtshim-test-{os.getpid()}/virtshim-{NAME}-volumes"
    groups = VmCgroups(hierarchies())
    try:
        pid = started(daemons, place, network(others), group)
        assert group in Path(f"/proc/{pid}/cgroup").read_text()
        daemons.end(place, soon())
        assert not groups.directories(group)
    finally:
        groups.remove(os.path.dirname(group))


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1", "::1"])
def test_a_port_that_a_container_holds_is_named(
    daemons: ShareDaemons, place: Place, others: OthersNamespace, address: str
) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for kind, name in ((socket.SOCK_STREAM, "tcp"), (socket.SOCK_DGRAM, "udp")):
        with netns.run_inside(others.path, lambda kind=kind: socket.socket(family, kind)) as held:
            if family == socket.AF_INET6:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as most servers do
            held.bind((address, 8080))
            if name == "tcp":
                held.listen()
            wanted = dataclasses.replace(network(others, tcp=(22,)), **{name: (8080,)})
            with pytest.raises(TapmanagerError, match=f"port 8080/{name} of the pod is held by another") as told:
                daemons.start(place, 0, [], soon(), "", wanted)
            assert told.value.kind == "failed-precondition"
            assert not os.path.lexists(place.directory)


def test_another_namespace_at_the_path_is_refused(daemons: ShareDaemons, place: Place, others: OthersNamespace) -> None:
    for wanted in (
        dataclasses.replace(network(others), inode=others.inode + 1),
        dataclasses.replace(network(others), netns=f"{others.path}-none"),
        dataclasses.replace(network(others), netns="/etc/passwd", inode=os.stat("/etc/passwd").st_ino),
    ):
        with pytest.raises(TapmanagerError, match="is not the pod's network namespace any more"):
            daemons.start(place, 0, [], soon(), "", wanted)


def test_what_passt_says_is_the_error(daemons: ShareDaemons, place: Place, others: OthersNamespace) -> None:
    with pytest.raises(TapmanagerError, match=r"passt does not start: .*nic7"):
        daemons.start(place, 0, [], soon(), "", dataclasses.replace(network(others), interface="nic7"))
    assert not os.path.lexists(place.directory)


def test_a_missing_passt_is_named_with_the_remedy(place: Place, others: OthersNamespace) -> None:
    without = ShareDaemons(VmCgroups([]), passt="/nowhere/passt")
    with pytest.raises(TapmanagerError, match="passt is missing at /nowhere/passt; install") as told:
        without.start(place, 0, [], soon(), "", network(others))
    assert told.value.kind == "unavailable"
    with pytest.raises(TapmanagerError, match=r"shares\.passt"):
        without.require_passt()
    with pytest.raises(TapmanagerError, match=r"shares\.passt: /tmp/passt is below /tmp"):
        ShareDaemons(VmCgroups([]), passt="/tmp/passt").require_passt()


def test_the_pods_sysctls_change_no_more_than_passt_needs(
    daemons: ShareDaemons, place: Place, others: OthersNamespace
) -> None:
    lowest, ping = "net.ipv4.ip_unprivileged_port_start", "net.ipv4.ping_group_range"
    others.run("sysctl", "-qw", f"{lowest}=1024", f"{ping}=1 0")
    started(daemons, place, network(others, tcp=(2222,)))
    assert others.run("sysctl", "-n", lowest, ping).split() == ["1024", str(UID), str(UID)]
    others.run("sysctl", "-qw", f"{ping}=5 9")
    started(daemons, place, network(others, tcp=(2222, 443), udp=(53,)))
    assert others.run("sysctl", "-n", lowest, ping).split() == ["53", "5", str(UID)]


def test_the_rights_of_the_unit_suffice(place: Place, others: OthersNamespace, daemons: ShareDaemons) -> None:
    unit = (PROJECT / "systemd/virtshim-shares.service").read_text()
    (rights,) = re.findall(r"^CapabilityBoundingSet=(.*)$", unit, re.MULTILINE)
    bounding = ",".join(["-all", *(f"+{one.removeprefix('CAP_').lower()}" for one in rights.split())])
    script = (
        "import sys, time; from tapmanager.shares.daemons import *; from tapmanager.shares.passt import Network\n"
        "ShareDaemons(VmCgroups([]), passt=sys.argv[1]).start(\n"
        "  Place(sys.argv[2]), 0, [], time.monotonic() + 60, '', Network(sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), \n"
        "  'eth0', ('10.90.7.5/24',), (22,)))\n"
    )
    words = [PASST, place.directory, others.path, str(others.inode), str(UID)]
    subprocess.run(
        ["setpriv", "--no-new-privs", "--bounding-set", bounding, sys.executable, "-c", script, *words],
        check=True,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
    )
    assert daemons.networks(os.path.dirname(place.directory)) == {NAME: True}
    assert others.run("sysctl", "-n", "net.ipv4.ip_unprivileged_port_start").strip() == "22"


def test_others_reach_the_guest_at_the_pods_addresses(
    daemons: ShareDaemons, place: Place, others: OthersNamespace
) -> None:
    started(daemons, place, network(others, tcp=(80,), udp=(53,)))
    with guest_of(place) as guest, configured(guest).listener(80) as server:
        assert exchange(dial(others.outside, IPV4, 80), server) == PEER
        for address in (IPV4, "127.0.0.1"):
            assert exchange(dial(others.path, address, 80), server) == GATEWAY
        with guest.listener(53, socket.SOCK_DGRAM) as names:
            assert ask(others.outside, IPV4, 53, names) == PEER
        server.close()
        with guest.listener(80, family=socket.AF_INET6) as server6:
            assert exchange(dial(others.outside, IPV6, 80), server6) == PEER_IPV6
            exchange(dial(others.path, "::1", 80), server6)


def test_the_guest_speaks_with_the_pods_addresses_and_reaches_the_containers(
    daemons: ShareDaemons, place: Place, others: OthersNamespace
) -> None:
    started(daemons, place, network(others))
    with guest_of(place) as guest:
        configured(guest)
        with listener(others.outside, 8080) as server:
            assert exchange(dial(guest.path, PEER, 8080), server) == IPV4
        with listener(others.outside, 8080, family=socket.AF_INET6) as server:
            assert exchange(dial(guest.path, PEER_IPV6, 8080), server) == IPV6
        with listener(others.outside, 5353, socket.SOCK_DGRAM) as server:
            assert ask(guest.path, PEER, 5353, server) == IPV4
        with listener(others.path, 9090) as container:
            assert exchange(dial(guest.path, GATEWAY, 9090), container) == "127.0.0.1"
        for address in (PEER, PEER_IPV6):
            guest.run("ping", "-c1", "-W5", address)


def test_dhcp_gives_the_guest_the_pods_address(daemons: ShareDaemons, place: Place, others: OthersNamespace) -> None:
    started(daemons, place, network(others))
    with guest_of(place) as guest:
        guest.ask_by_dhcp()
        assert guest.addresses()[0] == f"{IPV4}/24"
        with listener(others.outside, 8080) as server:
            assert exchange(dial(guest.path, PEER, 8080), server) == IPV4


def test_the_guest_makes_no_ipv6_address_of_its_own(
    daemons: ShareDaemons, place: Place, others: OthersNamespace
) -> None:
    started(daemons, place, network(others))
    with guest_of(place) as guest:
        guest.run("sysctl", "-qw", "net.ipv6.conf.nic0.accept_ra=2", "net.ipv6.conf.nic0.autoconf=1")
        guest.ip("link set nic0 down", "link set nic0 up")
        configured(guest)
        guest.run("ping", "-c3", "-i0.5", "-W5", PEER_IPV6)
        assert guest.addresses() == [f"{IPV4}/24", f"{IPV6}/64"]


@pytest.mark.parametrize("address", [f"{IPV4}/32", f"{IPV6}/128"])
def test_a_pod_of_one_family_with_an_address_on_no_subnet(
    daemons: ShareDaemons, place: Place, others: OthersNamespace, address: str
) -> None:
    wanted = dataclasses.replace(network(others, tcp=(80,)), addresses=(address,))
    started(daemons, place, wanted)
    taken = others.run("ss", "-Hlnt").split()
    assert ("0.0.0.0:80" in taken, "[::]:80" in taken) == (":" not in address, ":" in address)


def test_more_search_domains_than_passt_can_tell_do_not_matter(
    daemons: ShareDaemons, place: Place, others: OthersNamespace
) -> None:
    dns = Dns(("10.96.0.10", "fd00::10"), tuple(f"n{number}.example" for number in range(20)))
    started(daemons, place, dataclasses.replace(network(others), dns=dns))
