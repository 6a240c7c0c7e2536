"""Keeps all objects of one kind as the API server last reported them. Lists them, then watches them, and lists them again when
the watch is too old.

https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPException
from typing import Any, Final
from urllib.parse import quote

import structlog
from urllib3.exceptions import HTTPError

from virtshim.kubeapi.asking import RequestLimits, connection_to, get, headers_of
from virtshim.kubeapi.kubeconfig import Access
from virtshim.model.errors import InvalidRequest, Unavailable
from virtshim.system.clock import Clock
from virtshim.system.rate_limits import TroubleLog
from virtshim.system.threads import lasting

log = structlog.get_logger(__name__)

Document = Mapping[str, Any]

_PAGE: Final = 100
# Seconds: for the first list; for a page; that the server lets a watch last; until the next try.
_FIRST_LIST: Final = 120.0
_LIST: Final = 30.0
_WATCH: Final = 300
_AGAIN: Final = 2.0
# Bytes of one line of a watch.
_LONGEST_LINE: Final = 8 << 20
_PART: Final = 64 << 10
_GONE: Final = 410
_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
# TCP: a server that is gone without a word is noticed after 15 + 3 * 5 s.
_KEEP_ALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


class _TooOld(Exception):
    """The server no longer has the changes since then."""


class Collection:
    """Objects by (namespace, name). Thread-safe. A caller that writes an object puts the answer here, so that its next look
    is not older than its own write."""

    def __init__(
        self,
        access: Callable[[], Access],
        path: str,
        changed: Callable[[Document], None],
        clock: Clock,
        selector: str = "",
        fields: str = "",
        wanted: Callable[[Document], Document] | None = None,
    ) -> None:
        """`path`: such as /api/v1/pods. `selector`, `fields`: of labels and of fields, "" for all. `changed`: is called with each
        object that is new, changed or gone. `wanted`: the part of an object that is kept, with its metadata; None: all of it."""
        self._access = access
        self._path = path
        self._selector = f"&labelSelector={quote(selector, safe='')}" if selector else ""
        self._selector += f"&fieldSelector={quote(fields, safe='')}" if fields else ""
        self._changed = changed
        self._wanted = wanted
        self._clock = clock
        self._lock = threading.Lock()
        self._objects: dict[tuple[str, str], Document] = {}
        self._listed = threading.Event()
        self._closing = threading.Event()
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._failures = TroubleLog(log, over="watch.works_again")

    def start(self) -> None:
        self._thread = lasting(self._run, f"watch {self._path}")

    def start_and_list(self) -> None:
        """Returns when all objects have been read once. Raises Unavailable."""
        self.start()
        if not self._clock.wait(self._listed, _FIRST_LIST):
            raise Unavailable(f"the API server has not answered within {_FIRST_LIST:g} s; the log says why")

    @property
    def is_complete(self) -> bool:
        """Whether all objects have been read once."""
        return self._listed.is_set()

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    # Not SSLSocket.shutdown: after that, the socket would send without TLS.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join(_AGAIN)

    def all(self) -> list[Document]:
        with self._lock:
            return list(self._objects.values())

    def get(self, namespace: str, name: str) -> Document | None:
        with self._lock:
            return self._objects.get((namespace, name))

    def wrote(self, document: Document, before: str) -> None:
        """Call this after a write. `before`: the object's version before the write, "" for a new object. Ignores the document if
        the watch is ahead."""
        with self._lock:
            found = self._objects.get(_key(document))
            if (_version(found) if found is not None else "") == before:
                self._objects[_key(document)] = self._kept(document)

    def found_gone(self, namespace: str, name: str, uid: str) -> None:
        """Call this when the server has said that the object is gone."""
        with self._lock:
            found = self._objects.get((namespace, name))
            if found is not None and found["metadata"].get("uid") == uid:
                del self._objects[namespace, name]

    def _kept(self, document: Document) -> Document:
        slim = _slim(document)
        return slim if self._wanted is None else {**self._wanted(slim), "metadata": slim["metadata"]}

    # --- below: the thread

    def _run(self) -> None:
        version = ""
        while not self._closing.is_set():
            try:
                version = self._watch(version or self._list())
            except _TooOld:
                version = ""
                continue
            except (OSError, ValueError, HTTPError, HTTPException, InvalidRequest) as exc:
                if self._closing.is_set():
                    return
                why = " ".join(str(exc).split())[:300] or type(exc).__name__
                self._failures.met("watch.failed", path=self._path, error=why, remedy="see the API server's log")
                version = ""
                self._clock.wait(self._closing, _AGAIN)
            except Exception:  # an unexpected object; without this thread, the known objects would become outdated
                log.exception("watch.broken", path=self._path)
                version = ""
                self._clock.wait(self._closing, _AGAIN)

    def _list(self) -> str:
        """Returns the version of the list."""
        found: dict[tuple[str, str], Document] = {}
        page = ""
        while True:
            limits = RequestLimits(_LIST, _LONGEST_LINE * 4)
            answer = get(self._access(), f"{self._path}?limit={_PAGE}{self._selector}{page}", limits)
            if answer.status == _GONE:
                raise _TooOld
            if answer.status != 200:
                raise OSError(
                    f"the API server answers {answer.status} {answer.reason}: {answer.document.get('message', '')}"
                )
            items = answer.document.get("items")
            for one in items if isinstance(items, list) else ():
                found[_key(one)] = self._kept(one)
            metadata = answer.document.get("metadata") or {}
            if not metadata.get("continue"):
                break
            page = f"&continue={quote(metadata['continue'], safe='')}"
        with self._lock:
            before, self._objects = self._objects, found
        for key in before.keys() | found.keys():
            if before.get(key) != found.get(key):
                self._changed(found.get(key) or before[key])
        self._listed.set()
        self._failures.over()
        return str(metadata.get("resourceVersion", ""))

    def _watch(self, version: str) -> str:
        """Returns the version to continue from when the server has ended the watch."""
        began = self._clock.monotonic()
        query = f"watch=true&allowWatchBookmarks=true&timeoutSeconds={_WATCH}&resourceVersion={quote(version, safe='')}"
        for line in self._lines(f"{self._path}?{query}{self._selector}"):
            event = json.loads(line)
            kind, document = event.get("type"), event.get("object")
            if kind == "ERROR" or not isinstance(document, dict):
                if isinstance(document, dict) and document.get("code") == _GONE:
                    raise _TooOld
                raise OSError(f"the API server ends the watch: {str(document)[:200]}")
            version = _version(document) or version
            if kind != "BOOKMARK":
                self._take(kind, document)
        if self._clock.monotonic() < began + _AGAIN:
            self._clock.wait(self._closing, _AGAIN)
        return version

    def _take(self, kind: str, document: Document) -> None:
        with self._lock:
            if kind == "DELETED":
                self._objects.pop(_key(document), None)
            else:
                self._objects[_key(document)] = self._kept(document)
        self._changed(document)

    def _lines(self, path: str) -> Iterator[bytes]:
        access = self._access()
        with contextlib.closing(connection_to(access, _WATCH + _LIST)) as connection:
            connection.connect()
            for option in _KEEP_ALIVE:
                connection.sock.setsockopt(*option)
            with self._lock:
                self._socket = connection.sock
            try:
                if self._closing.is_set():
                    return
                connection.request("GET", access.prefix + path, headers=headers_of(access), preload_content=False)
                with contextlib.closing(connection.getresponse()) as answer:
                    if answer.status == _GONE:
                        raise _TooOld
                    if answer.status != 200:
                        raise OSError(f"the API server answers {answer.status} {answer.reason}")
                    yield from _split(answer.stream(_PART))
            finally:
                with self._lock:
                    self._socket = None


def _split(parts: Iterator[bytes]) -> Iterator[bytes]:
    rest = bytearray()
    for part in parts:
        rest += part
        *lines, tail = rest.split(b"\n")
        rest = bytearray(tail)
        if len(rest) > _LONGEST_LINE:
            raise ValueError(f"a change is larger than {_LONGEST_LINE} bytes")
        yield from (bytes(line) for line in lines if line)


def _key(document: Document) -> tuple[str, str]:
    metadata = document["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def _version(document: Document) -> str:
    return str((document.get("metadata") or {}).get("resourceVersion", ""))


def _slim(document: Document) -> Document:
    """The object without managedFields and without kubectl's last-applied annotation, which are most of a small object."""
    metadata = {name: value for name, value in document["metadata"].items() if name != "managedFields"}
    if _APPLIED in (annotations := metadata.get("annotations") or {}):
        metadata["annotations"] = {name: value for name, value in annotations.items() if name != _APPLIED}
    return {**document, "metadata": metadata}
