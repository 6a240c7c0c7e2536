"""Opens the state database. If it is damaged, virtshim copies its readable rows to a new database, then renames the damaged one.

The new database is complete before the damaged one is renamed, so a kill loses nothing. Before that rename, the next start makes
the new database again; after it, the next start only renames the new database.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from virtshim.model.container import ContainerPhase
from virtshim.model.errors import InternalError, ShimError
from virtshim.model.image import Image
from virtshim.model.sandbox import SandboxPhase
from virtshim.store import rows
from virtshim.store.damage import DatabaseDamaged, aside_name, readable_rows, set_aside
from virtshim.store.migrate import split_by_config
from virtshim.store.records import SqliteRecords
from virtshim.store.writer import spend_reserve
from virtshim.system.files import sync

# Records in these phases are not copied. If creation did finish, recovery rebuilds the record from the VM.
_HALF_MADE = (ContainerPhase.CREATING, SandboxPhase.CREATING)

log = structlog.get_logger(__name__)


def open_records(path: str) -> SqliteRecords:
    """Raises what `SqliteRecords` raises, except DatabaseDamaged."""
    if not os.path.exists(path) and os.path.exists(_new(path)):
        _take_over(path)
    try:
        return SqliteRecords(path)
    except DatabaseDamaged as exc:
        log.critical("database.damaged", error=str(exc))
        _make_new(path)
        _take_over(path)
        return SqliteRecords(path)


def _new(path: str) -> str:
    return f"{path}.new"


def _make_new(path: str) -> None:
    """The new database is on disk when this returns. Raises InternalError, ResourceExhausted."""
    new = _new(path)
    for suffix in ("", "-wal", "-shm"):  # left by an earlier, unfinished attempt
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new + suffix)
    spend_reserve(path)  # the new database keeps a reserve of its own
    records = SqliteRecords(new)
    try:
        _salvage(path, records)
    finally:
        records.close()
        spend_reserve(new)
    if os.path.exists(f"{new}-wal"):
        raise InternalError(f"the new state database {new} cannot be written; is the disk full?")
    sync(os.path.dirname(path))


def _take_over(path: str) -> None:
    """Renames the new database to `path`. Raises InternalError."""
    new = _new(path)
    # From the file's time, so that a repetition after a kill uses the same name.
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(os.stat(new).st_mtime))
    set_aside(path, stamp)
    try:
        os.replace(new, path)
        sync(os.path.dirname(path))
    except OSError as exc:
        raise InternalError(f"the new state database {new} cannot be renamed: {exc.strerror}") from exc
    log.critical("database.replaced", kept_as=aside_name(path, stamp))


def _salvage(damaged: str, records: SqliteRecords) -> None:
    """Copies the rows that are whole. Of the node's facts it copies only the id: the others describe a completed recovery,
    which the new database has yet to go through."""
    for key, value in readable_rows(damaged, "node", ("key", "value")):
        if key == "id" and isinstance(value, str):
            records.set_node_fact("id", value)
    counts = {
        "sandboxes": _copy(damaged, "sandboxes", rows.SANDBOX.parse, records.sandboxes.put),
        "containers": _copy(damaged, "containers", rows.container_from, records.containers.put),
        "images": _copy(damaged, "images", _images_from, lambda images: list(map(records.images.put, images))),
        "borrowed": _copy(damaged, "borrowed", rows.BORROWED.parse, records.borrowed.put),
        "device_conditions": _copy(damaged, "device_conditions", rows.CONDITION.parse, records.device_conditions.put),
    }
    log.warning("database.salvaged", **counts)


def _images_from(document: Any) -> Sequence[Image]:
    """Accepts documents of older schemas: the damaged database may not have been upgraded yet."""
    return [rows.IMAGE.parse(text) for text in split_by_config(document).values() or (document,)]


def _copy(damaged: str, table: str, parse: Callable[[Any], Any], put: Callable[[Any], object]) -> int:
    seen = set()
    for (document,) in readable_rows(damaged, table, ("document",)):
        try:
            if document not in seen:
                seen.add(document)
                record = parse(document)
                if getattr(record, "phase", None) not in _HALF_MADE:
                    put(record)
        except ShimError as exc:
            log.warning("database.lost_row", table=table, error=str(exc))
    return len(seen)
