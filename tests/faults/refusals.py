"""Calls that must fail, and how long they may take."""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc
import pytest


def failing(call: Callable[[], object], code: grpc.StatusCode, words: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() is code, caught.value.details()
    assert words in caught.value.details()


def within(seconds: float, call: Callable[[], object]) -> object:
    started = time.monotonic()
    result = call()
    taken = time.monotonic() - started
    assert taken < seconds, f"took {taken:.1f} s"
    return result
