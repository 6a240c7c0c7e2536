"""Parses a CDI specification (Container Device Interface, up to 1.1.0). No I/O.

A VM can use its device nodes and, as hints, its environment variables and a device's annotation `bdf`. As the standard
demands, an unknown field makes the specification invalid, because it may matter.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from virtshim.devices.values import CriDevice, PciAddress
from virtshim.model.errors import InvalidRequest
from virtshim.model.yaml_text import MAX_TEXT_BYTES, parse_mapping

MAX_BYTES: Final = MAX_TEXT_BYTES
VERSIONS: Final = ("0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")

_LABEL: Final = r"[A-Za-z](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?"
_DEVICE: Final = r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?"
_QUALIFIED: Final = re.compile(rf"{_LABEL}/{_LABEL}={_DEVICE}")
_MAX_FAULTS: Final = 3


@dataclass(frozen=True, slots=True)
class CdiEdits:
    """The part of containerEdits that concerns a VM. `left_out`: names of fields that are set but mean nothing to a
    VM."""

    nodes: tuple[CriDevice, ...] = ()
    envs: tuple[tuple[str, str], ...] = ()
    left_out: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class CdiDevice:
    """`address`: the PCI function that the annotation `bdf` names."""

    name: str
    edits: CdiEdits
    address: PciAddress | None = None


@dataclass(frozen=True, slots=True)
class CdiSpec:
    """`edits`: apply once, whichever of its devices is requested."""

    kind: str
    devices: tuple[CdiDevice, ...]
    edits: CdiEdits


def check_name(name: str) -> None:
    """Raises InvalidRequest if the name is not `vendor.tld/class=device`."""
    if _QUALIFIED.fullmatch(name) is None:
        raise InvalidRequest(
            f"{name[:120]!r} is not a CDI device name (vendor.tld/class=device); correct the device plugin"
        )


def parse_spec(data: bytes) -> CdiSpec:
    """Parses JSON or YAML. Raises InvalidRequest with the faults."""
    try:
        text = data.decode()
    except UnicodeDecodeError as exc:
        raise InvalidRequest("not UTF-8 text") from exc
    try:
        spec = _Spec.model_validate(parse_mapping(text))
    except ValidationError as exc:
        faults = [
            f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg'].removeprefix('Value error, ')}"
            for fault in exc.errors(include_url=False)
        ]
        more = f"; and {len(faults) - _MAX_FAULTS} more" if len(faults) > _MAX_FAULTS else ""
        raise InvalidRequest("; ".join(faults[:_MAX_FAULTS]) + more) from exc
    devices = tuple(_device(device) for device in spec.devices)
    (name, often), *_ = Counter(device.name for device in devices).most_common(1)
    if often > 1:
        raise InvalidRequest(f"device {name} is listed twice")
    return CdiSpec(spec.kind, devices, _edits(spec.containerEdits))


# --- The shape of the text. Fields have the standard's names; those that mean nothing to a VM are checked loosely.

_Text = Annotated[str, Field(min_length=1)]
_Env = Annotated[str, Field(pattern=r"^[^=]+=")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


class _Node(_Part):
    path: _Text
    hostPath: str = ""  # noqa: N815
    type: Annotated[str, Field(pattern=r"^[bcup]?$")] = ""
    major: int = 0
    minor: int = 0
    fileMode: int = 0  # noqa: N815
    permissions: Annotated[str, Field(pattern=r"^([rwm]*|none)$")] = ""
    uid: int = 0
    gid: int = 0


class _Edits(_Part):
    env: list[_Env] = []
    deviceNodes: list[_Node] = []  # noqa: N815
    netDevices: list[dict[str, Any]] = []  # noqa: N815
    hooks: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    intelRdt: dict[str, Any] = {}  # noqa: N815
    additionalGids: list[int] = []  # noqa: N815


class _Device(_Part):
    name: Annotated[str, Field(pattern=rf"^{_DEVICE}$")]
    annotations: dict[str, str] = {}
    containerEdits: _Edits = _Edits()  # noqa: N815


class _Spec(_Part):
    cdiVersion: str  # noqa: N815
    kind: Annotated[str, Field(pattern=rf"^{_LABEL}/{_LABEL}$")]
    annotations: dict[str, str] = {}
    devices: Annotated[list[_Device], Field(min_length=1)]
    containerEdits: _Edits = _Edits()  # noqa: N815

    @field_validator("cdiVersion")
    @classmethod
    def _known(cls, version: str) -> str:
        if version.removeprefix("v") not in VERSIONS:
            raise ValueError(f"{version[:20]!r} is not a version that virtshim knows (0.1.0 to {VERSIONS[-1]})")
        return version


def _device(device: _Device) -> CdiDevice:
    bdf = device.annotations.get("bdf")
    return CdiDevice(device.name, _edits(device.containerEdits), None if bdf is None else PciAddress.parse(bdf))


def _edits(edits: _Edits) -> CdiEdits:
    nodes = tuple(
        CriDevice(node.hostPath or node.path, node.path, node.permissions or "rwm") for node in edits.deviceNodes
    )
    envs = tuple((name, value) for name, _, value in (env.partition("=") for env in edits.env))
    fields = ("netDevices", "hooks", "mounts", "intelRdt", "additionalGids")
    return CdiEdits(nodes, envs, frozenset(field for field in fields if getattr(edits, field)))
