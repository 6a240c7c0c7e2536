"""A file that takes its parser over finds nothing to read and nobody to talk to, and its use of resources is limited.

The attack is played by a malicious qemu-img, and by a malicious tar reader in a copy of virtshim."""

from __future__ import annotations

import gzip
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.loop import loop_device, no_loop_devices
from fakes.registry import FakeRegistry, tar
from fakes.webserver import LOOPBACK, WebServer, serving
from leaks import runs
from podclient import wait_until

import virtshim
from virtshim.images import confinement, layer_child, verify
from virtshim.images.confinement import Bounds
from virtshim.images.filestore import ImageFileStore, ImageSettings
from virtshim.model.errors import DeadlineExceeded, InternalError, InvalidRequest, ShimError
from virtshim.model.image import DiskFormat
from virtshim.system import process
from vmwrapper.confine import landlock

pytestmark = [
    pytest.mark.hostile,
    pytest.mark.skipif(os.geteuid() != 0, reason="AREA hostile NOT TESTED: needs root, which is what is given up"),
]

NEVER = threading.Event()
PROJECT = Path(virtshim.__file__).parents[1]

# Each line is an attempt: its name and its action. The script reports what it reached.
ATTACK = """
import ctypes, os, socket
def _reached():
    def new(path):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
    def ends(pid):
        os.kill(pid, 0)
    def call(number, *arguments):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syscall(number, *arguments) < 0:
            raise OSError(ctypes.get_errno(), "")
    attempts = {
        "is root": lambda: os.getuid() and [][0],
        "is in root's groups": lambda: {0} & {os.getgid(), *os.getgroups()} or [][0],
        "root again": lambda: os.setuid(0),
        "a secret of root": lambda: open(SECRET).close(),
        "a file for all": lambda: LANDLOCK and open("/etc/hostname").close() or LANDLOCK or [][0],
        "a new file": lambda: new("/tmp/virtshim-taken-over"),
        "its image": lambda: FD and new(f"/proc/self/fd/{FD}") or FD or [][0],
        "the network": lambda: socket.socket(socket.AF_INET).close(),
        "a server of this node": lambda: socket.socket().connect(("127.0.0.1", PORT)),
        "a socket of any kind": lambda: socket.socket(socket.AF_UNIX).close(),
        "the kernel's tables": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close(),
        "virtshim by a signal": lambda: ends(os.getppid()),
        "virtshim's memory": lambda: call(101, 0x4206, os.getppid(), 0, 0),
        "another process": lambda: os.fork() or os._exit(0),
        "a namespace": lambda: call(272, 0x10000000),
        "a mount": lambda: call(165, b"none", b"/mnt", b"tmpfs", 0, 0),
        "new privileges": lambda: call(157, 39, 0, 0, 0, 0) or [][0],
    }
    reached = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except (OSError, IndexError, LookupError, ImportError):
            continue
        reached.append(name)
    return "reached: " + ", ".join(reached)
"""


@pytest.fixture
def web() -> Iterator[WebServer]:
    with serving() as server:
        yield server


@pytest.fixture
def attack(tmp_path: Path) -> Iterator[str]:
    """The attack's code, with its targets."""
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    secret.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"SECRET, LANDLOCK, PORT = {str(secret)!r}, {bool(landlock.abi())}, {server.getsockname()[1]}\n" + ATTACK


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ImageFileStore]:
    store = ImageFileStore(str(tmp_path / "images"), ImageSettings(insecure_registries=LOOPBACK, max_bytes=64 << 20))
    store.sweep()
    yield store
    assert store.stored() == frozenset()
    assert list((tmp_path / "images" / "incoming").iterdir()) == []


@pytest.fixture
def false_qemu_img(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., None]]:
    """Puts a program in PATH before the real one, where everybody can run it."""
    directory = Path("/var/tmp") / f"virtshim-{tmp_path_factory.mktemp('programs').name}-{os.getpid()}"
    directory.mkdir(mode=0o755)
    monkeypatch.setitem(process.ENVIRONMENT, "PATH", f"{directory}:{process.ENVIRONMENT['PATH']}")

    def put(code: str) -> None:
        program = directory / "qemu-img"
        program.write_text(f"#!/usr/bin/python3 -IS\n{code}")
        program.chmod(0o755)

    yield put
    shutil.rmtree(directory)


@pytest.fixture
def false_tar_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A copy of virtshim whose child has been taken over when it unpacks its first layer."""

    def put(code: str) -> None:
        copy = tmp_path / "virtshim-copy"
        for package in ("vmwrapper", "virtshim"):
            shutil.copytree(PROJECT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
        with (copy / "virtshim/images/confined/layer_tar.py").open("a") as module:
            module.write(f"\nfrom virtshim.model.errors import InvalidRequest\n{code}\n")
        monkeypatch.setattr(confinement, "ROOT", str(copy))

    return put


def pulled_from_a_registry(web: WebServer, store: ImageFileStore) -> None:
    store.fetch(FakeRegistry(web).push("a/b", {"disk/a.img": bytes(1024)}), None, NEVER)


def test_a_taken_over_qemu_img_reaches_nothing(web, store, attack, false_qemu_img) -> None:
    fd = "import sys; FD = sys.argv[-1].rpartition('/')[2]\n"
    false_qemu_img(f"{attack}{fd}sys.stderr.write(_reached()); sys.exit(1)")
    with pytest.raises(InvalidRequest, match="cannot be read by qemu-img: reached:;"):
        store.fetch(web.serve("/x.img", bytes(1024)), None, NEVER)
    if not landlock.abi():
        pytest.skip("NOT TO BE HAD HERE: this kernel has no Landlock; files that everybody may read are NOT held back")


@pytest.mark.skipif(**no_loop_devices())
def test_a_qemu_img_taken_over_while_it_copies_to_a_volume_reaches_only_that_volume(
    tmp_path: Path, attack: str, false_qemu_img
) -> None:
    """The volume belongs to root, as a device does, and is all that it has of root."""
    fd = "import sys; FD = sys.argv[3].rpartition('/')[2].partition('\"')[0]\n"
    modes = "import os\nfor change in (lambda: os.chmod(SECRET, 0o644), lambda: os.chown(SECRET, 1, 1)):\n"
    modes += "    try: change(); sys.stderr.write('a mode')\n    except OSError: pass\n"
    false_qemu_img(f"{attack}{fd}{modes}sys.stderr.write(_reached() + '!'); sys.exit(1)")
    image, volume = tmp_path / "image", tmp_path / "volume"
    for file in (image, volume):
        file.write_bytes(bytes(1 << 20))
    with loop_device(volume) as device, device.open("r+b") as opened, pytest.raises(InternalError) as told:
        verify.qemu_img_copy_to_device(str(image), DiskFormat.RAW, opened.fileno(), 512)
    if not landlock.abi():
        assert "Landlock" in str(told.value)
        pytest.skip("NOT TO BE HAD HERE: this kernel has no Landlock, and nothing is copied without")
    assert str(told.value).endswith(": reached: is root, is in root's groups!")


def test_a_taken_over_layer_unpacker_reaches_nothing(web, store, attack, false_tar_reader) -> None:
    false_tar_reader(
        f"{attack}\nFD = ''\ndef _taken(self, chunks): raise InvalidRequest(_reached())\nTarStream.__init__ = _taken"
    )
    with pytest.raises(InvalidRequest, match=r"reached: $"):
        pulled_from_a_registry(web, store)
    if not landlock.abi():
        pytest.skip("NOT TO BE HAD HERE: this kernel has no Landlock; seccomp alone keeps files closed")


def test_the_same_attack_as_root_reaches_everything(attack: str) -> None:
    """Otherwise the two tests above would prove nothing."""
    code = f"FD = ''\n{attack}\nLANDLOCK = True\nprint(_reached())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    Path("/tmp/virtshim-taken-over").unlink()
    for name in (
        "is root",
        "a secret of root",
        "a file for all",
        "a new file",
        "a server of this node",
        "another process",
    ):
        assert name in done.stdout


def test_a_killed_qemu_img_is_not_blamed_on_the_image(web, store, false_qemu_img) -> None:
    false_qemu_img("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(InternalError, match="qemu-img was killed by signal 9"):
        store.fetch(web.serve("/x.img", bytes(1024)), None, NEVER)


def test_a_hung_qemu_img_ends_when_its_caller_cancels(web, store, false_qemu_img) -> None:
    false_qemu_img("import time; time.sleep(600)")
    gives_up = threading.Event()
    timer = threading.Timer(1.0, gives_up.set)
    timer.start()
    with pytest.raises(DeadlineExceeded, match="qemu-img was stopped"):
        store.fetch(web.serve("/x.img", bytes(1024)), None, gives_up)
    timer.join()


def test_a_qemu_img_that_takes_too_much_memory_is_stopped(web, store, false_qemu_img) -> None:
    false_qemu_img("held = []\nwhile True: held.append(bytearray(64 << 20))")
    with pytest.raises(InvalidRequest, match=r"cannot be read by qemu-img: .*MemoryError"):
        store.fetch(web.serve("/x.img", bytes(1024)), None, NEVER)


def test_a_qemu_img_that_never_ends_is_stopped_and_the_limit_is_named(web, store, false_qemu_img, monkeypatch) -> None:
    monkeypatch.setattr(verify, "BOUNDS", Bounds(1 << 30, 1))
    false_qemu_img("while True: pass")
    with pytest.raises(InvalidRequest, match=r"in 1 s of processor time, the limit; convert it"):
        store.fetch(web.serve("/x.img", bytes(1024)), None, NEVER)


def test_endless_output_of_qemu_img_is_read_up_to_a_limit(web, store, false_qemu_img, monkeypatch) -> None:
    monkeypatch.setattr(verify, "BOUNDS", Bounds(1 << 30, 1))
    false_qemu_img("import os\nwhile True: os.write(1, b'[' * 65536)")
    with pytest.raises(ShimError):
        store.fetch(web.serve("/x.img", bytes(1024)), None, NEVER)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "def _taken(self, chunks):\n while True: pass",
            "more than 1 s of processor time, the limit for layers of its size; push the disk as qcow2",
        ),
        ("def _taken(self, chunks):\n bytearray(2 << 30)", "cannot be unpacked in the memory allowed for it"),
    ],
    ids=["time", "memory"],
)
def test_a_limit_reached_while_unpacking_is_named(
    web, store, false_tar_reader, monkeypatch, code: str, words: str
) -> None:
    monkeypatch.setattr(layer_child, "LEAST_CPU_SECONDS", -1)  # and 2 s for 64 MiB
    false_tar_reader(f"{code}\nTarStream.__init__ = _taken")
    with pytest.raises(InvalidRequest, match=words):
        pulled_from_a_registry(web, store)


# Each entry writes to virtshim without the code for frames.
NONSENSE = {
    "a frame of 4 GiB": ("b'D\\xff\\xff\\xff\\xff'", "sent invalid data"),
    "a frame of no kind": ("b'?\\0\\0\\0\\0'", "sent invalid data"),
    "a size that is none": ("b'S\\0\\0\\0\\2-1'", "sent invalid data"),
    "a disk without end": ("(b'D\\0\\1\\0\\0' + bytes(65536)) * 2000", "is larger than 67108864 bytes"),
    "an early end": ("b'E\\0\\0\\0\\0' * 9 + b'F\\0\\0\\0\\0'", "unpacking its layers failed|is empty"),
    "a kernel outside of /boot": ("b'K\\0\\0\\0\\x0d/boot/../etc\\x001'", "sent invalid data"),
    "a kernel without words": ("b'K\\0\\0\\0\\0'", "sent invalid data"),
    "a kernel that is larger than it says": (
        "b'K\\0\\0\\0\\x09/boot/k\\x009' + b'D\\0\\1\\0\\0' + bytes(65536)",
        "sent invalid data",
    ),
    "half a kernel": (
        "b'K\\0\\0\\0\\x09/boot/k\\x009' + b'E\\0\\0\\0\\0' * 9 + b'F\\0\\0\\0\\0'",
        "sent invalid data|unpacking its layers failed",
    ),
    "words that move the cursor": ("b'X\\0\\0\\0\\4\\x1b[2J'", r"^\?\[2J$"),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_messages_of_a_taken_over_child_do_no_harm(web, store, false_tar_reader, case: str) -> None:
    data, words = NONSENSE[case]
    body = f"def _taken(self, chunks):\n data = memoryview({data})\n while data: data = data[os.write(1, data):]\n os._exit(1)"
    false_tar_reader(f"import os\n{body}\nTarStream.__init__ = _taken")
    with pytest.raises(ShimError, match=words):
        pulled_from_a_registry(web, store)


def test_a_verdict_without_qemu_imgs_findings_is_rejected(web, store, false_qemu_img) -> None:
    for said in ("", "{}", '{"format": "raw"}', '{"format": "\\x1b[2J", "virtual-size": 1024}', "[" * 60_000):
        false_qemu_img(f"print({said!r})")
        with pytest.raises(ShimError) as caught:
            store.fetch(web.serve("/x.img", bytes(1024)), None, NEVER)
        assert str(caught.value).isprintable()


def test_a_child_ends_when_virtshim_is_killed() -> None:
    code = (
        "import os, time\n"
        "from virtshim.images.confinement import account, Bounds, ConfinedChild\n"
        "with ConfinedChild(account()).unpack(Bounds(1 << 29, 60)):\n"
        "    print(open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read(), flush=True)\n"
        "    time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(PROJECT)}
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    wait_until(lambda: os.stat(f"/proc/{child}").st_uid != 0, 10, "it has given its user up")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not runs(child), 5, "the child is gone")
    parent.stdout.close()


@pytest.mark.parametrize("user", ["root", "nobody-of-this-name"])
def test_nothing_is_read_without_an_unprivileged_user(web, tmp_path: Path, user: str) -> None:
    store = ImageFileStore(str(tmp_path / "images"), ImageSettings(insecure_registries=LOOPBACK, parser_user=user))
    for name in (web.serve("/x.img", bytes(1024)), FakeRegistry(web).push("a/b", {"disk/a.img": bytes(1024)})):
        with pytest.raises(InternalError, match=r"images\.parser_user"):
            store.fetch(name, None, NEVER)
    assert store.stored() == frozenset()


def test_compression_formats_are_what_the_tests_assume() -> None:
    assert gzip.decompress(gzip.compress(tar({"a": b"b"})))
