"""The dashboard accepts only the name of its own run."""

from __future__ import annotations

import pytest

from virtshim.dashboard.login import is_called

NAME = "virtshim-0123.localhost"


@pytest.mark.parametrize("host", [NAME, f"{NAME}:8734", f"{NAME}:9"])
def test_the_dashboards_name_is_accepted_with_any_port(host: str) -> None:
    assert is_called(host, NAME)


@pytest.mark.parametrize(
    "host",
    [
        "", ":8734", "evil.example", "localhost", "localhost:8734", "127.0.0.1:8734", "[::1]:8734", f"{NAME}.evil.example",
        f"evil.{NAME}", f"{NAME}:80:80", f"{NAME}:x", f"{NAME}:", f"{NAME}@evil.example", "virtshim-4567.localhost:8734",
    ],
)  # fmt: skip
def test_any_other_name_is_refused(host: str) -> None:
    assert not is_called(host, NAME)
