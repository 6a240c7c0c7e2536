"""A real tapmanager process on private paths, with its own real CNI bridge network, and its leftovers on the machine."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from toy_guest import ToyGuest

from tapmanager import protocol

PLUGINS = "/usr/lib/cni"


def until(condition: Callable[[], object], seconds: float = 10.0, what: str = "the condition") -> None:
    """Waits until `condition()` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true within {seconds} s"
        time.sleep(0.01)


def sandbox() -> str:
    return secrets.token_hex(32)


class TapNode:
    """`start` and `stop` the process as often as a test likes; `clean` removes the host's side."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = str(folder / "t.sock")
        self.netns_dir = Path("/run/netns")
        self.conf_dir = folder / "cni"
        self.bin_dir = folder / "bin"
        self.leases = folder / "leases"
        self.ledger = folder / "ledger"
        tag = secrets.token_hex(3)
        self.bridge = f"vst{tag}"
        self.network = f"vst-{tag}"
        # Of 10.89.0.0/16, which nothing else on the machine uses; a third octet of its own a node.
        self.subnet = f"10.89.{secrets.randbelow(200) + 20}"
        # What Python runs.
        self.program: tuple[str, ...] = ("-m", "tapmanager")
        self.process: subprocess.Popen[bytes] | None = None
        self.log = folder / "tapmanager.log"
        self._arguments: tuple[str, ...] = ()
        for made in (self.conf_dir, self.bin_dir):
            made.mkdir(parents=True)
        self.configure()

    # -- CNI -----------------------------------------------------------------------------------------------------------

    def bridge_plugin(self, **more: object) -> dict[str, object]:
        ipam = {
            "type": "host-local",
            "dataDir": str(self.leases),
            "ranges": [[{"subnet": f"{self.subnet}.0/24"}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        return {"type": "bridge", "bridge": self.bridge, "isGateway": True, "ipMasq": True, "ipam": ipam, **more}

    def configure(self, *plugins: dict[str, object], version: str = "1.0.0", **more: object) -> None:
        chain = list(plugins) or [self.bridge_plugin()]
        conf = {"cniVersion": version, "name": self.network, "plugins": chain, **more}
        (self.conf_dir / "10-test.conflist").write_text(json.dumps(conf))

    def plugin(self, name: str, script: str) -> None:
        """Installs a plugin of our own, for /bin/sh."""
        path = self.bin_dir / name
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(0o755)

    # -- the process ---------------------------------------------------------------------------------------------------

    def start(self, *more: str) -> None:
        self._arguments = more
        command = [
            sys.executable, *self.program,
            "--socket", self.socket, "--state-dir", str(self.ledger), "--netns-dir", str(self.netns_dir),
            "--cni-conf-dir", str(self.conf_dir), "--cni-bin-dir", str(self.bin_dir), "--cni-bin-dir", PLUGINS,
            *more,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until(self._answers, 20, "tapmanager's first answer")

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(OSError):
            self.call("list", timeout=2)
            return True
        return False

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(30)
        self.process = None
        return code

    # -- asking --------------------------------------------------------------------------------------------------------

    def call(self, verb: str, args: dict[str, object] | None = None, timeout: float = 60.0) -> dict[str, object]:
        answer, fds = protocol.call(self.socket, verb, args or {}, timeout)
        protocol.close_all(fds)
        return answer

    def attach(self, which: str, name: str = "web-0", timeout: float = 60.0, **more: object):
        pod = {"namespace": "default", "name": name, "uid": "uid-1"}
        dns = {"servers": ["10.96.0.10"], "searches": ["default.svc.cluster.local", "cluster.local"], "options": []}
        return self.call("attach", {"sandbox": which, "pod": pod, "dns": dns, **more}, timeout)

    def release(self, which: str, timeout: float = 60.0) -> None:
        assert self.call("release", {"sandbox": which}, timeout) == {}

    def listed(self) -> list[str]:
        return list(self.call("list")["sandboxes"])

    def arm(self, which: str, uid: int = 0, queues: int | None = None, stream: str = "") -> None:
        """Arms the key as virtshim does before it starts the sandbox's VM; without `queues` as earlier versions did. `stream`:
        the path of passt's socket."""
        limits = {"cpu_shares": 0, "cpu_quota": 0, "cpu_period": 0, "cpuset_cpus": "", "cpuset_mems": "", "memory": 0}
        args = {"sandbox": which, "uid": uid, "container": "c" * 64, "parent": "", "limits": {**limits, "swap": None}}
        more = {**({} if queues is None else {"queues": queues}), **({"stream": stream} if stream else {})}
        assert self.call("group", {**args, "oom_score_adj": 0, **more}) == {"made": False}

    def fetch(self, which: str, key: str) -> tuple[list[dict[str, object]], list[int]]:
        """Fetches the taps as the process of a VM that virtshim has just started."""
        with contextlib.suppress(protocol.RemoteError):  # no such sandbox
            self.arm(which)
        answer, fds = protocol.call(self.socket, "fetch", {"sandbox": which, "key": key}, 10.0)
        return answer["interfaces"], fds

    @contextlib.contextmanager
    def guest(self, which: str, network: dict[str, object]) -> Iterator[ToyGuest]:
        nics, fds = self.fetch(which, network["fetch_key"])
        assert len(nics) == len(fds) == 1
        with ToyGuest(fds[0], nics[0]["mac"]) as guest:
            yield guest

    # -- looking -------------------------------------------------------------------------------------------------------

    def netns_of(self, which: str) -> Path:
        return self.netns_dir / f"virtshim-{which[:20]}"

    def inside(self, which: str, *command: str) -> str:
        name = self.netns_of(which).name
        return subprocess.run(
            ["ip", "netns", "exec", name, *command], capture_output=True, text=True, check=True
        ).stdout

    def leased(self) -> set[str]:
        folder = self.leases / self.network
        return {path.name for path in folder.iterdir() if path.name[0].isdigit()} if folder.exists() else set()

    def ports(self) -> set[str]:
        folder = Path(f"/sys/class/net/{self.bridge}/brif")
        return set(os.listdir(folder)) if folder.exists() else set()

    def nat_rules(self) -> list[str]:
        rules = subprocess.run(["iptables-save", "-t", "nat"], capture_output=True, text=True, check=True).stdout
        return [line for line in rules.splitlines() if f"{self.subnet}." in line or self.network in line]

    def forget_nat_rules(self) -> None:
        """Removes the NAT rules of this node's pods, as a reboot does."""
        chains = set()
        for rule in self.nat_rules():
            words = shlex.split(rule)
            if words[:2] == ["-A", "POSTROUTING"]:
                subprocess.run(["iptables", "-w", "-t", "nat", "-D", *words[1:]], check=True)
                chains.add(words[-1])
        for chain in chains:
            for flag in ("-F", "-X"):
                subprocess.run(["iptables", "-w", "-t", "nat", flag, chain], check=True)

    def leftovers(self) -> list[str]:
        """Everything that a pod of this node may leave; empty after all were released."""
        found = [f"lease {ip}" for ip in sorted(self.leased())]
        found += [f"bridge port {port}" for port in sorted(self.ports())]
        found += [f"nat rule {rule}" for rule in self.nat_rules()]
        if self.ledger.exists():
            found += [f"ledger file {path.name}" for path in self.ledger.iterdir() if path.name != "lock"]
        found += [f"placement {path.name}" for path in self.placement("").parent.glob("*")]
        return found

    def placement(self, sandbox: str) -> Path:
        """The file that says where the sandbox's next VM goes, and who may fetch its taps."""
        return Path(self.socket).parent / "placements" / f"{sandbox}.json"

    def descriptors(self) -> int:
        assert self.process is not None
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def renew(self) -> None:
        """Resets it for the next test: without pods, plugins, leases and bridge, with a process without extra arguments."""
        if self.runs() and self._arguments:
            self.stop()
        if not self.runs():
            self.start()
        self._empty(self.folder, {Path(self.socket), self.ledger, self.log, self.conf_dir, self.bin_dir})
        self._empty(self.conf_dir)
        self._empty(self.bin_dir)
        self.configure()
        self._release_all()
        if self.leftovers():  # a test has failed: the others shall not
            self.stop(signal.SIGKILL)
            self.forget_nat_rules()
            self._empty(self.ledger)
            self.start()
        self._remove_bridge()
        self.log.write_bytes(b"")

    def clean(self) -> None:
        """Releases what a failed test left, ends the process, removes the bridge. Gone is success."""
        if not self.runs():
            with contextlib.suppress(AssertionError):
                self.start()
        if self.runs():
            self.configure()
            self._release_all()
            self.stop()
        self._remove_bridge()

    @staticmethod
    def _empty(directory: Path, but: Collection[Path] = ()) -> None:
        for path in {*directory.iterdir()} - {*but}:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _release_all(self) -> None:
        for which in self.listed():
            with contextlib.suppress(protocol.RemoteError):
                self.release(which)

    def _remove_bridge(self) -> None:
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True, check=False)

    def settled_leftovers(self) -> list[str]:
        with contextlib.suppress(AssertionError):  # a veth goes a moment after its namespace
            until(lambda: not self.leftovers(), 5)
        return self.leftovers()


@contextlib.contextmanager
def for_a_test(node: TapNode) -> Iterator[TapNode]:
    """A node shared by many tests: it runs, nothing of a test is left at its end, and the next test finds it unchanged."""
    left: list[str] = []
    try:
        yield node
    finally:
        try:
            left = node.settled_leftovers()
        finally:
            node.renew()
    assert left == [], "left behind by tapmanager"


@contextlib.contextmanager
def private_node() -> Iterator[TapNode]:
    """A configured but not started node; nothing of it is left at the end. It has a short path because socket names hold
    107 bytes. /var/tmp is in memory in `make test`: tapmanager syncs each change of its ledger."""
    folder = Path(tempfile.mkdtemp(prefix="vst-", dir="/var/tmp"))
    made = TapNode(folder)
    left: list[str] = []
    try:
        yield made
    finally:
        try:
            left = made.settled_leftovers()
        finally:
            made.clean()
            shutil.rmtree(folder)
    assert left == [], "left behind by tapmanager"
