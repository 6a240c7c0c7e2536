"""Root in a guest that bypasses the guest's kernel gets nothing but its volumes from virtiofsd. The daemon is real, and
started as for a VM."""

from __future__ import annotations

import contextlib
import os
import random
import stat
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from fakes import fuse_client as fuse
from fakes.fuse_client import HEAD, ROOT, FuseClient, Gone, refusal
from leaks import runs
from podclient import wait_until

from tapmanager.cgroups.tree import VmCgroups, hierarchies
from tapmanager.shares.daemons import Place, ShareDaemons
from tapmanager.shares.plan import SharedMount

pytestmark = [
    pytest.mark.hostile,
    pytest.mark.volumes,
    pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root can mount"),
]
PROGRAM = os.environ.get("VIRTSHIM_TEST_VIRTIOFSD", "")
UID = 2130706433
ATTACKER, VICTIM = "0123456789abcdef0123", "fedcba98765432100123"
SECRET = "of another pod"
NULL = os.makedev(1, 3)
EXCHANGE, WHITEOUT = 2, 4
FEW = 300


def soon() -> float:
    return time.monotonic() + 60


@dataclass
class Volumes:
    """Volumes on one file system, as hostPaths may be. The attacker may write `mine` and `other`, and read `fixed`."""

    top: Path
    mine: Path
    other: Path
    fixed: Path
    victims: Path

    def places(self) -> dict[str, Path]:
        """The volumes by the attacker's name for each."""
        return {"0": self.mine, "1": self.other, "2": self.fixed}


@pytest.fixture
def volumes(tmp_path: Path) -> Iterator[Volumes]:
    top = tmp_path / "node"
    top.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "virtshim-test", top], check=True)
    try:
        made = Volumes(top, *(top / name for name in ("mine", "other", "fixed", "victims")))
        for volume in (made.mine, made.other, made.fixed, made.victims):
            volume.mkdir()
            volume.chmod(0o777)
            (volume / "file").write_text(SECRET if volume == made.victims else "hello")
        (top / "shadow").write_text(SECRET)
        (top / "shadow").chmod(0o600)
        yield made
    finally:
        subprocess.run(["umount", "-l", top], check=True)


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShareDaemons]:
    """The daemons, which may have few files open, so that a client soon exhausts them. Earlier tests end their own
    children."""
    earlier = running_children()
    daemons = ShareDaemons(VmCgroups(hierarchies()), PROGRAM, open_files=FEW)
    yield daemons
    wait_until(lambda: running_children() <= earlier, 60, "those whose clients have hung up are gone")
    daemons.all(str(tmp_path_factory.getbasetemp()))  # and buries them


def running_children() -> set[str]:
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {pid for pid in pids if runs(int(pid))}


def serving(place: Place) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and place.root in (entry / "cmdline").read_text():
                found.append(int(entry.name))
    return sorted(found)


@pytest.fixture
def attackers(daemons: ShareDaemons, volumes: Volumes, tmp_path: Path) -> Iterator[Place]:
    place = Place(f"{tmp_path}/shares/{ATTACKER}")
    mounts = (
        SharedMount(str(volumes.mine)),
        SharedMount(str(volumes.other)),
        SharedMount(str(volumes.fixed), readonly=True),
    )
    daemons.start(place, UID, mounts, soon())
    yield place
    daemons.end(place, soon())


@pytest.fixture
def victims(daemons: ShareDaemons, volumes: Volumes, tmp_path: Path) -> Iterator[FuseClient]:
    """The daemon of another VM with an honest client."""
    place = Place(f"{tmp_path}/shares/{VICTIM}")
    daemons.start(place, UID, (SharedMount(str(volumes.victims)),), soon())
    with FuseClient(place.socket) as client:
        yield client
    daemons.end(place, soon())


@pytest.fixture
def client(attackers: Place) -> Iterator[FuseClient]:
    with FuseClient(attackers.socket) as client:
        yield client


def content(client: FuseClient, path: str) -> str:
    node = client.walk(path)
    return client.read(node, client.open(node)).decode()


def test_the_attacker_can_use_its_own_volumes(client: FuseClient, volumes: Volumes) -> None:
    """Otherwise the other tests here prove nothing."""
    assert content(client, "0/file") == "hello"
    made, handle = client.create(client.walk("0"), "new", uid=1234)
    assert client.write(made.node, handle, b"by the guest") == 12
    assert (volumes.mine / "new").read_text() == "by the guest"
    assert (volumes.mine / "new").stat().st_uid == 1234


@pytest.mark.parametrize(
    "flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_PATH, os.O_RDONLY | os.O_NONBLOCK]
)
@pytest.mark.parametrize("kind", [stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFLNK])
def test_special_files_are_never_opened(client: FuseClient, volumes: Volumes, kind: int, flags: int) -> None:
    """Files that the node may have left in a volume: a device that answers, a FIFO without a writer, a symlink out of
    the volume."""
    path = volumes.mine / "odd"
    if kind == stat.S_IFLNK:
        path.symlink_to(volumes.top / "shadow")
    else:
        os.mknod(path, kind | 0o666, NULL)
    node = client.lookup(client.walk("0"), "odd").node
    for opcode in (fuse.OPEN, fuse.OPENDIR):
        with pytest.raises(OSError, match=r".") as said:
            client.call(opcode, node, struct.pack("<II", flags, 0))
        assert refusal(said.value) in ("EBADF", "ENOTDIR", "ENOENT", "ELOOP", "ENXIO", "EINVAL", "EACCES", "EPERM")
    if flags == os.O_PATH and kind != stat.S_IFLNK:  # which opens a name, and reads nothing
        made, handle = client.create(client.walk("0"), "odd", flags=flags)
        for attempt in (lambda: client.read(made.node, handle), lambda: client.write(made.node, handle, b"evil")):
            with pytest.raises(OSError, match=r".") as said:
                attempt()
            assert refusal(said.value) == "EBADF"
    else:
        with pytest.raises(OSError, match=r"."):
            client.create(client.walk("0"), "odd", flags=flags)
    assert content(client, "0/file") == "hello", "and it serves still"


def test_device_nodes_cannot_be_opened_in_the_daemons_mounts(attackers: Place) -> None:
    """Not even a taken-over virtiofsd can open them. Set-user-ID files have no effect there either."""
    for pid in serving(attackers):
        lines = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
        options = {line[4].removeprefix(attackers.root): set(line[5].split(",")) for line in lines}
        for name in ("/0", "/1", "/2"):
            assert {"nodev", "nosuid", "noexec"} <= options[name]


@pytest.mark.parametrize("device", [NULL, os.makedev(8, 0), os.makedev(1, 1)])
@pytest.mark.parametrize("kind", [stat.S_IFCHR, stat.S_IFBLK])
def test_the_attacker_cannot_make_device_nodes_in_a_volume(
    client: FuseClient, volumes: Volumes, kind: int, device: int
) -> None:
    with pytest.raises(OSError, match=r".") as said:
        client.make_node(client.walk("0"), "device", kind | 0o666, device)
    assert refusal(said.value) == "EPERM"
    assert not (volumes.mine / "device").exists()


def test_exchange_and_whiteout_leave_no_usable_device(client: FuseClient, volumes: Volumes) -> None:
    with contextlib.suppress(OSError):
        client.rename(client.walk("0"), "file", client.walk("0"), "moved", WHITEOUT)
    left = volumes.mine / "file"
    assert not left.exists() or not stat.S_ISCHR(left.stat().st_mode) or left.stat().st_rdev == 0


def test_files_cannot_be_linked_or_moved_between_volumes(client: FuseClient, volumes: Volumes) -> None:
    """All volumes are on one file system, so the kernel could do it."""
    before = tree(volumes)
    for source in ("0", "1", "2"):
        for into in {"0", "1", "2"} - {source}:
            attempts: list[Callable[[], object]] = [
                partial(client.link, client.walk(f"{source}/file"), client.walk(into), "linked"),
                partial(client.rename, client.walk(source), "file", client.walk(into), "moved"),
                partial(client.rename, client.walk(source), "file", client.walk(into), "file", EXCHANGE),
            ]
            for attempt in attempts:
                with pytest.raises(OSError, match=r".") as said:
                    attempt()
                assert refusal(said.value) in ("EXDEV", "EROFS", "EINVAL")
    assert tree(volumes) == before


def test_a_volume_itself_cannot_be_moved_replaced_or_removed(client: FuseClient, volumes: Volumes) -> None:
    before = tree(volumes)
    attempts: list[Callable[[], object]] = [
        lambda: client.rename(ROOT, "0", ROOT, "9"),
        lambda: client.rename(ROOT, "0", ROOT, "1", EXCHANGE),
        lambda: client.rename(ROOT, "2", client.walk("0"), "fixed"),
        lambda: client.call(fuse.RMDIR, ROOT, b"2\0"),
        lambda: client.call(fuse.MKDIR, ROOT, struct.pack("<II", 0o755, 0) + b"9\0"),
        lambda: client.symlink(ROOT, "9", "/"),
        lambda: client.create(ROOT, "9"),
        lambda: client.call(fuse.SETATTR, ROOT, attributes(mode=0o777)),
    ]
    for attempt in attempts:
        with pytest.raises(OSError, match=r"."):
            attempt()
    assert tree(volumes) == before


def test_no_request_changes_a_read_only_volume(client: FuseClient, volumes: Volumes) -> None:
    before = tree(volumes)
    top, file = client.walk("2"), client.walk("2/file")
    attempts: list[Callable[[], object]] = [
        lambda: client.open(file, os.O_RDWR),
        lambda: client.open(file, os.O_RDONLY | os.O_TRUNC),
        lambda: client.create(top, "new"),
        lambda: client.make_node(top, "new", stat.S_IFREG | 0o644),
        lambda: client.symlink(top, "new", "x"),
        lambda: client.link(file, top, "new"),
        lambda: client.rename(top, "file", top, "new"),
        lambda: client.call(fuse.UNLINK, top, b"file\0"),
        lambda: client.call(fuse.SETATTR, file, attributes(mode=0o777)),
        lambda: client.call(fuse.SETATTR, file, attributes(size=0)),
        lambda: client.set_attribute(file, "user.x", b"y"),
    ]
    for attempt in attempts:
        with pytest.raises(OSError, match=r"."):
            attempt()
    handle = client.open(file)
    for opcode in (fuse.WRITE, fuse.FALLOCATE):
        with pytest.raises(OSError, match=r"."):
            client.call(opcode, file, struct.pack("<QQIIQII", handle, 0, 4, 0, 0, 0, 0) + b"evil")
    assert tree(volumes) == before


@pytest.mark.parametrize(
    "name", ["..", ".", "", "../shadow", "../../shadow", "/etc/passwd", "0/../../shadow", "file/..", "x" * 256]
)
def test_no_name_leads_out_of_a_volume(client: FuseClient, volumes: Volumes, name: str) -> None:
    before = tree(volumes)
    for parent in ("0", "2"):
        top = client.walk(parent)
        found = None
        with contextlib.suppress(OSError):
            found = client.lookup(top, name)
        assert found is None or stat.S_ISDIR(found.mode)
        with contextlib.suppress(OSError):
            client.create(client.lookup(found.node, "mine").node if found else top, name)
        attempts: list[Callable[[], object]] = [
            partial(client.rename, top, "file", top, name),
            partial(client.rename, top, name, top, "in"),
            partial(client.call, fuse.MKDIR, top, struct.pack("<II", 0o755, 0) + name.encode() + b"\0"),
            partial(client.call, fuse.UNLINK, top, name.encode() + b"\0"),
            partial(client.symlink, top, name, "x"),
            partial(client.link, client.walk("0/file"), top, name),
        ]
        for attempt in attempts:
            with pytest.raises(OSError, match=r"."):
                attempt()
    assert tree(volumes) == before


def test_the_parent_of_a_volume_shows_only_the_volumes(client: FuseClient, volumes: Volumes) -> None:
    """ROOT's inode is not the node's, whatever the request."""
    for start in ("0", "2"):
        node = client.walk(start)
        for _ in range(5):
            with contextlib.suppress(OSError):
                node = client.lookup(node, "..").node
            for name in ("etc", "proc", "mine", "victims", "shadow", "dev", "root"):
                with pytest.raises(OSError, match=r"."):
                    client.lookup(node, name)


@pytest.mark.parametrize(
    "target", ["{top}/shadow", "/etc/passwd", "../../shadow", "/proc/self/fd/3", "/proc/1/root/etc"]
)
def test_the_attackers_symlinks_are_never_followed_on_the_node(
    client: FuseClient, volumes: Volumes, target: str
) -> None:
    before = (volumes.top / "shadow").stat()
    top = client.walk("0")
    link = client.symlink(top, "link", target.format(top=volumes.top)).node
    body = struct.pack("<QQIIQII", 0, 0, 4096, 0, 0, 0, 0)
    for attempt in (
        lambda: client.open(link),
        lambda: client.open(link, os.O_WRONLY | os.O_TRUNC),
        lambda: client.create(top, "link"),
        lambda: client.create(top, "link", flags=os.O_WRONLY | os.O_TRUNC),
        lambda: client.lookup(link, "x"),
        lambda: client.call(fuse.OPENDIR, link, bytes(8)),
        lambda: client.call(fuse.READ, link, body),
        lambda: client.call(fuse.SETATTR, link, attributes(size=0)),
        lambda: client.set_attribute(link, "user.x", b"y"),
    ):
        with pytest.raises(OSError, match=r"."):
            attempt()
    with contextlib.suppress(OSError):
        client.call(fuse.SETATTR, link, attributes(mode=0o777))
    with contextlib.suppress(OSError):
        client.call(fuse.SETATTR, link, attributes(uid=1234))
    client.link(link, top, "second")
    after = (volumes.top / "shadow").stat()
    assert (after.st_mode, after.st_uid, after.st_size, after.st_nlink) == (
        before.st_mode,
        before.st_uid,
        before.st_size,
        before.st_nlink,
    )


def test_handles_and_nodes_of_others_are_invalid(client: FuseClient, victims: FuseClient, volumes: Volumes) -> None:
    """This includes those that the victim's daemon gave its own client."""
    node = victims.walk("0/file")
    handle = victims.open(node)
    assert victims.read(node, handle) == SECRET.encode()
    before = tree(volumes)
    guess = random.Random(27)
    numbers = [node, handle, 0, 2, 3, 4, 5, 8, 16, 1023, 1024, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1]
    numbers += [guess.randrange(1 << bits) for bits in (16, 32, 48, 64) for _ in range(20)]
    own = client.walk("0/file")
    for number in numbers:
        for opcode, where, body in (
            (fuse.GETATTR, number, bytes(16)),
            (fuse.OPEN, number, struct.pack("<II", os.O_RDWR, 0)),
            (fuse.READ, own, struct.pack("<QQIIQII", number, 0, 4096, 0, 0, 0, 0)),
            (fuse.READDIR, ROOT, struct.pack("<QQIIQII", number, 0, 4096, 0, 0, 0, 0)),
            (fuse.WRITE, own, struct.pack("<QQIIQII", number, 0, 4, 0, 0, 0, 0) + b"evil"),
            (fuse.RELEASE, own, struct.pack("<QIIQ", number, 0, 0, 0)),
            (fuse.LINK, ROOT, struct.pack("<Q", number) + b"linked\0"),
        ):
            if number in (own, ROOT):
                continue
            answer = b""
            with contextlib.suppress(OSError):
                answer = client.call(opcode, where, body)
            assert SECRET.encode() not in answer
    assert tree(volumes) == before
    assert victims.read(node, handle) == SECRET.encode()


@pytest.mark.parametrize(
    "name", ["security.capability", "trusted.overlay.opaque", "security.selinux", "system.posix_acl_access"]
)
def test_attributes_with_an_effect_on_the_node_cannot_be_set(client: FuseClient, volumes: Volumes, name: str) -> None:
    capability = struct.pack("<IIIII", 0x02000001, 0xFFFFFFFF, 0, 0xFFFFFFFF, 0)
    with pytest.raises(OSError, match=r".") as said:
        client.set_attribute(client.walk("0/file"), name, capability)
    assert refusal(said.value) in ("ENOSYS", "EPERM", "EOPNOTSUPP")
    assert name not in os.listxattr(volumes.mine / "file")


def test_the_attackers_open_files_are_bounded_and_others_are_served(
    client: FuseClient, victims: FuseClient, volumes: Volumes
) -> None:
    """virtiofsd keeps each file open that a guest has looked up, until the guest forgets it, and the node has few open
    files to spare."""
    for number in range(FEW + 100):
        (volumes.mine / str(number)).touch()
    held: list[int] = []
    top = client.walk("0")
    with pytest.raises(OSError, match=r".") as said:
        held.extend(client.lookup(top, str(number)).node for number in range(FEW + 100))
    assert refusal(said.value) in ("EMFILE", "ENFILE")
    assert content(victims, "0/file") == SECRET
    for node in held:
        client.forget(node)
    assert client.lookup(top, "0").node, "what it has forgotten is free"


def test_malformed_requests_end_at_most_the_attackers_own_daemon(
    attackers: Place, victims: FuseClient, volumes: Volumes
) -> None:
    before = tree(volumes)
    guess = random.Random(27)
    with contextlib.suppress(Gone, OSError), FuseClient(attackers.socket) as client:
        top = client.walk("0")
        for request in broken(top, guess):
            with contextlib.suppress(OSError):
                client.raw(request, room=guess.choice((0, 1, 15, 16, 17, 4096)), queue=1)
    assert content(victims, "0/file") == SECRET
    assert tree(volumes) == before


@pytest.mark.parametrize("number", range(1, 5))
def test_lies_about_references_or_files_end_at_most_the_attackers_own_daemon(
    attackers: Place, victims: FuseClient, volumes: Volumes, number: int
) -> None:
    before = tree(volumes)
    with contextlib.suppress(Gone, OSError), FuseClient(attackers.socket) as client:
        if number <= 3:
            node = (ROOT, client.walk("0"), client.walk("0/file"))[number - 1]
            client.forget(node, 1 << 40)
            client.lookup(node, "file")
        else:
            client.create(client.walk("2"), "file", flags=os.O_RDWR | os.O_TRUNC)
    assert content(victims, "0/file") == SECRET
    assert tree(volumes) == before


@pytest.mark.parametrize(
    "chain",
    [
        [(0, 64, 0, 0)],
        [(1 << 63, 64, 0, 0)],
        [(0x10_0000 + (4 << 20) - 8, 64, 0, 0)],
        [(0x10_0000, 0xFFFFFFFF, 0, 0)],
        [(0x20_0000, 64, 1, 0)],
        [(0x20_0000, 64, 1, 63), (0, 0, 0, 0)],
        [(0x20_0000, 64, 1, 65535)],
        [(0x20_0000, 64, 4, 0)],
        [(0x20_0000, 0, 0, 0)],
    ],
)
def test_lies_about_memory_end_at_most_the_attackers_own_daemon(
    attackers: Place, victims: FuseClient, chain: list[tuple[int, int, int, int]]
) -> None:
    """Addresses outside of the guest's memory, a circular chain, and a chain that leaves the table."""
    with FuseClient(attackers.socket, patience=1.0) as client, contextlib.suppress(Gone):
        client.chain(chain)
    assert content(victims, "0/file") == SECRET


def test_setuid_files_are_possible_as_for_the_root_of_a_container(client: FuseClient, volumes: Volumes) -> None:
    """Files keep their owners, so a guest's root can leave a setuid file in a writable volume, as a container's root
    can. The directories above a volume protect it from local users of the node; file capabilities, which need no
    owner, cannot be set."""
    made, _ = client.create(client.walk("0"), "tool", mode=0o4755)
    with contextlib.suppress(OSError):
        client.call(fuse.SETATTR, made.node, attributes(mode=0o4755))
    assert "security.capability" not in os.listxattr(volumes.mine / "tool")


def attributes(mode: int | None = None, uid: int | None = None, size: int | None = None) -> bytes:
    """struct fuse_setattr_in."""
    valid = (mode is not None) * 1 | (uid is not None) * 2 | (size is not None) * 8
    return struct.pack("<IIQQQQQQIIIIIIII", valid, 0, 0, size or 0, 0, 0, 0, 0, 0, 0, 0, mode or 0, 0, uid or 0, 0, 0)


def broken(top: int, guess: random.Random) -> Iterator[bytes]:
    for opcode in (*range(1, 52), 4096, 0xFFFFFFFF):
        if opcode in (fuse.DESTROY, fuse.UNLINK, fuse.RMDIR):
            continue
        for body in (b"", b"x", b"no end of a name", bytes(8), b"\xff" * 64, guess.randbytes(200)):
            for length in (HEAD.size + len(body), 0, 1, 39, 0xFFFFFFFF):
                yield HEAD.pack(length, opcode, guess.randrange(1 << 64), top, 0, 0, 0, 0) + body
    yield b""
    yield b"\0" * 39
    yield HEAD.pack(56, fuse.BATCH_FORGET, 1, 0, 0, 0, 0, 0) + struct.pack("<II", 0xFFFFFFFF, 0) + bytes(8)
    yield HEAD.pack(80, fuse.READ, 1, top, 0, 0, 0, 0) + struct.pack("<QQIIQII", 0, 1 << 63, 0xFFFFFFFF, 0, 0, 0, 0)


def tree(volumes: Volumes) -> dict[str, tuple[int, ...]]:
    """Everything in the node's file system that guests might change."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(volumes.top.rglob("*")):
        status = path.lstat()
        found[str(path)] = (status.st_mode, status.st_uid, status.st_ino, status.st_nlink, status.st_size)
    return found
