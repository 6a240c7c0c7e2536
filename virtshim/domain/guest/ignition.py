"""Configurations of Ignition, which sets up Fedora CoreOS and Flatcar at their first boot from what the firmware has. Pure."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from virtshim.domain.errors import InvalidRequest

# Where a guest's firmware has it: Fedora CoreOS, RHEL CoreOS; Flatcar. An image looks at its own alone.
FIRMWARE_NAMES: Final = ("opt/com.coreos/config", "opt/org.flatcar-linux/config")
# A key of a Secret or ConfigMap.
DEFAULT_KEY: Final = "config.ign"

_VERSION: Final = re.compile(r"[23]\.[0-9]{1,3}\.[0-9]{1,3}(?:-[a-z0-9.-]{1,40})?")


def checked(text: str) -> str:
    """As it is. Raises InvalidRequest, which shows nothing of what is in it, for what no Ignition would read."""
    try:
        document = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        place = f" at line {exc.lineno}, column {exc.colno}" if isinstance(exc, json.JSONDecodeError) else ""
        raise InvalidRequest(
            f"not valid JSON{place}; Ignition reads no YAML: translate a Butane configuration with butane"
        ) from None
    if not isinstance(document, dict) or not isinstance(document.get("ignition"), dict):
        raise InvalidRequest('no Ignition configuration; it begins {"ignition": {"version": "3.3.0"}}')
    version: Any = document["ignition"].get("version")
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise InvalidRequest(
            "ignition.version is missing, or none of 2.x.x and 3.x.x; write the specification's version"
        )
    return text


def _no_constant(name: str) -> Any:
    raise ValueError(name)
