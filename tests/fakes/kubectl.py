"""A scripted kubectl that records how it was called. `FakeKubectl` runs it as a program.

A plan is a JSON list of [regular expression, answer]; the first match counts. An answer has `out`, `err`, `code`, or
`does`: `terminal` (an attach: prints its input in hex) or `ports` (a port-forward: greets and echoes).
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
from pathlib import Path


class FakeKubectl:
    """`directory` goes to the front of PATH."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        self._calls = directory / "calls"
        self.program("kubectl", f'exec {sys.executable} -IS {__file__} {directory} "$@"')
        self.plan()

    def program(self, name: str, script: str) -> None:
        path = self.directory / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def plan(self, **answers: object) -> None:
        """Maps the words of a call to an answer. Spaces in the words are `_`; other words may come between."""
        rules = [(name.replace("_", ".* "), answer) for name, answer in answers.items()]
        self.rules(*rules)

    def rules(self, *rules: tuple[str, object]) -> None:
        (self.directory / "plan").write_text(json.dumps(rules))

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self._calls.read_text().splitlines()] if self._calls.exists() else []

    @property
    def forwards(self) -> bool:
        """Whether its port-forward runs."""
        return Path("/proc", (self.directory / "forwarding").read_text()).exists()

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": f"{self.directory}:{os.environ['PATH']}"}


def _play(directory: str, words: list[str]) -> int:
    with open(f"{directory}/calls", "a", encoding="utf-8") as calls:
        calls.write(json.dumps(words) + "\n")
    with open(f"{directory}/plan", encoding="utf-8") as plan:
        rules = json.load(plan)
    answer = next((answer for pattern, answer in rules if re.search(pattern, " ".join(words))), None)
    if answer is None:
        print(f"error: fake kubectl has no plan for {words}", file=sys.stderr)
        return 99
    print(answer.get("out", ""), end="", flush=True)
    print(answer.get("err", ""), end="", file=sys.stderr, flush=True)
    if answer.get("does") == "terminal":
        _terminal()
    if answer.get("does") == "ports":
        _ports(words[-1])
    return int(answer.get("code", 0))


def _terminal() -> None:
    """A terminal that ends at ctrl-d."""
    if os.isatty(0):
        size = os.get_terminal_size(0)
        os.write(1, f"size {size.columns}x{size.lines}\r\n".encode())
    os.write(1, b"login: ")
    while (typed := os.read(0, 100)) not in (b"", b"\x04"):
        os.write(1, f"<{typed.hex()}>".encode())


def _ports(spec: str) -> None:
    local, _, port = spec.rpartition(":")
    with socket.create_server(("127.0.0.1", int(local or 0))) as server:
        Path(sys.argv[1], "forwarding").write_text(str(os.getpid()), encoding="utf-8")
        print(f"Forwarding from 127.0.0.1:{server.getsockname()[1]} -> {port}", flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_echo, args=(connection, port), daemon=True).start()


def _echo(connection: socket.socket, port: str) -> None:
    with connection:
        connection.sendall(f"port {port}\n".encode())
        while data := connection.recv(1000):
            connection.sendall(data.upper())


if __name__ == "__main__":
    sys.exit(_play(sys.argv[1], sys.argv[2:]))
