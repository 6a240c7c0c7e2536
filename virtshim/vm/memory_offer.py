"""Gives a starting QEMU the file that is its guest's memory. The file has no name, so vmwrapper fetches a descriptor."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Final

import structlog

from tapmanager import protocol
from virtshim.model.errors import InternalError
from virtshim.vm.file_owner import QemuIds

log = structlog.get_logger(__name__)

# Seconds for one question, once vmwrapper has connected.
_QUESTION: Final = 5.0


@contextlib.contextmanager
def memory_offered(path: str, memory: int, qemu: QemuIds | None, *, shared: bool) -> Iterator[None]:
    """Within the block, the user of this VM's QEMU gets the descriptor `memory` at the socket `path`, once. Raises
    InternalError."""
    try:
        listener = _listening(path, qemu)
    except OSError as exc:
        raise InternalError(f"the socket {path} for a guest's memory cannot be made: {exc.strerror or exc}") from exc
    thread = threading.Thread(target=_serve, args=(listener, memory, shared), name="memory-offer", daemon=True)
    try:
        thread.start()
        yield
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # ends a thread that nobody has asked
        if thread.ident is not None:
            thread.join()
        listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _listening(path: str, qemu: QemuIds | None) -> socket.socket:
    directory = os.path.dirname(path)
    os.makedirs(directory, exist_ok=True)
    os.chmod(directory, 0o711)  # noqa: S103  QEMU's user must pass it, whatever the umask
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)
        if qemu is not None:
            os.chown(path, qemu.uid, -1)
        listener.listen(1)
    except BaseException:
        listener.close()
        raise
    return listener


def _serve(listener: socket.socket, memory: int, shared: bool) -> None:
    try:
        peer, _ = listener.accept()
    except OSError:
        return  # the start is over
    with peer:
        try:
            peer.settimeout(_QUESTION)
            asked = protocol.recv_frame(peer)
            if asked is None:
                return
            question, more = asked
            protocol.close_all(more)
            number = question.get("id")
            protocol.send_frame(
                peer, protocol.answer(number if isinstance(number, int) else 0, {"shared": shared}), [memory]
            )
        except (OSError, protocol.FrameError) as exc:  # vmwrapper says what it missed
            log.warning("memory.not_offered", error=str(exc))
