"""Read-only access to the state database for other programs, also while the daemon uses it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

from virtshim.devices.values import DeviceCondition
from virtshim.model.container import Container
from virtshim.model.errors import ShimError, WrongState
from virtshim.model.sandbox import Sandbox
from virtshim.model.text import escaped
from virtshim.store import rows
from virtshim.store.damage import reading


def read_claims(path: str) -> dict[str, str]:
    """Claim -> container id. {} if the database or its table does not exist yet. Raises WrongState if it cannot be read."""
    return {
        str(claim): str(container)
        for claim, container in _rows(path, "claims", "select claim, container_id from claims")
    }


def read_conditions(path: str) -> dict[str, DeviceCondition]:
    """By claim. Raises as `read_claims`."""
    found = {}
    for claim, document in _rows(path, "device_conditions", "select claim, document from device_conditions"):
        with contextlib.suppress(ShimError):  # the daemon reports it
            found[str(claim)] = rows.CONDITION.parse(document)
    return found


def read_running(path: str) -> list[tuple[Sandbox, Container]]:
    """Running containers with their sandboxes. Omits unreadable records: see `read_unreadable`. Raises as `read_claims`."""
    sandboxes = _sandboxes(path)
    found = []
    for key, document in _rows(path, "containers", "select sandbox_id, document from containers"):
        with contextlib.suppress(ShimError):
            container = rows.container_from(document)
            if container.is_running and str(key) in sandboxes:
                found.append((sandboxes[str(key)], container))
    return found


def read_ready(path: str) -> list[Sandbox]:
    """Ready sandboxes. Otherwise as `read_running`."""
    return [sandbox for sandbox in _sandboxes(path).values() if sandbox.is_ready]


def read_unreadable(path: str) -> list[str]:
    """Descriptions of the sandboxes and containers whose records are unreadable. Raises as `read_claims`."""
    found: list[str] = []
    for key, namespace, name, document in _rows(
        path, "sandboxes", "select id, namespace, name, document from sandboxes order by created_at"
    ):
        with _named(found, f"sandbox {key} ({_shown(namespace)}/{_shown(name)})"):
            rows.SANDBOX.parse(document)
    for key, name, document in _rows(
        path, "containers", "select id, name, document from containers order by created_at"
    ):
        with _named(found, f"container {key} ({_shown(name)})"):
            rows.container_from(document)
    return found


def read_tables(path: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields each table's name and rows; nothing if there is no database yet. Raises WrongState at the first table that cannot
    be read."""
    if not os.path.exists(path):
        return
    try:
        with reading(path) as database:
            database.row_factory = sqlite3.Row
            names = [
                row[0] for row in database.execute("select name from sqlite_master where type = 'table' order by name")
            ]
            for name in names:
                quoted = name.replace('"', '""')
                yield name, [dict(row) for row in database.execute(f'select * from "{quoted}"')]  # noqa: S608  the name comes from the database itself
    except sqlite3.Error as exc:
        raise WrongState(f"the state database {path} cannot be read ({exc}); run this as root") from exc


@contextlib.contextmanager
def _named(found: list[str], what: str) -> Iterator[None]:
    try:
        yield
    except ShimError:
        found.append(what)


def _shown(text: object) -> str:
    return escaped(str(text), 100)


def _sandboxes(path: str) -> dict[str, Sandbox]:
    found = {}
    for key, document in _rows(path, "sandboxes", "select id, document from sandboxes"):
        with contextlib.suppress(ShimError):  # the daemon reports it
            found[str(key)] = rows.SANDBOX.parse(document)
    return found


def _rows(path: str, table: str, query: str) -> Sequence[tuple[Any, ...]]:
    if not os.path.exists(path):
        return ()
    try:
        with reading(path) as database:
            if not database.execute("select 1 from sqlite_master where name = ?", (table,)).fetchone():
                return ()
            return database.execute(query).fetchall()
    except sqlite3.Error as exc:
        raise WrongState(f"the state database {path} cannot be read ({exc}); run this as root") from exc
