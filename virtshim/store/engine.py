"""The SQLite engine: strict pragmas, and BEGIN IMMEDIATE so that a lock is taken once and never upgraded half-way."""

from __future__ import annotations

import os
from typing import Any

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.pool import StaticPool

from virtshim.domain.errors import InternalError
from virtshim.store.damage import lossless_text

_PRAGMAS = ("journal_mode=wal", "synchronous=full", "foreign_keys=on", "busy_timeout=5000")


def open_engine(path: str) -> Engine:
    """The file is made 0600 if missing: it holds what pods were given, secrets included. Raises InternalError where it cannot
    be written."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    except OSError as exc:
        raise InternalError(
            f"the state database {path} cannot be written: {exc.strerror}; repair that and restart virtshim"
        ) from exc
    engine = create_engine(
        f"sqlite:///{path}",
        poolclass=StaticPool,  # one connection: writers take turns under the records' lock, readers use memory
        connect_args={"check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def _strict(dbapi: Any, _record: Any) -> None:
        dbapi.text_factory = lossless_text
        dbapi.isolation_level = None  # Python 3.11's driver would not BEGIN before a SELECT or DDL
        for pragma in _PRAGMAS:
            dbapi.execute(f"pragma {pragma}")

    @event.listens_for(engine, "begin")
    def _immediate(connection: Any) -> None:
        connection.exec_driver_sql("begin immediate")

    return engine
