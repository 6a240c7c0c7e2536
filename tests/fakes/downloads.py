"""One image whose download takes long, at a web server or a registry of the test."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

from fakes.webserver import WebServer

from virtshim.images.filestore import ImageFileStore

NEVER = threading.Event()
FILE = "/disk.qcow2"


class Source:
    """One image, and the path at its server whose bytes take long."""

    def __init__(self, web: WebServer, name: str, path: str, body: bytes) -> None:
        self.web, self.name, self.path, self.body = web, name, path, body
        # With `by_several`: the one connection, which is slow, goes on; what it still brings then.
        self.goes_on, self.left = threading.Event(), len(body)

    def cut(self, *after: int, etag: str = '"1"') -> None:
        self.web.serve_parts(self.path, self.body, after, etag)

    def asked(self) -> list[str]:
        return self.web.ranges(self.path)


def fetch(store: ImageFileStore, source: Source, cancelled: threading.Event = NEVER) -> Any:
    return store.fetch(source.name, None, cancelled)


def is_whole(store: ImageFileStore, found: Any, qcow2: bytes) -> bool:
    return (
        found.digest.hex == hashlib.sha256(qcow2).hexdigest() and Path(store.path(found.digest)).read_bytes() == qcow2
    )
