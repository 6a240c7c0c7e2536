"""`virtshim check` decides by permissions whether a user can reach a file."""

import stat

import pytest

from virtshim.preflight.access import AccessMode, FileStatus, UserAccount, allows, first_blocked

QEMU = UserAccount("libvirt-qemu", 64055, frozenset({64055, 108}))
ROOT = UserAccount("root", 0, frozenset({0}))


def directory(path: str, mode: int, uid: int = 0, gid: int = 0) -> FileStatus:
    return FileStatus(path, stat.S_IFDIR | mode, uid, gid)


@pytest.mark.parametrize(
    ("mode", "uid", "gid", "allowed"),
    [
        (0o711, 0, 0, True),
        (0o700, 0, 0, False),
        (0o710, 0, 108, True),
        (0o701, 0, 108, False),  # the group's bits decide for its members, even where others may more
        (0o100, 64055, 0, True),
        (0o011, 64055, 108, False),  # and the owner's for the owner
    ],
)
def test_the_first_matching_permission_class_decides(mode: int, uid: int, gid: int, allowed: bool) -> None:
    assert allows(directory("/d", mode, uid, gid), QEMU, AccessMode.EXECUTE) is allowed


def test_root_may_read_everything_but_executes_only_executable_files() -> None:
    file = FileStatus("/f", stat.S_IFREG | 0o600, 1, 1)
    assert allows(directory("/d", 0o000, 1, 1), ROOT, AccessMode.EXECUTE)
    assert allows(file, ROOT, AccessMode.READ | AccessMode.WRITE)
    assert not allows(file, ROOT, AccessMode.EXECUTE)


def test_all_requested_permissions_are_needed() -> None:
    assert not allows(FileStatus("/dev/kvm", stat.S_IFCHR | 0o640, 0, 108), QEMU, AccessMode.READ | AccessMode.WRITE)
    assert allows(FileStatus("/dev/kvm", stat.S_IFCHR | 0o660, 0, 108), QEMU, AccessMode.READ | AccessMode.WRITE)


def test_the_first_directory_in_the_way_is_named() -> None:
    way = [directory("/", 0o755), directory("/a", 0o700), directory("/a/b", 0o700)]
    assert first_blocked(way, QEMU) == way[1]
    assert first_blocked(way[:1], QEMU) is None
