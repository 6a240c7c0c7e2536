"""A node's agent: tells the API server what virtshim says about the node's VMs, and virtshim what the objects ask for.

The agent has no state of its own. VMs run on without it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import structlog

from virtshim.cluster import image_mappings
from virtshim.cluster.api import LEASES, PODS, VMS, Api, ConflictFound, Document, GoneFound, Notices, below
from virtshim.cluster.image_mappings import ImageMappings
from virtshim.cluster.node_words import BY_OPERATOR, REQUESTED, conditions, kept
from virtshim.cluster.reading import part, parts, pod_seen, said, stamp_of, text, vm_seen
from virtshim.cluster.values import AGENT_LEASE, PAUSED, VM_LABEL, PodSeen, Said, VmSeen
from virtshim.cri.operator_client import LastingVm
from virtshim.guest.operation import Action
from virtshim.kubeapi.kubeconfig import Access
from virtshim.kubeapi.watching import Collection
from virtshim.model.errors import ShimError, Unavailable
from virtshim.system.clock import Clock
from virtshim.system.rate_limits import TroubleLog

log = structlog.get_logger(__name__)

# Seconds: between two looks at the node's VMs; between two signs of life.
_LOOK: Final = 2.0
_SIGN: Final = 20.0


class NodeVms(Protocol):
    """virtshim's admin socket. Every call raises ShimError."""

    def lasting_vms(self) -> Sequence[LastingVm]: ...
    def inspect(self, vm: str) -> dict[str, Any]: ...
    def act(self, action: Action, vm: str, seconds: int = 0) -> tuple[bool, str]: ...
    def remove_vm(self, vm: LastingVm) -> str: ...
    def take_vm(self, vm: LastingVm) -> str: ...


def _quiet() -> None:
    """Nobody asks whether the agent is alive."""


@dataclass(slots=True)
class Agent:
    """`virtshim`: opens a client of the admin socket. `translations_dir`: where image mappings are mirrored, "" for nowhere.
    `alive`: is called while it works."""

    node: str
    namespace: str
    access: Callable[[], Access]
    clock: Clock
    virtshim: Callable[[], contextlib.AbstractContextManager[NodeVms]]
    translations_dir: str = ""
    alive: Callable[[], object] = _quiet
    api: Api = field(init=False)
    pods: Collection = field(init=False)
    vms: Collection = field(init=False)
    mappings: Collection = field(init=False)
    _mirror: ImageMappings = field(init=False)
    _signed_at: float = -_SIGN
    _failures: TroubleLog = field(init=False)

    def __post_init__(self) -> None:
        self.api = Api(self.access)
        self._failures = TroubleLog(log, over="agent.works_again")
        fields = f"spec.nodeName={self.node}"
        self.pods = Collection(self.access, PODS, _unused, self.clock, VM_LABEL, fields)
        self.vms = Collection(self.access, VMS, _unused, self.clock, wanted=_nodes_of)
        path = below(image_mappings.MAPPINGS, image_mappings.NAMESPACE)
        self.mappings = Collection(self.access, path, _unused, self.clock)
        notices = Notices(self.api, self.clock, "virtshim-agent", image_mappings.API_VERSION, image_mappings.KIND)
        self._mirror = ImageMappings(
            self.translations_dir,
            lambda one, reason, why: notices.tell(one, reason, f"node {self.node}: {why}", is_warning=True),
        )

    def start(self) -> None:
        """Raises Unavailable. Does not wait for image mappings, which a cluster may lack."""
        if self.translations_dir:
            self.mappings.start()
        for one in (self.vms, self.pods):
            one.start_and_list()

    def run(self, stopping: threading.Event) -> None:
        while not stopping.is_set():
            self.alive()
            self.look()
            self.clock.wait(stopping, _LOOK)

    def close(self) -> None:
        self.vms.close()
        self.pods.close()
        self.mappings.close()

    def look(self) -> None:
        """One round: reports the node's VMs, and does what the API server asks for. A VM that fails does not delay the others."""
        self._mirror_mappings()
        try:
            with self.virtshim() as virtshim:
                found = virtshim.lasting_vms()
                self._sign()
                for vm in found:
                    self._tried(vm.full_name, lambda vm=vm: self._settle(virtshim, vm, found))  # type: ignore[misc]
            self._forget_others(found)
            self._failures.over(key="node")
        except (ShimError, ConflictFound, LookupError) as exc:
            remedy = "is virtshim running, and does the API server answer?"
            self._failures.met("agent.failed", key="node", error=str(exc), remedy=remedy)

    def _mirror_mappings(self) -> None:
        """Waits until all mappings are known, because files of other mappings are removed. Works without virtshim."""
        if not self.translations_dir or not self.mappings.is_complete:
            return
        try:
            self._mirror.settle(self.mappings.all())
            self._failures.over(key="mappings")
        except Unavailable as exc:
            remedy = "the agent must be able to write to images.translations_dir"
            self._failures.met("agent.mappings_failed", key="mappings", error=str(exc), remedy=remedy)

    def _tried(self, key: str, act: Callable[[], None]) -> None:
        self.alive()
        try:
            act()
            self._failures.over(key=key)
        except (ShimError, ConflictFound, LookupError) as exc:
            self._failures.met("agent.vm_failed", key=key, vm=key, error=str(exc))

    def _sign(self) -> None:
        """Renews the agent's Lease, but only while virtshim answers, because the agent reports what virtshim says."""
        now = self.clock.monotonic()
        if now < self._signed_at + _SIGN:
            return
        name = f"{AGENT_LEASE}{self.node}"
        at = stamp_of(self.clock.now_ns() / 1e9).replace("Z", ".000000Z")
        spec = {"holderIdentity": self.node, "leaseDurationSeconds": int(3 * _SIGN), "renewTime": at}
        leases = f"{LEASES}/leases"
        try:
            self.api.change(below(leases, self.namespace, name), {"spec": spec})
        except GoneFound:
            document = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": name},
                "spec": spec,
            }
            self.api.create(below(leases, self.namespace), document)
        self._signed_at = now

    # --- one VM

    def _settle(self, virtshim: NodeVms, vm: LastingVm, found: Sequence[LastingVm]) -> None:
        document = self.vms.get(vm.namespace, vm.name)
        if document is None:
            return
        seen = vm_seen(document, has_budget=False)
        namespace, _, name = vm.pod.partition("/")
        user = self.pods.get(namespace, name)
        pod = pod_seen(user) if user is not None else None
        if user is not None and pod is not None and pod.owner == seen.uid:
            self._settle_pod(virtshim, vm, pod, user)
        if seen.deleting and not vm.vm_id:
            log.info("vm.removed", vm=vm.full_name, said=virtshim.remove_vm(vm))
            self._tell_kept(seen, None)
            return
        # One for each container of the pod that is a VM.
        mine = [kept(one) for one in found if (one.namespace, one.name) == (vm.namespace, vm.name)]
        told = [one for one in mine if one is not None]
        self._tell_kept(seen, max(told, key=lambda one: one.get("savedAt", 0), default=None))

    def _settle_pod(self, virtshim: NodeVms, vm: LastingVm, pod: PodSeen, document: Document) -> None:
        told = self._seen(virtshim, vm, pod)
        if vm.undecided and pod.asked_to_take:
            log.info("vm.taken", vm=vm.full_name, said=virtshim.take_vm(vm))
        paused = told.get(PAUSED, Said(False))
        if pod.asked_to_pause and not paused.is_true and not vm.comes_from and not vm.moved_to:
            virtshim.act(Action.PAUSE, vm.vm_id)
            told = {**self._seen(virtshim, vm, pod), PAUSED: Said(True, REQUESTED)}
        elif not pod.asked_to_pause and paused.is_true and paused.reason != BY_OPERATOR:
            virtshim.act(Action.RESUME, vm.vm_id)
            told = {**self._seen(virtshim, vm, pod), PAUSED: Said(False, "Resumed")}
        self._tell(pod, document, told)

    def _seen(self, virtshim: NodeVms, vm: LastingVm, pod: PodSeen) -> Mapping[str, Said]:
        return conditions(pod, vm, virtshim.inspect(vm.vm_id))

    def _tell(self, pod: PodSeen, document: Document, told: Mapping[str, Said]) -> None:
        had = {text(one, "type"): one for one in parts(part(document, "status"), "conditions")}
        news = {name: one for name, one in told.items() if said(had, name) != one}
        if not news:
            return
        now = stamp_of(self.clock.now_ns() / 1e9)
        made = [
            {
                "type": name,
                "status": "True" if one.is_true else "False",
                "reason": one.reason,
                "message": one.message,
                "lastTransitionTime": now,
            }
            for name, one in news.items()
        ]
        path = below(PODS, document["metadata"]["namespace"], pod.name, "status")
        written = self.api.change_lists(path, {"metadata": {"uid": pod.uid}, "status": {"conditions": made}})
        self.pods.wrote(written, pod.version)

    def _tell_kept(self, vm: VmSeen, found: Mapping[str, float | int] | None) -> None:
        nodes = part(vm.shown, "nodes")
        if nodes.get(self.node) == found:
            return
        # None removes fields that no longer apply, because a merge patch leaves fields that it does not name.
        whole = None if found is None else {"savedAt": None, "savedBytes": None, "lapsesAt": None, **found}
        path = below(VMS, vm.namespace, vm.name, "status")
        written = self.api.change(path, {"metadata": {"uid": vm.uid}, "status": {"nodes": {self.node: whole}}})
        self.vms.wrote(written, vm.version)

    def _forget_others(self, found: Sequence[LastingVm]) -> None:
        """Removes this node from the status of VMs of which it has nothing any more."""
        here = {(one.namespace, one.name) for one in found}
        for document in self.vms.all():
            seen = vm_seen(document, has_budget=False)
            if self.node in seen.kept and (seen.namespace, seen.name) not in here:
                self._tried(f"{seen.namespace}/{seen.name}", lambda seen=seen: self._tell_kept(seen, None))  # type: ignore[misc]


def _nodes_of(vm: Document) -> Document:
    """A cluster may have very many VMs, and each agent sees them all."""
    return {"status": {"nodes": part(part(vm, "status"), "nodes")}}


def _unused(_document: Document) -> None:
    """The agent looks at all objects each time."""
