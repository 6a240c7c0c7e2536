"""Where something listens: an IP address and a TCP port, or the path of a Unix socket."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Self

from virtshim.domain.errors import InvalidRequest

_UNIX = "unix:"


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """`path` is "" for TCP."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises InvalidRequest."""
        if text.startswith(f"{_UNIX}/"):
            return cls(path=text.removeprefix(_UNIX))
        host, _, port = text.rpartition(":")
        try:
            found = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
            if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
                raise ValueError  # noqa: TRY301  told like a wrong host
        except ValueError:
            raise InvalidRequest(
                f"{text!r} is no address: write an IP address and a port, such as 127.0.0.1:10011 or [::1]:10011, or "
                "unix:/a/path"
            ) from None
        return cls(str(found), int(port))
