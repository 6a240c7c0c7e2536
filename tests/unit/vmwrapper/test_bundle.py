"""The one-file vmwrapper works as libvirt runs it, with the system's isolated Python. Stand-ins play QEMU and
tapmanager."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tapmanager import protocol
from vmwrapper import __main__ as wrapper
from vmwrapper import bundle
from vmwrapper.confine import kernel, seccomp

SANDBOX = "ab" * 32
KEY = "cd" * 32
ARGS = ["-name", "x", "-machine", "pc-q35-7.2,usb=off"]

# Tells how it was started: arguments, environment, and what its inherited descriptors are.
QEMU = """#!/usr/bin/python3 -IS
import json, os, sys
fds = {}
for fd in os.listdir("/proc/self/fd"):
    try:
        fds[fd] = os.readlink("/proc/self/fd/" + fd)
    except OSError:
        pass
json.dump({"argv": sys.argv, "env": dict(os.environ), "fds": fds}, sys.stdout)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("bundle") / "vmwrapper"
    bundle.write(str(path))
    return str(path)


@pytest.fixture
def qemu(tmp_path: Path) -> str:
    path = tmp_path / "qemu"
    path.write_text(QEMU)
    path.chmod(0o755)
    return str(path)


def run(program: str, args: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    clean = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", **env}
    return subprocess.run([program, *args], env=clean, capture_output=True, text=True, timeout=30, check=False)


class Tapmanager:
    """Answers `fetch` on a socket, each request with the next of `answers`."""

    def __init__(self, path: Path, answers: list[Callable[[socket.socket, dict[str, object]], None]]) -> None:
        self.path = str(path)
        self.requests: list[dict[str, object]] = []
        self._answers = answers
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(4)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        for answer in self._answers:
            conn, _ = self._listener.accept()
            with conn:
                received = protocol.recv_frame(conn)
                assert received is not None
                self.requests.append(received[0])
                answer(conn, received[0])

    def close(self) -> None:
        self._thread.join(10)
        self._listener.close()


@pytest.fixture
def tapmanager(tmp_path: Path) -> Iterator[Callable[..., Tapmanager]]:
    made: list[Tapmanager] = []

    def make(*answers: Callable[[socket.socket, dict[str, object]], None]) -> Tapmanager:
        made.append(Tapmanager(tmp_path / "tap.sock", list(answers)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def taps(conn: socket.socket, request: dict[str, object]) -> None:
    fd = os.open("/dev/null", os.O_RDWR)
    nics = [{"mac": "0a:58:00:00:00:01", "mtu": 1500}]
    protocol.send_frame(conn, protocol.answer(1, {"interfaces": nics}), [fd])
    os.close(fd)


def refuses(kind: str, message: str) -> Callable[[socket.socket, dict[str, object]], None]:
    return lambda conn, request: protocol.send_frame(conn, protocol.error(1, kind, message))


def hangs_up(conn: socket.socket, request: dict[str, object]) -> None:
    return


def test_without_our_environment_the_real_emulator_is_run_unchanged(program: str, qemu: str) -> None:
    probe = ["-S", "-no-user-config", "-nodefaults", "-nographic", "-machine", "none,accel=kvm:tcg", "-daemonize"]
    done = run(program, probe, VIRTSHIM_EMULATOR=qemu)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["argv"] == [qemu, *probe]


def test_ld_preload_of_the_daemon_does_not_reach_qemu(program: str, qemu: str) -> None:
    done = run(program, [], VIRTSHIM_EMULATOR=qemu, LD_PRELOAD="/none.so", LD_LIBRARY_PATH="/qemus/own")
    told = json.loads(done.stdout)["env"]
    assert ("LD_PRELOAD" in told, told["LD_LIBRARY_PATH"]) == (False, "/qemus/own")


def test_qemus_output_goes_into_the_named_pipe(program: str, qemu: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    done = run(program, [], VIRTSHIM_EMULATOR=qemu, VIRTSHIM_OUTPUT=str(tmp_path / "pipe"))
    with open(reader, "rb") as file:
        fds = json.loads(file.read())["fds"]
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (fds["1"], fds["2"]) == (str(tmp_path / "pipe"), str(tmp_path / "pipe"))
    assert str(tmp_path / "pipe") not in {what for number, what in fds.items() if int(number) > 2}


def test_a_vm_without_its_pipe_does_not_start(program: str, qemu: str, tmp_path: Path) -> None:
    done = run(program, [], VIRTSHIM_EMULATOR=qemu, VIRTSHIM_OUTPUT=str(tmp_path / "none"))
    assert done.returncode == 1
    assert "none, the pipe for QEMU's output: No such file or directory; only virtshim can start this VM" in done.stderr


def test_the_default_emulator_answers_libvirts_version_probe(program: str) -> None:
    if not os.path.exists(f"/usr/bin/qemu-system-{os.uname().machine}"):
        pytest.skip("QEMU is not installed")
    assert "QEMU emulator version" in run(program, ["-version"]).stdout


def test_qemu_gets_the_nics_with_only_their_tap_descriptors_and_none_of_our_variables(
    program: str, qemu: str, tapmanager: Callable[..., Tapmanager]
) -> None:
    there = tapmanager(taps)
    env = {"VIRTSHIM_SANDBOX": SANDBOX, "VIRTSHIM_FETCH_KEY": KEY, "VIRTSHIM_TAPMANAGER": there.path, "HOME": "/x"}
    done = run(program, ARGS, VIRTSHIM_EMULATOR=qemu, **env)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert there.requests[0]["verb"] == "fetch"
    assert there.requests[0]["args"] == {"sandbox": SANDBOX, "key": KEY}
    assert not [name for name in seen["env"] if name.startswith("VIRTSHIM_")]
    assert seen["env"]["HOME"] == "/x"
    assert KEY not in done.stdout
    assert seen["argv"][: len(ARGS) + 1] == [qemu, *ARGS]
    netdev = seen["argv"][seen["argv"].index("-netdev") + 1]
    fd = netdev.split("fd=")[1].split(",")[0]
    assert "virtio-serial-pci.ioeventfd=off" in seen["argv"]
    beyond_stdio = {number: what for number, what in seen["fds"].items() if int(number) > 2 and what.startswith("/dev")}
    assert beyond_stdio == {fd: "/dev/null"}
    assert not [what for what in seen["fds"].values() if what.startswith("socket")]


@pytest.mark.parametrize("first", [refuses("unavailable", "too many connections"), hangs_up], ids=["busy", "restart"])
def test_a_briefly_absent_tapmanager_is_waited_for(
    program: str, qemu: str, tapmanager: Callable[..., Tapmanager], first: Callable[..., None]
) -> None:
    there = tapmanager(first, taps)
    env = {"VIRTSHIM_SANDBOX": SANDBOX, "VIRTSHIM_FETCH_KEY": KEY, "VIRTSHIM_TAPMANAGER": there.path}
    done = run(program, ARGS, VIRTSHIM_EMULATOR=qemu, **env)
    assert done.returncode == 0, done.stderr
    assert len(there.requests) == 2


def test_a_refusal_is_reported_in_one_line_without_the_key(
    program: str, qemu: str, tapmanager: Callable[..., Tapmanager]
) -> None:
    there = tapmanager(refuses("permission", "no network of sandbox x for this key"))
    env = {"VIRTSHIM_SANDBOX": SANDBOX, "VIRTSHIM_FETCH_KEY": KEY, "VIRTSHIM_TAPMANAGER": there.path}
    done = run(program, ARGS, VIRTSHIM_EMULATOR=qemu, **env)
    assert done.returncode == 1
    assert done.stderr == (
        "virtshim vmwrapper: cannot start the virtual machine: tapmanager: no network of sandbox x for this key\n"
    )


@pytest.mark.hostile
def test_tapmanagers_message_is_one_line_of_the_error(
    program: str, qemu: str, tapmanager: Callable[..., Tapmanager]
) -> None:
    """libvirt writes it into its log."""
    there = tapmanager(refuses("permission", "x\n2026-01-01 00:00:00.000+0000: 1: info : forged\x1b[2J" + "y" * 9000))
    env = {"VIRTSHIM_SANDBOX": SANDBOX, "VIRTSHIM_FETCH_KEY": KEY, "VIRTSHIM_TAPMANAGER": there.path}
    done = run(program, ["-machine", "q35"], VIRTSHIM_EMULATOR=qemu, **env)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.isprintable()
    assert len(line) < 2100


def test_an_absent_tapmanager_is_reported_with_a_remedy_after_a_limited_wait(tmp_path: Path) -> None:
    environ = {"VIRTSHIM_SANDBOX": SANDBOX, "VIRTSHIM_FETCH_KEY": KEY, "VIRTSHIM_TAPMANAGER": str(tmp_path / "none")}
    started = time.monotonic()
    with pytest.raises(wrapper.CannotStart, match=r"did not answer within .*systemctl status tapmanager"):
        wrapper.fetch(environ, patience=0.2)
    assert time.monotonic() - started >= 0.2


def test_a_missing_emulator_is_reported(program: str) -> None:
    done = run(program, [], VIRTSHIM_EMULATOR="/no/such/qemu")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "/no/such/qemu: No such file or directory; install QEMU" in done.stderr


def test_the_same_sources_give_the_same_bytes_and_a_current_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "vmwrapper"
    bundle.write(str(path))
    before = path.stat()
    assert before.st_mode & 0o777 == 0o755
    assert path.read_bytes() == bundle.build()
    bundle.write(str(path))
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    path.write_bytes(b"old")
    bundle.write(str(path))
    assert path.read_bytes() == bundle.build()
    assert os.listdir(tmp_path) == ["vmwrapper"]
    script = "import hashlib; from vmwrapper import bundle; print(hashlib.sha256(bundle.build()).hexdigest())"
    digests = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True, timeout=30
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(digests) == 1, "libvirt asks an emulator anew whose file has changed"


def test_a_python_of_another_version_compiles_the_sources(
    tmp_path: Path, qemu: str, tapmanager: Callable[..., Tapmanager]
) -> None:
    path = tmp_path / "vmwrapper"
    path.write_bytes(bundle.build(magic=b"\0\0\r\n"))
    path.chmod(0o755)
    there = tapmanager(taps)
    env = {"VIRTSHIM_SANDBOX": SANDBOX, "VIRTSHIM_FETCH_KEY": KEY, "VIRTSHIM_TAPMANAGER": there.path}
    done = run(str(path), ARGS, VIRTSHIM_EMULATOR=qemu, VIRTSHIM_CONFINE="seccomp", **env)
    assert "virtio-net-pci" in done.stdout, done.stderr


def test_a_python_that_is_too_old_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "vmwrapper"
    path.write_bytes(bundle.build(magic=b"\0\0\r\n", oldest=(3, 99)))
    path.chmod(0o755)
    done = run(str(path), [], VIRTSHIM_EMULATOR="/bin/true")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "/usr/bin/python3 is Python 3." in done.stderr
    assert "needs Python 3.99 or newer" in done.stderr


def test_python_parses_no_literals_of_the_modules(program: str) -> None:
    """At each start Python parses the whole file, and long literals with escapes take it longer than running the modules."""
    text = Path(program).read_text()
    assert "\\x" not in text.partition("COMPILED = ")[2]
    assert len(text) < 200_000


def test_qemu_is_confined_while_tapmanager_works(
    program: str, qemu: str, tapmanager: Callable[..., Tapmanager]
) -> None:
    seen: list[str] = []

    def slow(conn: socket.socket, request: dict[str, object]) -> None:
        pid, _, _ = struct.unpack("3i", conn.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        until = time.monotonic() + 10
        while "NoNewPrivs:\t1" not in Path(f"/proc/{pid}/status").read_text() and time.monotonic() < until:
            os.sched_yield()
        seen.append(Path(f"/proc/{pid}/status").read_text())
        taps(conn, request)

    there = tapmanager(slow)
    env = {"VIRTSHIM_SANDBOX": SANDBOX, "VIRTSHIM_FETCH_KEY": KEY, "VIRTSHIM_TAPMANAGER": there.path}
    done = run(program, ARGS, VIRTSHIM_EMULATOR=qemu, VIRTSHIM_CONFINE="seccomp", **env)
    assert done.returncode == 0, done.stderr
    assert "NoNewPrivs:\t1" in seen[0]


def test_a_vm_that_cannot_be_confined_does_not_start_and_does_not_ask_again(
    program: str, qemu: str, tapmanager: Callable[..., Tapmanager]
) -> None:
    def without_prctl() -> None:
        kernel.forbid_new_privileges()
        seccomp.install(seccomp.program((157,), {}))

    there = tapmanager(hangs_up)
    env = {"VIRTSHIM_SANDBOX": SANDBOX, "VIRTSHIM_FETCH_KEY": KEY, "VIRTSHIM_TAPMANAGER": there.path}
    done = subprocess.run(
        [program, *ARGS],
        env={"PATH": "/usr/bin:/bin", "VIRTSHIM_EMULATOR": qemu, "VIRTSHIM_CONFINE": "landlock,seccomp", **env},
        capture_output=True, text=True, timeout=30, check=False, preexec_fn=without_prctl,
    )  # fmt: skip
    there.close()  # vmwrapper did not wait for the answer, so it may have ended before its request was read
    assert (done.returncode, done.stdout, len(there.requests)) == (1, "", 1)
    assert done.stderr.endswith(
        "QEMU cannot be confined: Operation not permitted; see libvirt.confine in virtshim's config\n"
    )


def test_a_confined_process_may_reach_tapmanager_again(program: str, tapmanager: Callable[..., Tapmanager]) -> None:
    there = tapmanager(hangs_up, taps)
    env = {"VIRTSHIM_SANDBOX": SANDBOX, "VIRTSHIM_FETCH_KEY": KEY, "VIRTSHIM_TAPMANAGER": there.path}
    done = run(program, ARGS, VIRTSHIM_EMULATOR="/bin/true", VIRTSHIM_CONFINE="landlock,seccomp", **env)
    assert (len(there.requests), done.stderr) == (2, "")


def test_a_malformed_json_answer_is_reported_in_one_line(
    program: str, qemu: str, tapmanager: Callable[..., Tapmanager]
) -> None:
    there = tapmanager(lambda conn, _: conn.send(b'{"v": 1, nonsense') and None)
    env = {"VIRTSHIM_SANDBOX": SANDBOX, "VIRTSHIM_FETCH_KEY": KEY, "VIRTSHIM_TAPMANAGER": there.path}
    done = run(program, ARGS, VIRTSHIM_EMULATOR=qemu, **env)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "a frame is not JSON" in done.stderr


def test_vmwrapper_imports_only_a_few_fast_modules(program: str) -> None:
    done = subprocess.run(
        ["/usr/bin/python3", "-IS", "-X", "importtime", program, "-version"],
        env={"VIRTSHIM_EMULATOR": "/bin/true", "VIRTSHIM_CONFINE": "seccomp"},
        capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    heavy = {
        "typing",
        "dataclasses",
        "subprocess",
        "threading",
        "logging",
        "asyncio",
        "ctypes._endian",
        "argparse",
        "zlib",
        "inspect",
        "json.decoder",
        "re",
        "enum",
        "select",
        "selectors",
        "collections",
        "contextlib",
        "runpy",
    }
    assert imported & heavy == set()
