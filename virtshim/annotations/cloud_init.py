"""Annotations for cloud-init and Ignition. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from virtshim.annotations.options import Reader, VmOptions, flag, one_of, sets
from virtshim.guest.login import parse_keys
from virtshim.model.errors import InvalidRequest
from virtshim.model.yaml_text import parse_mapping
from virtshim.seed.sources import DataSource, checked, parse_data_encoding, parse_data_key, parse_data_source

_USER_DATA_SOURCE: Final = "VirtletCloudInitUserDataSource"
_SOURCE_KEY: Final = f"{_USER_DATA_SOURCE}Key"
_SOURCE_ENCODING: Final = f"{_USER_DATA_SOURCE}Encoding"


def without_source(annotations: Mapping[str, str]) -> Iterator[str]:
    """Faults of annotations that belong to a source, or to its key, if the pod names no source."""
    for key in (_SOURCE_KEY, _SOURCE_ENCODING):
        if annotations.get(key) and not annotations.get(_USER_DATA_SOURCE):
            yield f"annotation {key}: belongs to {_USER_DATA_SOURCE}, which is missing; write that, or remove this one"
    if annotations.get(_SOURCE_ENCODING) == "base64" and not annotations.get(_SOURCE_KEY):
        yield f"annotation {_SOURCE_ENCODING}: belongs to a {_SOURCE_KEY}, which is missing; name one, or remove this one"


def _meta_data(text: str) -> dict[str, Any]:
    meta_data = parse_mapping(text)
    try:
        json.dumps(meta_data, allow_nan=False)
    except (TypeError, ValueError):
        raise InvalidRequest(
            "a value cannot be written as JSON (a date, binary data, .nan or .inf); put it in quotes"
        ) from None
    return meta_data


def _source(*, with_key: bool) -> Callable[[str], DataSource | None]:
    return lambda text: parse_data_source(text, with_key=with_key) if text else None


def _user_data_key(options: VmOptions, text: str) -> VmOptions:
    """Called after the annotation of the source was read, because its name sorts first."""
    key, source = parse_data_key(text) if text else "", options.user_data_source
    return dataclasses.replace(options, user_data_source=source and dataclasses.replace(source, key=key))


GUEST_DATA: Final[Mapping[str, Reader]] = {
    "VirtletCloudInitImageType": sets(
        "config_drive",
        lambda text: one_of(
            {"": False, "nocloud": False, "configdrive": True},
            "not a cloud-init image type; write nocloud or configdrive",
        )(text.lower()),
    ),
    "VirtletCloudInitMetaData": sets("meta_data", _meta_data),
    "VirtletCloudInitUserData": sets("user_data", parse_mapping),
    "VirtletCloudInitUserDataOverwrite": sets("user_data_overwrite", flag),
    "VirtletCloudInitUserDataScript": sets("user_data_script", str),
    "VirtletSSHKeys": sets("ssh_keys", parse_keys),
    "VirtletForceDHCPNetworkConfig": sets("force_dhcp", flag),
    _USER_DATA_SOURCE: sets("user_data_source", _source(with_key=False)),
    _SOURCE_KEY: _user_data_key,
    _SOURCE_ENCODING: sets("user_data_encoding", parse_data_encoding),
    "VirtletSSHKeySource": sets("ssh_key_source", _source(with_key=True)),
    "VirtletFilesFromDataSource": sets("files_source", _source(with_key=False)),
}

IGNITION: Final = "virtshim.io/ignition"
IGNITION_SOURCE: Final = "virtshim.io/ignition-source"
IGNITION_READERS: Final[Mapping[str, Reader]] = {
    IGNITION: sets("ignition", lambda text: checked(text) if text else ""),
    IGNITION_SOURCE: sets("ignition_source", _source(with_key=True)),
}


def ignition_of_two_places(annotations: Mapping[str, str]) -> Iterator[str]:
    """The fault of a pod that has both Ignition annotations."""
    if annotations.get(IGNITION) and annotations.get(IGNITION_SOURCE):
        yield f"annotation {IGNITION_SOURCE}: {IGNITION} is set too, but a guest has one configuration; remove one"
