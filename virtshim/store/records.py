"""The journal in SQLite, one table for each kind of record. Implements `virtshim.store.ports.StateRecords`."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, Table, create_engine, delete, event, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import DatabaseError
from sqlalchemy.pool import StaticPool

from virtshim.devices.values import BorrowedDevice, DeviceCondition
from virtshim.model.container import Container
from virtshim.model.errors import InternalError, ResourceExhausted, WrongState
from virtshim.model.ids import ContainerId, ImageId, SandboxId
from virtshim.model.image import Image
from virtshim.model.sandbox import Sandbox
from virtshim.store import damage, rows, schema
from virtshim.store.damage import DatabaseDamaged, database_trouble, lossless_text
from virtshim.store.migrate import migrate
from virtshim.store.table import SqliteTable, TableMapping
from virtshim.store.writer import DatabaseWriter, spend_reserve
from virtshim.system.files import free_bytes, replace_text

_D = TypeVar("_D", BorrowedDevice, DeviceCondition)

# The cache has 256 KiB instead of 2 MiB, because reads never touch the database.
_PRAGMAS = ("journal_mode=wal", "synchronous=full", "foreign_keys=on", "busy_timeout=5000", "cache_size=-256")


def open_engine(path: str) -> Engine:
    """Creates the file with mode 0600 if it is missing, because it holds pods' secrets. Raises InternalError if it cannot be
    written."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    except OSError as exc:
        raise InternalError(
            f"the state database {path} cannot be written: {exc.strerror}; repair this and restart virtshim"
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
        # Takes the write lock at once, so no transaction has to upgrade its lock.
        connection.exec_driver_sql("begin immediate")

    return engine


class SqliteRecords:
    """Safe to use from any thread."""

    def __init__(
        self, path: str, engine: Callable[[str], Engine] = open_engine, free: Callable[[int], int] = free_bytes
    ) -> None:
        """Opens or creates the database, upgrades its schema and loads all records. `engine` opens the database; `free` returns
        the free bytes of an open file's disk. Raises WrongState for a database of a newer version, DatabaseDamaged for a
        damaged one, InternalError for an unusable one."""
        self._path = path
        self._damage = ""
        if wrong := damage.check(path):
            raise DatabaseDamaged(wrong)
        try:
            self._open(path, engine, free)
        except (ResourceExhausted, InternalError) as exc:
            # The disk may be full: a clean close removed the write-ahead log, and SQLite needs room for a new one. Its error
            # does not always say so.
            if isinstance(exc, DatabaseDamaged) or not spend_reserve(path):
                raise
            self._open(path, engine, free)

    def _open(self, path: str, engine: Callable[[str], Engine], free: Callable[[int], int]) -> None:
        self._engine = engine(path)
        try:
            migrate(self._engine)
            self._writing = DatabaseWriter(self._engine, path, free)
            self.sandboxes: SqliteTable[SandboxId, Sandbox] = SqliteTable(self._writing, _SANDBOXES)
            self.containers: SqliteTable[ContainerId, Container] = SqliteTable(
                self._writing, _containers(_claims_by_container(self._engine))
            )
            _delete_orphaned_claims(self._engine)
            self.images: SqliteTable[ImageId, Image] = SqliteTable(self._writing, _IMAGES)
            self.borrowed: SqliteTable[str, BorrowedDevice] = SqliteTable(self._writing, _BORROWED)
            self.device_conditions: SqliteTable[str, DeviceCondition] = SqliteTable(self._writing, _CONDITIONS)
        except DatabaseError as exc:
            self._engine.dispose()
            raise database_trouble(exc) from exc
        except BaseException:
            self._engine.dispose()
            raise

    def close(self) -> None:
        self._engine.dispose()

    def trouble(self) -> str:
        return self._damage or self._writing.trouble()

    def check(self) -> None:
        self._damage = damage.check(self._path)

    def unreadable(self) -> dict[str, str]:
        return {key: why for table in self._tables() for key, why in list(table.unreadable.items())}

    def _tables(self) -> Sequence[SqliteTable[Any, Any]]:
        return (self.sandboxes, self.containers, self.images, self.borrowed, self.device_conditions)

    def to_text(self, sandbox: Sandbox, container: Container) -> str:
        return rows.pair_document(sandbox, container)

    def from_text(self, text: str) -> tuple[Sandbox, Container]:
        return rows.pair_from(text)

    def newest_stamp(self) -> int:
        """The latest creation time of any sandbox or container, in nanoseconds; 0 without records."""
        stamps = [s.created_at for s in self.sandboxes.all()] + [c.created_at for c in self.containers.all()]
        return max(stamps, default=0)

    def node_fact(self, key: str) -> str | None:
        """A fact that must outlive the process: `id` or `boot`."""
        with self._writing.lock, self._engine.connect() as connection:
            row = connection.execute(select(schema.node.c.value).where(schema.node.c.key == key)).first()
            return None if row is None else str(row[0])

    def set_node_fact(self, key: str, value: str) -> None:
        statement = insert(schema.node).values(key=key, value=value)
        statement = statement.on_conflict_do_update(index_elements=["key"], set_={"value": value})
        with self._writing.lock:  # start-up needs this write, even on a full disk
            self._writing.commit(statement, {}, makes_new=False)

    def node_id(self) -> str:
        """A UUID that marks what this node owns. Made once; a file holds a second copy, in case the database is lost."""
        beside = f"{os.path.dirname(self._path)}/node.id"
        stored, copy = self.node_fact("id"), _read_copy(beside)
        found = stored or copy or str(uuid.uuid4())
        if found != stored:
            self.set_node_fact("id", found)
        if found != copy:
            _write_copy(beside, found)
        return found


def _sandbox_columns(sandbox: Sandbox) -> dict[str, Any]:
    return {
        "id": sandbox.id.value,
        "namespace": sandbox.key.namespace,
        "name": sandbox.key.name,
        "uid": sandbox.key.uid,
        "attempt": sandbox.key.attempt,
        "phase": sandbox.phase.value,
        "created_at": sandbox.created_at,
        "document": rows.SANDBOX.text(sandbox),
    }


def _container_columns(container: Container) -> dict[str, Any]:
    return {
        "id": container.id.value,
        "sandbox_id": container.sandbox_id.value,
        "name": container.name.name,
        "attempt": container.name.attempt,
        "phase": container.phase.value,
        "created_at": container.created_at,
        "document": rows.container_document(container),
    }


def _write_claims(connection: Connection, before: Container | None, now: Container) -> None:
    if now.claims != (() if before is None else before.claims):
        _replace_claims(connection, now.id.value, now.claims)


def _image_columns(image: Image) -> dict[str, Any]:
    return {"id": image.id.value, "pulled_at": image.pulled_at, "document": rows.IMAGE.text(image)}


_SANDBOXES = TableMapping[SandboxId, Sandbox](
    table=schema.sandboxes,
    what="pod sandbox",
    key_of=lambda sandbox: sandbox.id,
    columns=_sandbox_columns,
    parse=rows.SANDBOX.parse,
    order="created_at",
    unknown=rows.unreadable_sandbox,
)


def _containers(claims: Mapping[str, tuple[str, ...]]) -> TableMapping[ContainerId, Container]:
    """`claims`: by container id. A container whose document is unreadable keeps its claims."""
    return TableMapping(
        table=schema.containers,
        what="container",
        key_of=lambda container: container.id,
        columns=_container_columns,
        parse=rows.container_from,
        order="created_at",
        unknown=lambda row, why: rows.unreadable_container(row, why, claims.get(str(row["id"]), ())),
        also=_write_claims,
    )


_IMAGES = TableMapping[ImageId, Image](
    table=schema.images,
    what="image",
    key_of=lambda image: image.id,
    columns=_image_columns,
    parse=rows.IMAGE.parse,
    order="pulled_at",
    unknown=lambda _row, _why: None,  # the image's file has all that matters
)


def _by_claim(table: Table, what: str, documents: rows.Documents[_D]) -> TableMapping[str, _D]:
    """Records of devices. One that is unreadable is not listed: the driver that a borrowed device came from is then unknown,
    and the next reset finds a fault again."""
    return TableMapping(
        table=table,
        what=what,
        key_of=lambda record: record.claim,
        columns=lambda record: {"claim": record.claim, "document": documents.text(record)},
        parse=documents.parse,
        order="claim",
        unknown=lambda _row, _why: None,
    )


_BORROWED = _by_claim(schema.borrowed, "borrowed device", rows.BORROWED)
_CONDITIONS = _by_claim(schema.device_conditions, "device condition", rows.CONDITION)


def _replace_claims(connection: Connection, container: str, claims: Sequence[str]) -> None:
    """Makes `claims` the container's only claims. Raises WrongState if another container holds one of them; the caller must then
    roll the transaction back."""
    table = schema.claims
    query = select(table.c.claim, table.c.container_id).where(table.c.claim.in_(claims))
    there = {claim: holder for claim, holder in connection.execute(query)}  # noqa: C416 (rows are no pairs to a type checker)
    for claim, holder in there.items():
        if holder != container:
            raise WrongState(f"device {claim} is held by container {holder}")
    connection.execute(delete(table).where(table.c.container_id == container, table.c.claim.not_in(claims)))
    if new := [claim for claim in dict.fromkeys(claims) if claim not in there]:
        connection.execute(insert(table), [{"claim": claim, "container_id": container} for claim in new])


def _claims_by_container(engine: Engine) -> Mapping[str, tuple[str, ...]]:
    table = schema.claims
    found: dict[str, tuple[str, ...]] = {}
    with engine.connect() as connection:
        for claim, holder in connection.execute(select(table.c.claim, table.c.container_id).order_by(table.c.claim)):
            found[holder] = (*found.get(holder, ()), claim)
    return found


def _delete_orphaned_claims(engine: Engine) -> None:
    """Deletes claims without a container. Only editing the database by hand can leave them."""
    known = select(schema.containers.c.id)
    with engine.begin() as connection:
        connection.execute(delete(schema.claims).where(schema.claims.c.container_id.not_in(known)))


def _read_copy(path: str) -> str | None:
    """None if the file is missing or holds no UUID. Raises InternalError if it cannot be read."""
    try:
        return str(uuid.UUID(Path(path).read_text(encoding="ascii").strip()))
    except (FileNotFoundError, ValueError):
        return None
    except OSError as exc:
        raise InternalError(f"the node's id cannot be read from {path}: {exc.strerror}") from exc


def _write_copy(path: str, node: str) -> None:
    """The file is on disk when this returns. Raises InternalError."""
    try:
        replace_text(path, f"{node}\n")
    except OSError as exc:
        raise InternalError(f"the node's id cannot be written to {path}: {exc.strerror}") from exc
