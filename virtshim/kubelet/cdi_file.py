"""The CDI specification of a resource's devices, for containers that get names instead of nodes.

It stays when the plugin ends: containers that were given a name are restarted with it.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from typing import Any, Final

from virtshim.domain.devices.pools import Offer, Pool
from virtshim.files import replace_text

_VERSION: Final = "0.6.0"


def qualified_name(pool: Pool, offer: Offer) -> str:
    """The resource's own name is the CDI kind: vendor/class=device."""
    return f"{pool.resource}={offer.id}"


def specification(pool: Pool, offers: Sequence[Offer]) -> dict[str, Any]:
    """Those of the offers that have device nodes. `bdf` is what VM runtimes look for, and holds one address: where a group has
    several functions, its node and the container's variable say which."""
    return {
        "cdiVersion": _VERSION,
        "kind": pool.resource,
        "devices": [
            {
                "name": offer.id,
                "annotations": {"bdf": str(offer.functions[0])} if len(offer.functions) == 1 else {},
                "containerEdits": {"deviceNodes": [{"path": node, "permissions": "rw"} for node in offer.nodes]},
            }
            for offer in offers
            if offer.group is not None
        ],
    }


def write(directory: str, pool: Pool, offers: Sequence[Offer]) -> None:
    """Replaces the file in one step, if there is anything new in it. OSError."""
    path = f"{directory}/virtshim-{pool.resource.replace('/', '_')}.json"
    text = json.dumps(specification(pool, offers), indent=1)
    if _holds(path, text.encode()):
        return
    os.makedirs(directory, mode=0o755, exist_ok=True)
    replace_text(path, text, 0o644)


def _holds(path: str, text: bytes) -> bool:
    """Whether a file is there with that text; whatever else is there keeps nobody waiting."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    with os.fdopen(fd, "rb") as file:
        return stat.S_ISREG(os.fstat(fd).st_mode) and file.read(len(text) + 1) == text
