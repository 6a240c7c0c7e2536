"""The proxy passes on future methods, errors, metadata, deadlines and large messages unchanged."""

import threading
from typing import Any

import grpc
import pytest
from fakes.background import Background
from fakes.cri import Client, refused
from fakes.journal import WAIT_LIMIT
from fakes.runtime import FakeRuntime, Refusal
from podclient import wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = pytest.mark.proxy

MADE_UP = "/runtime.v2.RuntimeService/MadeUp"


def carrying(id_: str) -> bytes:
    """A message of a future CRI: a number, then an id."""
    return b"\x18\x07" + b"\x32\x40" + id_.encode()


def test_an_unknown_method_goes_to_the_primary(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    primary.answers["MadeUp"] = b"anything \xff at all"
    assert client.channel.unary_unary(MADE_UP)(b"\xff\xff", timeout=20) == b"anything \xff at all"
    assert primary.calls[0].request == b"\xff\xff"
    assert other.calls == []


def test_an_unknown_method_with_the_id_of_a_pod_goes_to_its_owner(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    other.answers["MadeUp"] = b"done"
    for id_ in (other.add_pod(), other.add_container("")):
        assert client.channel.unary_unary(MADE_UP)(carrying(id_), timeout=20) == b"done"
    assert not primary.asked("MadeUp")


def test_an_unknown_stream_goes_to_the_owner(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    other.answers["MadeUpStream"] = lambda *_: [b"one", b"two", b"three"]
    stream = client.channel.unary_stream(f"{MADE_UP}Stream")(carrying(other.add_pod()), timeout=20)
    assert list(stream) == [b"one", b"two", b"three"]


def test_an_unknown_bidirectional_stream_passes_both_ways(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    said = iter([carrying(other.add_pod()), b"two"])
    talk = client.channel.stream_stream(f"{MADE_UP}Talk")(said, timeout=20)
    assert [one[-3:] for one in talk][1:] == [b"two"]


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
@pytest.mark.parametrize("method", ["StartContainer", "MadeUp"])
def test_an_error_keeps_code_message_and_details(
    client: Client, primary: FakeRuntime, other: FakeRuntime, code: grpc.StatusCode, method: str
) -> None:
    trailing = (("grpc-status-details-bin", b"\x08\x05\x00\xff"), ("retry-after", "7"))
    primary.answers[method] = Refusal(code, "köln: it is so\n100 %", trailing)
    with pytest.raises(grpc.RpcError) as error:
        client.channel.unary_unary(f"/runtime.v1.RuntimeService/{method}")(b"", timeout=20)
    assert (error.value.code(), error.value.details()) == (code, "köln: it is so\n100 %")
    assert {(key, value) for key, value in error.value.trailing_metadata()} >= set(trailing)


def test_metadata_and_trace_context_pass(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    sent = (("traceparent", trace), ("tracestate", "a=b"), ("x-own-bin", b"\xff"))
    primary.answers["Version"] = _with_metadata
    _, call = client.runtime.Version.with_call(pb.VersionRequest(), timeout=20, metadata=sent)
    assert primary.calls[0].metadata.items() >= dict(sent).items()
    assert ("began", "yes") in [(key, value) for key, value in call.initial_metadata()]
    assert ("ended", "yes") in [(key, value) for key, value in call.trailing_metadata()]


def _with_metadata(_request: bytes, context: Any) -> bytes:
    context.send_initial_metadata((("began", "yes"),))
    context.set_trailing_metadata((("ended", "yes"),))
    return b""


def test_the_runtime_gets_the_callers_deadline(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    client.Version(pb.VersionRequest(), timeout=1234)
    assert 1100 < primary.calls[0].remaining < 1300  # gRPC writes it in coarse steps
    client.runtime.Version(pb.VersionRequest())
    assert primary.calls[1].remaining > 1 << 30  # none


def test_an_exceeded_deadline_is_reported_as_such(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    ended = threading.Event()
    primary.answers["StartContainer"] = _until_given_up(ended)
    with refused(grpc.StatusCode.DEADLINE_EXCEEDED):
        client.StartContainer(pb.StartContainerRequest(), timeout=0.5)
    assert ended.wait(WAIT_LIMIT)


def test_a_caller_that_gives_up_ends_the_runtimes_call(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    ended = threading.Event()
    primary.answers["PullImage"] = _until_given_up(ended)
    call = client.image.PullImage.future(pb.PullImageRequest())
    wait_until(lambda: bool(primary.asked("PullImage")), WAIT_LIMIT, "the pull has reached the runtime")
    call.cancel()
    assert ended.wait(WAIT_LIMIT)


def _until_given_up(ended: threading.Event) -> Any:
    def answer(_request: bytes, context: Any) -> bytes:
        context.add_callback(ended.set)
        ended.wait(WAIT_LIMIT)
        return b""

    return answer


def test_messages_of_16_mib_pass_both_ways(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    big = b"x" * ((16 << 20) - 100)
    primary.answers["MadeUp"] = primary.answers["ExecSync"] = lambda request, _: request
    for method in ("MadeUp", "ExecSync"):
        call = client.channel.unary_unary(f"/runtime.v1.RuntimeService/{method}")
        message = pb.ExecSyncResponse(stdout=big[:-100]).SerializeToString()
        assert call(b"\x12" + message[1:], timeout=60) == b"\x12" + message[1:]


def test_a_list_that_is_too_long_is_an_error_that_says_so(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    for runtime in (primary, other):
        runtime.answers["ListImages"] = pb.ListImagesResponse(images=[pb.Image(id="x" * (9 << 20))]).SerializeToString()
    with refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
        client.ListImages(pb.ListImagesRequest())


def test_200_calls_and_16_listeners_do_not_wait_for_each_other(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    free = threading.Event()
    try:
        primary.answers["StopContainer"] = lambda *_: b"" * free.wait(WAIT_LIMIT)
        listening = [client.runtime.GetContainerEvents(pb.GetEventsRequest(), timeout=WAIT_LIMIT) for _ in range(16)]
        wait_until(lambda: len(primary.listeners) + len(other.listeners) == 32, WAIT_LIMIT, "all listen")
        held = [client.runtime.StopContainer.future(pb.StopContainerRequest(), timeout=WAIT_LIMIT) for _ in range(200)]
        wait_until(lambda: len(primary.asked("StopContainer")) == 200, WAIT_LIMIT, "all are under way")
        other.tell("one")
        assert [next(events).container_id for events in listening] == ["one"] * 16
        assert Background(lambda: client.Version(pb.VersionRequest()).runtime_name).done() == "primary"
    finally:
        free.set()
    for call in held:
        call.result()
    for events in listening:
        events.cancel()
    wait_until(lambda: not primary.listeners and not other.listeners, WAIT_LIMIT, "nobody listens any more")
