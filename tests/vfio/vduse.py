"""A virtio network card implemented by this program (VDUSE), for a machine without a vDPA card. Runs in the machine.

`vdpa dev add` puts it on the vDPA bus, where vhost_vdpa makes a node for it as for any other. It keeps the frames of the
guest and answers each with one with exchanged addresses and the same rest.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import struct
import subprocess
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

# linux/vduse.h
_SET_API_VERSION: Final = 0x40088101
_CREATE_DEVICE: Final = 0x41508102
_DESTROY_DEVICE: Final = 0x41008103
_GET_MEMORY: Final = 0xC0208110
_SET_UP_QUEUE: Final = 0x40208114
_QUEUE_INFO: Final = 0xC0308115
_SET_KICK: Final = 0x40088116
_INTERRUPT: Final = 0x40048117
_STATUS, _MEMORY_CHANGED = 1, 2
_REQUEST: Final = struct.Struct("=II16x128s")
_ANSWER: Final = struct.Struct("=II16x128x")

_NETWORK: Final = 1
_VERSION_1, _ACCESS_PLATFORM, _HAS_MAC = 1 << 32, 1 << 33, 1 << 5
_RECEIVE, _TRANSMIT = 0, 1
_QUEUE_SIZE: Final = 256
_DRIVER_OK: Final = 4
_NEXT, _WRITE = 1, 2
# struct virtio_net_hdr_v1
_HEADER: Final = 12


@dataclass
class _Queue:
    """A virtqueue in the guest's memory, at addresses of the guest."""

    size: int
    descriptors: int
    available: int
    used: int
    seen: int


class NetworkCard:
    """On the vDPA bus, as `name`, while the block runs. `mac`: six bytes."""

    def __init__(self, name: str, mac: bytes) -> None:
        self.name = name
        self.sent: list[bytes] = []
        self._mac = mac
        self._queues: dict[int, _Queue] = {}
        self._maps: list[tuple[int, int, mmap.mmap]] = []
        self._kicks = {number: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for number in (_RECEIVE, _TRANSMIT)}
        self._over = os.eventfd(0)
        self._thread = threading.Thread(target=self._serve, name=name)

    def __enter__(self) -> Self:
        self._control = os.open("/dev/vduse/control", os.O_RDWR)
        fcntl.ioctl(self._control, _SET_API_VERSION, struct.pack("=Q", 0))
        features = _VERSION_1 | _ACCESS_PLATFORM | _HAS_MAC
        config = self._mac + bytes(2)
        parts = (self.name.encode(), 0, _NETWORK, features, len(self._kicks), mmap.PAGESIZE, len(config))
        fcntl.ioctl(self._control, _CREATE_DEVICE, struct.pack("=256sIIQII52xI", *parts) + config)
        self._device = os.open(f"/dev/vduse/{self.name}", os.O_RDWR | os.O_NONBLOCK)
        for number in self._kicks:
            fcntl.ioctl(self._device, _SET_UP_QUEUE, struct.pack("=IH26x", number, _QUEUE_SIZE))
        # The kernel asks the device while it is put on the bus.
        self._thread.start()
        subprocess.run(["vdpa", "dev", "add", "name", self.name, "mgmtdev", "vduse"], check=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        subprocess.run(["vdpa", "dev", "del", self.name], check=True)
        os.eventfd_write(self._over, 1)
        self._thread.join()
        self._forget_memory()
        os.close(self._device)
        fcntl.ioctl(self._control, _DESTROY_DEVICE, struct.pack("256s", self.name.encode()))
        for descriptor in (self._control, self._over, *self._kicks.values()):
            os.close(descriptor)

    @property
    def node(self) -> str:
        """/dev/vhost-vdpa-N"""
        (found,) = (name for name in os.listdir(f"/sys/bus/vdpa/devices/{self.name}") if name.startswith("vhost-vdpa-"))
        return f"/dev/{found}"

    def _serve(self) -> None:
        poll = select.poll()
        for descriptor in (self._device, self._over, *self._kicks.values()):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._over in ready:
                return
            if self._device in ready:
                self._answer()
            if self._kicks[_TRANSMIT] in ready:
                os.eventfd_read(self._kicks[_TRANSMIT])
                self._transmit()
            if self._kicks[_RECEIVE] in ready:
                os.eventfd_read(self._kicks[_RECEIVE])  # buffers for what comes

    def _answer(self) -> None:
        kind, number, words = _REQUEST.unpack(os.read(self._device, _REQUEST.size))
        if kind == _STATUS:
            self._queues.clear()
        if kind == _MEMORY_CHANGED:
            self._forget_memory()
        os.write(self._device, _ANSWER.pack(number, 0))
        if kind == _STATUS and words[0] & _DRIVER_OK:
            self._begin()

    def _begin(self) -> None:
        for number, kick in self._kicks.items():
            info = fcntl.ioctl(self._device, _QUEUE_INFO, struct.pack("=I44x", number))
            _, size, descriptors, available, used, seen, ready = struct.unpack("=IIQQQH6xB7x", info)
            if ready:
                self._queues[number] = _Queue(size, descriptors, available, used, seen)
                fcntl.ioctl(self._device, _SET_KICK, struct.pack("=Ii", number, kick))
        self._transmit()

    def _transmit(self) -> None:
        for head, parts in self._taken(_TRANSMIT):
            frame = b"".join(self._bytes(address, length) for address, length, _ in parts)[_HEADER:]
            self._put_back(_TRANSMIT, head, 0)
            self.sent.append(frame)
            self._receive(frame[6:12] + self._mac + frame[12:])

    def _receive(self, frame: bytes) -> None:
        """Delivers a frame, which is lost if the guest has no room."""
        for head, parts in self._taken(_RECEIVE, most=1):
            rest = struct.pack("=10xH", 1) + frame
            for address, length, _ in parts:
                self._write(address, rest[:length])
                rest = rest[length:]
            self._put_back(_RECEIVE, head, _HEADER + len(frame))

    def _taken(self, number: int, most: int = _QUEUE_SIZE) -> list[tuple[int, list[tuple[int, int, int]]]]:
        """The guest's buffers: (head, [(address, length, flags)])."""
        queue = self._queues.get(number)
        found = []
        while queue is not None and len(found) < most and queue.seen != self._short(queue.available + 2):
            head = index = self._short(queue.available + 4 + 2 * (queue.seen % queue.size))
            parts = []
            while True:
                where = queue.descriptors + 16 * index
                address, length, flags, index = struct.unpack("=QIHH", self._bytes(where, 16))
                parts.append((address, length, flags))
                if not flags & _NEXT:
                    break
            found.append((head, parts))
            queue.seen = (queue.seen + 1) & 0xFFFF
        return found

    def _put_back(self, number: int, head: int, length: int) -> None:
        queue = self._queues[number]
        index = self._short(queue.used + 2)
        self._write(queue.used + 4 + 8 * (index % queue.size), struct.pack("=II", head, length))
        self._write(queue.used + 2, struct.pack("=H", (index + 1) & 0xFFFF))
        fcntl.ioctl(self._device, _INTERRUPT, struct.pack("=I", number))

    def _short(self, address: int) -> int:
        return int.from_bytes(self._bytes(address, 2), "little")

    def _bytes(self, address: int, length: int) -> bytes:
        memory, offset = self._memory(address)
        return memory[offset : offset + length]

    def _write(self, address: int, data: bytes) -> None:
        memory, offset = self._memory(address)
        memory[offset : offset + len(data)] = data

    def _memory(self, address: int) -> tuple[mmap.mmap, int]:
        """QEMU's description of the guest's memory at that address, and the offset in it."""
        for start, last, memory in self._maps:
            if start <= address <= last:
                return memory, address - start
        entry = bytearray(struct.pack("=QQQB7x", 0, address, address, 0))
        descriptor = fcntl.ioctl(self._device, _GET_MEMORY, entry)
        offset, start, last, access = struct.unpack("=QQQB7x", entry)
        try:
            protection = (mmap.PROT_READ if access & 1 else 0) | (mmap.PROT_WRITE if access & 2 else 0)
            memory = mmap.mmap(descriptor, last - start + 1, mmap.MAP_SHARED, protection, offset=offset)
        finally:
            os.close(descriptor)
        self._maps.append((start, last, memory))
        return memory, address - start

    def _forget_memory(self) -> None:
        while self._maps:
            self._maps.pop()[2].close()
