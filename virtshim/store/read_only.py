"""What the state database says of devices, read while a daemon may be using it: for programs beside it. Nothing is written."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Sequence

from virtshim.domain.devices.condition import DeviceCondition
from virtshim.domain.errors import ShimError, WrongState
from virtshim.store import rows
from virtshim.store.damage import reading


def read_claims(path: str) -> dict[str, str]:
    """Claim -> id of the container. {} where there is no database yet, or an older one. WrongState if it cannot be read."""
    return {
        str(claim): str(container)
        for claim, container in _rows(path, "claims", "select claim, container_id from claims")
    }


def read_conditions(path: str) -> dict[str, DeviceCondition]:
    """By claim; as `read_claims`."""
    found = {}
    for claim, document in _rows(path, "device_conditions", "select claim, document from device_conditions"):
        with contextlib.suppress(ShimError):  # the daemon tells of it
            found[str(claim)] = rows.condition_from(document)
    return found


def _rows(path: str, table: str, query: str) -> Sequence[tuple[str, str]]:
    if not os.path.exists(path):
        return ()
    try:
        with reading(path) as database:
            if not database.execute("select 1 from sqlite_master where name = ?", (table,)).fetchone():
                return ()
            return database.execute(query).fetchall()
    except sqlite3.Error as exc:
        raise WrongState(f"the state database {path} cannot be read ({exc}); run this as root") from exc
