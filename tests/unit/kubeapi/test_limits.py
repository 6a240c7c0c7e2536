"""A request ends when its time is over, whatever the server does meanwhile."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.apiserver import Api, kubeconfig

from virtshim.kubeapi.asking import RequestLimits, get
from virtshim.kubeapi.kubeconfig import access


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    api = Api(tmp_path_factory.mktemp("api"))
    yield api
    api.close()


@contextlib.contextmanager
def trickling(api: Api, first: bytes) -> Iterator[tuple[str, threading.Event]]:
    """A server's address: it answers with `first`, and then a byte at a time for as long as somebody listens. Then the event is
    set."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(api.certificate, api.key)
    over, hung_up = threading.Event(), threading.Event()

    def serve() -> None:
        with context.wrap_socket(listening.accept()[0], server_side=True) as connection:
            connection.recv(1)
            try:
                connection.sendall(first)
                while not over.wait(0.02):
                    connection.sendall(b"x")
            except OSError:
                hung_up.set()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(60)
        server = threading.Thread(target=serve)
        server.start()
        try:
            yield f"https://127.0.0.1:{listening.getsockname()[1]}", hung_up
        finally:
            over.set()
            server.join(60)


def answer_of(path: str, limits: RequestLimits) -> Any:
    """Or what was raised; None if it takes a minute."""
    done: list[Any] = []

    def ask() -> None:
        try:
            done.append(get(access(path), "/version", limits))
        except Exception as exc:  # noqa: BLE001
            done.append(exc)

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    asker.join(60)
    return done[0] if done else None


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nX-Slow: ",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n",
    ],
    ids=["status", "header", "body", "body of a known length"],
)
def test_an_answer_that_arrives_a_byte_at_a_time_is_given_up(api: Api, tmp_path: Path, first: bytes) -> None:
    with trickling(api, first) as (server, hung_up):
        found = answer_of(kubeconfig(api, tmp_path, {"token": "secret"}, server=server), RequestLimits(0.5))
        assert hung_up.wait(60)
    assert isinstance(found, TimeoutError)
    assert str(found) == "its answer takes longer than 0.5 s"


def test_an_endless_name_lookup_is_given_up(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def slow(*_: object, **__: object) -> list[Any]:
        answered.wait(60)
        return []

    config = kubeconfig(api, tmp_path, {"token": "secret"}, server="https://slow.example")
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    try:
        found = answer_of(config, RequestLimits(0.2))
    finally:
        answered.set()
    assert isinstance(found, TimeoutError)


def test_the_next_address_of_a_name_is_tried(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        there = [nobody.getsockname(), api.server.server_address]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in there]
        api.answers = {"/prefix/version": {"major": "1"}}
        config = kubeconfig(
            api, tmp_path, {"token": "secret"},
            server="https://kubernetes.example/prefix",
        )  # fmt: skip
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        assert answer_of(config, RequestLimits()).document == {"major": "1"}


def test_a_process_without_threads_says_so(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    config = kubeconfig(api, tmp_path, {"token": "secret"})
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match="no thread for the request: can't start new thread"):
        get(access(config), "/version")
