"""Records: the journal in SQLite with everything also in memory. Implements `virtshim.ports.Records`.

A write goes to the database first and to memory after it is committed; reads never touch the database.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence

from sqlalchemy import Delete, Engine, Update, delete, select, update
from sqlalchemy.dialects.sqlite import Insert, insert
from sqlalchemy.exc import IntegrityError, OperationalError

from virtshim.domain.container import Container
from virtshim.domain.errors import AlreadyExists, InternalError, NotFound, ResourceExhausted, ShimError
from virtshim.domain.ids import ContainerId, ImageDigest, SandboxId
from virtshim.domain.image import Image
from virtshim.domain.sandbox import Sandbox
from virtshim.store import rows, schema
from virtshim.store.engine import open_engine
from virtshim.store.migrate import migrate


class SqliteRecords:
    """Safe to use from any thread."""

    def __init__(self, path: str) -> None:
        """Opens or makes the database, brings its schema up to date and loads everything. Raises WrongState for a database
        of a newer version, InternalError for an unreadable one."""
        self._lock = threading.Lock()
        try:
            self._engine: Engine = open_engine(path)
            migrate(self._engine)
            self._load()
        except OperationalError as exc:
            raise _database_trouble(exc) from exc

    def close(self) -> None:
        self._engine.dispose()

    def _load(self) -> None:
        with self._engine.connect() as connection:
            self._sandboxes = {
                s.id: s
                for (doc,) in connection.execute(select(schema.sandboxes.c.document).order_by("created_at"))
                for s in (rows.sandbox_from(doc),)
            }
            self._containers = {
                c.id: c
                for (doc,) in connection.execute(select(schema.containers.c.document).order_by("created_at"))
                for c in (rows.container_from(doc),)
            }
            self._images = {
                i.digest: i
                for (doc,) in connection.execute(select(schema.images.c.document).order_by("pulled_at"))
                for i in (rows.image_from(doc),)
            }

    # --- node facts

    def node_fact(self, key: str) -> str | None:
        with self._lock, self._engine.connect() as connection:
            row = connection.execute(select(schema.node.c.value).where(schema.node.c.key == key)).first()
            return None if row is None else str(row[0])

    def set_node_fact(self, key: str, value: str) -> None:
        statement = insert(schema.node).values(key=key, value=value)
        self._write(statement.on_conflict_do_update(index_elements=["key"], set_={"value": value}))

    def node_id(self) -> str:
        """A UUID made once for this database; marks what this node owns."""
        found = self.node_fact("id")
        if found is None:
            found = str(uuid.uuid4())
            self.set_node_fact("id", found)
        return found

    # --- sandboxes

    def add_sandbox(self, sandbox: Sandbox) -> None:
        values = _sandbox_values(sandbox)
        self._write(
            insert(schema.sandboxes).values(**values),
            then=lambda: self._sandboxes.__setitem__(sandbox.id, sandbox),
            taken=f"a sandbox for pod {sandbox.key} exists already",
        )

    def replace_sandbox(self, sandbox: Sandbox) -> None:
        statement = update(schema.sandboxes).where(schema.sandboxes.c.id == sandbox.id.value)
        changed = self._write(
            statement.values(**_sandbox_values(sandbox)),
            then=lambda: self._sandboxes.__setitem__(sandbox.id, sandbox),
        )
        if not changed:
            raise NotFound(f"sandbox {sandbox.id} is gone")

    def delete_sandbox(self, sandbox: SandboxId) -> None:
        self._write(
            delete(schema.sandboxes).where(schema.sandboxes.c.id == sandbox.value),
            then=lambda: self._sandboxes.pop(sandbox, None),
        )

    def sandboxes(self) -> Sequence[Sandbox]:
        return list(self._sandboxes.values())

    def sandbox(self, sandbox: SandboxId) -> Sandbox | None:
        return self._sandboxes.get(sandbox)

    # --- containers

    def add_container(self, container: Container) -> None:
        values = _container_values(container)
        self._write(
            insert(schema.containers).values(**values),
            then=lambda: self._containers.__setitem__(container.id, container),
            taken=f"container {container.name} exists already in sandbox {container.sandbox_id}",
        )

    def replace_container(self, container: Container) -> None:
        statement = update(schema.containers).where(schema.containers.c.id == container.id.value)
        changed = self._write(
            statement.values(**_container_values(container)),
            then=lambda: self._containers.__setitem__(container.id, container),
        )
        if not changed:
            raise NotFound(f"container {container.id} is gone")

    def delete_container(self, container: ContainerId) -> None:
        self._write(
            delete(schema.containers).where(schema.containers.c.id == container.value),
            then=lambda: self._containers.pop(container, None),
        )

    def containers(self) -> Sequence[Container]:
        return list(self._containers.values())

    def container(self, container: ContainerId) -> Container | None:
        return self._containers.get(container)

    # --- images

    def put_image(self, image: Image) -> None:
        values = {"pulled_at": image.pulled_at, "document": rows.image_document(image)}
        statement = insert(schema.images).values(digest=image.digest.value, **values)
        self._write(
            statement.on_conflict_do_update(index_elements=["digest"], set_=values),
            then=lambda: self._images.__setitem__(image.digest, image),
        )

    def delete_image(self, digest: ImageDigest) -> None:
        self._write(
            delete(schema.images).where(schema.images.c.digest == digest.value),
            then=lambda: self._images.pop(digest, None),
        )

    def images(self) -> Sequence[Image]:
        return list(self._images.values())

    # ---

    def _write(
        self, statement: Insert | Update | Delete, then: Callable[[], object] | None = None, taken: str = ""
    ) -> int:
        """One transaction; `then` changes memory, after the commit and before anyone else may write."""
        with self._lock:
            try:
                with self._engine.begin() as connection:
                    changed = connection.execute(statement).rowcount
            except IntegrityError as exc:
                raise AlreadyExists(taken or "the record exists already") from exc
            except OperationalError as exc:
                raise _database_trouble(exc) from exc
            if then is not None and changed:
                then()
        return int(changed)


def _sandbox_values(sandbox: Sandbox) -> dict[str, object]:
    return {
        "id": sandbox.id.value,
        "namespace": sandbox.key.namespace,
        "name": sandbox.key.name,
        "uid": sandbox.key.uid,
        "attempt": sandbox.key.attempt,
        "phase": sandbox.phase.value,
        "created_at": sandbox.created_at,
        "document": rows.sandbox_document(sandbox),
    }


def _container_values(container: Container) -> dict[str, object]:
    return {
        "id": container.id.value,
        "sandbox_id": container.sandbox_id.value,
        "name": container.name.name,
        "attempt": container.name.attempt,
        "phase": container.phase.value,
        "created_at": container.created_at,
        "document": rows.container_document(container),
    }


def _database_trouble(exc: OperationalError) -> ShimError:
    """SQLite's codes: https://www.sqlite.org/rescode.html (13 is SQLITE_FULL)."""
    code = getattr(exc.orig, "sqlite_errorcode", 0) & 0xFF
    if code == 13:
        return ResourceExhausted("the state database cannot grow: the disk is full. Free space and repeat the call")
    return InternalError(f"the state database cannot be used: {exc.orig}")
