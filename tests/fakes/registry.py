"""A registry that misbehaves as a real one never does, and layers for it."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from typing import Any

from fakes.webserver import WebServer


class FakeRegistry:
    """Holds images in memory behind a WebServer, to misbehave as a real registry never does."""

    def __init__(self, web: WebServer) -> None:
        self.web = web
        self.layer_type = "application/vnd.oci.image.layer.v1.tar+gzip"

    def name(self, repository: str) -> str:
        return f"{self.web.address}/{repository}"

    def blob(self, repository: str, data: bytes) -> dict[str, Any]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.web.serve(f"/v2/{repository}/blobs/{digest}", data)
        return {"mediaType": self.layer_type, "digest": digest, "size": len(data)}

    def document(self, repository: str, reference: str, document: Any) -> dict[str, Any]:
        data = json.dumps(document).encode()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        for name in (reference, digest):
            self.web.serve(f"/v2/{repository}/manifests/{name}", data)
        return {"digest": digest, "size": len(data)}

    def manifest(
        self,
        repository: str,
        layers: list[tuple[bytes, bytes]],
        reference: str = "latest",
        architecture: str = "amd64",
        says: Any = None,
    ) -> dict[str, Any]:
        """A manifest. `layers` as (packed, plain) bytes, lowest first. `says`: the config for containers."""
        diffs = [f"sha256:{hashlib.sha256(plain).hexdigest()}" for _, plain in layers]
        config = {"architecture": architecture, "os": "linux", "rootfs": {"type": "layers", "diff_ids": diffs}}
        if says is not None:
            config["config"] = says
        return self.document(
            repository,
            reference,
            {
                "schemaVersion": 2,
                "config": self.blob(repository, json.dumps(config).encode()),
                "layers": [self.blob(repository, packed) for packed, _ in layers],
            },
        )

    def push(self, repository: str, *trees: dict[str, bytes], **options: Any) -> str:
        """Pushes one gzip layer per tree, lowest first; returns the name to pull."""
        plain = [tar(tree) for tree in trees]
        self.manifest(repository, [(gzip.compress(layer, 1), layer) for layer in plain], **options)
        return self.name(repository)


def tar(tree: dict[str, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:  # noqa: A002
    """A tar; a name that ends with a slash is a directory."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as archive:
        for name, data in tree.items():
            entry = tarfile.TarInfo(name)
            if name.endswith("/"):
                entry.type = tarfile.DIRTYPE
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
