"""Builds Events for the API server.

https://kubernetes.io/docs/reference/kubernetes-api/cluster-resources/event-v1/
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any, Final

# Characters of an object's name, and of an Event's message.
_LONGEST_NAME: Final = 253
_LONGEST_MESSAGE: Final = 1024


def event_document(
    about: Mapping[str, str], reason: str, message: str, at: float, component: str, *, is_warning: bool
) -> dict[str, Any]:
    """`about`: apiVersion, kind, namespace, name and uid of the object. `at`: seconds since the epoch. The Event's name is the
    object's name with a random suffix, as in kubelet's Events."""
    own = secrets.token_hex(8)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{about['name'][: _LONGEST_NAME - len(own) - 1].rstrip('.-')}.{own}",
            "namespace": about["namespace"],
        },
        "involvedObject": dict(about),
        "type": "Warning" if is_warning else "Normal",
        "reason": reason,
        "message": message[:_LONGEST_MESSAGE],
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
        "source": {"component": component},
        "reportingComponent": component,
        "reportingInstance": socket.gethostname(),
    }
