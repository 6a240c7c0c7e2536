"""The proxy's reader of protobuf bytes returns the same as protobuf."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.errors import InvalidRequest
from virtshim.proxy.wire import message, payloads, text, text_map, texts

words = st.text(max_size=8)
configs = st.builds(
    pb.PodSandboxConfig,
    metadata=st.builds(pb.PodSandboxMetadata, name=words, uid=words, namespace=words, attempt=st.integers(0, 9)),
    hostname=words,
    annotations=st.dictionaries(words, words, max_size=3),
    labels=st.dictionaries(words, words, max_size=3),
)
requests = st.builds(pb.RunPodSandboxRequest, config=configs, runtime_handler=words)


@given(st.lists(requests, min_size=1, max_size=3))
def test_fields_are_read_as_by_protobuf_even_in_concatenated_messages(
    parts: list[pb.RunPodSandboxRequest],
) -> None:
    data = b"".join(part.SerializeToString() for part in parts)
    read = pb.RunPodSandboxRequest.FromString(data)
    config = message(data, 1)
    assert text(data, 2) == read.runtime_handler
    assert text_map(config, 7) == dict(read.config.annotations)
    assert text(message(config, 1), 3) == read.config.metadata.namespace
    assert pb.PodSandboxConfig.FromString(config) == read.config


@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        text_map(message(data, 1), 7)
    assert all(one.isascii() for one in texts(data))


def test_unknown_field_numbers_are_skipped() -> None:
    data = b"\x08\x96\x01" + b"\x11" + bytes(8) + b"\x1d" + bytes(4) + b"\x22\x02id"
    assert list(payloads(data)) == [(4, b"id")]
    assert texts(data) == ["id"]


@pytest.mark.parametrize("data", [b"\x09abc", b"\x0d", b"\x0a", b"\x0a\x02a", b"\x0c", b"\x08" + b"\xff" * 10])
def test_truncated_messages_and_groups_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not a protobuf message"):
        list(payloads(data))


def test_text_that_is_not_utf_8_is_refused_where_it_is_read() -> None:
    with pytest.raises(InvalidRequest, match="UTF-8"):
        text(b"\x12\x01\xff", 2)
    assert text(b"\x12\x01\xff", 3) == ""
