"""What is the same in a CreateContainer that kubelet repeats. Pure."""

from __future__ import annotations

import dataclasses

from virtshim.domain.container import ContainerConfig
from virtshim.domain.guest.termination_message import termination_file


def comparable(config: ContainerConfig) -> ContainerConfig:
    """Without what kubelet makes anew for each call: the path of its file for the termination message is random, and the order of
    what it keeps in maps is (variables, devices)."""
    file = termination_file(config.annotations, config.mounts)
    mounts = config.mounts
    if file is not None:
        mounts = tuple(dataclasses.replace(one, host_path="") if one.host_path == file.host else one for one in mounts)
    return dataclasses.replace(
        config,
        mounts=mounts,
        envs=tuple(sorted(config.envs)),
        devices=tuple(sorted(config.devices, key=lambda one: (one.container_path, one.host_path, one.permissions))),
        cdi=tuple(sorted(config.cdi)),
    )
