"""Writes to the state database, one at a time, with disk space reserved for removals.

A reserve file beside the database holds the space. Writes that add records fail if the reserve cannot be kept. On a full disk,
writes that end or remove something get the reserve's space, so kubelet can always remove pods and thus free space.
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

# More than SQLite's write-ahead log needs: it grows to 1000 pages of 4 KiB, then starts over (wal_autocheckpoint).
_RESERVE: Final = 5 << 20
_SUFFIX: Final = ".reserve"

ExtraWrite: TypeAlias = Callable[[Connection], None]


class DatabaseWriter:
    """Writes to the database at `path`. The caller holds `lock` during `commit` and what must follow it."""

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
        """Returns the number of changed rows. `values`: the statement's parameters. `also`: further writes in the transaction, if
        a row changed. `synced`: if false, a power cut may undo the write until a later commit is synced, which syncs all
        earlier ones. `makes_new`: refuse the write if only the reserve is left; by default true for insertions. Raises
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
        """With a write-ahead log, "normal" omits the sync after each transaction, and no other sync."""
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
            connection.close()  # returns it to the pool, which holds only this connection

    def trouble(self) -> str:
        """See `StateRecords.trouble`. Damage stays. Any other trouble may have passed, so a write is tried."""
        if self._trouble and not self._damage:
            new = secrets.token_hex(8)  # SQLite does not write an unchanged value
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
            # A full disk is not reported as trouble: that would make the node not ready, and then kubelet removes no pods.
            self._trouble = "" if isinstance(error, ResourceExhausted) else str(error)
            raise error from exc
        self._trouble = ""
        return changed

    def _keep_reserve(self) -> None:
        """Raises ResourceExhausted. Ignores other errors: the write itself meets them too and reports them better."""
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
                "the disk of the state database has only the space left that removing pods needs; free space and repeat the call"
            )


def spend_reserve(path: str) -> bool:
    """Frees the reserve of the database at `path`. False if there was none."""
    try:
        os.unlink(path + _SUFFIX)
    except OSError:
        return False
    return True
