"""A guest's side of the agent's channel and of the command ports, scripted by a test."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import select
import socket
import termios
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fakes.guest import Listener

from virtshim.guest import exec_scripts

Script = Callable[["HostileAgent", socket.socket], None]

IN_A_SOCKET = 256 << 10
"""Bytes that a guest can send at most while nobody reads them."""


def waits_to_be_read(connected: socket.socket) -> bool:
    """Whether some of the sent bytes are still unread. Scripts wait for it, so that the next bytes are read separately."""
    return array("i", fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, bytes(4)))[0] > 0


def until_read(connected: socket.socket) -> None:
    while waits_to_be_read(connected):
        os.sched_yield()


class HostileAgent(Listener):
    """Hands each connection to the script, in turn; the last one serves all further connections."""

    def __init__(self, path: Path, *scripts: Script) -> None:
        self.connections = self.sent = 0
        self.requests: list[dict[str, Any]] = []
        self._scripts = list(scripts)
        super().__init__(path)

    def client(self, connected: socket.socket) -> None:
        script = self._scripts[min(self.connections, len(self._scripts) - 1)]
        self.connections += 1
        script(self, connected)

    def say(self, connected: socket.socket, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            count = connected.send(rest)
            self.sent += count
            rest = rest[count:]

    def asked(self, connected: socket.socket) -> Iterator[dict[str, Any]]:
        for line in connected.makefile("rb"):
            request = json.loads(line.lstrip(b"\xff"))
            self.requests.append(request)
            yield request


def in_step(request: dict[str, Any]) -> bytes:
    """The right answer to a synchronisation request, b"" for any other request."""
    if request["execute"] != "guest-sync-delimited":
        return b""
    return b"\xff" + json.dumps({"return": request["arguments"]["id"]}).encode() + b"\n"


def says(*pieces: bytes) -> Script:
    """Answers any request with this, then hangs up."""

    def script(agent: HostileAgent, connected: socket.socket) -> None:
        next(agent.asked(connected))
        for piece in pieces:
            agent.say(connected, piece)

    return script


def answers(*pieces: bytes) -> Script:
    """Synchronises, then gives this answer to every command."""

    def script(agent: HostileAgent, connected: socket.socket) -> None:
        for request in agent.asked(connected):
            for piece in (in_step(request),) if in_step(request) else pieces:
                agent.say(connected, piece)

    return script


def answers_byte_by_byte(answer: bytes) -> Script:
    """Synchronises, then gives this answer to every command."""

    def script(agent: HostileAgent, connected: socket.socket) -> None:
        for request in agent.asked(connected):
            if in_step(request):
                agent.say(connected, in_step(request))
                continue
            for at in range(len(answer)):
                agent.say(connected, answer[at : at + 1])
                until_read(connected)

    return script


def polite(agent: HostileAgent, connected: socket.socket) -> None:
    answers(b'{"return": {}}\n')(agent, connected)


def record(token: bytes, words: bytes) -> bytes:
    return b"\1" + token + b" " + words + b";"


def silent(token: bytes) -> list[bytes]:
    return [record(token, b"start"), record(token, b"end")]


class HostilePort(Listener):
    """Sends the given bytes once a client is connected."""

    def __init__(self, path: Path) -> None:
        self.said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.sent = 0
        self.byte_by_byte = False
        super().__init__(path)

    def client(self, connected: socket.socket) -> None:
        connected.settimeout(0.02)
        while not self._closed and (piece := self._next(connected)) is not None:
            rest = memoryview(piece)
            while rest and not self._closed:
                with contextlib.suppress(TimeoutError):
                    count = connected.send(rest[:1] if self.byte_by_byte else rest)
                    rest = rest[count:]
                    self.sent += count
                    if self.byte_by_byte:
                        until_read(connected)

    def _next(self, connected: socket.socket) -> bytes | None:
        """b"" to look again; None when it is over."""
        if select.select([connected], (), (), 0)[0] and not connected.recv(65536):
            return None
        with contextlib.suppress(queue.Empty):
            return self.said.get(timeout=0.02)
        return b""


class HostileVm:
    """An agent that starts commands correctly, and whose ports then send what `out` and `err` give for the session's
    token; None in it hangs up. With `gone` it reports that the command has ended; with `ends` each command ends as
    soon as it is started."""

    def __init__(self, directory: Path, ports: int = 6) -> None:
        self.out: Callable[[bytes], Iterable[bytes | None]] = silent
        self.err: Callable[[bytes], Iterable[bytes | None]] = silent
        self.gone = self.ends = False
        self.ports = {
            f"virtshim.exec.{number}": HostilePort(directory / f"exec-{number}.sock") for number in range(ports)
        }
        self.agent = HostileAgent(directory / "agent.sock", self._serve)

    def _serve(self, agent: HostileAgent, connected: socket.socket) -> None:
        for request in agent.asked(connected):
            connected.sendall(in_step(request) or json.dumps({"return": self._answer(request)}).encode() + b"\n")

    def _answer(self, request: dict[str, Any]) -> object:
        if request["execute"] == "guest-exec-status":
            return {"exited": request["arguments"]["pid"] != 1 or self.gone, "exitcode": 0}
        words = request["arguments"]["arg"]
        if words[2] != "virtshim-exec":
            self.gone = self.gone or exec_scripts.KILL in words
            return {"pid": 2}
        self.gone = self.ends
        token, out, err = words[3].encode(), words[4], words[5]
        for name, talk in ((out, self.out), (err, self.err)):
            for piece in talk(token) if name else ():
                self.ports[name].said.put(piece)
        return {"pid": 1}

    def speaks_byte_by_byte(self) -> None:
        """Sends each byte on its ports separately."""
        for port in self.ports.values():
            port.byte_by_byte = True

    def close(self) -> None:
        for listener in (self.agent, *self.ports.values()):
            listener.close()
