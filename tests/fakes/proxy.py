"""`virtshim proxy` as a program, in front of fake runtimes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Self

from fakes.cri import Client

_PROJECT = Path(__file__).resolve().parents[2]


class Proxy:
    """`with Proxy(directory, primary, other) as proxy: proxy.client...`; `directory` has a short path."""

    def __init__(
        self,
        directory: Path,
        primary: str,
        other: str,
        settings: str = "",
        others: str = "",
        *,
        other_is_virtshim: bool = False,
    ) -> None:
        """`primary`, `other`: the runtimes' sockets. `settings`, `others`: more of [proxy], and of the other runtime.
        `other_is_virtshim`: it is this node's virtshim, which adopts pods on the socket `admin`."""
        self.socket = f"{directory}/run/proxy.sock"
        self.metrics = f"{directory}/metrics.sock"
        self.admin = f"{directory}/run/admin.sock"
        self.log = directory / "proxy.log"
        self._config = directory / "config.toml"
        self._config.write_text(
            f"""
            [paths]
            state_dir = "{directory}/state"
            run_dir = "{directory}/run"
            [cri]
            socket = {json.dumps(other if other_is_virtshim else f"{directory}/run/virtshim.sock")}
            [proxy]
            {settings}
            [proxy.primary]
            name = "primary"
            socket = {json.dumps(primary)}
            [[proxy.others]]
            name = "other"
            socket = {json.dumps("" if other_is_virtshim else other)}
            handlers = ["vm"]
            {others}
            [metrics]
            proxy_address = "unix:{self.metrics}"
            [log]
            format = "json"
            """
        )
        self.process: subprocess.Popen[bytes] | None = None
        self.client = Client(self.socket)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.client.channel.close()
        self.stop()

    def start(self) -> None:
        """Starts it; returns when it is ready, or raises AssertionError with its log if it ends."""
        process = self.launch()
        assert self.is_ready(process), self.log.read_text()

    def launch(self) -> subprocess.Popen[bytes]:
        self._ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._ready.bind("")  # an abstract name of the kernel's choice
        name = "@" + self._ready.getsockname().decode().lstrip("\0")
        environment = {**os.environ, "NOTIFY_SOCKET": name, "PYTHONPATH": str(_PROJECT)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "virtshim", "proxy", "--config", str(self._config)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
            )  # fmt: skip
        return self.process

    def is_ready(self, process: subprocess.Popen[bytes]) -> bool:
        """Waits until it is ready; False if it ended."""
        self._ready.settimeout(0.1)
        with self._ready:
            for _ in range(600):
                try:
                    if b"READY=1" in self._ready.recv(4096):
                        return True
                except TimeoutError:
                    if process.poll() is not None:
                        return False
        return False

    def stop(self, how: int = signal.SIGTERM) -> int:
        """Stops it; returns its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(60)

    def events(self) -> list[dict[str, object]]:
        """The events that it has logged."""
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]
