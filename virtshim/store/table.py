"""One kind of record in SQLite and in memory. Implements `virtshim.store.ports.Table`.

A write is committed to the database, then applied to memory. Reads never touch the database.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog
from sqlalchemy import Column, Connection, Delete, Update, bindparam, delete, select, update
from sqlalchemy import Table as SqlTable
from sqlalchemy.dialects.sqlite import Insert, insert
from sqlalchemy.exc import IntegrityError

from virtshim.model.errors import AlreadyExists, InternalError, InvalidRequest, NotFound
from virtshim.store.writer import DatabaseWriter

K = TypeVar("K")
R = TypeVar("R")

log = structlog.get_logger(__name__)

# The parameter for the key in a WHERE clause. No column has this name.
_KEY = "which"


@dataclass(frozen=True)  # no slots: with them Python 3.11 cannot make a generic frozen dataclass
class TableMapping(Generic[K, R]):
    """How one kind of record is stored in its SQL table."""

    table: SqlTable
    what: str  # the record's kind, in error texts
    key_of: Callable[[R], K]  # its text is the value in the key's column
    columns: Callable[[R], dict[str, Any]]  # the whole row, with `document`
    parse: Callable[[str], R]  # a document to its record
    order: str  # the column that sorts lists
    # (row, reason): stands for a row whose document is unreadable; None to list nothing.
    unknown: Callable[[Mapping[str, Any], str], R | None]
    # (connection, before, now): further writes in the transaction that adds or replaces a row.
    also: Callable[[Connection, R | None, R], None] = lambda _connection, _before, _now: None


@dataclass(frozen=True, slots=True)
class _Statements:
    """The writes to one SQL table, built once: SQLAlchemy takes longer to build a statement than SQLite to execute it."""

    key: Column[Any]
    insert: Insert
    update: Update
    delete: Delete
    put: Insert


@functools.cache
def _statements_of(table: SqlTable) -> _Statements:
    key = next(iter(table.primary_key))
    is_this = key == bindparam(_KEY)
    new = insert(table)
    changed = {column.name: new.excluded[column.name] for column in table.columns}
    return _Statements(
        key=key,
        insert=new,
        update=update(table).where(is_this),
        delete=delete(table).where(is_this),
        put=new.on_conflict_do_update(index_elements=[key], set_=changed),
    )


class SqliteTable(Generic[K, R]):
    """Safe to use from any thread. All tables of a database share one `writing`."""

    def __init__(self, writing: DatabaseWriter, mapping: TableMapping[K, R]) -> None:
        self._writing = writing
        self._map = mapping
        self._do = _statements_of(mapping.table)
        self._listeners: tuple[Callable[[R | None, R | None], None], ...] = ()
        self.unreadable: dict[str, str] = {}
        self.generation = 0
        self._memory: dict[K, R] = {}
        with writing.engine.connect() as connection:
            for row in connection.execute(select(mapping.table).order_by(mapping.table.c[mapping.order])).mappings():
                self._load({str(column): value for column, value in row.items()})

    def _load(self, row: Mapping[str, Any]) -> None:
        key = str(row[self._do.key.name])
        try:
            record: R | None = self._parsed(row["document"], key)
        except InternalError as exc:
            self.unreadable[key] = str(exc)
            log.warning("record.unreadable", what=self._map.what, id=key, error=str(exc))
            try:
                record = self._map.unknown(row, str(exc))
            except (InvalidRequest, TypeError, ValueError):  # not even its id can be read
                record = None
        if record is not None:
            self._memory[self._map.key_of(record)] = record

    def _parsed(self, document: str, key: str) -> R:
        record = self._map.parse(document)
        if str(self._map.key_of(record)) != key:
            raise InternalError(f"a {self._map.what} record in the state database has a different id than its row")
        return record

    def on_change(self, tell: Callable[[R | None, R | None], None]) -> None:
        """Calls `tell(before, after)` for each later change, in order, once the change is on disk and in memory. None stands for
        no record. `tell` may read tables; it must neither block nor write."""
        self._listeners = (*self._listeners, tell)

    def add(self, record: R, *, survives_power_cuts: bool = True) -> None:
        values = self._map.columns(record)
        self._write(self._do.insert, values, self._map.key_of(record), record, synced=survives_power_cuts)

    def replace(self, record: R, *, survives_power_cuts: bool = True) -> None:
        key = self._map.key_of(record)
        values = {_KEY: str(key), **self._map.columns(record)}
        if not self._write(self._do.update, values, key, record, synced=survives_power_cuts):
            raise NotFound(f"{self._map.what} {key} is gone")

    def put(self, record: R) -> None:
        self._write(self._do.put, self._map.columns(record), self._map.key_of(record), record)

    def delete(self, key: K) -> None:
        self._write(self._do.delete, {_KEY: str(key)}, key, None)

    def get(self, key: K) -> R | None:
        return self._memory.get(key)

    def all(self) -> Sequence[R]:
        return list(self._memory.values())

    def _also(self, key: K, record: R) -> Callable[[Connection], None]:
        return lambda connection: self._map.also(connection, self._memory.get(key), record)

    def _write(
        self,
        statement: Insert | Update | Delete,
        values: Mapping[str, Any],
        key: K,
        record: R | None,
        *,
        synced: bool = True,
    ) -> int:
        """Writes in one transaction and updates memory before the next writer may start. `record`: None for a deletion. Returns
        the number of changed rows."""
        with self._writing.lock:
            try:
                also = None if record is None else self._also(key, record)
                changed = self._writing.commit(statement, values, also, synced=synced)
            except IntegrityError as exc:
                raise AlreadyExists(f"{self._map.what}: the id or name is already taken") from exc
            if changed:
                self.unreadable.pop(str(key), None)
                before = self._memory.get(key)
                if record is None:
                    self._memory.pop(key, None)
                else:
                    self._memory[key] = record
                self.generation += 1
                for tell in self._listeners:
                    tell(before, record)
            return changed
