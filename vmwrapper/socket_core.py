"""`socket` in the written vmwrapper: only the standard library's C module, because the rest loads `enum` and `selectors`, which
would double vmwrapper's time."""

from __future__ import annotations

import _socket
from _socket import *  # noqa: F403  as the standard library's module does

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self


class socket(_socket.socket):  # type: ignore[no-redef]  # noqa: N801  the standard library's name
    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
