"""With --all, every example is tried."""

import pytest
from fakes.examples import take_all


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--all"):
        take_all()
