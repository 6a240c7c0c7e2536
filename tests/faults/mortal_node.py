"""A node of three daemons that die on order, laid out as by `virtshim up`, and checks for leftovers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from dying import Killer, pids_of
from guest import BOOT, READY
from node import VIRTSHIM, free_cidr
from podclient import PodClient, container_config, log_lines, pod_config, wait_for_log, wait_until

from criproto.runtime_v1 import api_pb2 as pb
from tapmanager.cgroups.tree import hierarchies
from virtshim.cli.daemons import Daemon
from virtshim.cli.node_dir import NodeDir, NodeOptions, write_node
from vmwrapper import bundle

_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Bystander:
    pod: str
    container: str
    address: str
    log: str
    pids: frozenset[int]


_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class _Undertaker:
    """Adopts QEMUs whose libvirt ended, as `virtshim up` does, because the init of some machines is slow to reap."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._bury, daemon=True)
        self._libc = ctypes.CDLL(None)
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def _bury(self) -> None:
        while not self._over.wait(0.02):
            for children in Path("/proc/self/task").glob("*/children"):
                with contextlib.suppress(OSError):  # a thread that has just ended
                    for child in children.read_text().split():
                        self._bury_one(int(child))

    def _bury_one(self, pid: int) -> None:
        """Reaps one process, but no child of the tests, which want its exit code."""
        with contextlib.suppress(OSError):
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition(") ")
            if rest.startswith("Z") and name.partition("(")[2].startswith(("qemu-system", "vmwrapper")):
                os.waitid(os.P_PID, pid, os.WEXITED)


# The limits in seconds of a CNI plugin, of qemu-img, and of vmwrapper while tapmanager does not answer: enough on a busy
# machine. A tapmanager that was killed is started again only after the call.
CNI_LIMIT = 8.0
QEMU_IMG_LIMIT = 6.0
FETCH_LIMIT = 3.0
CNI_PLUGINS = "/usr/lib/cni"
# Bytes of all templates.
TEMPLATES = 1 << 30
# The order in which the daemons are started; the last one serves kubelet.
_DAEMONS = ("shares", "tapmanager", "virtshim")


class MortalNode:
    """`programs` and `plugins` are searched first for what virtshim and CNI run; `environment` is added at a daemon's
    next start. `settings`: more settings. `enter`: a command that starts virtshim inside a namespace."""

    def __init__(self, directory: str, image_url: str, *, settings: str = "", enter: Sequence[str] = ()) -> None:
        self.image_url = image_url
        # The image of the bystander, which stays on the node.
        self.guest = f"{image_url}/guest.qcow2"
        self.directory = directory
        self._node = NodeDir.at(directory)
        self._enter = enter
        self.programs, self.plugins = Path(f"{directory}.programs"), Path(f"{directory}.plugins")
        self.volume = f"{directory}.volume"
        # A block device, if the tests have one.
        self.root_volume = ""
        for folder in (self.programs, self.plugins, Path(self.volume)):
            folder.mkdir()
        self.state_volume = Path(f"{self.volume}/state")
        key = Path(f"{self.volume}/key")
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(32))
        overlay = Path(f"{directory}.toml")
        overlay.write_text(
            '[images]\ndownload_protocol = "http"\n'
            f'[tapmanager]\ncni_bin_dir = ["{self.plugins}", "{CNI_PLUGINS}"]\ncni_timeout = {CNI_LIMIT}\n'
            f'[saved]\nkey_file = "{key}"\n[templates]\nmax_bytes = {TEMPLATES}\n{settings}'
        )
        options = NodeOptions(directory, config=str(overlay), domain_type="qemu", pod_cidr=free_cidr())
        self.settings = write_node(self._node, options)
        write_vmwrapper(Path(self._node.vmwrapper))
        self.network = f"virtshim-{self._node.path_hash}"
        self.killers = {name: Killer(f"{directory}/{name}.order") for name in _DAEMONS}
        self.environment: dict[str, dict[str, str]] = {name: {} for name in self.killers}
        self._daemons = {name: Daemon(name, ()) for name in self.killers}
        # Ids of containers that were made here: their cgroups lie beside those of other nodes.
        self.containers: set[str] = set()
        self.bystander: Bystander | None = None
        # Call -> daemon -> its steps, once a call was counted.
        self.steps: dict[str, dict[str, list[str]]] = {}
        self._undertaker = _Undertaker()

    def up(self) -> None:
        """Starts the daemons that do not run; returns when the CRI socket serves."""
        for name in _DAEMONS:
            if not self._daemons[name].is_running:
                self.start(name)
        with self.client() as cri:
            wait_until(lambda: _answers(cri), 60, "the node is ready")

    def start(self, name: str) -> None:
        """Starts the daemon; returns when it is ready."""
        self._daemons[name].argv = self._command(name)
        self._daemons[name].start()

    def _command(self, name: str) -> tuple[str, ...]:
        environment = {
            "VIRTSHIM_TEST_ORDER": self.killers[name].order,
            "VIRTSHIM_TEST_PROGRAMS": str(self.programs),
            "VIRTSHIM_TEST_QEMU_IMG_LIMIT": str(QEMU_IMG_LIMIT),
            **self.environment[name],
        }
        words = (f"{key}={value}" for key, value in environment.items())
        return "env", *words, sys.executable, str(_HERE / f"dying_{name}.py"), "--config", self._node.config_file

    def pid(self, name: str) -> int:
        process = self._daemons[name].process
        assert process is not None
        return process.pid

    def restart(self, *names: str) -> None:
        """Kills and restarts the named daemons, or all."""
        for name in names or _DAEMONS:
            self.kill(name)
        self.up()

    def kill(self, name: str) -> None:
        """Sends SIGKILL if the daemon runs."""
        process = self._daemons[name].process
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Resident memory in KiB and number of descriptors of each daemon."""
        found = {}
        for name, daemon in self._daemons.items():
            assert daemon.process is not None
            here = Path(f"/proc/{daemon.process.pid}")
            rss = next(line for line in (here / "status").read_text().splitlines() if line.startswith("VmRSS:"))
            found[name] = (int(rss.split()[1]), len(os.listdir(here / "fd")))
        return found

    def died(self, name: str, within: float) -> bool:
        """Whether the daemon dies within that time."""
        until = time.monotonic() + within
        while self._daemons[name].is_running and time.monotonic() < until:
            time.sleep(0.01)
        return not self._daemons[name].is_running

    def client(self, timeout: float = 60.0) -> PodClient:
        return PodClient(self.settings.cri_socket, timeout)

    def stop(self) -> None:
        """Stops the daemons as a machine's shutdown does: SIGTERM, virtshim first."""
        for daemon in reversed(self._daemons.values()):
            daemon.stop()

    def end(self) -> None:
        """Stops the daemons, then removes everything by `virtshim down`."""
        for killer in self.killers.values():
            killer.disarm()
        self.stop()
        for folder in (self.programs, self.plugins, Path(self.volume)):
            shutil.rmtree(folder)
        done = subprocess.run(
            [*self._enter, *VIRTSHIM, "down", "--dir", self._node.path, "--all"],
            capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        self._undertaker.end()
        assert done.returncode == 0, done.stderr

    # --- a VM that runs through it all

    def start_bystander(self) -> None:
        with self.client(120.0) as cri:
            config = pod_config("bystander", f"{self._node.path}/logs/bystander")
            pod = cri.run_pod(config)
            container = cri.create(pod, container_config(cri.pull(self.guest)), config)
            cri.start(container)
            log = cri.status(container).log_path
            wait_for_log(log, READY, BOOT)
            self.bystander = Bystander(pod, container, cri.pod_ip(pod), log, frozenset(self.qemu_pids()))

    def check_bystander(self, cri: PodClient) -> None:
        """Checks that the bystander has the same process, an address that answers, and a log without a lost or doubled
        line."""
        it = self.bystander
        assert it is not None
        assert it.pids <= self.qemu_pids(), "the running VM was touched"
        assert cri.status(it.container).state == pb.CONTAINER_RUNNING
        assert cri.pod_status(it.pod).state == pb.SANDBOX_READY
        assert cri.pod_ip(it.pod) == it.address
        ping = ["ping", "-c", "1", "-w", "10", "-i", "0.5", it.address]
        assert subprocess.run(ping, capture_output=True, check=False).returncode == 0, "its network is gone"
        assert sum("virtshim-guest: ready" in line for line in log_lines(it.log)) == 1

    # --- programs that fail on order

    @contextlib.contextmanager
    def program(self, folder: Path, name: str, script: str) -> Iterator[None]:
        """Replaces a program by a shell script inside the block."""
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        try:
            yield
        finally:
            path.unlink()

    # --- what lies about

    def image_files(self, cri: PodClient | None = None) -> set[str]:
        """The disks in the image store, including half-made ones, or the images that the node lists."""
        if cri is not None:
            images = cri.images.ListImages(pb.ListImagesRequest(), timeout=20).images
            return {image.id.removeprefix("sha256:") for image in images}
        store = Path(f"{self.settings.paths.state_dir}/images")
        return {path.name for folder in ("sha256", "incoming") for path in (store / folder).iterdir()}

    def half_made_templates(self) -> set[str]:
        """Directories of templates that are being made. A template that is made has no file with a name."""
        templates = f"{self.settings.paths.state_dir}/templates"
        return set(os.listdir(templates)) if os.path.isdir(templates) else set()

    def left(self) -> set[str]:
        """Everything of pods other than the bystander."""
        found = {f"qemu {pid}" for pid in self.qemu_pids()} | {f"virtiofsd {pid}" for pid in self.virtiofsd_pids()}
        found |= {f"passt {pid}" for pid in self.passt_pids()}
        state, run = self.settings.paths.state_dir, self.settings.paths.run_dir
        for directory in (f"{state}/containers", f"{state}/vms", f"{run}/vm", f"{run}/shares", f"{run}/placements",
                          self.settings.tapmanager.state_dir,
                          f"{self._node.cni}/leases", "/run/netns", f"{self._node.libvirt}/etc/qemu"):  # fmt: skip
            for path in Path(directory).rglob("*") if os.path.isdir(directory) else ():
                found.add(str(path))
        found |= {f"link {name}" for name in os.listdir("/sys/class/net")}
        found |= {f"mount {line}" for line in Path("/proc/self/mounts").read_text().splitlines() if "virtshim" in line}
        found |= {f"template {name}" for name in self.half_made_templates()}
        found |= self._cgroups()
        return {item for item in found if "last_reserved" not in item and not item.endswith((".lock", "/lock"))}

    def _cgroups(self) -> set[str]:
        state = f"{self.settings.paths.state_dir}/containers"
        self.containers |= set(os.listdir(state)) if os.path.isdir(state) else set()
        groups = (path for one in hierarchies() for path in Path(f"{one.root}/virtshim").glob("virtshim-*"))
        return {f"cgroup {path}" for path in groups if path.name.split("-")[1] in self.containers}

    def qemu_pids(self) -> set[int]:
        return pids_of("qemu-system", self._node.path)

    def virtiofsd_pids(self) -> set[int]:
        """The processes that serve volumes of this node's VMs."""
        return pids_of("virtiofsd", self._node.path)

    def passt_pids(self) -> set[int]:
        """The processes that connect this node's VMs with the network namespaces of other runtimes' pods."""
        return pids_of("passt", self._node.path)

    @contextlib.contextmanager
    def armed(
        self, name: str, number: int, when: str, victims: str = "", spared: Collection[int] = ()
    ) -> Iterator[None]:
        """`victims`: the daemon survives and each process of this node that runs that program dies, except `spared`."""
        self.killers[name].arm(number, when, victims, spared)
        try:
            yield
        finally:
            self.killers[name].disarm()
            wait_until(lambda: not self.killers[name].is_striking() or self.died(name, 0.0), 30, "the strike is over")


def write_vmwrapper(file: Path) -> None:
    """The one file, with FETCH_LIMIT."""
    bundle.write(str(file))
    begins = "import main\n\nmain()\n"
    code = file.read_text()
    assert code.endswith(begins)
    limited = f"import fetch, main\n\nfetch.__defaults__ = ({FETCH_LIMIT}, None)\nmain()\n"
    file.write_text(code.removesuffix(begins) + limited)


def _answers(cri: PodClient) -> bool:
    try:
        status = cri.runtime.Status(pb.StatusRequest(), timeout=2).status
    except grpc.RpcError:
        return False
    return all(condition.status for condition in status.conditions)
