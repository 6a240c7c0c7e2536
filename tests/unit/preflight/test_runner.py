"""All checks are reported in order, even if one hangs or fails."""

import threading
from collections.abc import Sequence

from virtshim.config.settings import Settings
from virtshim.preflight.checks import findings
from virtshim.preflight.finding import Finding, Level, ok

SETTINGS = Settings()


def slow(_settings: Settings) -> Sequence[Finding]:
    threading.Event().wait(0.2)
    return [ok("slow", "")]


def quick(_settings: Settings) -> Sequence[Finding]:
    return [ok("quick", "one"), ok("quick", "two")]


def silent(_settings: Settings) -> Sequence[Finding]:
    return []


def broken(_settings: Settings) -> Sequence[Finding]:
    raise RuntimeError("a bug")


over = threading.Event()


def hanging_check(_settings: Settings) -> Sequence[Finding]:
    over.wait()
    return []


def test_findings_have_the_order_of_the_checks() -> None:
    told = [finding.subject for finding in findings((slow, quick, silent), SETTINGS, limit=10)]
    assert told == ["slow", "quick", "quick"]


def test_a_check_that_hangs_is_an_error_and_the_others_are_reported() -> None:
    hung, *rest = findings((hanging_check, quick), SETTINGS, limit=0.3)
    over.set()
    assert (hung.level, hung.subject) == (Level.ERROR, "hanging check")
    assert [finding.text for finding in rest] == ["one", "two"]


def test_a_check_that_fails_is_an_error_and_the_others_are_reported() -> None:
    failed, *rest = findings((broken, quick), SETTINGS, limit=10)
    assert failed.level is Level.ERROR
    assert "a bug" in failed.text
    assert len(rest) == 2
