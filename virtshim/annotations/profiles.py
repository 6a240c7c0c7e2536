"""Profiles: annotations that the node's operator has put together under a name. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from virtshim.model.errors import InvalidRequest

PROFILE_ANNOTATION: Final = "virtshim.io/profile"


@dataclass(frozen=True, slots=True)
class Profile:
    """`handlers`: the RuntimeClass handlers whose pods have the profile without naming it."""

    name: str
    annotations: Mapping[str, str] = field(repr=False)
    handlers: tuple[str, ...] = ()


# The profiles of every node; an operator's profile with the same name replaces one. This one is for an unmodified
# Windows without virtio drivers. It does not set the firmware, because only the disk knows which one it needs.
BUILT_IN: Final = (
    Profile(
        "windows",
        {
            "VirtletDiskDriver": "sata",
            "virtshim.io/nic-model": "e1000e",
            "virtshim.io/hyperv": "true",
            "virtshim.io/clock": "localtime",
            "virtshim.io/tablet": "true",
            "VirtletCloudInitImageType": "configdrive",
        },
    ),
)


def of_pod(profiles: Sequence[Profile], annotations: Mapping[str, str], handler: str) -> Mapping[str, str]:
    """The annotations of the profile that the pod names, or else of its handler's profile; the pod's own annotations
    override them. Raises InvalidRequest for a profile that this node does not have."""
    profiles = [*profiles, *(one for one in BUILT_IN if all(one.name != own.name for own in profiles))]
    name = annotations.get(PROFILE_ANNOTATION, "")
    if not name:
        return next((one.annotations for one in profiles if handler and handler in one.handlers), {})
    for one in profiles:
        if one.name == name:
            return one.annotations
    known = [one.name for one in profiles]
    near = difflib.get_close_matches(name[:100], known, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)} (vm.profiles makes more)"
    raise InvalidRequest(f"annotation {PROFILE_ANNOTATION}: this node has no profile {name[:80]!r}; {remedy}")
