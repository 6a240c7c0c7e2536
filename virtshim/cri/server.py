"""The CRI socket: who may serve it, its mode, the thread pool."""

from __future__ import annotations

import fcntl
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import grpc
import structlog

from criproto.people_v1 import people_pb2_grpc
from criproto.runtime_v1 import api_pb2_grpc
from virtshim.cri.image import ImageServicer
from virtshim.cri.interceptors import Calls
from virtshim.cri.people import PeopleServicer
from virtshim.cri.runtime import RuntimeServicer
from virtshim.domain.errors import WrongState

log = structlog.get_logger(__name__)

# kubelet's and containerd's limit; gRPC's default of 4 MiB is too small for the lists of a big node.
_MESSAGE_BYTES: Final = 16 << 20


class SocketLock:
    """Held as long as a process serves (or is about to serve) a socket path. grpc takes a live socket over without a word,
    so the lock comes first."""

    def __init__(self, socket_path: str) -> None:
        """Raises WrongState if another process holds it."""
        self._fd = os.open(f"{socket_path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise WrongState(
                f"another virtshim (pid {holder or 'unknown'}) serves {socket_path}; stop it first"
            ) from exc
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)


class CriServer:
    """Serves CRI's services, and that of our own commands, on one Unix socket. Start it only after recovery: an empty list
    means to kubelet that all pods died."""

    def __init__(
        self,
        socket_path: str,
        max_calls: int,
        runtime: RuntimeServicer,
        image: ImageServicer,
        people: PeopleServicer | None = None,
    ) -> None:
        self._path = socket_path
        self._pool = ThreadPoolExecutor(max_calls, thread_name_prefix="cri")
        self._server = grpc.server(
            self._pool,
            interceptors=[Calls()],
            options=(
                ("grpc.max_receive_message_length", _MESSAGE_BYTES),
                ("grpc.max_send_message_length", _MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),
            ),
        )
        self._runtime = runtime
        api_pb2_grpc.add_RuntimeServiceServicer_to_server(runtime, self._server)
        api_pb2_grpc.add_ImageServiceServicer_to_server(image, self._server)
        if people is not None:
            people_pb2_grpc.add_PeopleServicer_to_server(people, self._server)

    def start(self) -> None:
        """The caller holds the path's `SocketLock`. The socket is 0600 from its first moment."""
        _remove_stale(self._path)
        before = os.umask(0o177)
        try:
            if not self._server.add_insecure_port(f"unix:{self._path}"):
                raise WrongState(f"cannot listen on {self._path}")
        except RuntimeError as exc:
            raise WrongState(f"cannot listen on {self._path}: {exc}") from exc
        finally:
            os.umask(before)
        os.chmod(self._path, 0o600)
        self._server.start()
        log.info("cri.serving", socket=self._path)

    def stop(self, grace: float) -> None:
        """New calls are refused and event streams ended at once; other calls under way get `grace` seconds."""
        stopped = self._server.stop(grace)
        self._runtime.end_streams()
        stopped.wait()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _remove_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise WrongState(f"{path} is there and is not a socket; move it away or set cri.socket to another path")
    os.unlink(path)
