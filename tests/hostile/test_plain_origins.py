"""An attacker who answers in place of an allowed web server cannot deliver another image."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest
from fakes.webserver import LOOPBACK, WebServer

from virtshim.images.filestore import ImageFileStore, ImageSettings
from virtshim.images.policy import Rule
from virtshim.model.errors import PermissionRefused

pytestmark = pytest.mark.hostile

DISK = b"\xeb\x3c" + bytes(1022)


def test_an_allowed_prefix_admits_plain_http_only_with_a_digest(web: WebServer, tmp_path: Path) -> None:
    policy = (Rule("", "refuse"), Rule(web.address, "nothing"))
    store = ImageFileStore(
        str(tmp_path / "images"), ImageSettings(insecure_registries=LOOPBACK, max_bytes=1 << 20, policy=policy)
    )
    name = web.serve("/x.img", DISK)
    with pytest.raises(PermissionRefused, match="plain HTTP"):
        store.fetch(name, None, threading.Event())
    assert web.seen == []
    named = store.fetch(f"{name}@sha256:{hashlib.sha256(DISK).hexdigest()}", None, threading.Event())
    assert named.size == len(DISK)
