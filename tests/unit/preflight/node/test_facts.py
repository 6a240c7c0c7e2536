"""`virtshim check` reads facts about the node: its clock, sockets, QEMU and records."""

import contextlib
import dataclasses
import socket
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.full_records import CONTAINER, SANDBOX

from virtshim.config.settings import Settings
from virtshim.model.container import ContainerPhase
from virtshim.preflight import checks, node_checks, node_facts
from virtshim.preflight.finding import Level
from virtshim.store import rows
from virtshim.store.read_only import read_running

pytestmark = pytest.mark.operator


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="vs-") as made:
        yield Path(made)


def test_the_kernel_can_be_asked_for_its_clock() -> None:
    answer, trouble = node_facts.synchronised()
    assert (answer is None) == bool(trouble)


def test_a_socket_is_silent_until_a_server_listens(place: Path) -> None:
    path = f"{place}/s"
    assert node_facts.silence(path) == "No such file or directory"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        assert node_facts.silence(path) == "Connection refused"
        server.listen()
        assert node_facts.silence(path) == ""
    (place / "file").touch()
    assert node_facts.silence(f"{place}/file") == ""


def test_a_node_that_has_never_served_has_no_qemu(tmp_path: Path) -> None:
    settings = Settings.model_validate({"paths": {"state_dir": str(tmp_path)}})
    assert node_facts.qemus(settings) == ([], "")
    (tmp_path / "state.db").write_text("no database, but long enough to be taken for a damaged one" * 20)
    assert "cannot be read" in node_facts.qemus(settings)[1]


def test_the_records_of_containers_that_run_are_read(tmp_path: Path) -> None:
    running = dataclasses.replace(CONTAINER, status=dataclasses.replace(CONTAINER.status, phase=ContainerPhase.RUNNING))
    ended = dataclasses.replace(CONTAINER, status=dataclasses.replace(CONTAINER.status, phase=ContainerPhase.EXITED))
    with contextlib.closing(sqlite3.connect(tmp_path / "state.db")) as database:
        database.execute("create table sandboxes (id text, namespace text, name text, created_at int, document text)")
        database.execute("create table containers (id text, sandbox_id text, name text, created_at int, document text)")
        database.execute("insert into sandboxes values ('s', 'team', 'web', 1, ?)", (rows.SANDBOX.text(SANDBOX),))
        documents = [rows.container_document(running), rows.container_document(ended), "damaged"]
        database.executemany("insert into containers values ('c', 's', 'vm', 1, ?)", [(one,) for one in documents])
        database.commit()
    assert read_running(str(tmp_path / "state.db")) == [(SANDBOX, running)]
    settings = Settings.model_validate({"paths": {"state_dir": str(tmp_path)}})
    (found,) = node_checks.qemu_overhead(settings)
    assert found.level is Level.WARNING
    assert (
        "no VM runs, so there is nothing to measure; the records of container c (vm) cannot be read, so their"
        in found.text
    )
    assert "config.unreadable" in found.remedy


def test_only_a_few_unreadable_records_are_named(tmp_path: Path) -> None:
    settings = Settings.model_validate({"paths": {"state_dir": str(tmp_path)}})
    assert node_facts.unread(settings) == ("", "")
    with contextlib.closing(sqlite3.connect(tmp_path / "state.db")) as database:
        database.execute("create table sandboxes (id text, namespace text, name text, created_at int, document text)")
        database.executemany("insert into sandboxes values (?, 'team', 'a\nb', 1, 'damaged')", [(n,) for n in range(7)])
        database.commit()
    names = ", ".join(f"sandbox {number} (team/a\\nb)" for number in range(5))
    assert node_facts.unread(settings)[0] == f"the records of {names} and 2 more cannot be read"
    (tmp_path / "state.db").write_text("no database, but long enough to be taken for a damaged one" * 20)
    assert node_facts.unread(settings)[1] == "run this as root"


def test_every_check_of_a_nodes_surroundings_runs_on_any_machine(place: Path) -> None:
    settings = Settings.model_validate({"paths": {"state_dir": str(place), "run_dir": str(place)}})
    for check in (
        node_checks.kubelet_configuration, node_checks.kubelet_cgroups, node_checks.kubelet_runtime, node_checks.swap,
        node_checks.container_runtimes,
        node_checks.clock_synchronised, node_checks.clock_source, node_checks.virtshim, node_checks.shares,
        node_checks.qemu_overhead,
        node_checks.cluster_objects, node_checks.cluster_agent,
    ):  # fmt: skip
        assert all(found.text for found in check(settings))


@pytest.mark.parametrize(
    ("prints", "says"),
    [
        ('[ "$1" = --version ] && echo passt 2023_03_09.7c7625d', "older than 2024-08-21 (of 2023-03-09)"),
        ('[ "$1" = --version ] && echo passt unknown version; exit 1', "pods with containers beside their VM"),
        ('[ "$1" = --version ] && { echo passt unknown version; exit 0; }; exit 1', "(its version has no date)"),
        ("echo --map-guest-addr", ""),
    ],
)
def test_the_configured_passt_is_asked_for_its_version(tmp_path: Path, prints: str, says: str) -> None:
    program = tmp_path / "passt"
    program.write_text(f"#!/bin/sh\n{prints}\n")
    settings = Settings.model_validate({"shares": {"passt": str(program)}})
    (found,) = checks.passt(settings)
    assert f"no passt at {program}" in found.text
    program.chmod(0o755)
    (found,) = checks.passt(settings)
    assert (found.level is Level.OK) == (not says)
    assert says in found.text
