"""Detects a damaged state database, renames it, and reads the rows that are still readable."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from sqlalchemy.exc import DatabaseError

from virtshim.model.errors import InternalError, ResourceExhausted, ShimError
from virtshim.system.files import sync

# https://www.sqlite.org/rescode.html
_FULL, _CORRUPT, _NOT_A_DATABASE = 13, 11, 26

_SUFFIXES = ("", "-wal", "-shm")
_REMEDY = "restart virtshim: it sets the file aside and rebuilds the records from the virtual machines themselves"


class DatabaseDamaged(InternalError):
    """The file is corrupt. Callers must not conclude that its records do not exist."""


def database_trouble(exc: DatabaseError) -> ShimError:
    """Translates SQLite's error by its code, not by its text."""
    match getattr(exc.orig, "sqlite_errorcode", 0) & 0xFF:
        case code if code == _FULL:
            return ResourceExhausted("the state database cannot grow: the disk is full. Free space and repeat the call")
        case code if code in (_CORRUPT, _NOT_A_DATABASE):
            return DatabaseDamaged(f"the state database is damaged ({exc.orig}); {_REMEDY}")
        case _:
            return InternalError(
                f"the state database cannot be used: {exc.orig}; is its file system read-only, or failing?"
            )


@contextlib.contextmanager
def reading(path: str) -> Iterator[sqlite3.Connection]:
    """A read-only connection. Raises sqlite3.Error."""
    with contextlib.closing(sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=5)) as database:
        yield database


def check(path: str) -> str:
    """The damage of the file; "" if it is whole. Opens a new connection, because an open one would answer from its cache."""
    if not os.path.exists(path):
        return ""
    try:
        with reading(path) as database:
            found = [str(row[0]) for row in database.execute("pragma quick_check(1)")]
    except sqlite3.DatabaseError as exc:
        if getattr(exc, "sqlite_errorcode", 0) & 0xFF not in (_CORRUPT, _NOT_A_DATABASE):
            return ""
        found = [str(exc)]
    return "" if found == ["ok"] else f"the state database {path} is damaged ({'; '.join(found)[:200]}); {_REMEDY}"


def set_aside(path: str, stamp: str) -> None:
    """Renames the database and the files that belong to it. The database itself goes first: without its write-ahead log it could
    pass for a sound database of some time ago. May be repeated. Raises InternalError."""
    aside = aside_name(path, stamp)
    try:
        for suffix in _SUFFIXES:
            with contextlib.suppress(FileNotFoundError):
                os.replace(path + suffix, aside + suffix)
        sync(os.path.dirname(path))
    except OSError as exc:
        raise InternalError(f"the damaged state database {path} cannot be renamed: {exc.strerror}") from exc


def aside_name(path: str, stamp: str) -> str:
    return f"{path}.corrupt-{stamp}"


def readable_rows(path: str, table: str, columns: Sequence[str]) -> Iterator[Sequence[Any]]:
    """The readable rows of a damaged database: forward from the first row until the damage, then backward from the last row.
    A row may appear twice. The database is not changed."""
    with reading(path) as database:
        database.text_factory = lossless_text
        for order in ("asc", "desc"):
            with contextlib.suppress(sqlite3.Error):
                # The names are the schema's own.
                yield from database.execute(f"select {', '.join(columns)} from {table} order by rowid {order}")  # noqa: S608


def lossless_text(raw: bytes) -> str:
    """Decodes bytes that are not UTF-8 to surrogates. Parsers reject those, and the rest of the row stays readable."""
    return raw.decode("utf-8", "surrogateescape")
