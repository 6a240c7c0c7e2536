"""A malicious image, pulled as by kubelet, is refused with the reason, and nothing of it stays."""

from __future__ import annotations

import contextlib
import gzip
import io
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.background import Background
from fakes.registry import FakeRegistry, tar
from fakes.waiting import eventually
from fakes.webserver import LOOPBACK, WebServer

from virtshim.images.filestore import ImageFileStore, ImageSettings
from virtshim.model.errors import DeadlineExceeded, ShimError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

pytestmark = pytest.mark.hostile

NEVER = threading.Event()
MIB = 1 << 20
SECRET = "/etc/shadow"


@pytest.fixture
def store(tmp_path: Path) -> ImageFileStore:
    store = ImageFileStore(str(tmp_path / "images"), ImageSettings(insecure_registries=LOOPBACK, max_bytes=64 * MIB))
    store.sweep()
    return store


# -- layers ------------------------------------------------------------------------------------------------------------


def member(name: str, data: bytes = b"", **fields: object) -> bytes:
    """An archive of one entry with the given header fields."""
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    for field, value in fields.items():
        setattr(entry, field, value)
    return entry.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512) + bytes(1024)


def pax(record: bytes, size: int = 0) -> bytes:
    """An extended header with this record before a disk."""
    header = member("x", record, type=tarfile.XHDTYPE)[:-1024]
    return header + member("disk/a.img", bytes(size))


def rewritten(archive: bytes, offset: int, field: bytes) -> bytes:
    """The first header with one field changed and a valid checksum."""
    header = bytearray(archive[:512])
    header[offset : offset + len(field)] = field
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + archive[512:]


DISK = bytes(1024)

LAYERS: dict[str, tuple[bytes, str]] = {
    "a name that leads up": (member("disk/../../../etc/cron.d/evil", DISK), "has no file below /disk"),
    "a name that leads up from the top": (member("../../disk", DISK), "has no file below /disk"),
    "a name that goes up and down": (member("etc/../../cron.d/evil", DISK), "cannot be a volume either: .* contains '..'"),
    "a hard link to the node": (member("x", type=tarfile.LNKTYPE, linkname=SECRET), "hard link to 'etc/shadow', which is not"),
    "a whiteout of all": (tar({"a/x": DISK, "a/.wh...": b""}), "cannot be a volume either: it holds a whiteout of '..' in '/a'"),
    "a symbolic link": (member("disk/a.img", type=tarfile.SYMTYPE, linkname=SECRET), "is a link or a device"),
    "a link to itself": (member("disk/a.img", type=tarfile.SYMTYPE, linkname="a.img"), "is a link or a device"),
    "a hard link": (member("disk/a.img", type=tarfile.LNKTYPE, linkname=SECRET), "is a link or a device"),
    "the node's disk": (member("disk/a.img", type=tarfile.BLKTYPE, devmajor=8), "is a link or a device"),
    "a pipe": (member("disk/a.img", type=tarfile.FIFOTYPE), "is a link or a device"),
    "a sparse entry": (member("disk/a.img", DISK, type=tarfile.GNUTYPE_SPARSE), "holds a sparse entry"),
    "a sparse map": (pax(b"22 GNU.sparse.major=1\n"), "holds a sparse entry"),
    "a size below nothing": (rewritten(member("disk/a.img"), 124, b"\xff" * 12), "holds an invalid number"),
    "a size of all there is": (rewritten(member("disk/a.img"), 124, b"\x80" + b"\xff" * 11), "larger than 67108864 bytes"),
    "a size in words": (pax(b"14 size=-1024\n"), "holds a damaged pax header"),
    "a record that never ends": (pax(b"0 path=disk/a\n"), "holds a damaged pax header"),
    "a name of 2 MiB": (member("x", b"n" * (2 * MIB), type=tarfile.GNUTYPE_LONGNAME), "extension of more than 1 MiB"),
    "names for ever": (member("x", b"n\0", type=tarfile.GNUTYPE_LONGNAME)[:-1024] * 20_000, "has no file below /disk"),
    "a file that is cut short": (member("disk/a.img", DISK)[:600], "is cut short"),
    "two disks": (tar({"disk/a": DISK, "disk/b": DISK}), "has two files below /disk"),
    "too many directories": (tar({f"disk/{number}/": b"" for number in range(2000)}), "more than 1000 entries"),
    "no archive": (b"\x7fELF" * 512, "cannot be read: it holds"),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYERS)
def test_a_malicious_layer_is_refused(web: WebServer, refused: Callable[..., None], case: str) -> None:
    layer, words = LAYERS[case]
    registry = FakeRegistry(web)
    registry.manifest("a/b", [(gzip.compress(layer, 1), layer)])
    refused(registry.name("a/b"), words)


def zeros(size: int) -> bytes:
    """A tar with one file of so many zeros."""
    return member("ballast", bytes(size))


@pytest.mark.parametrize("members", [1, 8], ids=["one stream", "many streams"])
def test_a_decompression_bomb_is_refused_early(web: WebServer, refused: Callable[..., None], members: int) -> None:
    plain = zeros(100 * MIB)
    step = len(plain) // members
    packed = b"".join(gzip.compress(plain[at : at + step], 9) for at in range(0, len(plain), step))
    assert len(packed) < MIB
    registry = FakeRegistry(web)
    registry.manifest("a/b", [(packed, plain)])
    refused(registry.name("a/b"), r"unpacks to more than 67108864 bytes.*images\.max_bytes")


def test_other_images_are_pulled_while_a_layer_unpacks_for_an_hour(web: WebServer, tmp_path: Path) -> None:
    """A terabyte of zeros is refused at 64 GiB, after minutes; here the pull is cancelled before, and leaves nothing."""
    gibibyte = zstd.compress(bytes(1 << 30))
    # Named like a raw disk: other files of this size are refused at once if there is no space.
    header = rewritten(member("ballast.img"), 124, b"\x80" + (1 << 40).to_bytes(11, "big"))[:512]
    packed = zstd.compress(header) + gibibyte * 1024
    store = ImageFileStore(str(tmp_path / "images"), ImageSettings(insecure_registries=LOOPBACK, max_bytes=1 << 50))
    store.sweep()
    registry, gives_up = FakeRegistry(web), threading.Event()
    registry.manifest("a/bomb", [(packed, DISK)])
    bomb = Background(lambda: store.fetch(registry.name("a/bomb"), None, gives_up))
    eventually(lambda: any(one.received for one in store.under_way()))
    sound = store.fetch(registry.push("a/sound", {"disk/a.img": DISK}), None, NEVER)
    assert [one.image for one in store.under_way()] == [registry.name("a/bomb") + ":latest"]
    gives_up.set()
    with pytest.raises(DeadlineExceeded):
        bomb.done()
    assert store.stored() == {sound.digest, sound.tree}
    assert list((tmp_path / "images" / "incoming").iterdir()) == []


def test_damaged_compressed_data_is_refused(web: WebServer, refused: Callable[..., None]) -> None:
    plain = tar({"disk/a.img": DISK})
    packed = gzip.compress(plain)
    for number, (data, words) in enumerate(
        [
            (packed[:-20], "cut short"),
            (packed[:20] + b"\xff" * 20 + packed[40:], "cannot be unpacked"),
            (b"\x28\xb5\x2f\xfd" + packed, "zstd"),
            (packed + b"BZh9", "cannot be unpacked"),
        ]
    ):
        registry = FakeRegistry(web)
        registry.manifest(f"a/{number}", [(data, plain)])
        refused(registry.name(f"a/{number}"), words)


def test_a_layer_whose_content_differs_from_the_signed_digest_is_refused(
    web: WebServer, refused: Callable[..., None]
) -> None:
    registry = FakeRegistry(web)
    registry.manifest("a/b", [(gzip.compress(tar({"disk/a.img": b"\1" * 512})), tar({"disk/a.img": DISK}))])
    refused(registry.name("a/b"), "has the digest sha256:.*expected")


# -- disks -------------------------------------------------------------------------------------------------------------


def qcow2(tmp_path: Path, *options: str, size: str = "1M") -> bytes:
    disk = tmp_path / "made.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *options, disk, size], check=True, capture_output=True)
    data = disk.read_bytes()
    disk.unlink()
    with contextlib.suppress(FileNotFoundError):
        (tmp_path / "data").unlink()
    return data


def patched(data: bytes, offset: int, form: str, *values: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into(form, changed, offset, *values)
    return bytes(changed)


VMDK = f"""# Disk DescriptorFile
version=1
CID=fffffffe
parentCID=ffffffff
createType="monolithicFlat"
RW 20480 FLAT "{SECRET}" 0
""".encode()

DISKS: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "a backing file of the node": (lambda t: qcow2(t, "-u", "-b", SECRET, "-F", "raw"), "has a backing file"),
    "a backing file by JSON": (
        lambda t: qcow2(t, "-u", "-F", "raw", "-b", f'json:{{"driver":"file","filename":"{SECRET}"}}'), "has a backing file",
    ),
    "a backing file over the network": (lambda t: qcow2(t, "-u", "-b", "nbd://10.0.0.1/x", "-F", "raw"), "has a backing file"),
    "data in a file of the node": (lambda t: qcow2(t, "-o", f"data_file={t}/data"), "keeps its data in another file"),
    "encrypted": (
        lambda t: qcow2(t, "--object", "secret,id=s,data=x", "-o", "encrypt.format=aes,encrypt.key-secret=s"), "is encrypted",
    ),
    "larger than it may be": (lambda t: qcow2(t, size="1G"), r"a disk of 1073741824 bytes.*images\.max_bytes"),
    "larger than can be": (lambda t: patched(qcow2(t), 24, ">Q", (1 << 63) - 512), "cannot be read by qemu-img"),
    "tables larger than can be": (lambda t: patched(qcow2(t), 36, ">I", 0x7FFFFFFF), "cannot be read by qemu-img"),
    "tables at the end of the world": (lambda t: patched(qcow2(t), 40, ">Q", (1 << 63) - 65536), "cannot be read by qemu-img"),
    "65537 snapshots": (lambda t: patched(qcow2(t), 60, ">IQ", 65537, 65536), "cannot be read by qemu-img"),
    "snapshots in the middle of a cluster": (lambda t: patched(qcow2(t), 60, ">IQ", 1, 7), "cannot be read by qemu-img"),
    "an extension that never ends": (lambda t: patched(qcow2(t), 104, ">II", 0x12345678, 0xFFFFFFFF), "by qemu-img"),
    "cut short": (lambda t: qcow2(t)[:80], "is cut short"),
    "clusters of half the node": (lambda t: patched(qcow2(t), 20, ">I", 63), "cannot be read by qemu-img"),
    "features of the future": (lambda t: patched(qcow2(t), 72, ">Q", 1 << 40), "cannot be read by qemu-img"),
    "marked corrupt": (lambda t: patched(qcow2(t), 72, ">Q", 2), "marked corrupt"),
    "a VMDK of a file of the node": (lambda _: VMDK.ljust(1024, b"\n"), "a VMDK descriptor"),
    "a VMDK behind blanks": (lambda _: (b"  \n" + VMDK).ljust(1024, b"\n"), "is a text"),
    "a VMDK with its descriptor inside": (lambda _: b"KDMV" + struct.pack("<I", 1) + bytes(504) + VMDK.ljust(512), "is a VMDK"),
    "a VHD by its last sector": (lambda _: bytes(512) + b"conectix".ljust(512, b"\0"), "is a VHD"),
    "a page that asks to log in": (lambda _: b"<!DOCTYPE html>".ljust(512), "is a web page"),
    "nothing": (lambda _: b"", "is empty"),
}  # fmt: skip


@pytest.mark.parametrize("case", DISKS)
@pytest.mark.parametrize("source", ["web server", "registry"])
def test_a_malicious_disk_is_refused(
    web: WebServer, refused: Callable[..., None], tmp_path: Path, case: str, source: str
) -> None:
    make, words = DISKS[case]
    disk = make(tmp_path)
    if source == "web server":
        refused(web.serve("/evil.qcow2", disk), words)
    else:
        refused(FakeRegistry(web).push("a/evil", {"disk/a.img": disk}), words)


def test_a_sound_image_is_pulled_after_malicious_ones(web: WebServer, store: ImageFileStore, tmp_path: Path) -> None:
    """Two pulls of the sound image at once, and a malicious one beside them."""
    sound = qcow2(tmp_path)
    names = [web.serve("/sound.qcow2", sound), FakeRegistry(web).push("a/sound", {"disk/a.img": sound})]
    evil = web.serve("/evil.qcow2", VMDK.ljust(1024, b"\n"))
    found: list[str] = []

    def pull(name: str) -> None:
        with contextlib.suppress(ShimError):
            fetched = store.fetch(name, None, NEVER)
            found.extend(str(one) for one in (fetched.digest, fetched.tree) if one is not None)

    threads = [threading.Thread(target=pull, args=(name,)) for name in (*names, evil)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3, "one disk, brought twice, and the files of the one that has some"
    assert {str(digest) for digest in store.stored()} == set(found)


def test_a_sparse_archive_by_gnu_tar_is_refused(web: WebServer, refused: Callable[..., None], tmp_path: Path) -> None:
    """The archive has a terabyte in two kilobytes."""
    (tmp_path / "disk").mkdir()
    with open(tmp_path / "disk/a.img", "wb") as file:
        file.truncate(1 << 40)
    layer = subprocess.run(
        ["tar", "--sparse", "-C", tmp_path, "-cf", "-", "disk"], check=True, capture_output=True
    ).stdout
    registry = FakeRegistry(web)
    registry.manifest("a/b", [(gzip.compress(layer, 1), layer)])
    refused(registry.name("a/b"), "holds a sparse entry")
    assert io.BytesIO(layer).getbuffer().nbytes < MIB
