"""The three documents of a NoCloud seed: meta-data, user-data, network-config. No I/O.

meta-data and network-config are JSON, which is also YAML: cloud-init reads both, and a small guest needs no YAML parser.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml

from virtshim.domain.errors import InvalidRequest
from virtshim.guestinit.merge import merged
from virtshim.guestinit.network_config import network_config
from virtshim.guestinit.resolver import resolver_settings
from virtshim.ports.seeds import SeedRequest

_MAX_BYTES: Final = 1024 * 1024
_MAX_HOSTNAME: Final = 63

# Virtlet's users put it on a line of its own, where the script wants its volumes mounted. There are none to mount yet.
_MOUNT_TOKEN: Final = "@virtlet-mount-script@"  # noqa: S105 (a placeholder in a text)
_MOUNT_SCRIPT: Final = "# virtshim: no volumes to mount"


@dataclass(frozen=True, slots=True)
class SeedDocuments:
    """`network_config` None: the guest asks by DHCP."""

    meta_data: str
    user_data: str
    network_config: str | None


def seed_documents(request: SeedRequest) -> SeedDocuments:
    """InvalidRequest if a document would be too large."""
    network = None if request.options.force_dhcp else network_config(request.interfaces, request.dns)
    documents = SeedDocuments(
        meta_data=_json(_meta_data(request)),
        user_data=_user_data(request),
        network_config=None if network is None else _json(network),
    )
    for name, text in (("meta-data", documents.meta_data), ("user-data", documents.user_data)):
        if len(text.encode()) > _MAX_BYTES:
            raise InvalidRequest(f"cloud-init {name} is larger than {_MAX_BYTES} bytes; shorten the annotations")
    return documents


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _meta_data(request: SeedRequest) -> dict[str, Any]:
    """cloud-init runs its once-per-instance part whenever `instance-id` is a new one. It is made of the container's id: a
    re-created container has a new disk, so everything must run again, which a name made of the pod's would prevent."""
    generated: dict[str, Any] = {
        "instance-id": f"i-{request.container.short}",
        "local-hostname": _hostname(request),
    }
    if request.options.ssh_keys:
        generated["public-keys"] = list(request.options.ssh_keys)
    return {**generated, **request.options.meta_data}


def _hostname(request: SeedRequest) -> str:
    """A pod's name may be longer than Linux allows a hostname to be."""
    return (request.hostname or request.pod.name)[:_MAX_HOSTNAME].rstrip("-.")


def _user_data(request: SeedRequest) -> str:
    """A script replaces everything that is generated."""
    options = request.options
    if options.user_data_script:
        return options.user_data_script.replace(_MOUNT_TOKEN, _MOUNT_SCRIPT)
    generated = {} if options.user_data_overwrite else _generated_user_data(request)
    document = merged(options.user_data, generated)
    # ASCII only: PyYAML does not read back every character that it writes plainly (U+0085).
    return "#cloud-config\n" + yaml.safe_dump(document, sort_keys=False, allow_unicode=False, width=120)


def _generated_user_data(request: SeedRequest) -> dict[str, Any]:
    """What the pod asks of the guest besides its annotations."""
    return resolver_settings(request.dns, request.options.user_data)
