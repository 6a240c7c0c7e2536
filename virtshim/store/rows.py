"""Record <-> JSON document. The domain's dataclasses are the schema; pydantic checks types both ways."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from virtshim.domain.container import Container
from virtshim.domain.errors import InternalError, InvalidRequest
from virtshim.domain.image import Image
from virtshim.domain.sandbox import Sandbox

_R = TypeVar("_R", Sandbox, Container, Image)

# Environment values are bytes (CRI since 1.36.2): JSON holds them as base64. The config reaches nested dataclasses only
# through a container type, hence the one-element tuples.
_CONFIG = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
_SANDBOX: TypeAdapter[tuple[Sandbox]] = TypeAdapter(tuple[Sandbox], config=_CONFIG)
_CONTAINER: TypeAdapter[tuple[Container]] = TypeAdapter(tuple[Container], config=_CONFIG)
_IMAGE: TypeAdapter[tuple[Image]] = TypeAdapter(tuple[Image], config=_CONFIG)


def sandbox_document(sandbox: Sandbox) -> str:
    return _SANDBOX.dump_json((sandbox,)).decode()


def container_document(container: Container) -> str:
    return _CONTAINER.dump_json((container,)).decode()


def image_document(image: Image) -> str:
    return _IMAGE.dump_json((image,)).decode()


def sandbox_from(document: str) -> Sandbox:
    return _read(_SANDBOX, document, "sandbox")


def container_from(document: str) -> Container:
    return _read(_CONTAINER, document, "container")


def image_from(document: str) -> Image:
    return _read(_IMAGE, document, "image")


def _read(adapter: TypeAdapter[tuple[_R]], document: str, what: str) -> _R:
    """Raises InternalError: an unreadable record is never taken for an absent one."""
    try:
        return adapter.validate_json(document)[0]
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InternalError(f"a {what} record in the state database is unreadable at {where}: {first['msg']}") from exc
    except InvalidRequest as exc:  # what an id says of itself
        raise InternalError(f"a {what} record in the state database is unreadable: {exc}") from exc
