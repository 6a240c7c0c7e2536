"""Huge pages of 2 MiB for a test, given back afterwards."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


@contextlib.contextmanager
def reserved(count: int) -> Iterator[None]:
    """Reserves so many more. The kernel has one number for the whole machine, including isolated test runs, so they take
    turns."""
    with Path(__file__).open("rb") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        before = number("nr_hugepages")
        try:
            with contextlib.suppress(OSError):
                (PAGES / "nr_hugepages").write_text(str(before + count))
            if number("free_hugepages") < count:
                pytest.skip(f"NOT TO BE HAD HERE: this machine gives no {count} huge pages of 2 MiB")
            yield
        finally:
            if PAGES.exists():
                (PAGES / "nr_hugepages").write_text(str(before))


def number(name: str) -> int:
    """The number of huge pages, 0 if the kernel has none."""
    return int((PAGES / name).read_text()) if PAGES.exists() else 0
