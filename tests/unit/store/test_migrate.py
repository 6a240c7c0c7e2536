"""Schema versions are made, found and refused."""

import re
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from structlog.testing import capture_logs

from virtshim.model.errors import InternalError, WrongState
from virtshim.store import migrate, schema
from virtshim.store.records import SqliteRecords, open_engine


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


def test_the_schema_version_in_the_code_is_the_newest_step() -> None:
    config = Config()
    config.set_main_option("script_location", migrate.SCRIPTS)
    config.set_main_option("path_separator", "os")
    scripts = ScriptDirectory.from_config(config)
    assert scripts.get_heads() == [migrate.HEAD]


def test_the_steps_make_exactly_the_tables_of_the_schema(path: Path) -> None:
    engine = open_engine(str(path))
    migrate.upgrade_schema(engine)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []
    engine.dispose()


def test_a_new_database_equals_the_result_of_all_steps(tmp_path: Path) -> None:
    def described(by: Callable[[sa.Engine], None]) -> set[tuple[str, ...]]:
        path = tmp_path / by.__name__
        engine = open_engine(str(path))
        by(engine)
        engine.dispose()
        with sqlite3.connect(path) as database:
            rows = database.execute("select type, name, tbl_name, coalesce(sql, '') from sqlite_master").fetchall()
            versions = database.execute("select version_num from alembic_version").fetchall()
        database.close()
        return {tuple(re.sub(r"\s+", "", word) for word in row) for row in [*rows, *versions]}

    assert described(migrate.migrate) == described(migrate.upgrade_schema)


def test_an_upgrade_is_logged_with_both_versions_and_an_up_to_date_database_is_not(path: Path) -> None:
    engine = open_engine(str(path))
    with capture_logs() as logged:
        migrate.upgrade_schema(engine)
        migrate.migrate(engine)
    engine.dispose()
    assert logged == [{"event": "database.upgraded", "log_level": "info", "before": None, "now": migrate.HEAD}]


def test_the_indexes_are_unique_where_the_schema_says_so(path: Path) -> None:
    SqliteRecords(str(path)).close()
    engine = open_engine(str(path))
    found = {
        index["name"]: (table, tuple(index["column_names"]), bool(index["unique"]))
        for table in ("sandboxes", "containers")
        for index in sa.inspect(engine).get_indexes(table)
    }
    engine.dispose()
    assert found == {
        "sandboxes_by_key": ("sandboxes", ("namespace", "name", "uid", "attempt"), True),
        "containers_by_name": ("containers", ("sandbox_id", "name", "attempt"), True),
    }


def test_migrating_twice_changes_nothing(path: Path) -> None:
    for _ in range(2):
        SqliteRecords(str(path)).close()
    with sqlite3.connect(path) as database:
        assert database.execute("select version_num from alembic_version").fetchall() == [(migrate.HEAD,)]
    database.close()


def test_a_new_and_an_up_to_date_database_open_without_alembic(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "alembic", None)
    for _ in range(2):
        SqliteRecords(str(path)).close()


def test_a_database_of_a_newer_version_is_refused_and_left_alone(path: Path) -> None:
    SqliteRecords(str(path)).close()
    with sqlite3.connect(path) as database:
        database.execute("update alembic_version set version_num = '9999'")
    database.close()
    before = path.read_bytes()
    with pytest.raises(WrongState, match=re.escape("'9999', written by a newer virtshim")):
        SqliteRecords(str(path))
    assert path.read_bytes() == before


def test_a_step_that_fails_leaves_the_old_schema(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sqlite3.connect(path) as database:
        database.execute("create table images (something text)")  # in the way of the first step's third table
    database.close()
    with pytest.raises(InternalError, match="images"):
        SqliteRecords(str(path))
    with sqlite3.connect(path) as database:
        tables = {name for (name,) in database.execute("select name from sqlite_master where type = 'table'")}
    database.close()
    assert tables <= {"images", "alembic_version"}
