"""The steps of a plan: each is one write to the API server. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from virtshim.cluster.values import PodRef, PodSeen, Record


@dataclass(frozen=True, slots=True)
class Place:
    """Where a new pod may run. `only`, `rather`, `never`: names of nodes, "" for none."""

    only: str = ""
    rather: str = ""
    never: str = ""


@dataclass(frozen=True, slots=True)
class Create:
    """A new pod, which is not scheduled before the record names it. `restore_from`: the node that the VM moves from. `move_to`:
    the request of the spec that it is made for."""

    place: Place = Place()
    restore_from: str = ""
    move_to: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """The record becomes this one. `reason` and `message` are an event, if there is a reason."""

    record: Record
    reason: str = ""
    message: str = ""
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class Forget:
    """The record no longer names this pod, if the API server says that the pod is gone: what the controller has seen may be
    older than the pod."""

    pod: PodRef


@dataclass(frozen=True, slots=True)
class Ungate:
    """Gives a pod that the record names to the scheduler."""

    pod: PodSeen


@dataclass(frozen=True, slots=True)
class Delete:
    """Ends a pod in its grace period, if neither the VM nor the pod has changed since the controller saw them. `warning`: the
    reason of its event, "" for an ordinary one."""

    pod: PodSeen
    why: str
    warning: str = ""


@dataclass(frozen=True, slots=True)
class AskToPause:
    """Tells the agent of the pod's node whether the VM is to be paused."""

    pod: PodSeen
    paused: bool


@dataclass(frozen=True, slots=True)
class SetBudget:
    """Makes the VM's PodDisruptionBudget, or removes it."""

    exists: bool


@dataclass(frozen=True, slots=True)
class SetFinalizer:
    """`given_up`: nodes that keep something of the VM and are gone."""

    exists: bool
    given_up: tuple[str, ...] = ()


Step = Create | Note | Forget | Ungate | Delete | AskToPause | SetBudget | SetFinalizer
