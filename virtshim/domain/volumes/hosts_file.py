"""/etc/hosts in the guest: kubelet's, unless the pod's own user-data says what it is to be. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

HOSTS: Final = "/etc/hosts"


def says_hosts(user_data: Mapping[str, Any]) -> bool:
    return "manage_etc_hosts" in user_data or HOSTS in written_paths(user_data)


def written_paths(user_data: Mapping[str, Any]) -> list[Any]:
    """Of `write_files`; of a document that cloud-init would not take either, nothing."""
    files = user_data.get("write_files")
    return [file.get("path") for file in files if isinstance(file, Mapping)] if isinstance(files, list) else []
