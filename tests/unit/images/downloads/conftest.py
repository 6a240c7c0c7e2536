"""Images whose download takes long."""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Callable

import pytest
from fakes.downloads import FILE, Source
from fakes.registry import FakeRegistry
from fakes.webserver import WebServer


@pytest.fixture
def file(web: WebServer, qcow2: bytes, request: pytest.FixtureRequest) -> Source:
    path, body = getattr(request, "param", None) or (FILE, qcow2)
    return Source(web, web.serve_parts(path, body), path, body)


@pytest.fixture
def layer(fake_registry: FakeRegistry, make_tar: Callable[..., bytes], qcow2: bytes) -> Source:
    """Does not shrink when it is packed."""
    plain = make_tar({"disk/x": qcow2, "etc/noise": os.urandom(150_000)})
    packed = gzip.compress(plain)
    fake_registry.manifest("a", [(packed, plain)])
    path = f"/v2/a/blobs/sha256:{hashlib.sha256(packed).hexdigest()}"
    source = Source(fake_registry.web, fake_registry.name("a"), path, packed)
    source.cut()
    return source


@pytest.fixture(params=["file", "layer"])
def source(request: pytest.FixtureRequest) -> Source:
    made: Source = request.getfixturevalue(request.param)
    return made
