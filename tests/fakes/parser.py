"""The image parser on a thread of the test process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field

from fakes.journal import WAIT_LIMIT

from virtshim.images.confined.header import verdict
from virtshim.images.confined.layers import serve
from virtshim.images.confinement import Account, Bounds
from virtshim.model.errors import DeadlineExceeded
from virtshim.system.process import Finished, Piped, run

PIPE_BYTES = 1 << 20


class ParserThread:
    """Implements `virtshim.images.confinement.Parser` with the code of the confined child, whose start takes longer than
    most test images. Nothing confines it: `user` and limits have no effect."""

    def __init__(self, user: Account) -> None:
        self.user = user

    @contextlib.contextmanager
    def unpack(self, bounds: Bounds) -> Iterator[Piped]:
        source, feed = os.pipe()
        answers, target = os.pipe()
        for descriptor in (feed, answers):
            os.set_blocking(descriptor, False)
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        serving = _Serving(source, target)
        serving.thread.start()
        try:
            yield Piped(feed, answers, serving.end)
        finally:
            # The thread finds both pipes closed.
            os.close(feed)
            os.close(answers)
            serving.end(WAIT_LIMIT)

    def judge(self, descriptor: int, bounds: Bounds, cancelled: threading.Event | None) -> Finished:
        if cancelled is not None and cancelled.is_set():
            raise DeadlineExceeded("qemu-img was stopped: the caller gave up")
        line, is_usable = verdict(descriptor)
        said = f"{line}\n".encode()
        if not is_usable:
            return Finished(0, said, b"")
        argv = ["qemu-img", "info", "--output=json", f"/proc/self/fd/{descriptor}"]
        done = run(argv, timeout=WAIT_LIMIT, pass_fds=(descriptor,), cancelled=cancelled)
        return Finished(done.returncode, said + done.stdout, done.stderr)


@dataclass
class _Serving:
    source: int
    target: int
    trouble: str = ""
    exit_code: int = 0
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="parser")

    def end(self, timeout: float) -> Finished:
        self.thread.join(timeout)
        assert not self.thread.is_alive(), "the parser goes on though nobody feeds it or listens to it"
        return Finished(self.exit_code, b"", self.trouble.encode())

    def _run(self) -> None:
        try:
            serve(self.source, self.target)
        except EOFError:
            self.exit_code = 1
        except Exception:  # noqa: BLE001
            self.exit_code, self.trouble = 1, traceback.format_exc()
        finally:
            os.close(self.source)
            os.close(self.target)
