"""Opens the state database. One that is damaged is set aside, and what can still be read of it goes into a new one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from virtshim.domain.container import ContainerPhase
from virtshim.domain.errors import ShimError
from virtshim.domain.image import Image
from virtshim.domain.sandbox import SandboxPhase
from virtshim.store import rows
from virtshim.store.damage import DatabaseDamaged, readable_rows, set_aside
from virtshim.store.images_by_disk import split_by_config
from virtshim.store.records import SqliteRecords

# If one of these was finished meanwhile and the damaged file does not know it, its VM tells.
_HALF_MADE = (ContainerPhase.CREATING, SandboxPhase.CREATING)

log = structlog.get_logger(__name__)


def open_records(path: str) -> SqliteRecords:
    """Raises what `SqliteRecords` raises, but for damage."""
    try:
        return SqliteRecords(path)
    except DatabaseDamaged as exc:
        aside = set_aside(path, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()))
        log.critical("database.damaged", error=str(exc), kept_as=aside)
        records = SqliteRecords(path)
        _salvage(aside, records)
        return records


def _salvage(aside: str, records: SqliteRecords) -> None:
    """Rows that are whole. Of the node's facts only its id: that a recovery was finished is not true of the new database."""
    for key, value in readable_rows(aside, "node", ("key", "value")):
        if key == "id" and isinstance(value, str):
            records.set_node_fact("id", value)
    counts = {
        "sandboxes": _copy(aside, "sandboxes", rows.sandbox_from, records.sandboxes.put),
        "containers": _copy(aside, "containers", rows.container_from, records.containers.put),
        "images": _copy(aside, "images", _images_from, _each(records.images.put)),
        "borrowed": _copy(aside, "borrowed", rows.borrowed_from, records.borrowed.put),
        "device_conditions": _copy(aside, "device_conditions", rows.condition_from, records.device_conditions.put),
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


def _copy(aside: str, table: str, parse: Callable[[Any], Any], put: Callable[[Any], None]) -> int:
    seen = set()
    for (document,) in readable_rows(aside, table, ("document",)):
        try:
            if document not in seen:
                seen.add(document)
                record = parse(document)
                if getattr(record, "phase", None) not in _HALF_MADE:
                    put(record)
        except ShimError as exc:
            log.warning("database.lost_row", table=table, error=str(exc))
    return len(seen)
