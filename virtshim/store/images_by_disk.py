"""Image documents of schema versions up to 0003, which knew an image by its disk: all OCI images of one disk were one record,
with what each name said of containers. Documents in, documents out: what a migration has done must not change with the domain."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def split_by_config(document: Any) -> dict[str, str]:
    """Image id -> its document. The digest of an OCI config was not kept, so until its next pull an image is known by its disk as
    before; of several that said different things only the one that said nothing is, and the others get ids that nobody knows. A
    document that is newer, or unreadable, is not split: {}."""
    try:
        (fields,) = json.loads(document)
        disk = fields["digest"]["value"]
        names = (*fields["tags"], *fields["repo_digests"])
        said = {name: json.dumps(fields.get("configs", {}).get(name, {}), sort_keys=True) for name in names}
        if "id" in fields:
            return {}
        configs = sorted(set(said.values())) or ["{}"]
        return {
            image: json.dumps([_only(fields, image, config, {name for name in names if said[name] == config})])
            for config in configs
            for image in [disk if config == "{}" or len(configs) == 1 else _made_up(disk, config)]
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _only(fields: dict[str, Any], image: str, config: str, names: set[str]) -> dict[str, Any]:
    return {
        **{key: value for key, value in fields.items() if key != "configs"},
        "id": {"value": image},
        "tags": [name for name in fields["tags"] if name in names],
        "repo_digests": [name for name in fields["repo_digests"] if name in names],
        "config": json.loads(config),
    }


def _made_up(disk: str, config: str) -> str:
    return f"sha256:{hashlib.sha256(f'{disk} {config}'.encode()).hexdigest()}"
