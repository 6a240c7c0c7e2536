"""tapmanager reports plugins that fail, hang or are missing, and survives kills and unreadable records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tap_node import TapNode, sandbox, until

from tapmanager import protocol
from tapmanager.dhcp import packet

pytestmark = pytest.mark.network

# Records each call and the plugin's input.
_NOTING = "cat > {folder}/stdin.$CNI_COMMAND\necho $CNI_COMMAND >> {folder}/calls\n"


def refused(node: TapNode, kind: str, words: str, timeout: float = 60.0) -> str:
    """Attaches, which must fail so; returns the sandbox."""
    which = sandbox()
    with pytest.raises(protocol.RemoteError, match=words) as caught:
        node.attach(which, timeout=timeout)
    assert caught.value.kind == kind
    return which


def test_a_failing_plugin_is_reported_and_everything_before_it_is_undone(tap_node: TapNode) -> None:
    tap_node.plugin("sour", 'echo \'{"code": 100, "msg": "lemons", "details": "only"}\'; test $CNI_COMMAND = DEL\n')
    tap_node.configure(tap_node.bridge_plugin(), {"type": "sour"})
    which = refused(tap_node, "internal", r'plugin "sour" .* failed at ADD: lemons: only \(CNI error 100\)')
    assert tap_node.listed() == []
    assert not tap_node.netns_of(which).exists()
    until(lambda: not tap_node.leftovers(), what="all undone")


@pytest.mark.parametrize(
    ("made", "named"),
    [
        ("iptables -t nat -A OUTPUT -p tcp -j REDIRECT --to-ports 15001", "ip nat OUTPUT"),
        ("ip6tables -t nat -A PREROUTING -p tcp -j REDIRECT --to-ports 15006", "ip6 nat PREROUTING"),
        ("nft 'table inet mesh { chain c { type filter hook input priority 0; drop; }; }'", "inet mesh c"),
        ("iptables-legacy -t mangle -A OUTPUT -j MARK --set-mark 1", "ip_tables mangle"),
    ],
    ids=["iptables", "ip6tables", "nft", "iptables-legacy"],
)
def test_firewall_rules_for_packets_that_bypass_them_are_refused_by_name(
    tap_node: TapNode, made: str, named: str
) -> None:
    """A service mesh's plugin makes such rules. Rules of a bridge or a device do see frames, and empty tables may exist:
    in each namespace before Linux 5.15, once the node uses them."""
    if "legacy" in made and not Path("/proc/net/ip_tables_names").exists():
        pytest.skip("the kernel has no ip_tables")
    frames = "nft 'table bridge b { chain c { type filter hook forward priority 0; accept; }; }'"
    if "legacy" in made:
        frames = "iptables-legacy -t nat -S >/dev/null && inside ip6tables-legacy -t filter -S >/dev/null"
    tap_node.plugin("mesh", f"""
        test $CNI_COMMAND = ADD || exit 0
        inside() {{ ip netns exec $(basename $CNI_NETNS) "$@"; }}
        {{ inside {frames} && test -e {tap_node.folder}/harmless || inside {made}; }} >&2 || exit 1
        printf %s "$(sed 's/.*"prevResult": //; s/}}$//')"
    """)  # fmt: skip
    tap_node.configure(tap_node.bridge_plugin(), {"type": "mesh"})
    with pytest.raises(protocol.RemoteError, match=rf'network "{tap_node.network}" has rules .* \({named}\)') as told:
        tap_node.attach(sandbox())
    assert told.value.kind == "unimplemented"
    assert tap_node.listed() == []
    (tap_node.folder / "harmless").touch()
    which = sandbox()
    tap_node.attach(which)
    tap_node.release(which)


def test_a_network_that_cannot_be_undone_stays_listed_until_release_undoes_it(tap_node: TapNode) -> None:
    tap_node.plugin("sour", "exit 1\n")
    tap_node.configure(tap_node.bridge_plugin(), {"type": "sour"})
    which = refused(tap_node, "internal", "failed at ADD")
    assert tap_node.listed() == [which]
    with pytest.raises(protocol.RemoteError, match="failed at DEL"):
        tap_node.release(which)
    assert tap_node.listed() == [which]
    tap_node.plugin("sour", "exit 0\n")
    tap_node.release(which)
    assert tap_node.listed() == []


def test_attach_after_a_failure_starts_afresh(tap_node: TapNode) -> None:
    tap_node.plugin("sour", "exit 1\n")
    tap_node.configure(tap_node.bridge_plugin(), {"type": "sour"})
    which = refused(tap_node, "internal", "failed at ADD")
    tap_node.plugin("sour", "exit 0\n")
    tap_node.configure()
    network = tap_node.attach(which)
    assert tap_node.leased() == set(network["ips"])
    tap_node.release(which)


def test_a_slow_plugin_blocks_no_other_pod(tap_node: TapNode) -> None:
    go, begun = tap_node.folder / "go", tap_node.folder / "begun"
    os.mkfifo(go)
    tap_node.plugin("tar", f"test $CNI_COMMAND = DEL && exit 0\ntouch {begun}\nread line < {go}\nexit 1\n")
    tap_node.configure(tap_node.bridge_plugin(), {"type": "tar"})
    failures: list[object] = []
    slow = threading.Thread(target=lambda: failures.append(refused(tap_node, "internal", "failed at ADD")))
    slow.start()
    until(begun.exists, what="the plugin waiting")
    tap_node.configure()
    other = sandbox()
    tap_node.attach(other)
    tap_node.release(other)
    assert failures == []
    go.write_text("on\n")
    slow.join()
    assert len(failures) == 1


def test_a_hanging_plugin_is_killed_at_its_limit(quiet_node: TapNode) -> None:
    tap_node = quiet_node
    tap_node.start("--cni-timeout", "3")
    tap_node.plugin("tar", f"test $CNI_COMMAND = DEL && exit 0\necho $$ > {tap_node.folder}/pid\nexec sleep 600\n")
    tap_node.configure(tap_node.bridge_plugin(), {"type": "tar"})
    refused(tap_node, "deadline", "did not finish ADD within 3.0 s and was killed")
    pid = tap_node.folder / "pid"
    until(lambda: not Path(f"/proc/{int(pid.read_text())}").exists(), what="the plugin dead")
    until(lambda: not tap_node.listed(), what="all undone")


def test_status_and_attach_report_a_missing_plugin_or_config(tap_node: TapNode) -> None:
    assert tap_node.call("status") == {"ready": True, "reason": ""}
    tap_node.configure({"type": "unheard-of"})
    assert '"unheard-of" is not in' in str(tap_node.call("status")["reason"])
    refused(tap_node, "unavailable", '"unheard-of" is not in')
    (tap_node.conf_dir / "10-test.conflist").write_text("{")
    assert "not valid" in str(tap_node.call("status")["reason"])
    refused(tap_node, "unavailable", "not valid")
    (tap_node.conf_dir / "10-test.conflist").unlink()
    refused(tap_node, "unavailable", "no CNI config")
    told = tap_node.call("status")
    assert told["ready"] is False
    assert str(tap_node.conf_dir) in str(told["reason"])
    assert tap_node.listed() == []


def test_del_gets_the_cached_result_and_config_even_when_the_file_is_gone(tap_node: TapNode) -> None:
    echo = f"import json; print(json.dumps(json.load(open('{tap_node.folder}/stdin.ADD'))['prevResult']))"
    note = _NOTING.format(folder=tap_node.folder)
    tap_node.plugin("note", f'{note}test $CNI_COMMAND = DEL || {sys.executable} -c "{echo}"\n')
    tap_node.configure(tap_node.bridge_plugin(), {"type": "note", "capabilities": {"portMappings": True}})
    which = sandbox()
    mapping = {"protocol": "tcp", "container_port": 80, "host_port": 8080, "host_ip": ""}
    network = tap_node.attach(which, port_mappings=[mapping])
    conf = tap_node.conf_dir / "10-test.conflist"
    conf.unlink()
    tap_node.release(which)
    given = json.loads((tap_node.folder / "stdin.DEL").read_text())
    assert given["prevResult"]["ips"][0]["address"].split("/")[0] == network["ips"][0]
    assert given["runtimeConfig"]["portMappings"][0]["hostPort"] == 8080
    assert (tap_node.folder / "calls").read_text().split() == ["ADD", "DEL"]


def test_release_works_if_the_namespace_is_gone(tap_node: TapNode) -> None:
    """This includes masquerading rules, which the bridge plugin finds by the interface."""
    which = sandbox()
    tap_node.attach(which)
    assert tap_node.nat_rules() != []
    subprocess.run(["ip", "netns", "del", tap_node.netns_of(which).name], check=True)
    tap_node.release(which)
    assert tap_node.listed() == []
    until(lambda: not tap_node.leftovers(), what="lease and veth gone")


def test_release_works_after_a_reboot_without_the_rules(tap_node: TapNode) -> None:
    """bridge's DEL removes rules for the interface that it finds, and fails with iptables' nftables variant."""
    which = sandbox()
    tap_node.attach(which)
    record = tap_node.ledger / f"{which}.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"boot": "the one before"}))
    subprocess.run(["ip", "netns", "del", tap_node.netns_of(which).name], check=True)
    tap_node.forget_nat_rules()
    tap_node.release(which)
    assert tap_node.listed() == []
    until(lambda: not tap_node.leftovers(), what="lease and veth gone")


def test_a_plugin_that_may_move_the_interface_gets_no_namespace_if_it_is_gone(tap_node: TapNode) -> None:
    echo = f"import json; print(json.dumps(json.load(open('{tap_node.folder}/stdin'))['prevResult']))"
    script = f'cat > {tap_node.folder}/stdin\necho "$CNI_COMMAND=$CNI_NETNS" >> {tap_node.folder}/calls\n'
    tap_node.plugin("mover", f'{script}test $CNI_COMMAND = DEL || {sys.executable} -c "{echo}"\n')
    tap_node.configure(tap_node.bridge_plugin(ipMasq=False), {"type": "mover"})
    which = sandbox()
    network = tap_node.attach(which)
    subprocess.run(["ip", "netns", "del", tap_node.netns_of(which).name], check=True)
    tap_node.release(which)
    assert (tap_node.folder / "calls").read_text().split() == [f"ADD={network['netns']}", "DEL="]
    until(lambda: not tap_node.leftovers(), what="lease and veth gone")


def test_attach_after_a_reboot_creates_the_network_again(tap_node: TapNode) -> None:
    which = sandbox()
    first = tap_node.attach(which)
    subprocess.run(["ip", "netns", "del", tap_node.netns_of(which).name], check=True)
    second = tap_node.attach(which)
    assert second["fetch_key"] != first["fetch_key"]
    with tap_node.guest(which, second) as guest:
        guest.boot()
    tap_node.release(which)


def test_release_while_the_guest_still_runs_takes_its_network_away(tap_node: TapNode) -> None:
    which = sandbox()
    with tap_node.guest(which, tap_node.attach(which)) as guest:
        guest.boot()
        tap_node.release(which)
        until(lambda: not tap_node.leftovers(), what="all released under a running guest")


def test_a_restarted_tapmanager_still_has_its_pods(tap_node: TapNode) -> None:
    which = sandbox()
    network = tap_node.attach(which)
    with tap_node.guest(which, network) as guest:
        guest.boot()
        tap_node.stop(signal.SIGKILL)
        assert (
            subprocess.run(["ping", "-c1", "-W2", network["ips"][0]], capture_output=True, check=False).returncode == 0
        )
        tap_node.start()
        _, ack = guest.dhcp(packet.REQUEST, ciaddr=guest.address)
        assert ack.kind == packet.ACK
    with tap_node.guest(which, network) as again:
        again.boot()
    assert tap_node.attach(which) == network
    tap_node.release(which)


def test_a_clean_stop_leaves_pods_alone_and_removes_its_socket(tap_node: TapNode) -> None:
    which = sandbox()
    network = tap_node.attach(which)
    assert tap_node.stop() == 0
    assert not Path(tap_node.socket).exists()
    assert tap_node.netns_of(which).exists()
    tap_node.start()
    assert tap_node.attach(which) == network
    tap_node.release(which)


@pytest.mark.parametrize("phase", ["bridge", "hold"])
def test_release_cleans_up_after_a_tapmanager_killed_during_attach(tap_node: TapNode, phase: str) -> None:
    """It is killed before the chain's first plugin did anything, and after the bridge plugin did everything."""
    tap_node.plugin("hold", f"test $CNI_COMMAND = DEL && exit 0\necho $$ > {tap_node.folder}/pid\nexec sleep 600\n")
    chain = (
        [{"type": "hold"}, tap_node.bridge_plugin()]
        if phase == "hold"
        else [tap_node.bridge_plugin(), {"type": "hold"}]
    )
    tap_node.configure(*chain)
    which = sandbox()

    def attach() -> None:
        with pytest.raises(OSError):
            tap_node.attach(which)

    caller = threading.Thread(target=attach)
    caller.start()
    pid = tap_node.folder / "pid"
    until(lambda: pid.exists() and pid.read_text(), what="the plugin holding")
    tap_node.stop(signal.SIGKILL)
    caller.join()
    subprocess.run(
        ["kill", "-9", pid.read_text().strip()], check=True
    )  # what systemd does with the service's processes
    tap_node.start()
    assert tap_node.listed() == [which]
    tap_node.release(which)
    assert tap_node.listed() == []
    assert not tap_node.netns_of(which).exists()
    until(lambda: not tap_node.leftovers(), what="all cleared")


def test_an_unreadable_record_is_kept_listed_and_keeps_others_working(tap_node: TapNode) -> None:
    which, other = sandbox(), sandbox()
    tap_node.attach(which)
    assert tap_node.call("lost") == {"lost": {}}
    record = tap_node.ledger / f"{which}.json"
    good = record.read_text()
    record.write_text(good[:100])
    tap_node.stop()
    tap_node.start()
    assert tap_node.listed() == [which]
    for act in (tap_node.attach, tap_node.release):
        with pytest.raises(protocol.RemoteError, match=f"{which}.json cannot be read") as caught:
            act(which)
        assert caught.value.kind == "internal"
    assert tap_node.call("lost") == {"lost": {}}
    assert f"pod.not_recovered sandbox={which}" in tap_node.log.read_text()
    assert tap_node.netns_of(which).exists()
    tap_node.attach(other)
    tap_node.release(other)
    record.write_text(good)
    tap_node.release(which)


def test_a_second_tapmanager_is_refused_with_the_holder_of_the_lock(tap_node: TapNode) -> None:
    assert tap_node.process is not None
    command = [sys.executable, "-m", "tapmanager", "--socket", tap_node.socket, "--state-dir", str(tap_node.ledger)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert f"process {tap_node.process.pid}" in done.stderr
    assert "Traceback" not in done.stderr
    assert tap_node.call("status")["ready"] is True


def test_many_cycles_leave_no_descriptor_thread_or_file(tap_node: TapNode) -> None:
    def cycle() -> None:
        which = sandbox()
        network = tap_node.attach(which)
        with tap_node.guest(which, network) as guest:
            guest.boot()
        tap_node.release(which)

    assert tap_node.process is not None
    tasks = Path(f"/proc/{tap_node.process.pid}/task")
    cycle()
    descriptors, threads = tap_node.descriptors(), len(list(tasks.iterdir()))
    for _ in range(10):
        cycle()
    until(lambda: tap_node.descriptors() <= descriptors, what="descriptors closed")
    until(lambda: len(list(tasks.iterdir())) <= threads, what="threads ended")
    until(lambda: not tap_node.leftovers(), what="all released")


def test_a_part_that_somebody_removed_is_named(tap_node: TapNode) -> None:
    tap_node.configure(tap_node.bridge_plugin())
    whole, without_tap, without_netns = (sandbox() for _ in range(3))
    for which in (whole, without_tap, without_netns):
        tap_node.attach(which)
    assert tap_node.call("lost", {}) == {"lost": {}}
    subprocess.run(["ip", "-n", tap_node.netns_of(without_tap).name, "link", "delete", "tap0"], check=True)
    subprocess.run(["ip", "netns", "delete", tap_node.netns_of(without_netns).name], check=True)
    lost = tap_node.call("lost", {})["lost"]
    assert set(lost) == {without_tap, without_netns}
    assert "tap0" in lost[without_tap]
    assert "network namespace" in lost[without_netns]
    for which in (whole, without_tap, without_netns):
        tap_node.release(which)
    assert tap_node.call("lost", {}) == {"lost": {}}
