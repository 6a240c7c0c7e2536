"""Runs `virtshim up` and `down` as an operator would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from podclient import PodClient, pod_config, wait_until


def free_cidr() -> str:
    """A /16 that no route of this machine uses."""
    routes = subprocess.run(["ip", "-4", "route"], capture_output=True, text=True, check=True).stdout
    return next(f"10.{n}.0.0/16" for n in range(88, 128) if f"10.{n}." not in routes)


def state_key(directory: str) -> str:
    """Settings with the key of the cluster: nodes with these settings continue each other's VMs."""
    file = Path(directory) / "state.key"
    if not file.exists():
        file.touch(mode=0o600)
        file.write_bytes(os.urandom(32))
    return f'[saved]\nkey_file = "{file}"\n'


VIRTSHIM = [sys.executable, "-m", "virtshim"]


class Node:
    def __init__(
        self, directory: str, pod_cidr: str, config: str = "", patience: float = 90.0, enter: Sequence[str] = ()
    ) -> None:
        """`config`: more settings, as TOML. `patience`: seconds for the node to start or stop. `enter`: a command that
        starts the node inside a namespace."""
        self.directory = directory
        self._command = (*enter, *VIRTSHIM)
        self.pod_cidr = pod_cidr
        self._patience = patience
        self.socket = f"{directory}/run/virtshim.sock"
        self.output = Path(f"{directory}.log")
        self._config = Path(f"{directory}.toml")
        self._config.write_text('[images]\ndownload_protocol = "http"\n' + config)
        self.process: subprocess.Popen[bytes] | None = None

    def up(self, *options: str) -> None:
        """Starts the node; returns when the CRI socket serves. `options`: more command-line options."""
        self.output.write_text("")
        with self.output.open("ab") as file:
            self.process = subprocess.Popen(
                [
                    *self._command, "up", "--dir", self.directory, "--pod-cidr", self.pod_cidr,
                    "--domain-type", "qemu", "--config", str(self._config), *options,
                ],
                stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
        process = self.process
        wait_until(lambda: "up: ready" in self.log() or process.poll() is not None, self._patience, "the node is ready")
        assert process.poll() is None, self.log()

    def log(self) -> str:
        return self.output.read_text()

    def stop(self, how: int = signal.SIGINT) -> None:
        """Stops the node by Ctrl-C: the daemons end, the VMs stay."""
        if self.process is not None:
            self.process.send_signal(how)
            assert self.process.wait(60) == 0, self.log()
            self.process = None

    def down(self) -> None:
        """Runs `virtshim down`, which stops and removes everything."""
        done = subprocess.run(
            [*self._command, "down", "--dir", self.directory, "--all"],
            capture_output=True,
            text=True,
            timeout=self._patience + 30,
            check=False,
        )
        if self.process is not None:
            self.process.wait(60)
            self.process = None
        assert done.returncode == 0, done.stderr

    def daemons(self) -> dict[str, int]:
        """Process ids of the daemons that tests kill."""
        assert self.process is not None
        found = {}
        for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            try:
                words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            except OSError:  # it has just ended
                continue
            for name, word in (("tapmanager", b"tapmanager"), ("virtshim", b"serve"), ("containerd", b"containerd")):
                if word in words:  # `up` is the parent of the node's QEMUs too
                    found[name] = int(child)
        return found

    def make_bridge(self) -> None:
        with PodClient(self.socket) as client:
            pod = client.run_pod(pod_config("bridge", f"{self.directory}/logs"))
            client.remove_pod(pod)

    def qemu_pids(self) -> set[int]:
        """QEMU processes of this node's VMs."""
        found = set()
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    command = Path(f"/proc/{entry}/cmdline").read_bytes()
                except OSError:
                    continue
                if b"qemu-system" in command.split(b"\0")[0] and self.directory.encode() in command:
                    found.add(int(entry))
        return found
