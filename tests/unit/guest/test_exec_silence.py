"""virtshim checks a silent command now and then, and stops waiting for output after its exit."""

from __future__ import annotations

from virtshim.guest.exec_collector import SilenceTracker


def test_a_silent_command_is_checked_now_and_then():
    silence = SilenceTracker(0.0, check_after=5.0)
    silence.heard(0.1, exited=False)
    assert not silence.check_due(4.0, started=True)
    assert silence.check_due(5.2, started=True)
    assert not silence.check_due(5.3, started=True)
    assert silence.check_due(10.4, started=True)
    assert not silence.over(1000.0)


def test_a_command_that_does_not_begin_is_checked_sooner():
    assert SilenceTracker(0.0, check_after=5.0).check_due(1.1, started=False)


def test_a_command_that_writes_output_is_not_checked():
    silence = SilenceTracker(0.0, check_after=5.0)
    for second in range(1, 20):
        silence.heard(float(second), exited=False)
        assert not silence.check_due(second + 0.5, started=True)


def test_after_the_exit_silence_is_the_end_if_the_guest_ran_another_command_meanwhile():
    silence = SilenceTracker(0.0, check_after=5.0)
    silence.heard(1.0, exited=True)
    assert not silence.turn_due(1.4)
    assert silence.turn_due(1.6)
    assert not silence.over(4.0), "its relays may not have run yet"
    silence.turned(2.5)
    assert not silence.turn_due(2.55)
    assert not silence.over(2.55), "what was on its way is still read"
    assert silence.over(2.65)


def test_late_output_restarts_the_silence():
    silence = SilenceTracker(0.0, check_after=5.0)
    silence.heard(1.0, exited=True)
    silence.turned(2.5)
    silence.heard(2.55, exited=True)
    assert not silence.over(3.0)
    assert silence.turn_due(3.1)
    silence.turned(3.2)
    assert silence.over(3.4)


def test_endless_output_of_a_process_left_behind_is_not_read_for_long():
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


def test_the_last_bytes_of_a_command_that_is_gone_are_waited_for():
    silence = SilenceTracker(0.0, check_after=5.0)
    silence.gone(7.0)
    assert not silence.over(7.3)
    assert silence.over(7.6)
    assert not silence.check_due(100.0, started=True)
