"""Each renderer of cloud-init reads the network-config that virtshim writes, in the oldest supported version, Debian
12's and the newest. The output for ifupdown, netplan and systemd-networkd is applied beside gateways that answer."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from podclient import wait_until

from virtshim.model.network import Dns, Interface, Route
from virtshim.seed.documents import config_drive_network_data
from virtshim.seed.network_config import network_config

pytestmark = [pytest.mark.network, pytest.mark.cloudinit]

HERE = Path(__file__).parent / "cloudinit"
BUILT = Path(__file__).parents[3] / "build" / "cloud-init"
TOOLS = BUILT / "tools"
DNS = Dns(("10.96.0.10", "fd00:96::a"), ("ns.svc.cluster.local", "svc.cluster.local"))
MAC, SECOND_MAC, THIRD_MAC = "ee:ee:ee:00:00:01", "ee:ee:ee:00:00:02", "ee:ee:ee:00:00:03"
# Addresses behind all gateways.
FAR, FAR_6 = "10.200.0.1", "fd00:200::1"
HOST_MAC, HOST_LINK_LOCAL = "ee:ee:ee:ee:ee:ee", "fe80::ecee:eeff:feee:eeee"


def nic(
    *addresses: str, routes: tuple[Route, ...] = (), name: str = "eth0", mac: str = MAC, mtu: int = 1400
) -> Interface:
    return Interface(name, mac, mtu, addresses, routes)


SHAPES = {
    "bridge": (nic("10.88.0.5/16", routes=(Route("0.0.0.0/0", "10.88.0.1"), Route("10.96.0.0/12", "10.88.0.2"))),),
    "ptp": (nic("10.89.37.2/32", routes=(
        Route("10.89.37.1/32"), Route("10.89.37.0/24", "10.89.37.1"), Route("0.0.0.0/0", "10.89.37.1"))),),
    "ptp-dual": (nic("10.89.37.2/32", "fd00:89::2/128", routes=(
        Route("10.89.37.1/32"), Route("10.89.37.0/24", "10.89.37.1"), Route("0.0.0.0/0", "10.89.37.1"),
        Route("fd00:89::1/128"), Route("fd00:89::/64", "fd00:89::1"), Route("::/0", "fd00:89::1"))),),
    "calico": (nic("192.168.5.9/32", "fd00:5::9/128", routes=(
        Route("169.254.1.1/32"), Route("0.0.0.0/0", "169.254.1.1"), Route("::/0", HOST_LINK_LOCAL))),),
    "aws": (nic("10.0.3.7/32", routes=(Route("169.254.1.1/32"), Route("0.0.0.0/0", "169.254.1.1"))),),
    "dual": (nic("10.88.0.5/16", "fd00:88::5/64", routes=(
        Route("0.0.0.0/0", "10.88.0.1"), Route("10.96.0.0/12", "10.88.0.2"),
        Route("::/0", "fd00:88::1"), Route("fd00:96::/108", "fd00:88::2"))),),
    "six": (nic("fd00:88::5/64", routes=(Route("::/0", "fd00:88::1"),)),),
    "several": (
        nic("10.88.0.5/16", routes=(Route("0.0.0.0/0", "10.88.0.1"),)),
        nic("10.90.0.5/24", "fd00:90::5/64", name="net1", mac=SECOND_MAC, routes=(
            Route("0.0.0.0/0", "10.90.0.1"), Route("10.91.0.0/16", "10.90.0.1"), Route("::/0", "fd00:90::1"))),
        nic(name="net2", mac=THIRD_MAC, mtu=0),
    ),
}  # fmt: skip
# The ending of a shape's name for the form of a config drive.
DRIVE = "-drive"
OLD = ("eni", "netplan", "sysconfig")
RENDERERS = {
    "oldest": OLD,
    "usual": (*OLD, "networkd", "network_manager"),
    "newest": (*OLD, "networkd", "network_manager"),
}


@dataclasses.dataclass(frozen=True)
class Rendered:
    errors: dict[str, dict[str, str]]
    """By shape and renderer."""
    out: Path

    def text(self, shape: str, renderer: str) -> str:
        """All text that the guest's system would read, except how it finds the NIC's name."""
        files = sorted(
            path for path in (self.out / shape / renderer).rglob("*") if path.is_file() and path.suffix != ".rules"
        )
        return "\n".join(path.read_text() for path in files)


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rendered]:
    """The rendered files, by version."""
    documents = tmp_path_factory.mktemp("documents")
    for shape, interfaces in SHAPES.items():
        config = network_config(interfaces, DNS)
        assert config is not None
        (documents / f"{shape}.json").write_text(json.dumps(config))
        (documents / f"{shape}{DRIVE}.json").write_text(json.dumps(config_drive_network_data(config)))
    found = {}
    for version in RENDERERS:
        out = tmp_path_factory.mktemp(version)
        path = [str(root / "usr/lib/python3/dist-packages") for root in (BUILT / version, TOOLS)]
        words = [sys.executable, HERE / "render.py", documents, out]
        environment = {**os.environ, "PYTHONPATH": ":".join(path), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        found[version] = Rendered(json.loads(done.stdout), out)
    return found


@pytest.mark.parametrize("version", RENDERERS)
def test_every_renderer_accepts_every_network_config(rendered: dict[str, Rendered], version: str) -> None:
    nothing_wrong = dict.fromkeys(RENDERERS[version], "")
    shapes = [*SHAPES, *(f"{shape}{DRIVE}" for shape in SHAPES)]
    assert rendered[version].errors == dict.fromkeys(shapes, nothing_wrong)


@pytest.mark.parametrize("form", ["", DRIVE])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_renderer_writes_the_whole_network_config(rendered: dict[str, Rendered], shape: str, form: str) -> None:
    for version, renderers in RENDERERS.items():
        for renderer in renderers:
            text = rendered[version].text(f"{shape}{form}", renderer)
            missing = [fact for fact in facts(shape) if not re.search(rf"(?<![\w.:]){re.escape(fact)}(?![\w.:])", text)]
            assert missing == [], f"{renderer} of the {version}:\n{text}"


def facts(shape: str) -> Iterator[str]:
    """The words that a renderer's output must contain."""
    first = SHAPES[shape][0].addresses
    # Some omit name servers of a family in which the NIC has no address.
    yield from (server for server in DNS.servers if any((":" in server) == (":" in address) for address in first))
    yield from DNS.searches
    for interface in SHAPES[shape]:
        yield from (address.partition("/")[0] for address in interface.addresses)
        yield from (route.gateway for route in interface.routes if route.gateway and route.gateway != "10.90.0.1")
        yield from (
            route.destination.split("/")[0] for route in interface.routes if not route.destination.endswith("/0")
        )
        if interface.mtu:
            yield str(interface.mtu)


# `make test` has those of Debian 12.
APPLIED = [
    pytest.param(version, renderer, "", marks=[pytest.mark.full] * (version != "usual"))
    for version, renderers in RENDERERS.items()
    for renderer in renderers
    if renderer in ("eni", "netplan", "networkd")
]
APPLIED += [
    pytest.param("usual", renderer, DRIVE, marks=[pytest.mark.full] * (renderer != "netplan"))
    for renderer in ("eni", "netplan", "networkd")
]


@pytest.mark.parametrize(("version", "renderer", "form"), APPLIED)
def test_gateways_and_targets_behind_them_answer(
    rendered: dict[str, Rendered], tmp_path: Path, version: str, renderer: str, form: str
) -> None:
    with contextlib.ExitStack() as open_nets:
        nets = {shape: open_nets.enter_context(net(shape)) for shape in SHAPES}
        for shape, (guest, _) in nets.items():
            root = rendered[version].out / f"{shape}{form}" / renderer
            open_nets.enter_context(APPLY[renderer](guest, root, tmp_path / shape))
        for shape, (guest, _) in nets.items():
            reached = targets(shape)
            wait_until(lambda guest=guest, reached=reached: all(pings(guest, one) for one in reached), 60,
                       f"{shape}: {sorted(reached)} answer; {said(guest)}")  # fmt: skip
            defaults = json.loads(ip(guest, "-json", "-4", "route", "show", "default"))
            assert len(defaults) <= 1
            # Of an IPv6-only NIC ifupdown sets IPv6's alone, and the kernel takes it back when the NIC comes up.
            if renderer != "eni" or defaults:
                assert json.loads(ip(guest, "-json", "link", "show", "eth0"))[0]["mtu"] == 1400


def targets(shape: str) -> set[str]:
    """The gateways, and addresses behind a default route."""
    gateways = {route.gateway for interface in SHAPES[shape] for route in interface.routes if route.gateway}
    return {one if one != HOST_LINK_LOCAL else f"{one}%eth0" for one in gateways} | (
        {FAR_6 if ":" in one else FAR for one in gateways}
    )


@contextlib.contextmanager
def net(shape: str) -> Iterator[tuple[str, str]]:
    """Two namespaces: a guest's with its NICs, and one with their other ends, which have the gateways' addresses."""
    tag = secrets.token_hex(3)
    guest, host = f"ci-guest-{tag}", f"ci-host-{tag}"
    with contextlib.ExitStack() as made:
        for name in (guest, host):
            subprocess.run(["ip", "netns", "add", name], check=True)
            made.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
            # Addresses are usable at once, and only assigned ones exist.
            run(
                name,
                "sysctl",
                "-qw",
                "net.ipv6.conf.default.accept_dad=0",
                "net.ipv6.conf.all.accept_dad=0",
                "net.ipv4.ip_forward=1",
                "net.ipv6.conf.all.forwarding=1" if name == host else "net.ipv6.conf.all.forwarding=0",
            )
            ip(name, "link", "set", "lo", "up")
        ip(host, "address", "add", f"{FAR}/32", "dev", "lo")
        ip(host, "-6", "address", "add", f"{FAR_6}/128", "dev", "lo")
        for number, interface in enumerate(SHAPES[shape]):
            end = f"host{number}"
            mac = HOST_MAC[:-2] + f"{0xEE - number:02x}"
            ip(
                host,
                "link",
                "add",
                end,
                "address",
                mac,
                "type",
                "veth",
                "peer",
                interface.name,
                "address",
                interface.mac,
                "netns",
                guest,
            )
            ip(host, "link", "set", end, "up")
            for gateway in {route.gateway for route in interface.routes if route.gateway} - {HOST_LINK_LOCAL}:
                ip(host, "address", "add", str(ipaddress.ip_network(gateway)), "dev", end)
            for address in interface.addresses:
                ip(host, "route", "add", str(ipaddress.ip_network(address.partition("/")[0])), "dev", end)
        yield guest, host


def run(namespace: str, *words: str | Path) -> str:
    done = subprocess.run(
        ["ip", "netns", "exec", namespace, *words], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def ip(namespace: str, *words: str) -> str:
    done = subprocess.run(["ip", "-n", namespace, *words], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


def pings(namespace: str, target: str) -> bool:
    words = ["ip", "netns", "exec", namespace, "ping", "-c", "1", "-W", "1", target]
    return subprocess.run(words, capture_output=True, check=False, timeout=100).returncode == 0


def said(namespace: str) -> str:
    return "".join(ip(namespace, *words) for words in (("-o", "address"), ("route",), ("-6", "route")))


@contextlib.contextmanager
def with_ifupdown(namespace: str, root: Path, work: Path) -> Iterator[None]:
    # What it runs for IPv6 is where a package puts it, or not there: then it tells of errors.
    script = f"mount -t tmpfs none /run; mkdir /run/network; {TOOLS}/sbin/ifup --no-scripts --ignore-errors -a -i $0"
    run(namespace, "sh", "-c", script, root / "etc/network/interfaces")
    yield


@contextlib.contextmanager
def with_netplan(namespace: str, root: Path, work: Path) -> Iterator[None]:
    shutil.copytree(root, work)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(TOOLS / "usr/lib/x86_64-linux-gnu")}
    words = [TOOLS / "usr/libexec/netplan/generate", "--root-dir", work]
    subprocess.run(words, env=environment, capture_output=True, timeout=100, check=True)
    with networkd(namespace, work / "run/systemd/network"):
        yield


@contextlib.contextmanager
def with_networkd(namespace: str, root: Path, work: Path) -> Iterator[None]:
    with networkd(namespace, root / "etc/systemd/network"):
        yield


@contextlib.contextmanager
def networkd(namespace: str, settings: Path) -> Iterator[None]:
    """Runs networkd as in a container, without udev: /sys is read-only."""
    script = """
        mount -t tmpfs none /run && mkdir -p /run/systemd/network /run/systemd/netif/links /run/systemd/netif/leases
        for file in $0/*.network; do sed s/PermanentMACAddress/MACAddress/ $file > /run/systemd/network/${file##*/}; done
        chown -R systemd-network: /run/systemd/netif && mount -o remount,bind,ro /sys && exec /lib/systemd/systemd-networkd
    """
    words = ["ip", "netns", "exec", namespace, "sh", "-c", script, settings]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as daemon:
        try:
            yield
        finally:
            daemon.send_signal(signal.SIGKILL)


APPLY = {"eni": with_ifupdown, "netplan": with_netplan, "networkd": with_networkd}
