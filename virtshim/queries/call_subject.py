"""Whom a call is about, for the log: never more of a request than names and ids."""

from __future__ import annotations

from typing import Any

from virtshim.domain.errors import InvalidRequest
from virtshim.domain.ids import ContainerId, SandboxId
from virtshim.ports.records import Records

# Characters of ids in the log.
_SHORT = 20
_LONGEST = 256


def subject_of(records: Records, request: Any) -> dict[str, str]:
    """`pod`, `sandbox`, `container` and `image`, as far as they are known. `request`: a message of CRI's, whatever is in it."""
    container_id, sandbox_id = _text(request, "container_id"), _text(request, "pod_sandbox_id")
    found = {"container": container_id[:_SHORT], "sandbox": sandbox_id[:_SHORT], "image": _image(request)}
    container = _known(records.containers, ContainerId, container_id)
    sandbox = container.sandbox_id if container else _parsed(SandboxId, sandbox_id)
    if container is not None:
        found["sandbox"] = container.sandbox_id.short
    pod = records.sandboxes.get(sandbox) if sandbox else None
    found["pod"] = pod.key.readable if pod else _asked_for(request)
    return {key: value[:_LONGEST] for key, value in found.items() if value}


def _known(table: Any, kind: Any, text: str) -> Any:
    parsed = _parsed(kind, text)
    return table.get(parsed) if parsed else None


def _parsed(kind: Any, text: str) -> Any:
    try:
        return kind(text) if text else None
    except InvalidRequest:
        return None


def _asked_for(request: Any) -> str:
    """A pod that is not there yet."""
    metadata = getattr(getattr(request, "config", None), "metadata", None)
    namespace = getattr(metadata, "namespace", "")
    return f"{namespace}/{metadata.name}" if metadata is not None and namespace else ""


def _image(request: Any) -> str:
    spec = getattr(request, "image", None)
    return _text(spec, "image")


def _text(message: Any, field: str) -> str:
    value = getattr(message, field, "")
    return value if isinstance(value, str) else ""
