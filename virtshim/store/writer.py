"""Writes to the state database: one at a time, with room kept for those that give something back.

Beside the database lies a file that only takes room. A write that makes something new fails while that cannot be kept; when the
disk is full, what ends or removes something gets its room. So kubelet can always remove pods, which is what makes room.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from sqlalchemy import Connection, Delete, Engine, Update
from sqlalchemy.dialects.sqlite import Insert, insert
from sqlalchemy.exc import DatabaseError, IntegrityError

from virtshim.model.errors import ResourceExhausted, ShimError
from virtshim.store import schema
from virtshim.store.damage import DatabaseDamaged, database_trouble

# SQLite's write-ahead log grows to 1000 pages of 4 KiB, then it is written anew from its beginning (wal_autocheckpoint).
_RESERVE: Final = 5 << 20
_SUFFIX: Final = ".reserve"

ExtraWrite: TypeAlias = Callable[[Connection], None]


class DatabaseWriter:
    """Of one database at `path`. The caller holds `lock` around `commit` and what must follow it."""

    def __init__(self, engine: Engine, path: str, free: Callable[[int], int]) -> None:
        self.engine = engine
        self._free = free
        self.lock = threading.Lock()
        self._path = path
        self._reserve = path + _SUFFIX
        self._trouble = self._damage = ""
        with contextlib.suppress(ResourceExhausted):
            self._keep_reserve()

    def commit(
        self,
        statement: Insert | Update | Delete,
        values: Mapping[str, Any],
        also: ExtraWrite | None = None,
        *,
        synced: bool = True,
        makes_new: bool | None = None,
    ) -> int:
        """Rows changed. `makes_new`: it is refused when only the reserve is left; an insertion does if nothing else is said.
        `values`: of the statement's parameters. `also` writes what else belongs into the transaction, if there
        are any. Without `synced` a power cut may undo it, unless a later commit is synced: that syncs all before it. Raises
        IntegrityError, ResourceExhausted, DatabaseDamaged, InternalError, and what `also` raises."""
        if makes_new is None:
            makes_new = isinstance(statement, Insert)
        if makes_new:
            self._keep_reserve()
        try:
            with self._syncing(synced):
                changed = self._execute(statement, values, also)
        except ResourceExhausted:
            if makes_new or not spend_reserve(self._path):
                raise
            changed = self._execute(statement, values, also)
        return changed

    @contextlib.contextmanager
    def _syncing(self, synced: bool) -> Iterator[None]:
        """In a write-ahead log, "normal" leaves out the sync at the end of each transaction and no other."""
        if not synced:
            self._set_synchronous("normal")
        try:
            yield
        finally:
            if not synced:
                self._set_synchronous("full")

    def _set_synchronous(self, how: str) -> None:
        connection = self.engine.raw_connection()
        try:
            connection.cursor().execute(f"pragma synchronous={how}")
        finally:
            connection.close()  # back to the pool, which has this one alone

    def trouble(self) -> str:
        """See `StateRecords`. Damage does not go by itself; what else kept the last write from working may: it is tried."""
        if self._trouble and not self._damage:
            new = secrets.token_hex(8)  # SQLite writes nothing where nothing changes
            statement = insert(schema.node).values(key="written", value=new)
            with self.lock, contextlib.suppress(ShimError):
                self._execute(statement.on_conflict_do_update(index_elements=["key"], set_={"value": new}), {})
        return self._damage or self._trouble

    def _execute(
        self, statement: Insert | Update | Delete, values: Mapping[str, Any], also: ExtraWrite | None = None
    ) -> int:
        try:
            with self.engine.begin() as connection:
                changed = int(connection.execute(statement, values).rowcount)
                if changed and also is not None:
                    also(connection)
        except IntegrityError:
            raise
        except DatabaseError as exc:
            error = database_trouble(exc)
            if isinstance(error, DatabaseDamaged):
                self._damage = str(error)
            # A full disk is not noted: kubelet removes no pods from a node that is not ready.
            self._trouble = "" if isinstance(error, ResourceExhausted) else str(error)
            raise error from exc
        self._trouble = ""
        return changed

    def _keep_reserve(self) -> None:
        """Raises ResourceExhausted. Other trouble is the database's too, which tells it better."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self._reserve, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                missing = _RESERVE - os.fstat(descriptor).st_size
                if missing > 0:
                    self._require_room(descriptor, missing)
                    os.posix_fallocate(descriptor, 0, _RESERVE)
            finally:
                os.close(descriptor)

    def _require_room(self, descriptor: int, wanted: int) -> None:
        if self._free(descriptor) < wanted:
            raise ResourceExhausted(
                "the disk of the state database is full but for what removing pods needs; free space and repeat the call"
            )


def spend_reserve(path: str) -> bool:
    """The room that is kept beside that database is free; False if there was none."""
    try:
        os.unlink(path + _SUFFIX)
    except OSError:
        return False
    return True
