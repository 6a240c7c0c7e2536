"""When a command is asked after, and when nothing more is waited for."""

from __future__ import annotations

from virtshim.guestagent.silence import Vigil


def test_a_command_that_runs_in_silence_is_asked_after_now_and_then():
    vigil = Vigil(0.0)
    vigil.heard(0.1, exited=False)
    assert not vigil.check_due(4.0, started=True)
    assert vigil.check_due(5.2, started=True)
    assert not vigil.check_due(5.3, started=True)
    assert vigil.check_due(10.4, started=True)
    assert not vigil.over(1000.0)


def test_a_command_that_does_not_begin_is_asked_after_sooner():
    assert Vigil(0.0).check_due(1.1, started=False)


def test_one_that_talks_is_not_asked_after():
    vigil = Vigil(0.0)
    for second in range(1, 20):
        vigil.heard(float(second), exited=False)
        assert not vigil.check_due(second + 0.5, started=True)


def test_after_the_exit_silence_is_the_end_if_the_guest_ran_something_else_in_it():
    vigil = Vigil(0.0)
    vigil.heard(1.0, exited=True)
    assert not vigil.turn_due(1.4)
    assert vigil.turn_due(1.6)
    assert not vigil.over(4.0), "its relays may not have run yet"
    vigil.turned(2.5)
    assert not vigil.turn_due(2.55)
    assert not vigil.over(2.55), "what was on its way is still read"
    assert vigil.over(2.65)


def test_what_comes_late_begins_the_silence_anew():
    vigil = Vigil(0.0)
    vigil.heard(1.0, exited=True)
    vigil.turned(2.5)
    vigil.heard(2.55, exited=True)
    assert not vigil.over(3.0)
    assert vigil.turn_due(3.1)
    vigil.turned(3.2)
    assert vigil.over(3.4)


def test_a_process_left_behind_that_talks_without_end_is_not_listened_to_for_long():
    vigil = Vigil(0.0)
    vigil.heard(1.0, exited=True)
    for step in range(1, 60):
        vigil.heard(1.0 + step / 10, exited=True)
        assert not vigil.over(1.0 + step / 10)
    assert vigil.turn_due(6.9)
    vigil.turned(6.9)
    vigil.heard(6.95, exited=True)
    assert not vigil.turn_due(6.95)
    assert vigil.over(7.05)


def test_a_command_found_gone_has_its_last_bytes_awaited():
    vigil = Vigil(0.0)
    vigil.gone(7.0)
    assert not vigil.over(7.3)
    assert vigil.over(7.6)
    assert not vigil.check_due(100.0, started=True)
