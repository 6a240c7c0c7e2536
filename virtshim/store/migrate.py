"""Brings a database to this version's schema with Alembic; refuses one that a newer version wrote. A new one is made as the
newest, which takes no Alembic."""

from __future__ import annotations

import os

import structlog
from sqlalchemy import Engine, inspect, text

from virtshim.domain.errors import WrongState
from virtshim.store.schema import metadata

# The newest revision under migrations/versions; a test holds the two together. Known here so that a new or up-to-date
# database starts without importing Alembic (0.15 s, and 10 MiB for as long as the process lives).
HEAD = "0004"

# As Alembic makes it.
_VERSION_TABLE = (
    "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, "
    "CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
)

log = structlog.get_logger(__name__)

SCRIPTS = os.path.join(os.path.dirname(__file__), "migrations")


def migrate(engine: Engine) -> None:
    """Raises WrongState for a database of an unknown (newer) version."""
    if _current(engine) == HEAD:
        return
    if not inspect(engine).get_table_names():
        _make_newest(engine)
    else:
        upgrade_schema(engine)


def _make_newest(engine: Engine) -> None:
    with engine.begin() as connection:
        metadata.create_all(connection)
        connection.execute(text(_VERSION_TABLE))
        connection.execute(text("insert into alembic_version values (:head)"), {"head": HEAD})


def upgrade_schema(engine: Engine) -> None:
    """From whatever version it has. Raises as `migrate`."""
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory
    from alembic.util.exc import CommandError

    config = Config()
    config.set_main_option("script_location", SCRIPTS.replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    current = _current(engine)
    if current is not None:
        known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
        if current not in known:
            raise WrongState(
                f"the state database has schema version {current!r}, written by a newer virtshim; this version knows "
                f"up to {HEAD!r}. Install that newer version again, or move the database away after draining the node"
            )
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, "head")
        except CommandError as exc:
            raise WrongState(f"the state database cannot be brought to schema version {HEAD!r}: {exc}") from exc
    log.info("database.upgraded", before=current, now=HEAD)


def _current(engine: Engine) -> str | None:
    with engine.connect() as connection:
        there = connection.execute(
            text("select 1 from sqlite_master where type = 'table' and name = 'alembic_version'")
        ).first()
        if there is None:
            return None
        row = connection.execute(text("select version_num from alembic_version")).first()
        return None if row is None else str(row[0])
