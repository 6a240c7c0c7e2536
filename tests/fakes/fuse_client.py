"""A guest's side of virtiofs without a guest: it speaks vhost-user to a share daemon as QEMU does, and FUSE as a guest's
kernel does, or worse. It can put into the queues whatever root in a guest can.

    with FuseClient(path) as client:
        node, mode = client.lookup(ROOT, "0")
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import socket
import struct
from dataclasses import dataclass
from typing import Self

ROOT = 1

LOOKUP, FORGET, GETATTR, SETATTR, READLINK, SYMLINK, MKNOD, MKDIR = 1, 2, 3, 4, 5, 6, 8, 9
UNLINK, RMDIR, RENAME, LINK, OPEN, READ, WRITE, STATFS, RELEASE = 10, 11, 12, 13, 14, 15, 16, 17, 18
SETXATTR, GETXATTR, LISTXATTR, INIT, OPENDIR, READDIR, CREATE = 21, 22, 23, 26, 27, 28, 35
DESTROY, IOCTL, BATCH_FORGET, FALLOCATE, RENAME2, SETUPMAPPING, SYNCFS = 38, 39, 42, 43, 45, 48, 50
_NO_ANSWER = (FORGET, BATCH_FORGET)

_GET_FEATURES, _SET_FEATURES, _SET_OWNER, _SET_MEMORY = 1, 2, 3, 5
_SET_SIZE, _SET_ADDRESSES, _SET_BASE, _SET_KICK, _SET_CALL = 8, 9, 10, 12, 13
_GET_PROTOCOL, _SET_PROTOCOL, _SET_ENABLED = 15, 16, 18
_F_PROTOCOL, _F_VERSION_1 = 1 << 30, 1 << 32
_VERSION, _REPLY = 1, 4
_ANSWER_SIZE = 20

_QUEUES = 2  # what is urgent (forget), and requests
_SIZE = 64  # descriptors of a queue
_NEXT, _WRITABLE = 1, 2
_MEMORY = 4 << 20
# Guest-physical addresses begin here and QEMU's addresses elsewhere, so that mixing them up is noticed.
_PHYSICAL, _USER = 0x10_0000, 0x7000_0000_0000
_DESCRIPTORS, _AVAILABLE, _USED, _OF_A_QUEUE = 0, 0x1000, 0x2000, 0x4000
_REQUEST, _ANSWER = 0x10_0000, 0x20_0000
_LARGEST = 1 << 20

HEAD = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")


class Gone(Exception):
    """The daemon has hung up, or ended its queue."""


@dataclass(frozen=True)
class Entry:
    node: int
    ino: int
    size: int
    mode: int
    links: int
    uid: int


class FuseClient:
    """`call` returns the answer's bytes, or raises OSError with the daemon's errno."""

    def __init__(self, path: str, patience: float = 30.0) -> None:
        self._patience = patience
        self._memory_file = os.memfd_create("guest", os.MFD_CLOEXEC)
        os.ftruncate(self._memory_file, _MEMORY)
        self._memory = mmap.mmap(self._memory_file, _MEMORY)
        self._kicks = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(_QUEUES)]
        self._calls = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(_QUEUES)]
        self._sent = [0] * _QUEUES
        self._unique = 0
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(patience)
        self._connection.connect(path)
        try:
            self._set_up()
            self.call(INIT, 0, struct.pack("<IIII", 7, 31, 1 << 17, 0))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()
        for fd in (*self._kicks, *self._calls):
            os.close(fd)
        self._memory.close()
        os.close(self._memory_file)

    # --- FUSE

    def call(self, opcode: int, node: int, body: bytes = b"", *, room: int = 1 << 16, uid: int = 0) -> bytes:
        self._unique += 1
        request = HEAD.pack(HEAD.size + len(body), opcode, self._unique, node, uid, uid, 1, 0) + body
        answer = self.raw(request, room=_OUT.size + room, waits=opcode not in _NO_ANSWER)
        if not answer:
            return b""
        length, error, unique = _OUT.unpack_from(answer)
        assert unique == self._unique
        if error:
            raise OSError(-error, os.strerror(-error))
        return answer[_OUT.size : length]

    def lookup(self, parent: int, name: str | bytes) -> Entry:
        return _entry(self.call(LOOKUP, parent, _text(name)))

    def walk(self, path: str) -> int:
        node = ROOT
        for name in path.strip("/").split("/"):
            node = self.lookup(node, name).node
        return node

    def open(self, node: int, flags: int = os.O_RDONLY) -> int:
        handle: int = struct.unpack_from("<Q", self.call(OPEN, node, struct.pack("<II", flags, 0)))[0]
        return handle

    def read(self, node: int, handle: int, size: int = 4096) -> bytes:
        return self.call(READ, node, struct.pack("<QQIIQII", handle, 0, size, 0, 0, 0, 0), room=size)

    def write(self, node: int, handle: int, data: bytes) -> int:
        body = struct.pack("<QQIIQII", handle, 0, len(data), 0, 0, 0, 0) + data
        written: int = struct.unpack_from("<I", self.call(WRITE, node, body))[0]
        return written

    def create(
        self, parent: int, name: str, mode: int = 0o644, flags: int = os.O_RDWR, uid: int = 0
    ) -> tuple[Entry, int]:
        body = struct.pack("<IIII", flags | os.O_CREAT, mode, 0, 0) + _text(name)
        answer = self.call(CREATE, parent, body, uid=uid)
        return _entry(answer), struct.unpack_from("<Q", answer, 128)[0]

    def make_node(self, parent: int, name: str, mode: int, device: int = 0) -> Entry:
        return _entry(self.call(MKNOD, parent, struct.pack("<IIII", mode, device, 0, 0) + _text(name)))

    def link(self, node: int, parent: int, name: str) -> Entry:
        return _entry(self.call(LINK, parent, struct.pack("<Q", node) + _text(name)))

    def symlink(self, parent: int, name: str, target: str) -> Entry:
        return _entry(self.call(SYMLINK, parent, _text(name) + _text(target)))

    def rename(self, parent: int, name: str, into: int, new: str, flags: int | None = None) -> None:
        names = _text(name) + _text(new)
        if flags is None:
            self.call(RENAME, parent, struct.pack("<Q", into) + names)
        else:
            self.call(RENAME2, parent, struct.pack("<QII", into, flags, 0) + names)

    def set_attribute(self, node: int, name: str, value: bytes) -> None:
        self.call(SETXATTR, node, struct.pack("<II", len(value), 0) + _text(name) + value)

    def forget(self, node: int, times: int = 1) -> None:
        self.call(FORGET, node, struct.pack("<Q", times))

    # --- vhost-user

    def raw(self, request: bytes, *, room: int = 1 << 16, waits: bool = True, queue: int = 1) -> bytes:
        """Sends the bytes unchanged in one descriptor; the answer arrives in another one. Raises Gone."""
        self._memory[_REQUEST : _REQUEST + len(request)] = request
        self._memory[_ANSWER : _ANSWER + _OUT.size] = bytes(_OUT.size)
        chain = [(_PHYSICAL + _REQUEST, len(request), _NEXT if waits else 0, 1)]
        if waits:
            chain.append((_PHYSICAL + _ANSWER, min(room, _LARGEST), _WRITABLE, 0))
        used = self.chain(chain, queue)
        return bytes(self._memory[_ANSWER : _ANSWER + used]) if waits else b""

    def chain(self, descriptors: list[tuple[int, int, int, int]], queue: int = 1) -> int:
        """Passes the daemon this chain: address, length, flags, next of each. Returns how many bytes the daemon wrote."""
        base = queue * _OF_A_QUEUE
        for at, one in enumerate(descriptors):
            struct.pack_into("<QIHH", self._memory, base + _DESCRIPTORS + 16 * at, *one)
        sent = self._sent[queue]
        struct.pack_into("<H", self._memory, base + _AVAILABLE + 4 + 2 * (sent % _SIZE), 0)
        self._sent[queue] = sent = (sent + 1) & 0xFFFF
        struct.pack_into("<H", self._memory, base + _AVAILABLE + 2, sent)
        os.eventfd_write(self._kicks[queue], 1)
        return self._used(queue, sent)

    def _used(self, queue: int, sent: int) -> int:
        base = queue * _OF_A_QUEUE + _USED
        poll = select.poll()
        poll.register(self._calls[queue], select.POLLIN)
        poll.register(self._connection, select.POLLIN | select.POLLHUP)
        while struct.unpack_from("<H", self._memory, base + 2)[0] != sent:
            ready = poll.poll(self._patience * 1000)
            if not ready:
                raise Gone("no answer")
            if any(fd == self._connection.fileno() for fd, _ in ready):
                raise Gone("hung up")
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._calls[queue])
        length: int = struct.unpack_from("<II", self._memory, base + 4 + 8 * ((sent - 1) % _SIZE))[1]
        return length

    def _set_up(self) -> None:
        offered = self._ask(_GET_FEATURES)
        if offered & _F_PROTOCOL:
            self._ask(_GET_PROTOCOL)
        self._tell(_SET_FEATURES, struct.pack("<Q", offered & (_F_PROTOCOL | _F_VERSION_1)))
        if offered & _F_PROTOCOL:
            self._tell(_SET_PROTOCOL, struct.pack("<Q", 0))
        self._tell(_SET_OWNER)
        region = struct.pack("<IIQQQQ", 1, 0, _PHYSICAL, _MEMORY, _USER, 0)
        self._tell(_SET_MEMORY, region, self._memory_file)
        for queue in range(_QUEUES):
            base = _USER + queue * _OF_A_QUEUE
            self._tell(_SET_SIZE, struct.pack("<II", queue, _SIZE))
            self._tell(_SET_BASE, struct.pack("<II", queue, 0))
            places = (base + _DESCRIPTORS, base + _USED, base + _AVAILABLE, 0)
            self._tell(_SET_ADDRESSES, struct.pack("<IIQQQQ", queue, 0, *places))
            self._tell(_SET_CALL, struct.pack("<Q", queue), self._calls[queue])
            self._tell(_SET_KICK, struct.pack("<Q", queue), self._kicks[queue])
            if offered & _F_PROTOCOL:
                self._tell(_SET_ENABLED, struct.pack("<II", queue, 1))

    def _tell(self, request: int, payload: bytes = b"", fd: int = -1) -> None:
        message = struct.pack("<III", request, _VERSION, len(payload)) + payload
        socket.send_fds(self._connection, [message], [fd] if fd >= 0 else [])

    def _ask(self, request: int) -> int:
        self._tell(request)
        answer = b""
        while len(answer) < _ANSWER_SIZE:
            if not (more := self._connection.recv(_ANSWER_SIZE - len(answer))):
                raise Gone("hung up")
            answer += more
        answered, flags, _, value = struct.unpack("<IIIQ", answer)
        assert answered == request, answered
        assert flags & _REPLY
        return int(value)


def refusal(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error.errno))


def _text(name: str | bytes) -> bytes:
    return (name.encode() if isinstance(name, str) else name) + b"\0"


def _entry(answer: bytes) -> Entry:
    node = struct.unpack_from("<Q", answer)[0]
    ino, size = struct.unpack_from("<QQ", answer, 40)
    mode, links, uid = struct.unpack_from("<III", answer, 40 + 60)
    return Entry(node, ino, size, mode, links, uid)
