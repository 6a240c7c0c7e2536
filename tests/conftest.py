"""All tests share the areas of the machine, and the check that a test leaves nothing behind."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings
from leaks import Snapshot

from tapmanager.cgroups import tree as cgroups

# The time of an example depends on the machine's load.
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")

# Tests run gRPC and libvirt's embedded driver in one process, as the product does (see virtshim.cli.main).
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# A shell's background jobs ignore SIGINT, and programs started here would inherit that. Some tests end programs by
# Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

PROJECT = Path(__file__).resolve().parent.parent

# Areas that touch the machine: their tests are followed by a leak check.
_OUTSIDE = ("network", "guest", "e2e", "faults", "images", "devices")
# Fixtures that serve many tests start first, so that both snapshots contain them.
_SHARED = ("node", "debian", "vm", "empty_node", "node_of_both")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--strict-areas", action="store_true", help="fail if an area was skipped that this machine could have run"
    )
    parser.addoption(
        "--all",
        action="store_true",
        help="also what `make test` only samples: tests marked `full`, every kill point, a GiB",
    )


def missing_for(area: str) -> str:
    """Why this machine cannot run tests of that area; "" if it can."""
    if area in ("network", "guest", "e2e", "devices") and os.geteuid() != 0:
        return "needs root"
    if area in ("guest", "e2e"):
        for program in ("qemu-system-x86_64", "qemu-img"):
            if not shutil.which(program):
                return f"needs {program}; run make setup"
        if not (PROJECT / "build" / "guest.qcow2").exists():
            return "needs build/guest.qcow2; run make guest"
    if area == "debian" and not (PROJECT / "build" / "debian.qcow2").exists():
        return "needs build/debian.qcow2; run make debian-guest"
    if area == "cloudinit" and not (PROJECT / "build" / "cloud-init" / "inputs").exists():
        return "needs build/cloud-init; run make cloud-init"
    if area == "network" and not Path("/usr/lib/cni/bridge").exists():
        return "needs the CNI plugins; run make setup"
    return ""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("full")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers():
        why = missing_for(mark.name)
        if why:
            pytest.skip(f"AREA {mark.name} NOT TESTED: {why}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _report_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Handles modules that skip all their tests."""
    _report_skip(report)


def _report_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple) and _NOT_TO_BE_HAD not in report.longrepr[2]:
        skip = (report.nodeid, report.longrepr[2])
        if skip not in _REPORTED:  # each worker reports what it collects
            _REPORTED.append(skip)


_REPORTED: list[tuple[str, str]] = []
# The reason of a skip for what `make setup` cannot bring: another kernel, a program that no distribution packages.
_NOT_TO_BE_HAD = "NOT TO BE HAD HERE:"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the run on a machine that has root and the packages but skipped tests: a skip there is a hole in the gate."""
    if session.config.getoption("--strict-areas") and _REPORTED and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--strict-areas"):
        for name, why in _REPORTED:
            terminalreporter.write_line(f"SKIPPED, AND THAT FAILS THE GATE: {name}: {why}", red=True)


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test that uses the machine, the machine is as before: netns, links, processes, mounts, descriptors,
    leases."""
    if not any(request.node.get_closest_marker(area) for area in _OUTSIDE):
        yield
        return
    for name in _SHARED:
        if name in request.fixturenames:
            request.getfixturevalue(name)
    before = Snapshot.take()
    yield
    left = before.settled(seconds=10)
    assert not left, "left behind: " + "; ".join(left)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Restores the logging setup, because a test may run a command in this process, and commands set up logging for the
    whole process."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        with contextlib.suppress(OSError):  # of a directory that cannot be written
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    if structlog.is_configured():
        structlog.reset_defaults()
        for module in list(sys.modules.values()):
            # A logger keeps the configuration of its first use.
            if isinstance(log := getattr(module, "log", None), type(_A_LOGGER)):
                vars(log).pop("bind", None)


_A_LOGGER = structlog.get_logger()


@pytest.fixture
def pod_cgroup() -> Iterator[str]:
    """The path of a pod's cgroup, which exists before the VM and is removed after it, as by kubelet."""
    path = f"/virtshim-test-{secrets.token_hex(4)}"
    made = [Path(one.root + path) for one in cgroups.hierarchies() if one.is_needed]
    for directory in made:
        directory.mkdir()
    yield path
    for directory in made:
        directory.rmdir()
    assert [one.root for one in cgroups.hierarchies() if Path(one.root + path).exists()] == []


@pytest.fixture(scope="session")
def guest_image() -> Path:
    return PROJECT / "build" / "guest.qcow2"


@pytest.fixture(scope="session")
def null_image() -> Path:
    return PROJECT / "build" / "null.qcow2"
