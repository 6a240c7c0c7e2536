"""When a command is asked after, and when nothing more is waited for."""

from __future__ import annotations

from virtshim.guest.exec_collector import SilenceTracker


def test_a_command_that_runs_in_silence_is_asked_after_now_and_then():
    silence = SilenceTracker(0.0, check_after=5.0)
    silence.heard(0.1, exited=False)
    assert not silence.check_due(4.0, started=True)
    assert silence.check_due(5.2, started=True)
    assert not silence.check_due(5.3, started=True)
    assert silence.check_due(10.4, started=True)
    assert not silence.over(1000.0)


def test_a_command_that_does_not_begin_is_asked_after_sooner():
    assert SilenceTracker(0.0, check_after=5.0).check_due(1.1, started=False)


def test_one_that_talks_is_not_asked_after():
    silence = SilenceTracker(0.0, check_after=5.0)
    for second in range(1, 20):
        silence.heard(float(second), exited=False)
        assert not silence.check_due(second + 0.5, started=True)


def test_after_the_exit_silence_is_the_end_if_the_guest_ran_something_else_in_it():
    silence = SilenceTracker(0.0, check_after=5.0)
    silence.heard(1.0, exited=True)
    assert not silence.turn_due(1.4)
    assert silence.turn_due(1.6)
    assert not silence.over(4.0), "its relays may not have run yet"
    silence.turned(2.5)
    assert not silence.turn_due(2.55)
    assert not silence.over(2.55), "what was on its way is still read"
    assert silence.over(2.65)


def test_what_comes_late_begins_the_silence_anew():
    silence = SilenceTracker(0.0, check_after=5.0)
    silence.heard(1.0, exited=True)
    silence.turned(2.5)
    silence.heard(2.55, exited=True)
    assert not silence.over(3.0)
    assert silence.turn_due(3.1)
    silence.turned(3.2)
    assert silence.over(3.4)


def test_a_process_left_behind_that_talks_without_end_is_not_listened_to_for_long():
    silence = SilenceTracker(0.0, check_after=5.0)
    silence.heard(1.0, exited=True)
    for step in range(1, 60):
        silence.heard(1.0 + step / 10, exited=True)
        assert not silence.over(1.0 + step / 10)
    assert silence.turn_due(6.9)
    silence.turned(6.9)
    silence.heard(6.95, exited=True)
    assert not silence.turn_due(6.95)
    assert silence.over(7.05)


def test_a_command_found_gone_has_its_last_bytes_awaited():
    silence = SilenceTracker(0.0, check_after=5.0)
    silence.gone(7.0)
    assert not silence.over(7.3)
    assert silence.over(7.6)
    assert not silence.check_due(100.0, started=True)
