"""/etc/hosts in the guest: kubelet's, unless the pod's own user-data, or a file of its own, says what it is to be. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from virtshim.domain.annotations.options import VmOptions

HOSTS: Final = "/etc/hosts"


def says_hosts(options: VmOptions) -> bool:
    asked = options.user_data
    return "manage_etc_hosts" in asked or HOSTS in written_paths(asked) or HOSTS in options.files


def written_paths(user_data: Mapping[str, Any]) -> list[Any]:
    """Of `write_files`; of a document that cloud-init would not take either, nothing."""
    files = user_data.get("write_files")
    return [file.get("path") for file in files if isinstance(file, Mapping)] if isinstance(files, list) else []
