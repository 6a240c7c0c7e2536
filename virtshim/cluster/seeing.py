"""What the API server has, as far as the controller knows: by watches, and as values."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

from virtshim.cluster.api import BUDGETS, LEASES, NODES, PODS, VMS, Document, below
from virtshim.cluster.reading import node_seen, part, parts, pod_seen, seconds_of, text, vm_seen
from virtshim.cluster.turns import Key
from virtshim.cluster.values import AGENT_LASTS, AGENT_LEASE, VM_LABEL, NodeSeen, PodSeen, VmSeen, budget_name
from virtshim.kubeapi.kubeconfig import Access
from virtshim.kubeapi.watching import Collection
from virtshim.system.clock import Clock


class Cluster:
    """Thread-safe."""

    def __init__(
        self, access: Callable[[], Access], clock: Clock, namespace: str, touched: Callable[[Key], None]
    ) -> None:
        """`namespace`: where the agents' leases are. `touched`: is called with the name of a VM about which something is new."""
        self._touched = touched
        self._clock = clock
        self._lock = threading.Lock()
        self._nodes: dict[str, NodeSeen] = {}
        # Of each node's agent: the last sign, and when it counts from.
        self._signs: dict[str, tuple[str, float]] = {}
        self.vms = Collection(access, VMS, self._vm_changed, clock)
        self.pods = Collection(access, PODS, self._owned_changed, clock, VM_LABEL)
        self.budgets = Collection(access, BUDGETS, self._owned_changed, clock, VM_LABEL)
        self.nodes = Collection(access, NODES, self._node_changed, clock)
        self.leases = Collection(access, below(f"{LEASES}/leases", namespace), self._lease_changed, clock)

    @property
    def collections(self) -> tuple[Collection, ...]:
        return self.leases, self.nodes, self.budgets, self.vms, self.pods

    def seen(self, document: Document) -> VmSeen:
        metadata = document["metadata"]
        found = self.budgets.get(metadata["namespace"], budget_name(metadata["name"]))
        return vm_seen(document, has_budget=found is not None and _owner(found) == metadata["uid"])

    def pods_of(self, vm: VmSeen) -> list[PodSeen]:
        """Those with its label, whoever owns them."""
        return [
            pod_seen(one)
            for one in self.pods.all()
            if one["metadata"]["namespace"] == vm.namespace and _vm_of(one) == vm.name
        ]

    def nodes_seen(self) -> list[NodeSeen]:
        with self._lock:
            signs = {name: at for name, (_, at) in self._signs.items()}
            return [dataclasses.replace(one, agent_at=signs.get(one.name, 0.0)) for one in self._nodes.values()]

    def moving(self, besides: VmSeen) -> list[PodSeen]:
        """The first pods of the other VMs that move now."""
        found = []
        for document in self.vms.all():
            record = part(part(document, "status"), "record")
            if not part(record, "target") or document["metadata"]["uid"] == besides.uid:
                continue
            pod = self.pods.get(document["metadata"]["namespace"], text(part(record, "pod"), "name"))
            if pod is not None:
                found.append(pod_seen(pod))
        return found

    def _vm_changed(self, document: Document) -> None:
        self._touched((document["metadata"]["namespace"], document["metadata"]["name"]))

    def _owned_changed(self, document: Document) -> None:
        if name := _vm_of(document):
            self._touched((document["metadata"]["namespace"], name))

    def _node_changed(self, document: Document) -> None:
        """kubelet writes its node's status all the time; only what plans look at counts."""
        now = node_seen(document, 0.0)
        is_there = self.nodes.get("", now.name) is not None
        with self._lock:
            before = self._nodes.pop(now.name, None)
            if is_there:
                self._nodes[now.name] = now
        if not is_there or before != now:
            self._all_touched()

    def _lease_changed(self, document: Document) -> None:
        """An agent that renews its lease in time changes nothing. An agent that was away and renews its lease does.

        A sign counts from when it is seen, because the node's clock may be wrong. The first sign that is seen may be old, so its
        stamp counts unless the stamp is in the future."""
        node = document["metadata"]["name"].removeprefix(AGENT_LEASE)
        stamp, now = text(part(document, "spec"), "renewTime"), self._clock.now_ns() / 1e9
        with self._lock:
            known, before = self._signs.get(node, ("", 0.0))
            if stamp == known:
                return
            at = now if known else min(seconds_of(stamp), now)
            self._signs[node] = (stamp, at)
        if at >= before + AGENT_LASTS:
            self._all_touched()

    def _all_touched(self) -> None:
        for document in self.vms.all():
            self._vm_changed(document)


def _vm_of(document: Document) -> str:
    return text(part(document["metadata"], "labels"), VM_LABEL)


def _owner(document: Document) -> str:
    owners = [one for one in parts(document["metadata"], "ownerReferences") if one.get("controller") is True]
    return text(owners[0], "uid") if owners else ""
