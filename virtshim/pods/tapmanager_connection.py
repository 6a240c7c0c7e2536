"""Sends requests to tapmanager and translates its errors.

Each request has a connection of its own, so that a slow pod blocks no other and a restart of tapmanager needs no
reconnect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from tapmanager import protocol
from tapmanager.fields import BadField, Json
from virtshim.model.errors import BY_KIND, DeadlineExceeded, InternalError, Kind, Unavailable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Program:
    """The program at the other end, as messages name it. `keeps`: what a restart of the program does not disturb."""

    name: str
    unit: str
    keeps: str


TAPMANAGER: Final = Program("tapmanager", "tapmanager", "pods keep their network")
SHARES: Final = Program("the share program", "virtshim-shares", "VMs keep their volumes")


class TapmanagerConnection:
    """Stateless except for the socket's path; thread-safe. `program`: the share program speaks the same protocol."""

    def __init__(
        self, socket_path: str, program: Program = TAPMANAGER, patience: float = 1.0, alive_within: float = 4.0
    ) -> None:
        """Most answers arrive within `patience` seconds. After that, virtshim asks the program whether it lives. A
        program that works answers this question at once, even if it is busy, so a program that does not answer within
        `alive_within` seconds hangs."""
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
        """Sends one request. `doing` says in errors what it was for. `read` converts the answer, and raises BadField if
        it cannot. `newer`: arguments that an older version does not know and can do without. Raises ShimError."""
        with self._wire_errors(doing):
            return read(self._call_either(verb, args, timeout, newer))

    def tell(
        self, verb: str, args: Mapping[str, object], timeout: float, doing: str, newer: Collection[str] = ()
    ) -> None:
        """Like `ask`, for verbs with an empty answer."""
        with self._wire_errors(doing):
            self._call_either(verb, args, timeout, newer)

    def _call_either(self, verb: str, args: Mapping[str, object], timeout: float, newer: Collection[str]) -> Json:
        """Repeats the request without the `newer` arguments if the other side is older and refuses them. During an
        upgrade it may be; it has done nothing yet when it refuses."""
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
        """Called when a request takes long, so that nobody waits that long for a process that hangs."""
        try:
            _, fds = protocol.call(self._path, "list", {}, self._alive_within)
        except TimeoutError as exc:
            raise Unavailable(
                f"{self._program.name} at {self._path} does not answer; restart it (systemctl restart {self._program.unit}), "
                f"{self._program.keeps}"
            ) from exc
        except protocol.RemoteError:  # an error is an answer, too
            return
        protocol.close_all(fds)

    @contextlib.contextmanager
    def _wire_errors(self, doing: str) -> Iterator[None]:
        """The only place that turns errors of the wire into ShimErrors."""
        try:
            yield
        except protocol.RemoteError as exc:
            raise BY_KIND[Kind(exc.kind)](str(exc)) from exc
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
