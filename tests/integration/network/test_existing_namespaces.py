"""tapmanager attaches a VM to the namespace of a sandbox that another runtime made, and changes nothing there."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from others_namespace import OthersNamespace, others_namespace
from tap_node import TapNode, sandbox

from tapmanager import protocol

pytestmark = pytest.mark.network

IPV4, IPV6 = "10.90.7.5", "fd00:90::5"


@pytest.fixture
def others() -> Iterator[OthersNamespace]:
    with others_namespace(f"{IPV4}/24", f"{IPV6}/64") as made:
        yield made


def attach(node: TapNode, which: str, path: str, *addresses: str, **more: object) -> dict[str, object]:
    return node.attach(which, existing={"path": path, "addresses": list(addresses)}, **more)


def refused(node: TapNode, path: str, *addresses: str, **more: object) -> tuple[str, str]:
    which = sandbox()
    with pytest.raises(protocol.RemoteError) as told:
        attach(node, which, path, *addresses, **more)
    assert which not in node.listed()
    return told.value.kind, told.value.message


def test_the_guest_has_the_pods_addresses_and_the_namespace_stays_as_it_is(
    tap_node: TapNode, others: OthersNamespace
) -> None:
    which, before = sandbox(), others.described()
    network = attach(tap_node, which, others.path, IPV4, IPV6)
    (nic,) = network["interfaces"]
    assert network["netns"] == others.path
    assert network["ips"] == [IPV4, IPV6]
    assert network["dns"]["servers"] == ["10.96.0.10"]
    assert (nic["name"], nic["mtu"]) == ("eth0", 65520)
    assert nic["addresses"] == [f"{IPV4}/24", f"{IPV6}/64"]
    assert nic["routes"] == [
        {"destination": "169.254.7.1/32", "gateway": None},
        {"destination": "0.0.0.0/0", "gateway": "169.254.7.1"},
        {"destination": "::/0", "gateway": "fe80::7:1"},
    ]
    assert attach(tap_node, which, others.path, IPV4, IPV6) == network
    assert tap_node.call("lost") == {"lost": {}}
    assert tap_node.call("counters", {"after": ""}) == {"sandboxes": {}, "last": ""}
    assert tap_node.call("pod", {"sandbox": which})["name"] == "web-0"
    tap_node.release(which)
    tap_node.release(which)
    assert tap_node.listed() == []
    assert others.described() == before


def test_no_plugin_runs_and_none_is_needed(tap_node: TapNode, others: OthersNamespace) -> None:
    for path in tap_node.conf_dir.iterdir():
        path.unlink()
    which = sandbox()
    attach(tap_node, which, others.path, IPV4)
    tap_node.release(which)


def test_an_attached_pod_is_the_same_after_a_kill_of_tapmanager(tap_node: TapNode, others: OthersNamespace) -> None:
    which, before = sandbox(), others.described()
    network = attach(tap_node, which, others.path, IPV4)
    tap_node.stop(signal.SIGKILL)
    tap_node.start()
    assert others.described() == before
    assert tap_node.call("lost") == {"lost": {}}
    assert attach(tap_node, which, others.path, IPV4) == network
    tap_node.release(which)


def test_the_mac_that_the_vm_keeps_is_used(tap_node: TapNode, others: OthersNamespace) -> None:
    which = sandbox()
    network = attach(tap_node, which, others.path, IPV4, macs={"eth0": "02:00:00:00:77:01"})
    assert [nic["mac"] for nic in network["interfaces"]] == ["02:00:00:00:77:01"]
    tap_node.release(which)


def test_a_namespace_that_is_gone_or_another_one_is_lost(tap_node: TapNode, others: OthersNamespace) -> None:
    which = sandbox()
    attach(tap_node, which, others.path, IPV4)
    others.remove()
    assert list(tap_node.call("lost")["lost"]) == [which]
    with others_namespace(f"{IPV4}/24") as another:
        Path(others.path).touch()
        subprocess.run(["mount", "--bind", another.path, others.path], check=True)
        assert list(tap_node.call("lost")["lost"]) == [which]
        with pytest.raises(protocol.RemoteError, match="is not the network namespace that sandbox") as told:
            attach(tap_node, which, others.path, IPV4)
        assert told.value.kind == "failed-precondition"
        others.remove()
    tap_node.release(which)
    assert tap_node.call("lost") == {"lost": {}}


def test_after_a_reboot_nothing_is_attached(tap_node: TapNode, others: OthersNamespace) -> None:
    which = sandbox()
    attach(tap_node, which, others.path, IPV4)
    tap_node.stop()
    (record,) = tap_node.ledger.glob("*.json")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    record.write_text(record.read_text().replace(boot, "0" * len(boot)))
    tap_node.start()
    assert list(tap_node.call("lost")["lost"]) == [which]
    with pytest.raises(protocol.RemoteError, match="needs a new sandbox"):
        attach(tap_node, which, others.path, IPV4)
    tap_node.release(which)


def test_another_namespace_for_the_same_sandbox_is_refused(tap_node: TapNode, others: OthersNamespace) -> None:
    which = sandbox()
    attach(tap_node, which, others.path, IPV4)
    with others_namespace(f"{IPV4}/24") as another, pytest.raises(protocol.RemoteError) as told:
        attach(tap_node, which, another.path, IPV4)
    assert told.value.kind == "failed-precondition"
    assert others.path in told.value.message
    tap_node.release(which)


def test_a_namespace_belongs_to_one_pod(tap_node: TapNode, others: OthersNamespace) -> None:
    first, second = sandbox(), sandbox()
    attach(tap_node, first, others.path, IPV4)
    kind, message = refused(tap_node, others.path, IPV4, name="web-1")
    assert (kind, "pod default/web-0" in message) == ("invalid", True)
    tap_node.attach(second, name="web-2")
    kind, message = refused(tap_node, str(tap_node.netns_of(second)))
    assert (kind, "pod default/web-2" in message) == ("invalid", True)
    tap_node.release(first)
    tap_node.release(second)


def test_only_a_namespace_of_a_pod_is_used(tap_node: TapNode, others: OthersNamespace, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, "/proc/self/ns/uts"):
        assert refused(tap_node, str(path)) == ("invalid", f"{path} is not a network namespace")
    assert refused(tap_node, f"{tmp_path}/none")[0] == "failed-precondition"
    assert "not an absolute path" in refused(tap_node, "netns/x")[1]
    for path in ("/proc/self/ns/net", f"/proc/{os.getpid()}/ns/net"):
        assert "is the node's own network namespace" in refused(tap_node, path)[1]


def test_a_pod_has_one_network_with_its_addresses(tap_node: TapNode, others: OthersNamespace) -> None:
    kind, message = refused(tap_node, others.path, "10.90.7.6")
    assert (kind, "eth0" in message, "the pod has 10.90.7.6" in message) == ("failed-precondition", True, True)
    others.link("net1", "10.91.0.2/24")
    kind, message = refused(tap_node, others.path, IPV4)
    assert (kind, "2 networks (eth0, net1)" in message) == ("invalid", True)
    with others_namespace() as stopped:
        kind, message = refused(tap_node, stopped.path)
        assert (kind, "the pod needs a new sandbox" in message) == ("failed-precondition", True)


def test_the_vm_gets_a_connection_to_passt_which_only_root_can_make(
    tap_node: TapNode, others: OthersNamespace, tmp_path: Path
) -> None:
    which, path = sandbox(), tmp_path / "net" / "sock"
    path.parent.mkdir(mode=0o700)
    network = attach(tap_node, which, others.path, IPV4)
    with pytest.raises(protocol.RemoteError, match=r"args\.stream"):
        tap_node.arm(which)
    with socket.socket(socket.AF_UNIX) as passt:
        passt.bind(str(path))
        passt.listen()
        tap_node.arm(which, stream=str(path))
        answer, (descriptor,) = protocol.call(
            tap_node.socket, "fetch", {"sandbox": which, "key": network["fetch_key"]}, 10.0
        )
        (nic,) = network["interfaces"]
        assert answer == {"interfaces": [{"mac": nic["mac"], "mtu": 65520, "stream": True}]}
        with socket.socket(fileno=descriptor) as vms, passt.accept()[0] as passts:
            first = passts.recv(1024)
            assert first[:4] == (len(first) - 4).to_bytes(4)
            assert first[10:16].hex(":") == nic["mac"], "so that passt knows the guest"
            vms.sendall(b"frame")
            assert passts.recv(16) == b"frame"
    tap_node.release(which)


def fetch_refused(node: TapNode, which: str, key: object, path: Path) -> str:
    node.arm(which, stream=str(path))
    with pytest.raises(protocol.RemoteError) as told:
        protocol.call(node.socket, "fetch", {"sandbox": which, "key": key}, 10.0)
    return told.value.message


def test_a_link_or_anybodys_directory_gives_no_connection(
    tap_node: TapNode, others: OthersNamespace, tmp_path: Path
) -> None:
    which = sandbox()
    key = attach(tap_node, which, others.path, IPV4)["fetch_key"]
    folder = tmp_path / "net"
    assert "passt has ended" in fetch_refused(tap_node, which, key, folder / "sock")
    folder.mkdir(mode=0o700)
    assert "passt has ended" in fetch_refused(tap_node, which, key, folder / "sock")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "other"))
        other.listen()
        (folder / "sock").symlink_to(tmp_path / "other")
        assert "is not a socket" in fetch_refused(tap_node, which, key, folder / "sock")
        os.chown(folder, 4711, -1)
        assert "others than root" in fetch_refused(tap_node, which, key, folder / "sock")
    tap_node.release(which)


def test_a_pod_with_a_network_of_its_own_has_no_passt(tap_node: TapNode) -> None:
    which = sandbox()
    tap_node.attach(which)
    with pytest.raises(protocol.RemoteError, match=r"args\.stream"):
        tap_node.arm(which, stream="/run/x/sock")
    with pytest.raises(protocol.RemoteError, match=r"args\.stream: not an absolute path"):
        tap_node.arm(which, stream="x/sock")
    tap_node.release(which)
