from pathlib import Path

import pytest
from fakes.sysfs import FakeSysfs


@pytest.fixture
def host(tmp_path: Path) -> FakeSysfs:
    return FakeSysfs(tmp_path / "host")
