"""A guest without a VM: its agent answers on a socket and runs commands on this machine, and its serial ports are FIFOs
behind sockets. As with virtio, closing the host's end of a port ends the input inside."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import secrets
import select
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import IO, Any

from virtshim.guest import entrypoint_scripts, exec_scripts
from virtshim.model.errors import InternalError

# The environment variable that names the guest of a process.
_OWNER = "VIRTSHIM_TEST_GUEST"
# The commands that qemu-ga answers between freeze and thaw.
_WHILE_FROZEN = {"guest-ping", "guest-info", "guest-sync", "guest-sync-delimited"} | {
    "guest-fsfreeze-status",
    "guest-fsfreeze-thaw",
}


class Listener:
    """Serves one client at a time on a Unix socket, as QEMU does."""

    def __init__(self, path: Path) -> None:
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen(8)
        self._client: socket.socket | None = None
        self._closed = False
        self._tick = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closed:
            try:
                self._client, _ = self._listening.accept()
            except OSError:
                return
            with self._client, contextlib.suppress(OSError):
                self.client(self._client)

    def client(self, connected: socket.socket) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._closed = True
        self._tick.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        if self._client is not None:
            with contextlib.suppress(OSError):
                self._client.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        assert not self._thread.is_alive()


class _Port(Listener):
    """The guest's side is a new FIFO for each command. It is opened one way only: `goes_in` or `goes_out`."""

    def __init__(self, path: Path, device: Path) -> None:
        self._device = device
        self._connected: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._hung_up = threading.Event()
        super().__init__(path)

    def client(self, connected: socket.socket) -> None:
        self._hung_up.clear()
        self._connected.put(connected)
        poller = select.poll()
        poller.register(connected, select.POLLHUP)
        while not (self._closed or self._hung_up.is_set()):
            for _, event in poller.poll(20):
                if event & select.POLLHUP:
                    return

    def goes_out(self) -> None:
        """Announces that the guest is about to write."""
        connected = self._fifo()
        end = os.open(self._device, os.O_RDONLY | os.O_NONBLOCK)
        threading.Thread(target=self._out, args=(end, connected), daemon=True).start()

    def goes_in(self) -> None:
        connected = self._fifo()
        threading.Thread(target=self._in, args=(str(self._device), connected), daemon=True).start()

    def _fifo(self) -> socket.socket:
        self._device.unlink(missing_ok=True)
        os.mkfifo(self._device)
        return self._connected.get(timeout=10)

    def _out(self, end: int, connected: socket.socket) -> None:
        """Forwards output; discards bytes that nobody may read any more."""
        with open(end, "rb", buffering=0) as fifo, contextlib.suppress(OSError):
            while not self._closed and connected.fileno() >= 0:
                data = fifo.read(65536)
                if data:
                    connected.sendall(data)
                else:
                    self._tick.wait(0.002)

    def _in(self, device: str, connected: socket.socket) -> None:
        end = -1
        while end < 0:
            if self._closed:
                return
            try:
                end = os.open(device, os.O_WRONLY | os.O_NONBLOCK)  # works when somebody reads
            except OSError:
                self._tick.wait(0.002)
        os.set_blocking(end, True)
        with contextlib.suppress(OSError), open(end, "wb", buffering=0) as fifo:
            while data := connected.recv(65536):
                fifo.write(data)
        self._hung_up.set()  # QEMU closes a connection whose other side has said all


class _Agent(Listener):
    def __init__(self, path: Path, guest: HostGuest) -> None:
        self._guest = guest
        super().__init__(path)

    def client(self, connected: socket.socket) -> None:
        for line in connected.makefile("rb"):
            request = json.loads(line.lstrip(b"\xff"))
            name, arguments = request["execute"], request.get("arguments", {})
            mark = b"\xff" if name == "guest-sync-delimited" else b""
            connected.sendall(mark + json.dumps(self._guest.answer(name, arguments)).encode() + b"\n")


class HostGuest:
    """`disabled` commands are refused, as on Red Hat's distributions; `canned` are answers by command. `shell` is what the
    guest has as /bin/sh. `slots`: how many ports it has room for; it does not take up the
    ports `ports_not_taken_up`.
    `swept`: how often all sessions of earlier daemons were to be ended."""

    def __init__(self, directory: Path, ports: int = 12, slots: int = 120) -> None:
        self.agent_socket = str(directory / "agent.sock")
        self.sockets = str(directory)
        self.devices = directory / "devices"
        self.devices.mkdir()
        self.disabled: set[str] = set()
        self.ports_not_taken_up: set[int] = set()
        self.canned: dict[str, Any] = {}
        self.shell = ["/bin/sh"]
        self.swept = 0
        self.run = directory / "tmpfs"
        self.run.mkdir()
        self.file_systems = 2
        self.frozen = False
        self.clock_ns = time.time_ns()
        self.may_set_time = True
        self.ssh_keys: dict[str, list[str]] = {"root": []}
        self._files: dict[int, IO[bytes]] = {}
        self._name = secrets.token_hex(8)
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._lost: dict[int, subprocess.Popen[bytes]] = {}
        self.slots = max(ports, slots)
        self._ports: dict[str, _Port] = {}
        for number in range(ports):
            self._add_port(number)
        self._agent = _Agent(directory / "agent.sock", self)

    def plug(self, number: int) -> None:
        """As `virtshim.vm.ports.VmPlugging.plug_in`, which leaves a file behind when there is no room."""
        if len(self._ports) >= self.slots:
            Path(f"{self.sockets}/exec-{number}.sock").touch()
            raise InternalError("no free slot")
        self._add_port(number)

    def _add_port(self, number: int) -> None:
        name = f"virtshim.exec.{number}"
        self._ports[name] = _Port(Path(f"{self.sockets}/exec-{number}.sock"), self.devices / name)

    def answer(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if name in self.disabled:
            words = f"Command {name} has been disabled"
            return {"error": {"class": "CommandNotFound", "desc": words}}
        if self.frozen and name not in _WHILE_FROZEN:
            words = f"Command {name} has been disabled: the agent is in frozen state"
            return {"error": {"class": "CommandNotFound", "desc": words}}
        if name in self.canned:
            return {"return": self.canned[name]}
        match name:
            case "guest-sync-delimited":
                return {"return": arguments["id"]}
            case "guest-exec":
                return {"return": {"pid": self._spawn(arguments)}}
            case "guest-exec-status":
                return self._status(arguments["pid"])
            case "guest-file-open" | "guest-file-seek" | "guest-file-read" | "guest-file-close":
                return self._file(name, arguments)
            case _:
                return self._operation(name, arguments)

    def _operation(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        match name:
            case "guest-ping":
                return {"return": {}}
            case "guest-fsfreeze-freeze" | "guest-fsfreeze-thaw":
                self.frozen = name.endswith("freeze") and self.file_systems > 0
                return {"return": self.file_systems}
            case "guest-get-time":
                return {"return": self.clock_ns}
            case "guest-set-time":
                return self._set_time(arguments)
            case "guest-ssh-add-authorized-keys":
                return self._add_keys(arguments)
            case _:
                return {"error": {"class": "CommandNotFound", "desc": f"The command {name} has not been found"}}

    def _set_time(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Sets the time; without an argument from the clock chip."""
        if "time" in arguments and not self.may_set_time:
            words = "Failed to set time to guest: Operation not permitted"
            return {"error": {"class": "GenericError", "desc": words}}
        self.clock_ns = arguments.get("time", time.time_ns())
        return {"return": {}}

    def _add_keys(self, arguments: dict[str, Any]) -> dict[str, Any]:
        keys = self.ssh_keys.get(arguments["username"])
        if keys is None:
            words = f"failed to lookup user '{arguments['username']}'"
            return {"error": {"class": "GenericError", "desc": words}}
        keys += [key for key in arguments["keys"] if key not in keys]
        return {"return": {}}

    def _inside(self, word: str) -> str:
        return word.replace(entrypoint_scripts.DIRECTORY, f"{self.run}/virtshim-command")

    def _file(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if name == "guest-file-open":
            try:
                file = open(self._inside(arguments["path"]), f"{arguments['mode']}b")  # noqa: SIM115
            except OSError as exc:
                return {"error": {"class": "GenericError", "desc": f"failed to open file: {exc.strerror}"}}
            self._files[id(file)] = file
            return {"return": id(file)}
        file = self._files[arguments["handle"]]
        match name:
            case "guest-file-seek":
                whence = {"set": os.SEEK_SET, "cur": os.SEEK_CUR, "end": os.SEEK_END}[arguments["whence"]]
                return {"return": {"position": file.seek(arguments["offset"], whence), "eof": False}}
            case "guest-file-read":
                data = file.read(arguments["count"])
                text = base64.b64encode(data).decode()
                return {"return": {"count": len(data), "buf-b64": text, "eof": len(data) < arguments["count"]}}
            case _:
                self._files.pop(arguments["handle"]).close()
                return {"return": {}}

    def _spawn(self, arguments: dict[str, Any]) -> int:
        words = [self._inside(word) for word in arguments["arg"]]
        if words[2] == "virtshim-exec":
            words[1] = words[1].replace("/dev/virtio-ports", str(self.devices)).replace('-c "$dev"', '-p "$dev"')
            out, err, into = words[4:7]
            for name in filter(None, (out, err)):
                self._ports[name].goes_out()
            if into:
                self._ports[into].goes_in()
        env = dict(os.environ)
        if "env" in arguments:
            env = dict(setting.split("=", 1) for setting in arguments["env"])
        argv = [*self.shell, *words]
        if exec_scripts.KILL in words and exec_scripts.tag() in words:
            self.swept += 1
            argv = ["/bin/true"]  # "whatever an earlier virtshim left": on this machine that may be another test's
        if exec_scripts.WAIT_FOR_PORTS in words:  # it has no /sys of its own
            missing = sum(
                1 << index for index, number in enumerate(words[3:]) if int(number) in self.ports_not_taken_up
            )
            argv = ["/bin/sh", "-c", f"exit {missing}"]
        null = subprocess.DEVNULL
        child = subprocess.Popen(argv, stdin=null, stdout=null, stderr=null, env={**env, _OWNER: self._name})
        self._children[child.pid] = child
        return child.pid

    def _status(self, pid: int) -> dict[str, Any]:
        child = self._children.get(pid)
        if child is None:
            return {"error": {"class": "GenericError", "desc": f"PID {pid} does not exist"}}
        code = child.poll()
        if code is None:
            return {"return": {"exited": False}}
        del self._children[pid]
        return {"return": {"exited": True, **({"exitcode": code} if code >= 0 else {"signal": -code})}}

    def restart_agent(self) -> None:
        """Restarts the agent, which forgets its commands."""
        self._lost.update(self._children)
        self._children.clear()
        self._files.clear()

    def ports(self) -> int:
        """The number of ports."""
        return len(self._ports)

    def running(self) -> int:
        """Children whose end the agent has not yet reported."""
        return len(self._children)

    def close(self) -> None:
        """The VM ends."""
        for listener in (self._agent, *self._ports.values()):
            listener.close()
        for child in (*self._children.values(), *self._lost.values()):
            child.kill()
            child.wait()
        while self._kill_daemons():  # the killed may have been about to fork
            pass

    def _kill_daemons(self) -> bool:
        """Kills what the commands left running, as the machine's end does. True if there was anything."""
        mark, found = f"{_OWNER}={self._name}".encode(), False
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in environ.read_bytes().split(b"\0"):
                    os.kill(int(environ.parent.name), signal.SIGKILL)
                    found = True
        return found
