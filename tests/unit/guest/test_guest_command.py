"""Error messages about commands in guests."""

from virtshim.guest.command import too_late


def test_the_message_for_a_timed_out_command_says_that_it_did_not_end_in_time() -> None:
    assert too_late(30, 0.2) == "the command did not end within 30 s; it was killed"


def test_the_message_for_a_command_that_began_late_says_how_its_time_was_spent() -> None:
    said = too_late(30, 29.4)
    assert said.startswith("the command was killed after 0.6 s: 29.4 of its 30 s had passed when the agent came up")
