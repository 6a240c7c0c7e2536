"""`socket` in the written vmwrapper: the C module that the standard library's has inside. What is around it loads `enum` and
`selectors`, which would double vmwrapper's time, and is not used."""

from __future__ import annotations

import _socket
from _socket import *  # noqa: F403  as the standard library's module does

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self


class socket(_socket.socket):  # type: ignore[no-redef]  # noqa: N801  the standard library's name, and what it does with it
    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
