"""Who holds which device, read from a database that a daemon may be using: for commands beside it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from urllib.parse import quote

from virtshim.domain.errors import WrongState


def claims_seen(path: str) -> dict[str, str]:
    """Claim -> id of the container; {} where there is no database yet, or an older one. Nothing is written. WrongState if it
    cannot be read."""
    if not os.path.exists(path):
        return {}
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=5)) as database:
            if not database.execute("select 1 from sqlite_master where name = 'claims'").fetchone():
                return {}
            return dict(database.execute("select claim, container_id from claims"))
    except sqlite3.Error as exc:
        raise WrongState(f"the state database {path} cannot be read ({exc}); run this as root") from exc
