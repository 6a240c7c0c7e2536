"""What a command's ports bring, put together: output, exit code, why it could not start. Pure."""

from __future__ import annotations

import re

from virtshim.domain.errors import InternalError, InvalidRequest, ShimError, WrongState
from virtshim.domain.guest.streaming import Output, OutStream
from virtshim.domain.printable import printable_text
from virtshim.guestagent.session_stream import BadStream, Record, SessionStream

_CODE = re.compile(r"[0-9]{1,3}")
_CODE_MOST = 255


class CommandOutput:
    def __init__(self, token: str, *, stderr: bool) -> None:
        wanted = (OutStream.STDOUT, OutStream.STDERR) if stderr else (OutStream.STDOUT,)
        self._streams = {stream: SessionStream(token) for stream in wanted}
        self.code: int | None = None
        self.tty = ""

    def feed(self, stream: OutStream, data: bytes) -> list[Output]:
        """The output in these bytes. Raises ShimError: what the guest says of why there is no command, or InternalError if it
        does not keep to the form."""
        out: list[Output] = []
        try:
            for item in self._streams[stream].feed(data):
                if isinstance(item, Record):
                    self._note(item)
                else:
                    out.append(Output(stream, item))
        except BadStream as exc:
            raise InternalError(f"the guest breaks the exec protocol: {exc}") from exc
        return out

    @property
    def started(self) -> bool:
        return all(stream.started for stream in self._streams.values())

    @property
    def exited(self) -> bool:
        """The command itself has; others may hold its streams open."""
        return self.code is not None

    @property
    def complete(self) -> bool:
        return self.exited and all(stream.ended for stream in self._streams.values())

    def _note(self, record: Record) -> None:
        match record.word:
            case "exit":
                if not _CODE.fullmatch(record.value) or int(record.value) > _CODE_MOST:
                    raise BadStream("an exit code that is none")
                self.code = int(record.value)
            case "fail":
                raise failure(record.value)
            case "tty":
                self.tty = record.value if record.value.startswith("/dev/") and record.value.isprintable() else ""
            case _:
                pass  # start and end are the stream's own


def failure(words: str) -> ShimError:
    """What a script in the guest says of why there is no command: `WORD VALUE`."""
    what, _, value = words.partition(" ")
    shown = printable_text(value[:200])
    match what:
        case "directory":
            return InvalidRequest(f"the guest has no working directory {shown}; correct workingDir or the image")
        case "user":
            return InvalidRequest(f"the guest's /etc/passwd has no user {shown}; correct runAsUser or the image")
        case "tool":
            return WrongState(
                f"the guest has no program `{shown}` for this; {_REMEDY.get(shown, 'install it in the image')}"
            )
        case _:
            return InternalError("the guest could not start the command and gave no reason")


_REMEDY = {
    "setpriv": "to run commands as this user and groups install util-linux (Alpine: setpriv), coreutils or python3 in the image",
    "script": "for a terminal install util-linux's script, or python3, in the image",
    "unshare": "for readOnlyRootFilesystem install util-linux or busybox in the image",
    "setsid": "install util-linux or busybox in the image",
}
