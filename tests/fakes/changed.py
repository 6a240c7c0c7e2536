"""Records with arbitrary changes, beyond the domain's own transitions."""

from __future__ import annotations

import dataclasses
from typing import Any

from virtshim.model.container import Container, ContainerSpec

_OF_SPEC = {field.name for field in dataclasses.fields(ContainerSpec)}


def changed(container: Container, **fields: Any) -> Container:
    """The record with these fields of its spec or status changed."""
    spec = {name: value for name, value in fields.items() if name in _OF_SPEC}
    status = {name: value for name, value in fields.items() if name not in _OF_SPEC}
    return Container(dataclasses.replace(container.spec, **spec), dataclasses.replace(container.status, **status))
