"""Converts records to JSON documents and back. The dataclasses are the schema; pydantic checks types both ways."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from virtshim.devices.values import BorrowedDevice, DeviceCondition
from virtshim.model.container import (
    Container,
    ContainerConfig,
    ContainerName,
    ContainerPhase,
    ContainerSpec,
    ContainerStatus,
)
from virtshim.model.errors import InternalError, InvalidRequest
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.image import UNKNOWN_IMAGE, Image
from virtshim.model.sandbox import PodKey, Sandbox, SandboxConfig, SandboxPhase

_R = TypeVar("_R")

# Environment values are bytes (CRI since 1.36.2), so JSON holds them as base64. pydantic applies the config to nested dataclasses
# only inside a container type, hence the one-element tuples.
_CONFIG = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")


class Documents(Generic[_R]):
    """The documents of one kind of record. `what`: the kind, in error texts."""

    def __init__(self, adapter: TypeAdapter[tuple[_R]], what: str) -> None:
        self._adapter = adapter
        self._what = what

    def text(self, record: _R) -> str:
        return self._adapter.dump_json((record,)).decode()

    def parse(self, document: str) -> _R:
        """Raises InternalError."""
        return _valid(self._adapter, document, self._what)[0]


SANDBOX = Documents[Sandbox](TypeAdapter(tuple[Sandbox], config=_CONFIG), "sandbox")
IMAGE = Documents[Image](TypeAdapter(tuple[Image], config=_CONFIG), "image")
BORROWED = Documents[BorrowedDevice](TypeAdapter(tuple[BorrowedDevice], config=_CONFIG), "borrowed device")
CONDITION = Documents[DeviceCondition](TypeAdapter(tuple[DeviceCondition], config=_CONFIG), "device condition")
_SPEC = Documents[ContainerSpec](TypeAdapter(tuple[ContainerSpec], config=_CONFIG), "container")
_STATUS = Documents[ContainerStatus](TypeAdapter(tuple[ContainerStatus], config=_CONFIG), "container")

_WITH_SPEC: TypeAdapter[tuple[Sandbox, ContainerSpec]] = TypeAdapter(tuple[Sandbox, ContainerSpec], config=_CONFIG)
_WITH_STATUS: TypeAdapter[tuple[Sandbox, ContainerStatus]] = TypeAdapter(
    tuple[Sandbox, ContainerStatus], config=_CONFIG
)


# What error texts call the records of `RecordCopies`.
_COPY = "virtual machine's copy of its"


def container_document(container: Container) -> str:
    """One flat object, as earlier versions write and read it, from before spec and status were separate. The two have no field
    name in common."""
    spec, status = _SPEC.text(container.spec), _STATUS.text(container.status)
    return f"{spec.removesuffix('}]')},{status.removeprefix('[{')}"


def container_from(document: str) -> Container:
    return Container(_SPEC.parse(document), _STATUS.parse(document))


def unreadable_sandbox(row: Mapping[str, Any], why: str) -> Sandbox:
    """Stands for a sandbox whose document is unreadable. Raises InvalidRequest, TypeError, ValueError."""
    return Sandbox(
        id=SandboxId(row["id"]),
        key=PodKey(_text(row["namespace"]), _text(row["name"]), _text(row["uid"]), int(row["attempt"])),
        config=SandboxConfig(),
        created_at=int(row["created_at"]),
        phase=SandboxPhase.NOT_READY,
        reason=why,
    )


def unreadable_container(row: Mapping[str, Any], why: str, claims: tuple[str, ...] = ()) -> Container:
    """Stands for a container whose document is unreadable. Raises InvalidRequest, TypeError, ValueError."""
    own = ContainerId(row["id"])
    spec = ContainerSpec(
        id=own,
        sandbox_id=SandboxId(row["sandbox_id"]),
        name=ContainerName(_text(row["name"]), int(row["attempt"])),
        config=ContainerConfig(image=""),
        image=UNKNOWN_IMAGE,
        image_ref="",
        domain_uuid=str(own.domain_uuid()),
        created_at=int(row["created_at"]),
    )
    return Container(spec, ContainerStatus(phase=ContainerPhase.UNKNOWN, trouble=why, claims=claims))


def pair_document(sandbox: Sandbox, container: Container) -> str:
    """ASCII. Omits environment and fetch key: the pod and the VM's definition hold them."""
    network = sandbox.network and dataclasses.replace(sandbox.network, fetch_key="")
    bare = dataclasses.replace(container.spec.image_config, env=())
    spec = dataclasses.replace(container.spec, config=dataclasses.replace(container.config, envs=()), image_config=bare)
    pod = SANDBOX.text(dataclasses.replace(sandbox, network=network))
    vm = container_document(Container(spec, container.status))
    return json.dumps([*json.loads(pod), *json.loads(vm)], separators=(",", ":"))


def pair_from(document: str) -> tuple[Sandbox, Container]:
    """Raises InternalError."""
    sandbox, spec = _valid(_WITH_SPEC, document, _COPY)
    _, status = _valid(_WITH_STATUS, document, _COPY)
    return sandbox, Container(spec, status)


def _text(value: object) -> str:
    """Raises ValueError for bytes that are not UTF-8."""
    text = str(value)
    text.encode()
    return text


def _valid(adapter: TypeAdapter[_R], document: object, what: str) -> _R:
    """Raises InternalError, so that nobody takes an unreadable record for an absent one."""
    if not isinstance(document, str):
        raise InternalError(f"a {what} record in the state database is unreadable: it is not text")
    try:
        return adapter.validate_json(document)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InternalError(f"a {what} record in the state database is unreadable at {where}: {first['msg']}") from exc
    except (InvalidRequest, ValueError) as exc:  # a malformed id; bytes that are not UTF-8
        raise InternalError(f"a {what} record in the state database is unreadable: {exc}") from exc
