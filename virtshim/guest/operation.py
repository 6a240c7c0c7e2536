"""Operators' actions on VMs, and their results. No I/O."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # commands and the agent of a cluster use actions without records of containers
    from virtshim.model.container import Container
    from virtshim.model.ids import ContainerId, SandboxId


class Action(enum.Enum):
    PAUSE = "pause"
    RESUME = "resume"
    RESET = "reset"
    REBOOT = "reboot"
    FREEZE = "freeze"
    THAW = "thaw"
    SAVE = "save"
    RENEW = "renew"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`changed`: False if nothing had to change. `message`: for people."""

    changed: bool
    message: str


@dataclass(frozen=True, slots=True)
class ActionTaken:
    """`at`: nanoseconds since the epoch."""

    at: int
    action: Action
    container: ContainerId
    sandbox: SandboxId
    namespace: str
    pod: str
    message: str


def paused_by_operator(container: Container, *, paused: bool) -> Container:
    """Changes the record only; the caller pauses or resumes the VM."""
    return dataclasses.replace(container, status=dataclasses.replace(container.status, paused=paused))
