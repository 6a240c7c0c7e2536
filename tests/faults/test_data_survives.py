"""Data that a guest's database has committed is in its volume, whatever dies, and the restarted container continues
from there."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from guest import BOOT
from mortal_node import MortalNode
from podclient import container_config, log_lines, wait_until
from work import Work

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.volumes, pytest.mark.timeout(1200)]

SOON = 60.0
RECORD = 32  # bytes in its log


class Database:
    """journal.c in its own pod, with a volume in `directory`."""

    def __init__(self, work: Work, directory: Path) -> None:
        self._work = work
        self.directory = directory
        source = Path(__file__).with_name("journal.c")
        program = self.directory / "journal"
        subprocess.run(["gcc", "-static", "-O2", "-Wall", "-Wextra", "-o", program, source], check=True)
        self._image = work.cri.pull(f"{work.node.image_url}/guest.qcow2")

    def begin(self) -> None:
        """Starts the container's next attempt."""
        wanted = container_config(self._image, attempt=self._work.attempt)
        wanted.command.extend(["/var/lib/mysql/journal", "/var/lib/mysql"])
        wanted.mounts.add(container_path="/var/lib/mysql", host_path=str(self.directory))
        self._work.container = self._work.cri.create(self._work.pod, wanted, self._work.config)
        self._work.node.containers.add(self._work.container)
        self._work.attempt += 1
        self._work.cri.start(self._work.container)
        wait_until(lambda: bool(self._said("committed")), BOOT, "it commits")

    @property
    def found(self) -> int:
        """The records found at the start of this attempt."""
        return self._said("found")[0]

    @property
    def told(self) -> int:
        """The last record reported as committed."""
        return self._said("committed")[-1]

    @property
    def kept(self) -> int:
        """The records on the volume."""
        return os.stat(self.directory / "log").st_size // RECORD

    def goes_on(self) -> None:
        told = self.told
        wait_until(lambda: self.told > told + 5, SOON, f"it commits more than {told}")

    def _said(self, word: str) -> list[int]:
        lines = log_lines(self._work.cri.status(self._work.container).log_path)
        assert not [line for line in lines if line.startswith(("lost", "journal:"))], lines[-3:]
        return [int(line.split()[1]) for line in lines if line.startswith(word)]


@pytest.fixture
def database(work: Work, real_disk: Path) -> Database:
    """The database after its first commits."""
    work.run()
    made = Database(work, real_disk)
    made.begin()
    assert made.found == 0
    return made


def test_committed_data_survives_the_death_of_any_daemon(mortal: MortalNode, work: Work, database: Database) -> None:
    for daemon in ("virtshim", "tapmanager", "shares"):
        mortal.kill(daemon)
        mortal.up()
        database.goes_on()
    told = database.told
    for pid in mortal.virtiofsd_pids():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: says_so(work), SOON, "the container says so")
    goes_on_in_the_next_vm(work, database, told)


@pytest.mark.full
def test_committed_data_survives_a_kill_of_the_vm(work: Work, database: Database) -> None:
    database.goes_on()
    goes_on_in_the_next_vm(work, database, database.told)


def goes_on_in_the_next_vm(work: Work, database: Database, told: int) -> None:
    """Checks that the next VM continues after this one, which had no time to write anything back."""
    work.cri.stop(work.container, 0)
    assert work.cri.status(work.container).state == pb.CONTAINER_EXITED
    assert database.kept >= database.told >= told
    database.begin()
    assert database.found >= told
    database.goes_on()


def says_so(work: Work) -> bool:
    status = work.cri.status(work.container)
    return "virtiofsd" in status.message or status.state == pb.CONTAINER_EXITED
