"""Upgrades a database to this version's schema with Alembic, and refuses a database of a newer version. A new database gets
the newest schema without Alembic."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import structlog
from sqlalchemy import Engine, inspect, text

from virtshim.model.errors import WrongState
from virtshim.store.schema import metadata

# Up to schema version 0003, an image's id was the digest of its disk. So all OCI images with the same disk shared one record,
# which had an OCI config for each name. The code below works on JSON and not on `Image`, because a migration must not
# change when `Image` does.


def split_by_config(document: Any) -> dict[str, str]:
    """Image id -> document, one for each different config. The old document lacks the digest of the OCI config, so an image keeps
    its disk's digest as id until its next pull. If there are several configs, only the image with the empty one keeps it; the
    others get made-up ids. {} for a document that is newer or unreadable."""
    try:
        (fields,) = json.loads(document)
        disk = fields["digest"]["value"]
        names = (*fields["tags"], *fields["repo_digests"])
        config_of = {name: json.dumps(fields.get("configs", {}).get(name, {}), sort_keys=True) for name in names}
        if "id" in fields:
            return {}
        configs = sorted(set(config_of.values())) or ["{}"]
        return {
            image: json.dumps([_only(fields, image, config, {name for name in names if config_of[name] == config})])
            for config in configs
            for image in [disk if config == "{}" or len(configs) == 1 else _made_up(disk, config)]
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _only(fields: dict[str, Any], image: str, config: str, names: set[str]) -> dict[str, Any]:
    return {
        **{key: value for key, value in fields.items() if key != "configs"},
        "id": {"value": image},
        "tags": [name for name in fields["tags"] if name in names],
        "repo_digests": [name for name in fields["repo_digests"] if name in names],
        "config": json.loads(config),
    }


def _made_up(disk: str, config: str) -> str:
    return f"sha256:{hashlib.sha256(f'{disk} {config}'.encode()).hexdigest()}"


# The newest revision under migrations/versions; a test compares the two. The constant lets virtshim start with a new or current
# database without importing Alembic, which costs 0.15 s and 10 MiB for the life of the process.
HEAD = "0004"

# The same statement as Alembic's.
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
    """Upgrades from any known version. Raises as `migrate`."""
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
            raise WrongState(f"the state database cannot be upgraded to schema version {HEAD!r}: {exc}") from exc
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
