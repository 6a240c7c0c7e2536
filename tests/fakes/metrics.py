"""A Prometheus that scrapes once."""

from __future__ import annotations

import contextlib
import http.client
import socket

from prometheus_client.parser import text_string_to_metric_families

_SECONDS = 60.0

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_SECONDS)
        self.sock.connect(self._path)


def asked(path: str, target: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, str, str]:
    """Scrapes; returns status, content type and body."""
    with contextlib.closing(_UnixConnection(path)) as connection:
        connection.request(method, target, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()


def scraped(path: str) -> str:
    status, _, text = asked(path)
    assert status == 200, text
    return text


def values(text: str) -> Values:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def one(text: str, name: str, **labels: str) -> float:
    """The value of the only sample of that name with these labels, and maybe others. ValueError if there is none, or more."""
    (found,) = [
        value for (of, with_), value in values(text).items() if of == name and labels.items() <= dict(with_).items()
    ]
    return found
