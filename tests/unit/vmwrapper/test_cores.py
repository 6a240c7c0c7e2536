"""vmwrapper's replacements for two standard library modules behave like those modules."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmwrapper import ctypes_core, json_core, socket_core

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, st.booleans(), st.booleans())
def test_json_is_read_as_by_the_standard_library(value: object, ascii_only: bool, as_bytes: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    with contextlib.suppress(UnicodeEncodeError):  # a lone surrogate
        assert json_core.loads(text.encode() if as_bytes else text) == value


@given(st.text() | st.sampled_from(["", "{", '{"a" 1}', "[1,]", "nul", '"', "1 2", '{"a":1}x', "\ufeff{}"]))
def test_malformed_json_is_refused_as_by_the_standard_library(text: str) -> None:
    try:
        wanted = json.loads(text.strip())
    except ValueError:
        with pytest.raises(ValueError, match=r"."):
            json_core.loads(text.strip())
    else:
        assert json_core.loads(text.strip()) == wanted or wanted != wanted  # NaN


@given(
    st.recursive(st.text() | st.integers() | st.booleans(), lambda inner: st.dictionaries(st.text(), inner, max_size=3))
)
def test_json_is_written_as_by_the_standard_library(value: object) -> None:
    assert json_core.dumps(value) == json.dumps(value, separators=(",", ":"))


def test_the_small_json_writer_refuses_other_values() -> None:
    for value in ([], None, {1: 2, "a": b""}):
        with pytest.raises(TypeError):
            json_core.dumps(value)


def test_a_socket_is_closed_behind_its_block() -> None:
    with socket_core.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        assert one.fileno() >= 0
    assert one.fileno() == -1
    assert (socket_core.SOL_SOCKET, socket_core.SCM_RIGHTS) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)


def test_system_calls_are_made_as_by_the_standard_library() -> None:
    getpid, kill = 39, 62
    for module in (ctypes, ctypes_core):
        libc = module.CDLL(None, use_errno=True)
        assert libc.syscall(module.c_long(getpid)) == os.getpid()
        assert libc.syscall(module.c_long(kill), module.c_ulong(1 << 22), module.c_ulong(0)) == -1
        assert module.get_errno() == errno.ESRCH
        text = b"text"
        assert bytes(module.c_char_p(text)) == bytes(ctypes.c_char_p(text))
        assert bytes(module.c_char_p(None)) == bytes(8)
