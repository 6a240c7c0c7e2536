"""A token can be used once, and the number of sessions is limited."""

from __future__ import annotations

from virtshim.dashboard.login import Sessions


def test_a_token_is_exchanged_once() -> None:
    sessions = Sessions()
    token = sessions.new_token()
    secret = sessions.exchange(token)
    assert secret is not None
    assert sessions.knows(secret)
    assert sessions.exchange(token) is None
    assert sessions.knows(secret)


def test_a_new_token_makes_an_unused_one_void() -> None:
    sessions = Sessions()
    first, second = sessions.new_token(), sessions.new_token()
    assert sessions.exchange(first) is None
    assert sessions.exchange(second) is not None


def test_a_wrong_token_or_secret_is_refused() -> None:
    sessions = Sessions()
    assert sessions.exchange("") is None
    token = sessions.new_token()
    assert sessions.exchange("") is None
    assert sessions.exchange("x" * 10**6) is None
    assert sessions.exchange("\udcff\ud800") is None
    assert not sessions.knows("\udcff\ud800")
    assert not sessions.knows("")
    assert not sessions.knows(token)
    assert len(token) >= 43


def test_a_session_ends_on_request_and_when_there_are_too_many() -> None:
    sessions = Sessions()
    secrets = [sessions.exchange(sessions.new_token()) or "" for _ in range(17)]
    assert [sessions.knows(secret) for secret in secrets] == [False, *[True] * 16]
    sessions.end(secrets[-1])
    assert not sessions.knows(secrets[-1])
