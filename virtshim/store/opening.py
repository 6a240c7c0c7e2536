"""Opens the state database. One that is damaged is set aside, and what can still be read of it goes into a new one.

The new one is made beside it, and is whole before the damaged one is renamed. So a virtshim that is killed meanwhile loses
nothing: while the damaged one has its name the next start begins anew, and after that it gives the new one the name.
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

# If one of these was finished meanwhile and the damaged file does not know it, its VM tells.
_HALF_MADE = (ContainerPhase.CREATING, SandboxPhase.CREATING)

log = structlog.get_logger(__name__)


def open_records(path: str) -> SqliteRecords:
    """Raises what `SqliteRecords` raises, but for damage."""
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
    """On disk when it returns. Raises InternalError, ResourceExhausted."""
    new = _new(path)
    for suffix in ("", "-wal", "-shm"):  # of one that was not finished
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new + suffix)
    spend_reserve(path)  # the new one keeps its own
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
    """The new one gets the name. Raises InternalError."""
    new = _new(path)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(os.stat(new).st_mtime))  # the same after a kill
    set_aside(path, stamp)
    try:
        os.replace(new, path)
        sync(os.path.dirname(path))
    except OSError as exc:
        raise InternalError(f"the new state database {new} cannot be renamed: {exc.strerror}") from exc
    log.critical("database.replaced", kept_as=aside_name(path, stamp))


def _salvage(damaged: str, records: SqliteRecords) -> None:
    """Rows that are whole. Of the node's facts only its id: that a recovery was finished is not true of the new database."""
    for key, value in readable_rows(damaged, "node", ("key", "value")):
        if key == "id" and isinstance(value, str):
            records.set_node_fact("id", value)
    counts = {
        "sandboxes": _copy(damaged, "sandboxes", rows.sandbox_from, records.sandboxes.put),
        "containers": _copy(damaged, "containers", rows.container_from, records.containers.put),
        "images": _copy(damaged, "images", _images_from, _each(records.images.put)),
        "borrowed": _copy(damaged, "borrowed", rows.borrowed_from, records.borrowed.put),
        "device_conditions": _copy(damaged, "device_conditions", rows.condition_from, records.device_conditions.put),
    }
    log.warning("database.salvaged", **counts)


def _each(put: Callable[[Image], None]) -> Callable[[Sequence[Image]], None]:
    def put_each(images: Sequence[Image]) -> None:
        for image in images:
            put(image)

    return put_each


def _images_from(document: Any) -> Sequence[Image]:
    """Also of a database that was damaged before it was brought up to date."""
    return [rows.image_from(text) for text in split_by_config(document).values() or (document,)]


def _copy(damaged: str, table: str, parse: Callable[[Any], Any], put: Callable[[Any], None]) -> int:
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
