"""A trouble is logged once, and so is its end."""

from __future__ import annotations

import structlog
from structlog.testing import capture_logs

from virtshim.system.rate_limits import TroubleLog


def trouble() -> TroubleLog:
    return TroubleLog(structlog.get_logger(), over="disk.read_again")


def test_trouble_that_lasts_is_logged_once_and_so_is_its_end() -> None:
    with capture_logs() as logs:
        disk = trouble()
        for _ in range(47):
            disk.met("disk.not_read", error="gone")
        for _ in range(3):
            disk.over()
    assert logs == [
        {"event": "disk.not_read", "error": "gone", "log_level": "warning"},
        {"event": "disk.read_again", "log_level": "info"},
    ]


def test_trouble_that_comes_back_is_logged_again() -> None:
    with capture_logs() as logs:
        disk = trouble()
        disk.met("disk.not_read")
        disk.over()
        disk.met("disk.not_read")
    assert [one["event"] for one in logs] == ["disk.not_read", "disk.read_again", "disk.not_read"]


def test_each_object_in_trouble_is_logged_separately() -> None:
    with capture_logs() as logs:
        disk = trouble()
        disk.met("disk.not_read", key="a", disk="a")
        disk.met("disk.not_read", key="b", disk="b")
        disk.over(key="b", disk="b")
        disk.met("disk.not_read", key="a", disk="a")
    assert [(one["event"], one["disk"]) for one in logs] == [
        ("disk.not_read", "a"),
        ("disk.not_read", "b"),
        ("disk.read_again", "b"),
    ]


def test_an_object_that_is_gone_is_forgotten_without_a_log_line() -> None:
    with capture_logs() as logs:
        disk = trouble()
        disk.met("disk.not_read", key="a")
        disk.retain_only(["b"])
        disk.over(key="a")
    assert len(logs) == 1


def test_different_trouble_is_logged_even_if_the_first_is_not_over() -> None:
    with capture_logs() as logs:
        disk = trouble()
        disk.met("disk.late")
        disk.met("disk.not_read")
    assert [one["event"] for one in logs] == ["disk.late", "disk.not_read"]
