"""What is said of commands in guests."""

from virtshim.guest.command import too_late


def test_a_command_that_had_its_time_did_not_end_within_it() -> None:
    assert too_late(30, 0.2) == "the command did not end within 30 s; it was killed"


def test_one_that_began_when_its_time_was_nearly_over_is_told_for_what_it_went() -> None:
    said = too_late(30, 29.4)
    assert said.startswith("the command was killed after 0.6 s: 29.4 of its 30 s had passed when the agent came up")
