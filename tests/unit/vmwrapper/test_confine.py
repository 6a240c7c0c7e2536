"""A child process gives up its rights on the real kernel. A stand-in plays older kernels."""

from __future__ import annotations

import errno
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from vmwrapper.confine import kernel, landlock, seccomp

ROOT = Path(__file__).resolve().parents[3]

CONFINED = """
import errno, os, signal, socket, sys
from vmwrapper.confine import kernel, landlock, seccomp

def refused(what, *numbers):
    try:
        what()
    except OSError as exc:
        assert exc.errno in numbers, exc
    else:
        raise AssertionError("was allowed")

kernel.forbid_new_privileges()
"""


def confined(code: str, *arguments: str) -> None:
    """In a process of its own, as nothing of this is ever given back."""
    done = subprocess.run(
        [sys.executable, "-c", CONFINED + code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def has_landlock() -> int:
    version = landlock.abi()
    if not version:
        pytest.skip("NOT TO BE HAD HERE: this kernel has no Landlock, or it is not turned on: files are NOT held back")
    return version


# -- Landlock ----------------------------------------------------------------------------------------------------------


def test_only_the_paths_that_were_allowed_can_be_opened(has_landlock: int, tmp_path: Path) -> None:
    for name in ("own", "read", "other"):
        (tmp_path / name).write_text(name)
    confined(
        """
own, read, other = sys.argv[1:]
landlock.restrict([(own, landlock.WRITE), (read, landlock.READ), ("/not/there", landlock.READ)])
assert open(own, "r+").read() == "own"
assert open(read).read() == "read"
refused(lambda: open(read, "r+"), errno.EACCES)
refused(lambda: open(other), errno.EACCES)
refused(lambda: os.listdir("/etc"), errno.EACCES)
refused(lambda: os.unlink(other), errno.EACCES)
refused(lambda: os.execv("/bin/true", ["true"]), errno.EACCES)
""",
        *(str(tmp_path / name) for name in ("own", "read", "other")),
    )


def test_files_opened_before_stay_open(has_landlock: int, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    confined("log = open(sys.argv[1], 'w')\nlandlock.restrict([])\nlog.write('x')", str(tmp_path / "log"))
    assert (tmp_path / "log").read_text() == "x"


def test_a_socket_can_be_created_only_where_files_may_be_created(has_landlock: int, tmp_path: Path) -> None:
    (tmp_path / "vnc").mkdir()
    confined(
        """
landlock.restrict([(sys.argv[1] + "/vnc", landlock.MAKE)])
socket.socket(socket.AF_UNIX).bind(sys.argv[1] + "/vnc/sock")
refused(lambda: socket.socket(socket.AF_UNIX).bind(sys.argv[1] + "/sock"), errno.EACCES)
""",
        str(tmp_path),
    )


def test_signals_and_abstract_sockets_do_not_leave_the_confinement(has_landlock: int) -> None:
    if has_landlock < 6:
        pytest.skip(f"NOT TO BE HAD HERE: Landlock {has_landlock} has no scopes; signals are held by the uid alone")
    confined(
        """
server = socket.socket(socket.AF_UNIX)
server.bind("\\0virtshim-confine-" + str(os.getpid()))
server.listen()
if os.fork() == 0:
    landlock.restrict([])
    refused(lambda: os.kill(os.getppid(), 0), errno.EPERM)
    refused(lambda: socket.socket(socket.AF_UNIX).connect(server.getsockname()), errno.EPERM)
    os.kill(os.getpid(), 0)
    os._exit(0)
assert os.wait()[1] == 0
"""
    )


def test_tcp_is_refused_inside(has_landlock: int) -> None:
    if has_landlock < 4:
        pytest.skip(f"NOT TO BE HAD HERE: Landlock {has_landlock} knows no TCP; seccomp alone holds the network back")
    confined(
        """
server = socket.create_server(("127.0.0.1", 0))
landlock.restrict([])
refused(lambda: socket.create_connection(server.getsockname()), errno.EACCES)
refused(lambda: socket.create_server(("127.0.0.1", 0)), errno.EACCES)
"""
    )


_KNOWN_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16, 6: 16}


class Kernel:
    """Landlock of a given version: it refuses bits that it does not know, as the real one does."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.rulesets: list[bytes] = []
        self.rules: list[int] = []
        self.restricted = False

    def syscall(self, number: int, *arguments: int | bytes | None) -> int:
        if number == 444 and arguments[0] is None:
            if not self.version:
                raise OSError(errno.EOPNOTSUPP, "")
            return self.version
        if number == 444:
            described, size = arguments[0], arguments[1]
            assert isinstance(described, bytes)
            assert len(described) == size
            if struct.unpack_from("=Q", described)[0] >> _KNOWN_BITS[self.version]:
                raise OSError(errno.EINVAL, "")
            self.rulesets.append(described)
            return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        if number == 445:
            assert isinstance(arguments[2], bytes)
            rights, _ = struct.unpack("=Qi", arguments[2])
            if rights & ~struct.unpack_from("=Q", self.rulesets[-1])[0]:
                raise OSError(errno.EINVAL, "")
            self.rules.append(rights)
        self.restricted = self.restricted or number == 446
        return 0


@pytest.mark.parametrize(("version", "words"), [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3)])
def test_only_rights_that_the_kernel_knows_are_requested(
    version: int, words: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = Kernel(version)
    monkeypatch.setattr(kernel, "syscall", fake.syscall)
    assert landlock.restrict([(str(tmp_path), landlock.MAKE), ("/dev/null", landlock.DEVICE)]) == version
    assert [len(described) for described in fake.rulesets] == [8 * words]
    assert len(fake.rules) == 2
    assert fake.restricted


def test_without_landlock_nothing_is_restricted_and_that_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Kernel(0)
    monkeypatch.setattr(kernel, "syscall", fake.syscall)
    assert landlock.restrict([("/", landlock.READ)]) == 0
    assert not fake.restricted


# -- seccomp -----------------------------------------------------------------------------------------------------------


def test_listed_system_calls_are_refused_and_others_work() -> None:
    confined(
        """
seccomp.install(seccomp.program(seccomp.REFUSED, {}))
for number in seccomp.REFUSED:
    refused(lambda: kernel.syscall(number, 0, 0, 0, 0, 0, 0), errno.EPERM)
assert os.getpid() and os.listdir("/")
"""
    )


NUMBERS = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
# The system calls by name; the list has their names only in its comments.
WAYS_OUT = """
    ptrace process_vm_readv process_vm_writev process_madvise pidfd_open pidfd_getfd pidfd_send_signal add_key request_key keyctl
    bpf perf_event_open userfaultfd fanotify_init io_uring_setup io_uring_enter io_uring_register mount umount2 pivot_root chroot
    unshare setns open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr name_to_handle_at open_by_handle_at kexec_load
    kexec_file_load init_module finit_module delete_module swapon swapoff reboot syslog iopl ioperm settimeofday clock_settime
    clock_adjtime adjtimex sethostname setdomainname shmget semget msgget mq_open move_pages migrate_pages fork vfork execveat
"""


def test_every_system_call_that_leads_out_is_listed() -> None:
    numbers = dict(re.findall(r"^#define __NR_(\w+) (\d+)$", NUMBERS.read_text(), re.MULTILINE))
    assert [call for call in WAYS_OUT.split() if int(numbers[call]) not in seccomp.REFUSED] == []


def test_only_unix_stream_sockets_are_allowed() -> None:
    confined(
        """
seccomp.install(seccomp.program([seccomp.CONNECT], {
    seccomp.SOCKET: [seccomp.UNIX_STREAMS], seccomp.SOCKETPAIR: [seccomp.UNIX_STREAMS]}))
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET, socket.AF_VSOCK, socket.AF_ALG):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        refused(lambda: socket.socket(family, kind), errno.EPERM)
refused(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), errno.EPERM)
refused(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET), errno.EPERM)
socket.socketpair()
refused(lambda: socket.socket(socket.AF_UNIX).connect("/nowhere"), errno.EPERM)
"""
    )


def test_a_second_kind_of_socket_can_be_allowed() -> None:
    confined(
        """
seccomp.install(seccomp.program([], {seccomp.SOCKET: [seccomp.UNIX_STREAMS, seccomp.DEVICE_NEWS]}))
socket.socket(socket.AF_UNIX)
socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15)
refused(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0), errno.EPERM)
refused(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_RAW), errno.EPERM)
refused(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM), errno.EPERM)
"""
    )


def test_threads_can_be_started_and_processes_cannot() -> None:
    confined(
        """
import threading
seccomp.install(seccomp.program(seccomp.REFUSED, {seccomp.CLONE: [seccomp.THREADS]}, absent=[seccomp.CLONE3]))
thread = threading.Thread(target=lambda: None)
thread.start()
thread.join()
refused(os.fork, errno.EPERM)
"""
    )


def test_system_calls_of_another_abi_are_refused_too() -> None:
    """x32's numbers are those of x86-64 with one bit more."""
    confined(
        """
seccomp.install(seccomp.program(seccomp.REFUSED, {}))
refused(lambda: kernel.syscall(0x40000000 | 521, 0, 0, 0, 0), errno.ENOSYS)
refused(lambda: kernel.syscall(0x40000000 | 39), errno.ENOSYS)
"""
    )


def test_a_filter_stays_over_exec() -> None:
    confined(
        """
seccomp.install(seccomp.program([], {seccomp.SOCKET: [seccomp.UNIX_STREAMS]}))
os.execv(sys.executable, [sys.executable, "-c", '''
import socket
try:
    socket.socket(socket.AF_INET)
except PermissionError:
    raise SystemExit(0)
raise SystemExit(1)
'''])
"""
    )


def test_with_an_allow_list_all_other_calls_are_refused() -> None:
    confined(
        """
seccomp.install(seccomp.only_these([0, 1, 3, 9, 10, 11, 12, 39, 60, 231]))
assert os.getpid()
refused(lambda: os.open("/etc/hostname", os.O_RDONLY), errno.EPERM)
refused(os.fork, errno.EPERM)
refused(lambda: kernel.syscall(0x40000000 | 39), errno.EPERM)
os._exit(0)
"""
    )


# -- a user's rights ---------------------------------------------------------------------------------------------------


def test_no_file_is_written_and_memory_and_time_end(tmp_path: Path) -> None:
    confined(
        """
from vmwrapper.confine import drop_privileges
import resource
drop_privileges.bound(1 << 30, 7)
assert resource.getrlimit(resource.RLIMIT_CPU) == (7, 8)
assert open("/proc/self/oom_score_adj").read().strip() == "1000"
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with open(sys.argv[1], "wb", buffering=0) as file:
    refused(lambda: file.write(b"x"), errno.EFBIG)
try:
    bytearray(2 << 30)
except MemoryError:
    pass
else:
    raise AssertionError("was given")
""",
        str(tmp_path / "file"),
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: needs root, which is what is given up")
def test_a_change_of_user_is_permanent_and_leaves_only_its_own_group() -> None:
    confined(
        """
from vmwrapper.confine import drop_privileges
drop_privileges.own_namespaces()
os.setgroups([4, 27])  # as who starts it may have
drop_privileges.become(65534, 65534)
assert os.getresuid() == os.getresgid() == (65534,) * 3
assert os.getgroups() == []
refused(lambda: os.setuid(0), errno.EPERM)
refused(lambda: open("/etc/shadow"), errno.EACCES)
"""
    )


def test_a_process_without_its_parent_ends_at_once() -> None:
    confined(
        """
from vmwrapper.confine import drop_privileges
if os.fork() == 0:
    drop_privileges.end_with(1 << 30)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
"""
    )
