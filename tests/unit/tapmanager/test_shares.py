"""virtshim-shares reads its requests and calls virtiofsd correctly. tests/integration/volumes tests its work."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tapmanager.cgroups.tree import VmCgroups
from tapmanager.errors import TapmanagerError
from tapmanager.peer import Peer
from tapmanager.shares import passt, plan, verbs
from tapmanager.shares.__main__ import ShareSettings, load
from tapmanager.shares.daemons import Place, ShareDaemons
from tapmanager.shares.passt import Network
from tapmanager.shares.plan import SharedMount
from virtshim.config.settings import Shares

ROOT, QEMU = Peer(0, 1), Peer(2130706433, 2)
ID = "0123456789abcdef" * 4


class Recorded(ShareDaemons):
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def check(self, *args: Any) -> None:
        self.calls.append(("check", *args[:-1]))

    def start(
        self, place: Place, uid: int, mounts: Any, until: float, group: str = "", network: Network | None = None
    ) -> None:
        self.calls.append(("start", place.directory, uid, tuple(mounts), group, *([network] if network else [])))

    def end(self, place: Place, until: float) -> None:
        self.calls.append(("end", place.directory))


def ask(daemons: ShareDaemons, verb: str, args: dict[str, Any], peer: Peer = ROOT) -> Any:
    return verbs.perform(daemons, {"verb": verb, "args": args, "timeout": 5.0}, peer, time.monotonic() + 5).ok


def share(**changes: Any) -> dict[str, Any]:
    args = {"directory": "/run/shares", "container": ID, "uid": 7, "parent": "/kubepods/pod1", "mounts": []}
    return args | changes


def test_a_share_is_named_by_its_container_and_its_cgroup_is_below_its_pods() -> None:
    daemons = Recorded()
    mount = {"host_path": "/srv", "readonly": True, "follows": True}
    ask(daemons, "share", share(mounts=[mount]))
    ask(daemons, "share", share(parent=""))
    ask(daemons, "unshare", {"directory": "/run/shares", "name": ID[:20]})
    group = f"/kubepods/pod1/virtshim-{ID}-volumes"
    assert daemons.calls == [
        ("start", f"/run/shares/{ID[:20]}", 7, (SharedMount("/srv", readonly=True, follows=True),), group),
        ("start", f"/run/shares/{ID[:20]}", 7, (), ""),
        ("end", f"/run/shares/{ID[:20]}"),
    ]


NETWORK = {
    "netns": "/run/netns/cni-1",
    "inode": 4026532401,
    "uid": 2130706433,
    "interface": "eth0",
    "addresses": ["10.88.0.5/16", "fd00::5/64"],
    "ports": {"tcp": [22, 443], "udp": [53]},
    "dns": {"servers": ["10.96.0.10", "fd00::10"], "searches": ["svc.cluster.local", "cluster.local"]},
}


def network(**changes: Any) -> dict[str, Any]:
    return share(network={**NETWORK, **changes})


def test_a_share_without_volumes_may_have_a_network() -> None:
    daemons = Recorded()
    ask(daemons, "share", network())
    ((*_, asked),) = daemons.calls
    words = " ".join(passt.command_line(asked, "/run/shares/x/passt", "/tmp/sock"))
    assert words.startswith("/run/shares/x/passt --quiet --socket /tmp/sock --interface eth0 --mtu 65520 ")
    for part in (
        "--address 10.88.0.5 --netmask 16 --gateway 169.254.7.1",
        "--address fd00::5 --gateway fe80::7:1 --no-ra",
        "--dns 10.96.0.10 --dns fd00::10 --search svc.cluster.local --search cluster.local",
        "--tcp-ports 22 --tcp-ports 443 --udp-ports 53",
    ):
        assert part in words
    assert "-only" not in words


@pytest.mark.parametrize(("address", "only"), [("10.88.0.5/32", "--ipv4-only"), ("fd00::5/128", "--ipv6-only")])
def test_a_network_without_ports_and_names_has_one_family(address: str, only: str) -> None:
    daemons = Recorded()
    ask(daemons, "share", network(addresses=[address], ports={}, dns={}))
    ((*_, asked),) = daemons.calls
    words = " ".join(passt.command_line(asked, "/run/shares/x/passt", "/tmp/sock"))
    assert only in words
    assert "--dns none --search none --tcp-ports none --udp-ports none" in words
    assert ("--no-ra" in words) == (":" in address)


@pytest.mark.parametrize(
    ("verb", "args"),
    [
        ("share", network(netns="netns/x")),
        ("share", network(inode=0)),
        ("share", network(uid=0)),
        ("share", network(interface="-x y")),
        ("share", network(interface="a/b")),
        ("share", network(addresses=[])),
        ("share", network(addresses=["10.88.0.5"])),
        ("share", network(addresses=["10.88.0.5/16", "10.88.0.6/16"])),
        ("share", network(ports={"tcp": [0]})),
        ("share", network(ports={"tcp": [65536]})),
        ("share", network(ports={"tcp": ["22"]})),
        ("share", network(ports={"tcp": [22, 22]})),
        ("share", network(ports={"sctp": [22]})),
        ("share", network(ports={"tcp": list(range(1, 34)), "udp": list(range(1, 33))})),
        ("share", network(dns={"servers": ["none"]})),
        ("share", network(dns={"searches": ["-x y"]})),
        ("share", network(more=1)),
        ("passt", {"more": 1}),
        ("share", share(container="../../etc")),
        ("share", share(directory="/run/../etc")),
        ("share", share(directory="run")),
        ("share", share(directory="/")),
        ("share", share(parent="/a/../b")),
        ("share", share(uid=-1)),
        ("share", share(mounts=[{"host_path": "srv"}])),
        ("share", share(mounts=[{"host_path": "/srv", "readonly": "yes"}])),
        ("share", share(mounts=[{"host_path": "/srv"}] * 257)),
        ("share", share(more=1)),
        ("unshare", {"directory": "/run", "name": "../etc"}),
        ("unshare", {"directory": "/run", "name": ID}),
        ("check", {"mounts": [{"host_path": "/a\0b"}]}),
        ("list", {"directory": "/run/"}),
        ("mount", {}),
    ],
)
def test_a_request_that_could_lead_elsewhere_is_refused(verb: str, args: dict[str, Any]) -> None:
    daemons = Recorded()
    with pytest.raises(TapmanagerError) as refused:
        ask(daemons, verb, args)
    assert (refused.value.kind, daemons.calls) == ("invalid", [])


@pytest.mark.hostile
def test_every_share_request_of_qemu_is_refused() -> None:
    for verb in ("check", "passt", "share", "unshare", "list"):
        with pytest.raises(TapmanagerError, match="root only"):
            ask(Recorded(), verb, {}, QEMU)


def test_both_virtiofsds_are_recognised_and_get_equivalent_arguments() -> None:
    assert not plan.is_rust(
        "virtiofsd version 7.2.22 (Debian 1:7.2+dfsg-7)\nusing FUSE kernel interface version 7.36\n"
    )
    assert plan.is_rust("virtiofsd 1.10.1\n")
    ours = plan.command_line("/v", 3, "/run/shares/x/root", rust=False)
    rust = plan.command_line("/v", 3, "/run/shares/x/root", rust=True)
    assert ours[:5] == ("/v", "--fd=3", "--rlimit-nofile=0", "-o", "source=/run/shares/x/root")
    assert rust[:2] == ("/v", "--fd=3")
    assert "--shared-dir=/run/shares/x/root" in rust
    for words in (" ".join(ours), " ".join(rust)):
        assert "sandbox=namespace" in words
        assert "modcaps=-mknod:-setfcap" in words
        assert "submounts" in words
        assert "--rlimit-nofile=0" in words
    for command in (ours, rust, ("python", "launcher.py", "serve", "/run/shares/x/root")):
        assert plan.serves(command, "/run/shares/x/root")
        assert not plan.serves(command, "/run/shares/y/root")


@pytest.mark.parametrize(("of_the_node", "most"), [(800_000, 100_000), (1 << 63, 1_000_000)])
def test_only_the_volumes_of_eight_vms_together_can_exhaust_the_nodes_open_files(of_the_node: int, most: int) -> None:
    assert plan.most_open_files(of_the_node) == most


def test_the_share_program_reads_virtshims_settings_files(tmp_path: Path) -> None:
    assert ShareSettings() == ShareSettings(**Shares().model_dump()) == load(None)
    file = tmp_path / "config.toml"
    file.write_text('[shares]\nsocket = "/a"\nvirtiofsd = "/v"\npasst = "/p"\n[other]\nx = 1\n')
    (tmp_path / "config.toml.d").mkdir()
    (tmp_path / "config.toml.d" / "10.toml").write_text('[shares]\nsocket = "/b"\n')
    assert load(str(file)) == ShareSettings("/b", "/v", "/p")
    file.write_text("[shares]\ncolour = 1\n")
    with pytest.raises(TapmanagerError, match="colour"):
        load(str(file))


def test_a_missing_virtiofsd_is_reported_with_the_remedy() -> None:
    missing = ShareDaemons(None, "/nowhere/virtiofsd")  # type: ignore[arg-type]  # not asked for
    with pytest.raises(TapmanagerError, match="virtiofsd is missing at /nowhere/virtiofsd; install it") as refused:
        missing.check([], time.monotonic() + 5)
    assert refused.value.kind == "unavailable"


def test_a_process_with_the_reused_pid_of_an_ended_daemon_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(str(tmp_path / "share"))
    Path(place.root).mkdir(parents=True)
    wait = ["sh", "-c", "echo; read _"]
    with (
        subprocess.Popen([*wait, "virtiofsd", f"--shared-dir={place.root}"], stdin=-1, stdout=-1) as daemon,
        subprocess.Popen([*wait, "another"], stdin=-1, stdout=-1) as other,
    ):
        for process in (daemon, other):
            assert process.stdout is not None
            process.stdout.readline()  # its command line can be read
        open_one = os.pidfd_open

        def reused(pid: int) -> int:
            if pid != daemon.pid:
                return open_one(pid)
            daemon.kill()
            daemon.wait()
            return open_one(other.pid)

        monkeypatch.setattr("os.pidfd_open", reused)
        ShareDaemons(VmCgroups(())).end(place, time.monotonic() + 20)
        is_left = other.poll() is None
        other.kill()
    assert is_left
    assert not Path(place.directory).exists()
