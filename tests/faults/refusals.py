"""Calls that must fail."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest


def failing(call: Callable[[], object], code: grpc.StatusCode, words: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() is code, caught.value.details()
    assert words in caught.value.details()
