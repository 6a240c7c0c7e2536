"""A token works once, within a minute, and there are at most a thousand."""

from __future__ import annotations

import dataclasses

import pytest
from fakes.clock import FakeClock

from virtshim.model.errors import ResourceExhausted
from virtshim.model.ids import ContainerId
from virtshim.streaming.connection import MAX_OF_POD, MAX_PENDING, Tokens
from virtshim.streaming.ports import AttachStreams, Streams

ONE = AttachStreams(ContainerId("1" * 64), Streams(stdout=True))
TWO = AttachStreams(ContainerId("2" * 64), Streams(stdout=True))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def tokens(clock: FakeClock) -> Tokens:
    return Tokens(clock.monotonic)


def test_a_token_returns_its_request_once(tokens):
    token = tokens.issue(ONE)
    assert tokens.redeem(token) is ONE
    assert tokens.redeem(token) is None


def test_an_unknown_token_returns_no_request(tokens):
    tokens.issue(ONE)
    assert tokens.redeem("") is None
    assert tokens.redeem("x" * 22) is None


@pytest.mark.parametrize(("seconds", "valid"), [(59.9, True), (60.0, False), (1e6, False)])
def test_a_token_lives_a_minute(tokens, clock, seconds, valid):
    token = tokens.issue(ONE)
    clock.advance(seconds)
    assert (tokens.redeem(token) is ONE) == valid


def test_expired_tokens_make_room(tokens, clock):
    for _ in range(50):
        tokens.issue(ONE)
    clock.advance(30)
    for _ in range(50):
        tokens.issue(ONE)
    with pytest.raises(ResourceExhausted):
        tokens.issue(ONE)
    clock.advance(31)
    for _ in range(50):
        tokens.issue(ONE)
    with pytest.raises(ResourceExhausted):
        tokens.issue(ONE)


def test_used_and_revoked_tokens_make_room(tokens):
    mine = [tokens.issue(ONE) for _ in range(MAX_OF_POD)]
    tokens.redeem(mine[0])
    tokens.issue(ONE)
    tokens.revoke(lambda request: request is ONE)
    for _ in range(MAX_OF_POD):
        tokens.issue(ONE)


@pytest.mark.hostile
def test_unused_urls_of_one_pod_do_not_displace_those_of_others(tokens):
    hostile = dataclasses.replace(ONE, pod="default/hostile")
    for _ in range(MAX_OF_POD):
        tokens.issue(hostile)
    with pytest.raises(ResourceExhausted, match=r"pod default/hostile has 100 streaming URLs .* within 60 s"):
        tokens.issue(hostile)
    assert tokens.redeem(tokens.issue(dataclasses.replace(TWO, pod="default/other"))) == TWO


@pytest.mark.hostile
def test_the_number_of_unused_urls_is_limited(tokens):
    for pod in range(MAX_PENDING):
        tokens.issue(dataclasses.replace(ONE, pod=f"default/{pod}"))
    with pytest.raises(ResourceExhausted, match="1000 streaming URLs that wait together"):
        tokens.issue(dataclasses.replace(ONE, pod="default/last"))


def test_tokens_of_a_container_can_be_revoked(tokens):
    mine, other = tokens.issue(ONE), tokens.issue(TWO)
    tokens.revoke(lambda request: request is ONE)
    assert tokens.redeem(mine) is None
    assert tokens.redeem(other) is TWO
