"""VirtualMachine objects, and what the controller sees of the cluster. Pure."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from virtshim.annotations.names import ON_STOP_ANNOTATION, STATE_VOLUME_ANNOTATION

GROUP: Final = "virtshim.io"
API_VERSION: Final = f"{GROUP}/v1alpha1"
KIND: Final = "VirtualMachine"

# The label and the annotation of a VM's pods; the annotation is the runtime's.
VM_LABEL: Final = "virtshim.io/vm"
# Keeps a new pod from the scheduler until the VM's status names it.
GATE: Final = "virtshim.io/recorded"
FINALIZER: Final = "virtshim.io/kept"
# Conditions of pods, written by the node's agent.
ARRIVED: Final = "virtshim.io/arrived"
MOVED: Final = "virtshim.io/moved"
MOVABLE: Final = "virtshim.io/movable"
PAUSED: Final = "virtshim.io/paused"
# The reason of ARRIVED: all of the VM is there, and only the other node knows whether it may run.
UNDECIDED: Final = "Undecided"
# Annotations of pods, written by the controller. The runtime refuses names below virtshim.io/ that it does not know.
OWN_PREFIX: Final = "cluster.virtshim.io/"
TEMPLATE: Final = f"{OWN_PREFIX}template"
RESTARTED_AT: Final = f"{OWN_PREFIX}restarted-at"
MOVE_TO: Final = f"{OWN_PREFIX}move-to"
ASKED_TO_PAUSE: Final = f"{OWN_PREFIX}pause"
# Written by an operator onto the pod where a VM waits for a node that is gone for good: it runs there from then on.
TAKE: Final = f"{OWN_PREFIX}take"
# The prefix of the names of agents' leases.
AGENT_LEASE: Final = "virtshim-agent."

# Seconds after its last request until an eviction no longer counts; kubectl asks every 5 s.
EVICTION_LASTS: Final = 60.0
# Seconds after an agent's last sign until what it said is doubted.
AGENT_LASTS: Final = 60.0
# Seconds until the second try to make an object that the API server has refused, and between later ones at most.
_FIRST_AGAIN: Final = 5.0
_LONGEST_AGAIN: Final = 300.0


class State(enum.StrEnum):
    RUNNING = "Running"
    STOPPED = "Stopped"
    PAUSED = "Paused"
    SAVED = "Saved"


class Drain(enum.StrEnum):
    """What an eviction of the VM's pod does."""

    MOVE = "Move"
    SAVE = "Save"
    RESTART = "Restart"
    BLOCK = "Block"


@dataclass(frozen=True, slots=True)
class Spec:
    """`template`: a PodTemplateSpec. `restarted_at`, `move_to`: each new value is one request; "" for none."""

    state: State = State.RUNNING
    drain: Drain = Drain.MOVE
    stay_on_node: bool = False
    restarted_at: str = ""
    move_to: str = ""
    template: Mapping[str, Any] = field(default_factory=dict)

    @property
    def wants_pod(self) -> bool:
        return self.state in (State.RUNNING, State.PAUSED)

    @property
    def annotations(self) -> Mapping[str, str]:
        found = (self.template.get("metadata") or {}).get("annotations")
        return found if isinstance(found, dict) else {}

    @property
    def has_volume(self) -> bool:
        return bool(self.annotations.get(STATE_VOLUME_ANNOTATION))

    @property
    def stop_saves(self) -> bool:
        """Whether the stop of a new pod saves: a state volume is for that."""
        return self.has_volume or self.annotations.get(ON_STOP_ANNOTATION) == "save"


@dataclass(frozen=True, slots=True)
class PodRef:
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Eviction:
    """Somebody asks to evict the pod `pod` (a UID). `at`: the last request, in seconds since the epoch. `cordoned`: whether its
    node took no new pods then."""

    pod: str
    at: float
    cordoned: bool = False

    @property
    def until(self) -> float:
        return self.at + EVICTION_LASTS

    def counts(self, node: NodeSeen | None, now: float) -> bool:
        """Whether the eviction still counts: its time is not over, and nobody has uncordoned the node."""
        is_undone = self.cordoned and node is not None and not node.cordoned
        return now < self.until and not is_undone


@dataclass(frozen=True, slots=True)
class Refusal:
    """The API server does not take an object of the VM, or a move fails. `generation`: of the spec that asked for it. `tries`: in
    a row, the last one at `at`, in seconds since the epoch."""

    why: str
    generation: int
    tries: int
    at: float

    @property
    def next_try(self) -> float:
        return self.at + min(_LONGEST_AGAIN, _FIRST_AGAIN * 2.0 ** min(self.tries - 1, 10))


def refused_again(had: Refusal | None, why: str, generation: int, now: float) -> Refusal:
    """A change of the spec begins anew."""
    tries = had.tries + 1 if had is not None and had.generation == generation else 1
    return Refusal(why, generation, tries, now)


@dataclass(frozen=True, slots=True)
class Record:
    """What the VM's status says for the controller itself. Only pods that it names are ever scheduled, so each change of it is
    one write, guarded by the version of the object.

    `pod`: the one that runs the VM. `target`: the one that it moves to. `node`: where the VM ran last. `moved_to`,
    `restarted_at`: the last requests of the spec that are done. `failures`: pods that ended soon after their start, in a row;
    the last one at `ended_at`. `pod_refusal`, `budget_refusal`: of the last tries to make the next pod or to move, and to make
    the budget."""

    pod: PodRef | None = None
    target: PodRef | None = None
    node: str = ""
    moved_to: str = ""
    restarted_at: str = ""
    failures: int = 0
    ended_at: float = 0.0
    pod_refusal: Refusal | None = None
    budget_refusal: Refusal | None = None

    def names(self, uid: str) -> bool:
        return any(one is not None and one.uid == uid for one in (self.pod, self.target))

    def replace(self, **changed: Any) -> Record:
        return dataclasses.replace(self, **changed)


@dataclass(frozen=True, slots=True)
class Kept:
    """What a node keeps of a VM. `saved_at`: of its memory, in seconds since the epoch; 0 if no memory is saved."""

    saved_at: float = 0.0
    saved_bytes: int = 0
    lapses_at: float = 0.0


@dataclass(frozen=True, slots=True)
class VmSeen:
    """A VirtualMachine. `version`: its resourceVersion. `kept`: by node, as the agents say. `shown`: the status as it is written
    now. `has_budget`: whether its PodDisruptionBudget exists. `generation`: is another one after each change of the spec."""

    namespace: str
    name: str
    uid: str
    version: str
    spec: Spec = Spec()
    record: Record = Record()
    eviction: Eviction | None = None
    kept: Mapping[str, Kept] = field(default_factory=dict)
    shown: Mapping[str, Any] = field(default_factory=dict)
    deleting: bool = False
    has_finalizer: bool = False
    has_budget: bool = False
    generation: int = 0

    @property
    def saved(self) -> Mapping[str, Kept]:
        """The saved memories, by node. A node that has copied one to a state volume does not learn that the VM has continued on
        another node."""
        saved = {name: kept for name, kept in self.kept.items() if kept.saved_at}
        last = self.record.node
        return {name: kept for name, kept in saved.items() if name == last} if self.spec.has_volume else saved

    @property
    def wants_budget(self) -> bool:
        """Whether its pod is protected while nobody answers for the controller."""
        return not self.deleting and self.spec.drain in (Drain.MOVE, Drain.BLOCK)

    @property
    def pod_refusal(self) -> Refusal | None:
        """Why there is no pod of this spec, or no move; None if nothing is known against them."""
        return self._of_this_spec(self.record.pod_refusal)

    @property
    def budget_refusal(self) -> Refusal | None:
        """Not the first one: the watch of budgets may be behind another controller that has just made it."""
        found = self._of_this_spec(self.record.budget_refusal)
        return found if found is not None and found.tries > 1 and self.wants_budget else None

    def waits_to_try(self, refusal: Refusal | None, now: float) -> bool:
        found = self._of_this_spec(refusal)
        return found is not None and now < found.next_try

    def _of_this_spec(self, refusal: Refusal | None) -> Refusal | None:
        return refusal if refusal is not None and refusal.generation == self.generation else None


@dataclass(frozen=True, slots=True)
class Said:
    """A condition of a pod."""

    is_true: bool
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class PodSeen:
    """A pod. `owner`: the UID of the object that controls it. `gated`: not yet for the scheduler. `restore_from`: the node that
    its VM is to come from. `move_to`: the only node that it was made for. `stop_saves`, `has_volume`: whether its
    annotations ask for a save at its stop, and for a state volume. `unplaced`: the scheduler's message. `trouble`: kubelet's
    message about its container. A condition that nobody has written is None."""

    name: str
    uid: str
    version: str
    owner: str = ""
    created_at: float = 0.0
    node: str = ""
    phase: str = "Pending"
    deleting: bool = False
    gated: bool = False
    ready: bool = False
    runs: bool = False
    restore_from: str = ""
    move_to: str = ""
    template: str = ""
    restarted_at: str = ""
    stop_saves: bool = False
    has_volume: bool = False
    asked_to_pause: bool = False
    asked_to_take: bool = False
    arrived: Said | None = None
    moved: Said | None = None
    movable: Said | None = None
    paused: Said | None = None
    unplaced: str = ""
    trouble: str = ""

    @property
    def ref(self) -> PodRef:
        return PodRef(self.name, self.uid)

    @property
    def is_over(self) -> bool:
        """kubelet has ended it for good."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def may_run(self) -> bool:
        return not self.gated and not self.is_over

    @property
    def has_arrived(self) -> bool:
        return self.arrived is not None and self.arrived.is_true

    @property
    def has_moved(self) -> bool:
        """Its VM is another node's, for good."""
        return self.moved is not None and self.moved.is_true

    @property
    def is_paused(self) -> bool:
        return self.paused is not None and self.paused.is_true

    @property
    def is_undecided(self) -> bool:
        return self.arrived is not None and not self.arrived.is_true and self.arrived.reason == UNDECIDED


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """`agent_at`: the last sign of its agent, in seconds since the epoch; 0 if there was none."""

    name: str
    ready: bool = True
    cordoned: bool = False
    agent_at: float = 0.0

    @property
    def doubted_at(self) -> float:
        return self.agent_at + AGENT_LASTS

    def agent_is_silent(self, now: float) -> bool:
        return now >= self.doubted_at


def budget_name(vm: str) -> str:
    """The name of the PodDisruptionBudget of a VM."""
    return f"virtshim-{vm}"


def seen_pod(ref: PodRef | None, pods: Iterable[PodSeen]) -> PodSeen | None:
    """The pod that the record names, if it is seen."""
    return next((one for one in pods if ref is not None and one.uid == ref.uid), None)


def named(nodes: Iterable[NodeSeen], name: str) -> NodeSeen | None:
    return next((one for one in nodes if name and one.name == name), None)
