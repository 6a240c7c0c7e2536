"""More Protocols between the services and the outside, by the rules of `virtshim.ports`: what is asked of a guest's agent beside
commands, and where its answers go. What a guest says may be false; it harms that guest only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from virtshim.domain.ids import ContainerId
from virtshim.domain.streaming import Output
from virtshim.ports import StreamSession


class GuestCare(Protocol):
    """Each call waits for the agent to come up, `timeout` seconds in all. Errors: DeadlineExceeded (no agent, or no answer),
    Unavailable (the VM ended, the agent broke off), WrongState (the agent may not do that), InternalError (it refused)."""

    def freeze(self, container: ContainerId, timeout: float) -> int:
        """Its file systems write all they have and then nothing until `thaw`: how many they are. After WrongState nothing is
        frozen (no agent, or one that cannot); after any other error they may be, or may be soon."""

    def thaw(self, container: ContainerId, timeout: float) -> None:
        """No error if nothing is frozen."""

    def set_clock(self, container: ContainerId, timeout: float) -> None:
        """The guest's clock shows the host's time."""

    def add_ssh_keys(self, container: ContainerId, user: str, keys: Sequence[str], timeout: float) -> None:
        """They may log in as that user of the guest from now on; keys that are there already stay. NotFound: the guest has no
        such user, or another fault with its files that the agent tells."""

    def read_tail(self, container: ContainerId, path: str, most: int, timeout: float) -> bytes:
        """The last bytes of a file in the guest; none if it is not there."""

    def resize_console(self, container: ContainerId, columns: int, rows: int, timeout: float) -> None:
        """The terminal on the serial console has that size."""


class TerminationFiles(Protocol):
    """kubelet's files for containers' last words."""

    def write(self, path: str, pod_uid: str, message: bytes) -> None:
        """Replaces what is in the file. It must be there, and regular; below the pod's own directory no link is followed. Errors:
        InvalidRequest, InternalError."""


class CommandInputs(Protocol):
    """The inputs of containers' own commands. Errors: as `GuestCare`; ResourceExhausted (no port for it is free)."""

    async def open(self, container: ContainerId) -> StreamSession:
        """A way in, which ends alone: the command reads on from others."""

    def end(self, container: ContainerId, timeout: float) -> None:
        """The command reads the end of its input when all ways in have ended."""

    def resize(self, container: ContainerId, columns: int, rows: int, timeout: float) -> None:
        """The command's terminal has that size. InternalError if it has none."""


class CommandHearers(Protocol):
    """Those who are attached to containers' own commands. Called from any thread; answers at once."""

    def anybody(self, container: ContainerId) -> bool: ...

    def heard(self, container: ContainerId, output: Sequence[Output]) -> None:
        """The command has said that, and it is in the log."""

    def ended(self, container: ContainerId, code: int) -> None:
        """All that it said has been heard."""

    def forget(self, container: ContainerId) -> None:
        """Its VM runs no more."""
