from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A socket's address holds 107 bytes."""
    directory = tempfile.mkdtemp(prefix="hg-")
    yield Path(directory)
    shutil.rmtree(directory)
