"""Threads: permanent ones, pools of workers, and one for each container with background work."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

import structlog

from virtshim.model.ids import ContainerId

log = structlog.get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_lock = threading.Lock()
_lasting: dict[str, threading.Thread] = {}


def started(thread: threading.Thread) -> threading.Thread:
    """Starts and returns the thread. Raises RuntimeError if the system has none, so `self._thread = started(...)` is only
    set to a running one."""
    thread.start()
    return thread


def lasting(run: Callable[[], object], name: str) -> threading.Thread:
    """Starts a thread that a part of virtshim needs until it is closed, when `run` returns. If `run` raises, that is logged and
    visible in `lasting_threads`. Raises RuntimeError as `started` does."""

    def kept() -> None:
        try:
            run()
        except Exception:
            log.exception("thread.died", thread=name, remedy="restart virtshim; virtual machines run on")
            return
        with _lock:
            if _lasting.get(name) is threading.current_thread():
                del _lasting[name]

    thread = threading.Thread(target=kept, name=name, daemon=True)
    with _lock:
        _lasting[name] = started(thread)
    return thread


def lasting_threads() -> Mapping[str, bool]:
    """Whether each thread that should run does so, by name."""
    with _lock:
        return {name: thread.is_alive() for name, thread in _lasting.items()}


class Workers(ThreadPoolExecutor):
    """At most `most` threads, made when needed and reused. The first is made at once, so this raises RuntimeError if the
    system has none. If the system has no more threads, work waits for the existing ones, and `submit` only raises after
    `shutdown`.

    In that case Python's own pool raises and still runs the work later, which gRPC's server does not survive. This is a subclass
    because gRPC requires one."""

    def __init__(self, most: int, name: str) -> None:
        super().__init__(most, thread_name_prefix=name)
        self._most = most
        self._name = name
        self._changed = threading.Condition()
        self._due: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._workers: set[threading.Thread] = set()
        self._idle = 0
        self._is_over = False
        with self._changed:
            self._add_worker()

    def submit(self, work: Callable[P, T], /, *args: P.args, **options: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self._changed:
            if self._is_over:
                raise RuntimeError(f"{self._name}: closed")
            self._due.append((future, partial(work, *args, **options)))
            if len(self._due) > self._idle and len(self._workers) < self._most:
                try:
                    self._add_worker()
                except RuntimeError as exc:
                    log.warning("threads.none_to_give", of=self._name, error=str(exc))
            self._changed.notify()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As in the base class. A worker may call it, and is then not waited for."""
        with self._changed:
            self._is_over = True
            dropped = [future for future, _ in self._due] if cancel_futures else []
            if cancel_futures:
                self._due.clear()
            workers = self._workers - {threading.current_thread()}
            self._changed.notify_all()
        for future in dropped:
            future.cancel()
        for worker in workers if wait else ():
            worker.join()

    def _add_worker(self) -> None:
        """The lock is held. The new worker counts as idle."""
        name = f"{self._name}_{len(self._workers)}"
        self._workers.add(started(threading.Thread(target=self._run, name=name, daemon=True)))
        self._idle += 1

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._is_over)
                if not self._due:
                    return
                future, work = self._due.popleft()
                self._idle -= 1
            _do(future, work)
            del future, work  # an idle worker must not keep their contents
            with self._changed:
                self._idle += 1


def _do(future: Future[T], work: Callable[[], T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            result = work()
        except BaseException as exc:  # noqa: BLE001  passed on to the caller
            future.set_exception(exc)
        else:
            future.set_result(result)


# Seconds for all threads together to end.
_CLOSE: Final = 5.0


class ContainerThreads:
    """At most one thread for each container. `name`: the prefix of the threads' names."""

    def __init__(self, name: str) -> None:
        self._name = name
        # The threads check this, and end soon after it is set.
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._threads: dict[ContainerId, threading.Thread] = {}
        self._again: dict[ContainerId, Callable[[], None]] = {}

    def start(
        self, container: ContainerId, run: Callable[[], None], *, beside_earlier: bool = False, again: bool = False
    ) -> None:
        """Runs `run` on a thread for the container. Does nothing after `close`. If the container already has a thread,
        does nothing either, except with `beside_earlier`, which starts a second thread, and with `again`, which lets
        the existing thread call `run` at its end."""
        # The thread's log lines belong to the call that started it, but the call's own name would be wrong.
        bound = {key: value for key, value in structlog.contextvars.get_contextvars().items() if key != "rpc"}
        thread = threading.Thread(
            target=self._run, args=(container, run, bound), name=f"{self._name}-{container.short}", daemon=True
        )
        with self._lock:
            if again and container in self._threads:
                self._again[container] = run
            elif not self.closing.is_set() and (beside_earlier or container not in self._threads):
                self._threads[container] = started(thread)

    def thread(self, container: ContainerId) -> threading.Thread | None:
        with self._lock:
            return self._threads.get(container)

    def close(self) -> None:
        """Waits a few seconds for the threads to end."""
        self.closing.set()
        with self._lock:
            threads = tuple(self._threads.values())
        until = time.monotonic() + _CLOSE
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self, container: ContainerId, run: Callable[[], None], bound: Mapping[str, Any]) -> None:
        due: Callable[[], None] | None = run
        while due is not None:
            try:
                with structlog.contextvars.bound_contextvars(**bound):
                    due()
            except Exception:  # any error: work that was added meanwhile must still run
                log.exception("container.thread_crashed", thread=self._name, container=container.short)
            finally:
                due = self._next(container)

    def _next(self, container: ContainerId) -> Callable[[], None] | None:
        """The work that was added while the thread ran, if any; otherwise ends the thread. Both happen under the lock,
        so that a later call starts a new thread."""
        with self._lock:
            if self._threads.get(container) is not threading.current_thread():
                return None
            again = self._again.pop(container, None)
            if again is not None and not self.closing.is_set():
                return again
            del self._threads[container]
            return None
