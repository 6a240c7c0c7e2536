"""Requests to tapmanager, and what its errors mean here.

Each has a connection of its own, so a slow pod blocks nobody and a restart of tapmanager needs no reconnecting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from tapmanager import protocol
from tapmanager.fields import BadField, Json
from virtshim.model.errors import (
    Aborted,
    AlreadyExists,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Kind,
    NotFound,
    PermissionRefused,
    ResourceExhausted,
    ShimError,
    Unavailable,
    Unimplemented,
    WrongState,
)

T = TypeVar("T")

_ERRORS: Mapping[Kind, type[ShimError]] = {
    error.kind: error
    for error in (
        InvalidRequest,
        NotFound,
        AlreadyExists,
        WrongState,
        DeadlineExceeded,
        Unavailable,
        ResourceExhausted,
        PermissionRefused,
        Unimplemented,
        Aborted,
        InternalError,
    )
}


@dataclass(frozen=True, slots=True)
class Program:
    """Who answers, for messages. `keeps`: what its restart does no harm to."""

    name: str
    unit: str
    keeps: str


TAPMANAGER: Final = Program("tapmanager", "tapmanager", "pods keep their network")
SHARES: Final = Program("the share program", "virtshim-shares", "VMs keep their volumes")


class TapmanagerConnection:
    """Stateless but for the socket's path, thread-safe. `program`: the share program speaks the same protocol."""

    def __init__(
        self, socket_path: str, program: Program = TAPMANAGER, patience: float = 1.0, alive_within: float = 4.0
    ) -> None:
        """After `patience`, which most answers do not take, the program is asked whether it lives. It answers that at once,
        whatever else it does: one that says nothing `alive_within` that time hangs. Both are seconds."""
        self._patience = patience
        self._alive_within = alive_within
        self._path = socket_path
        self._program = program

    def ask(
        self,
        verb: str,
        args: Mapping[str, object],
        timeout: float,
        doing: str,
        read: Callable[[Json], T],
        newer: Collection[str] = (),
    ) -> T:
        """One request; `doing` says what for, in errors. `read` makes a value of the answer, and raises BadField where it
        cannot. `newer`: arguments that an earlier version does not know, and may do without. Raises ShimError."""
        with self._wire_errors(doing):
            return read(self._call_either(verb, args, timeout, newer))

    def tell(
        self, verb: str, args: Mapping[str, object], timeout: float, doing: str, newer: Collection[str] = ()
    ) -> None:
        """As `ask`, for verbs that answer with nothing."""
        with self._wire_errors(doing):
            self._call_either(verb, args, timeout, newer)

    def _call_either(self, verb: str, args: Mapping[str, object], timeout: float, newer: Collection[str]) -> Json:
        """While an upgrade goes on the other side may be the older one, which has done nothing yet when it says so."""
        try:
            return self._call(verb, args, timeout)
        except protocol.RemoteError as exc:
            if str(exc) not in {f"args.{name}: unknown field" for name in newer if name in args}:
                raise
        return self._call(verb, {name: value for name, value in args.items() if name not in newer}, timeout)

    def _call(self, verb: str, args: Mapping[str, object], timeout: float) -> Json:
        if timeout <= 0:
            raise TimeoutError
        when_over = self._require_alive if timeout > self._patience + self._alive_within else None
        answer, fds = protocol.call(self._path, verb, args, timeout, self._patience, when_over)
        protocol.close_all(fds)  # none of these verbs sends any
        return answer

    def _require_alive(self) -> None:
        """When a request takes long: nobody should wait as long as that may for a process that hangs."""
        try:
            _, fds = protocol.call(self._path, "list", {}, self._alive_within)
        except TimeoutError as exc:
            raise Unavailable(
                f"{self._program.name} at {self._path} does not answer; restart it (systemctl restart {self._program.unit}), "
                f"{self._program.keeps}"
            ) from exc
        except protocol.RemoteError:  # an answer
            return
        protocol.close_all(fds)

    @contextlib.contextmanager
    def _wire_errors(self, doing: str) -> Iterator[None]:
        """The one place where the wire's errors become the product's."""
        try:
            yield
        except protocol.RemoteError as exc:
            raise _ERRORS[Kind(exc.kind)](str(exc)) from exc
        except (protocol.FrameError, BadField) as exc:
            raise InternalError(f"{doing}: {self._program.name}'s answer cannot be used: {exc}") from exc
        except TimeoutError as exc:
            raise DeadlineExceeded(
                f"{doing}: {self._program.name} did not finish in time; it continues; try again"
            ) from exc
        except OSError as exc:
            why = exc.strerror or str(exc)
            remedy = f"check whether it is running: systemctl status {self._program.unit}"
            raise Unavailable(
                f"{doing}: {self._program.name} at {self._path} cannot be reached: {why}; {remedy}"
            ) from exc
