"""Annotations for Ignition. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Final

from virtshim.domain.annotations.options import VmOptions
from virtshim.domain.annotations.values import Reader
from virtshim.domain.guest.data_source import parse_source
from virtshim.domain.guest.ignition import checked

OWN: Final = "virtshim.io/ignition"
SOURCE: Final = "virtshim.io/ignition-source"


def _own(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, ignition=checked(text) if text else "")


def _source(options: VmOptions, text: str) -> VmOptions:
    source = parse_source(text, with_key=True) if text else None
    return dataclasses.replace(options, ignition_source=source)


def of_two_places(annotations: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with a pod that has both."""
    if annotations.get(OWN) and annotations.get(SOURCE):
        yield f"annotation {SOURCE}: {OWN} is there as well, and a guest has one configuration; remove one"


READERS: Final[Mapping[str, Reader]] = {OWN: _own, SOURCE: _source}
