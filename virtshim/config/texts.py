"""How settings are declared, and the types of their values: tables, paths, PCI addresses and ids, networks, names."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from virtshim.devices.values import PciAddress
from virtshim.model.errors import InvalidRequest
from virtshim.model.text import ListenAddress


class Section(BaseModel):
    """A table of the settings file. It is frozen, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def setting(
    default: Any, meaning: str, *, why: str, unit: str = "", allowed: str = "", reload: bool = False, **limits: Any
) -> Any:
    """A field of a `Section`, with everything that the reference page says about it. `why`: the reason for the default. `unit`:
    the unit of a number. `allowed`: the allowed values in words, where type and limits do not say. `reload`: whether SIGHUP
    changes the setting in a running daemon."""
    extra: dict[str, Any] = {"why": why, "unit": unit, "allowed": allowed, "reload": reload}
    return Field(default, description=meaning, json_schema_extra=extra, **limits)


PROFILE_NAME = r"^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"

PathText = Annotated[str, Field(pattern=r"^/", description="absolute path")]

# The name of an extended resource: a domain other than kubernetes.io, and a label name.
_RESOURCE_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_HEX_ID = re.compile(r"[0-9a-f]{4}")


# The runtime's name becomes part of a condition's type, and of a file name.
_RUNTIME_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def _pci(text: str) -> str:
    try:
        return str(PciAddress.parse(text))
    except InvalidRequest as exc:
        raise ValueError(str(exc)) from exc


def _resource(name: str) -> str:
    """kubelet reserves names in Kubernetes' own domain, and names of quotas."""
    if not _RESOURCE_NAME.fullmatch(name) or "kubernetes.io/" in name or name.startswith("requests."):
        raise ValueError(
            f"{name!r} is not a resource name that kubelet accepts; write domain/name, such as example.com/fast-nvme, with a "
            "domain other than kubernetes.io"
        )
    return name


def _runtime(name: str) -> str:
    if not _RUNTIME_NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a valid runtime name; write letters and digits, with - _ . between them, such as virtlet.cloud"
        )
    return name


def _hex_id(text: str) -> str:
    if text and not _HEX_ID.fullmatch(text):
        raise ValueError(
            f"{text!r} is not a PCI id; write four lower-case hex digits, such as 8086 (lspci -n shows vendor:device)"
        )
    return text


def _network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as exc:
        raise ValueError(f"{text!r} is not a network; write one such as 10.0.0.0/8 or fd00::/8") from exc


def _address(text: str) -> str:
    """A listening address; "" means that nothing listens."""
    try:
        _ = text and ListenAddress.parse(text)
    except InvalidRequest as exc:
        raise ValueError(str(exc)) from exc
    return text


AddressText = Annotated[str, AfterValidator(_address)]
HexId = Annotated[str, AfterValidator(_hex_id)]
PciText = Annotated[str, AfterValidator(_pci)]
NetworkText = Annotated[str, AfterValidator(_network)]
ResourceName = Annotated[str, AfterValidator(_resource)]
RuntimeName = Annotated[str, AfterValidator(_runtime)]
