"""Runs CNI plugins. No other module of tapmanager starts programs.

A plugin gets no arguments, a complete new environment, its own process group and a time limit, after which the group is killed.
Plugins run in the host's namespaces, as the specification requires.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO

from tapmanager.cni import conf as cni_conf
from tapmanager.cni.conf import CniAttachment, NetworkConf
from tapmanager.errors import TapmanagerError, deadline, internal, unavailable
from tapmanager.fields import Json

# Statistics of plugin runs: durations and failures since this process started.

# Upper bounds of the histogram's buckets in seconds. One more bucket without a bound follows.
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

# Most pairs of command and plugin. Operators use a few, and change them now and then.
_MOST = 256


@dataclass(slots=True)
class _Runs:
    failures: int = 0
    seconds: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))


class PluginRuns:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[tuple[str, str], _Runs] = {}

    def ran(self, command: str, plugin: str, seconds: float, *, failed: bool) -> None:
        with self._lock:
            if (command, plugin) not in self._runs and len(self._runs) >= _MOST:
                return
            runs = self._runs.setdefault((command, plugin), _Runs())
            runs.failures += failed
            runs.seconds += seconds
            runs.buckets[bisect.bisect_left(BOUNDS, seconds)] += 1

    def as_json(self) -> Json:
        """The counts are those of each bucket alone, not cumulative."""
        with self._lock:
            return {
                "bounds": list(BOUNDS),
                "runs": [
                    {
                        "command": command,
                        "plugin": plugin,
                        "failures": runs.failures,
                        "ms": round(runs.seconds * 1000),
                        "buckets": list(runs.buckets),
                    }
                    for (command, plugin), runs in self._runs.items()
                ],
            }


log = logging.getLogger(__name__)

_PIECE = 1 << 16
# Most bytes of a plugin's output that are kept. A result has a few hundred.
_MAX_OUTPUT = 1 << 20
# "Try again later", CNI specification, section 5 (error codes).
_TRY_AGAIN = 11


@dataclass(frozen=True, slots=True)
class _Call:
    """`sandbox`: "" for a call that concerns no single attachment."""

    command: str
    plugin: str
    network: str
    sandbox: str
    bin_dirs: tuple[str, ...]


class CniPlugins:
    """`plugin_timeout`: the longest run time of one plugin, in seconds. All points in time are of time.monotonic()."""

    def __init__(self, conf_dir: str, bin_dirs: Sequence[str], plugin_timeout: float) -> None:
        self._conf_dir = conf_dir
        self._bin_dirs = tuple(bin_dirs)
        self._plugin_timeout = plugin_timeout
        self.runs = PluginRuns()

    def limit(self, plugin_timeout: float) -> None:
        """Changes the time limit, from the next plugin on."""
        self._plugin_timeout = plugin_timeout

    def load(self) -> NetworkConf:
        """Reads the first configuration by file name. It is read each time, because operators and network add-ons replace it.

        Raises TapmanagerError (unavailable) with the remedy. If the first file is broken, the second is not used, because pods
        would get another network.
        """
        path = self._first_file()
        try:
            with open(path, "rb") as file:
                return cni_conf.parse_conf(file.read())
        except OSError as exc:
            raise unavailable(f"CNI config {path} cannot be read: {exc.strerror}") from exc
        except ValueError as exc:
            raise unavailable(
                f"CNI config {path} is not valid: {exc}; correct the file, which is read for each pod"
            ) from exc

    def _first_file(self) -> str:
        remedy = "install a network add-on, or put a .conflist file there"
        try:
            names = sorted(os.listdir(self._conf_dir))
        except OSError as exc:
            raise unavailable(f"no CNI config: {self._conf_dir}: {exc.strerror}; {remedy}") from exc
        for name in names:
            if name.endswith((".conf", ".conflist", ".json")) and not name.startswith("."):
                return os.path.join(self._conf_dir, name)
        raise unavailable(f"no CNI config: no .conf, .conflist or .json file in {self._conf_dir}; {remedy}")

    def trouble(self) -> str:
        """Why no pod can be attached now, as a message for users; "" if pods can be attached."""
        try:
            self.require_plugins(self.load(), self._bin_dirs)
        except TapmanagerError as exc:
            return str(exc)
        return ""

    def require_plugins(self, conf: NetworkConf, bin_dirs: Sequence[str]) -> None:
        """Raises TapmanagerError, which names the first plugin that is not installed. Called before anything is made, because a
        chain that cannot run completely could not be undone completely either."""
        for kind in (*conf.types(), *conf.ipam_types()):
            _find(kind, bin_dirs)

    def add(self, conf: NetworkConf, attachment: CniAttachment, until: float) -> Json:
        """Runs the chain and returns its last result. Raises TapmanagerError. After any exception, `delete` must follow."""
        result: Json | None = None
        for plugin in conf.plugins:
            out = self._run("ADD", conf, plugin, attachment, result, until)
            result = self._parsed(out, conf, plugin)
        if result is None:
            raise internal(f'CNI network "{conf.name}" has no plugins')
        return result

    def delete(self, conf: NetworkConf, attachment: CniAttachment, result: Json | None, until: float) -> None:
        """Runs the chain backwards. All plugins run even if one fails; then the first failure is raised."""
        first: TapmanagerError | None = None
        for plugin in reversed(conf.plugins):
            try:
                self._run("DEL", conf, plugin, attachment, cni_conf.result_for_del(conf, result), until)
            except TapmanagerError as exc:
                log.warning("cni.del.failed sandbox=%s plugin=%s error=%s", attachment.pod.sandbox, plugin["type"], exc)
                first = first or exc
        if first is not None:
            raise first

    def _parsed(self, out: bytes, conf: NetworkConf, plugin: Json) -> Json:
        try:
            raw = json.loads(out)
        except (ValueError, RecursionError) as exc:
            raise internal(
                f'CNI plugin "{plugin["type"]}" of network "{conf.name}" did not return JSON: {exc}'
            ) from exc
        if not isinstance(raw, dict):
            raise internal(f'CNI plugin "{plugin["type"]}" of network "{conf.name}" did not return a JSON object')
        return raw

    def _run(
        self,
        command: str,
        conf: NetworkConf,
        plugin: Json,
        attachment: CniAttachment,
        previous: Json | None,
        until: float,
    ) -> bytes:
        env = cni_conf.environment(command, attachment)
        data = cni_conf.stdin(conf, plugin, attachment.pod, previous)
        call = _Call(command, str(plugin["type"]), conf.name, attachment.pod.sandbox, attachment.bin_dirs)
        return self._carry_out(call, env, data, until)

    def _carry_out(self, call: _Call, env: dict[str, str], data: bytes, until: float) -> bytes:
        what = f'CNI plugin "{call.plugin}" of network "{call.network}"'
        path = _find(call.plugin, call.bin_dirs)
        started = time.monotonic()
        limit = min(self._plugin_timeout, until - started)
        if limit <= 0:
            raise deadline(f"the time limit expired before {what} could run ({call.command})")
        status = -1
        try:
            status, out, err = _spawn(path, env, data, limit)
        except OSError as exc:
            raise internal(f"{what}: cannot run {path}: {exc.strerror}") from exc
        except subprocess.TimeoutExpired as exc:
            raise deadline(f"{what} did not finish {call.command} within {limit:.1f} s and was killed") from exc
        finally:
            taken = time.monotonic() - started
            self.runs.ran(call.command, call.plugin, taken, failed=status != 0)
        level = logging.INFO if call.sandbox else logging.DEBUG
        words = (call.sandbox, call.command, call.plugin, status, taken * 1000)
        log.log(level, "cni.ran sandbox=%s command=%s plugin=%s status=%d ms=%.1f", *words)
        if status != 0:
            failure = cni_conf.failure(out, err, status)
            code = f" (CNI error {failure.code})" if failure.code else ""
            message = f"{what} failed at {call.command}: {failure.text}{code}"
            raise TapmanagerError("unavailable" if failure.code == _TRY_AGAIN else "internal", message)
        return out

    def status(self, conf: NetworkConf) -> str:
        """Why the plugins cannot attach pods now; "" if they can. For configurations with `has_status`."""
        try:
            self._ask_all("STATUS", conf, None)
        except TapmanagerError as exc:
            return str(exc)
        return ""

    def collect(self, conf: NetworkConf, sandboxes: Sequence[str]) -> None:
        """GC: the plugins free their resources of all other sandboxes. For configurations with `has_status`. Raises
        TapmanagerError."""
        self._ask_all("GC", conf, sandboxes)

    def _ask_all(self, command: str, conf: NetworkConf, sandboxes: Sequence[str] | None) -> None:
        env = cni_conf.environment_of_all(command, self._bin_dirs)
        until = time.monotonic() + self._plugin_timeout
        for plugin in conf.plugins:
            call = _Call(command, str(plugin["type"]), conf.name, "", self._bin_dirs)
            self._carry_out(call, env, cni_conf.stdin_of_all(conf, plugin, sandboxes), until)


def _spawn(path: str, env: dict[str, str], data: bytes, limit: float) -> tuple[int, bytes, bytes]:
    """Returns the exit status (negative: a signal), and the beginnings of standard output and error. Raises TimeoutExpired
    after it has killed the process group."""
    with (
        _stdin_file(data) as given,
        subprocess.Popen(
            [path],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            cwd="/",
            start_new_session=True,
        ) as plugin,
    ):
        try:
            out, err = _read_output(plugin, limit)
        except subprocess.TimeoutExpired:
            # The whole group, because an IPAM plugin that the plugin started may hang and keep the pipes open.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(plugin.pid, signal.SIGKILL)
            raise
        return plugin.returncode, out, err


def _stdin_file(data: bytes) -> IO[bytes]:
    """A file in memory with the data, positioned at its beginning."""
    file = open(os.memfd_create("cni-stdin"), "w+b")  # noqa: SIM115  the caller closes it
    file.write(data)
    file.seek(0)
    return file


def _read_output(plugin: subprocess.Popen[bytes], limit: float) -> tuple[bytes, bytes]:
    """Reads the output until the plugin has closed its pipes and ended. Output beyond the limit is dropped."""
    assert plugin.stdout is not None
    assert plugin.stderr is not None
    until = time.monotonic() + limit
    out, err = plugin.stdout.fileno(), plugin.stderr.fileno()
    output = {out: bytearray(), err: bytearray()}
    with selectors.DefaultSelector() as selector:
        for stream in output:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            left = until - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(plugin.args, limit)
            for key, _ in selector.select(left):
                piece = os.read(key.fd, _PIECE)
                output[key.fd] += piece[: _MAX_OUTPUT - len(output[key.fd])]
                if not piece:
                    selector.unregister(key.fd)
    plugin.wait(max(0.0, until - time.monotonic()))
    return bytes(output[out]), bytes(output[err])


def _find(kind: str, bin_dirs: Sequence[str]) -> str:
    for folder in bin_dirs:
        path = os.path.join(folder, kind)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    where = ", ".join(bin_dirs)
    remedy = "install it (containernetworking-plugins, or the network add-on)"
    raise unavailable(f'CNI plugin "{kind}" is not in {where}; {remedy}')
