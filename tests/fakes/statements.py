"""SQL that is compiled once for all databases of a process.

Tests open thousands of databases. For SQLAlchemy each is an engine with its own compiled statements, and compiling takes
longer than executing.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from sqlalchemy import Connection, Engine, event


class SharedStatements(MutableMapping[Any, Any]):
    """SQLAlchemy's keys begin with the engine's dialect object; the rest of them tells one statement from another."""

    def __init__(self) -> None:
        self._compiled: dict[Any, Any] = {}

    def __getitem__(self, key: Any) -> Any:
        return self._compiled[key[1:]]

    def __setitem__(self, key: Any, compiled: Any) -> None:
        self._compiled[key[1:]] = compiled

    def __delitem__(self, key: Any) -> None:
        del self._compiled[key[1:]]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._compiled)

    def __len__(self) -> int:
        return len(self._compiled)


_STATEMENTS = SharedStatements()


@event.listens_for(Engine, "engine_connect")
def _share(connection: Connection) -> None:
    connection.execution_options(compiled_cache=_STATEMENTS)
