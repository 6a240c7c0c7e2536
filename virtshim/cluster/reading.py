"""Objects of the API server as values. Pure.

Fields that are missing or of another type count as unset: the schema refuses them, and no object may make the controller fail."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any, TypeVar

from virtshim.annotations.names import ON_STOP_ANNOTATION, RESTORE_FROM_ANNOTATION, STATE_VOLUME_ANNOTATION
from virtshim.cluster.values import (
    ARRIVED,
    ASKED_TO_PAUSE,
    FINALIZER,
    GATE,
    MOVABLE,
    MOVE_TO,
    MOVED,
    PAUSED,
    RESTARTED_AT,
    TAKE,
    TEMPLATE,
    Drain,
    Eviction,
    Kept,
    NodeSeen,
    PodRef,
    PodSeen,
    Record,
    Refusal,
    Said,
    Spec,
    State,
    VmSeen,
)

Document = Mapping[str, Any]
_Choice = TypeVar("_Choice", State, Drain)


def vm_seen(document: Document, *, has_budget: bool) -> VmSeen:
    metadata, spec, status = (part(document, name) for name in ("metadata", "spec", "status"))
    nodes = part(status, "nodes")
    return VmSeen(
        namespace=text(metadata, "namespace"),
        name=text(metadata, "name"),
        uid=text(metadata, "uid"),
        version=text(metadata, "resourceVersion"),
        spec=Spec(
            state=_one_of(State, text(spec, "state"), State.RUNNING),
            drain=_one_of(Drain, text(spec, "drain"), Drain.MOVE),
            stay_on_node=spec.get("stayOnNode") is True,
            restarted_at=text(spec, "restartedAt"),
            move_to=text(spec, "moveTo"),
            template=part(spec, "template"),
        ),
        record=_record(part(status, "record")),
        eviction=_eviction(part(status, "eviction")),
        kept={name: _kept(part(nodes, name)) for name in nodes if isinstance(nodes[name], dict)},
        shown=status,
        deleting=bool(text(metadata, "deletionTimestamp")),
        has_finalizer=FINALIZER in words(metadata, "finalizers"),
        has_budget=has_budget,
        generation=int(number(metadata, "generation")),
    )


def pod_seen(document: Document) -> PodSeen:
    metadata, spec, status = (part(document, name) for name in ("metadata", "spec", "status"))
    annotations = part(metadata, "annotations")
    conditions = {text(one, "type"): one for one in parts(status, "conditions")}
    owners = [one for one in parts(metadata, "ownerReferences") if one.get("controller") is True]
    containers = parts(status, "containerStatuses")
    scheduled = conditions.get("PodScheduled", {})
    is_unplaced = text(scheduled, "status") == "False" and text(scheduled, "reason") == "Unschedulable"
    return PodSeen(
        name=text(metadata, "name"),
        uid=text(metadata, "uid"),
        version=text(metadata, "resourceVersion"),
        owner=text(owners[0], "uid") if owners else "",
        created_at=seconds_of(text(metadata, "creationTimestamp")),
        node=text(spec, "nodeName"),
        phase=text(status, "phase") or "Pending",
        deleting=bool(text(metadata, "deletionTimestamp")),
        gated=any(text(one, "name") == GATE for one in parts(spec, "schedulingGates")),
        ready=text(conditions.get("Ready", {}), "status") == "True",
        runs=_runs(annotations, containers, said(conditions, ARRIVED)),
        restore_from=text(annotations, RESTORE_FROM_ANNOTATION),
        move_to=text(annotations, MOVE_TO),
        template=text(annotations, TEMPLATE),
        restarted_at=text(annotations, RESTARTED_AT),
        stop_saves=text(annotations, ON_STOP_ANNOTATION) == "save",
        has_volume=bool(text(annotations, STATE_VOLUME_ANNOTATION)),
        asked_to_pause=text(annotations, ASKED_TO_PAUSE) == "true",
        asked_to_take=text(annotations, TAKE) == "true",
        arrived=said(conditions, ARRIVED),
        moved=said(conditions, MOVED),
        movable=said(conditions, MOVABLE),
        paused=said(conditions, PAUSED),
        unplaced=text(scheduled, "message") if is_unplaced else "",
        # kubelet says only there why it has refused or evicted a pod.
        trouble=_trouble(containers) or text(status, "message")[:1024],
    )


def node_seen(document: Document, agent_at: float) -> NodeSeen:
    """`agent_at`: the last sign of its agent, in seconds since the epoch."""
    conditions = {text(one, "type"): text(one, "status") for one in parts(part(document, "status"), "conditions")}
    return NodeSeen(
        name=text(part(document, "metadata"), "name"),
        ready=conditions.get("Ready") == "True",
        cordoned=part(document, "spec").get("unschedulable") is True,
        agent_at=agent_at,
    )


def said(conditions: Mapping[str, Document], name: str) -> Said | None:
    found = conditions.get(name)
    if found is None or text(found, "status") not in ("True", "False"):
        return None
    return Said(text(found, "status") == "True", text(found, "reason"), text(found, "message"))


def _runs(annotations: Document, containers: list[Document], arrived: Said | None) -> bool:
    """Whether the VM runs in the pod. The container of a target runs before all of the VM has arrived."""
    if text(annotations, RESTORE_FROM_ANNOTATION) and (arrived is None or not arrived.is_true):
        return False
    return any(part(one, "state").get("running") is not None for one in containers)


def _trouble(containers: list[Document]) -> str:
    """kubelet's words about a container that does not run: why it waits, and how its last run ended."""
    for one in containers:
        state, last = part(one, "state"), part(one, "lastState")
        waiting, ended = part(state, "waiting"), part(state, "terminated") or part(last, "terminated")
        if "running" in state or not (waiting or ended):
            continue
        found = [text(waiting, "message") or text(waiting, "reason"), text(ended, "message") or text(ended, "reason")]
        return "; ".join(one for one in found if one)[:1024]
    return ""


def _record(found: Document) -> Record:
    return Record(
        pod=_ref(part(found, "pod")),
        target=_ref(part(found, "target")),
        node=text(found, "node"),
        moved_to=text(found, "movedTo"),
        restarted_at=text(found, "restartedAt"),
        failures=int(number(found, "failures")),
        ended_at=number(found, "endedAt"),
        pod_refusal=_refusal(part(found, "podRefusal")),
        budget_refusal=_refusal(part(found, "budgetRefusal")),
    )


def _refusal(found: Document) -> Refusal | None:
    tries = int(number(found, "tries"))
    if tries < 1:
        return None
    return Refusal(text(found, "why"), int(number(found, "generation")), tries, number(found, "at"))


def _ref(found: Document) -> PodRef | None:
    return PodRef(text(found, "name"), text(found, "uid")) if text(found, "uid") else None


def _eviction(found: Document) -> Eviction | None:
    pod = text(found, "podUID")
    return Eviction(pod, number(found, "at"), found.get("cordoned") is True) if pod else None


def _kept(found: Document) -> Kept:
    return Kept(number(found, "savedAt"), int(number(found, "savedBytes")), number(found, "lapsesAt"))


def _one_of(kind: type[_Choice], found: str, usual: _Choice) -> _Choice:
    return kind(found) if found in list(kind) else usual


# --- parts of documents


def part(document: Document, name: str) -> Document:
    """{} if it is missing or no object."""
    found = document.get(name)
    return found if isinstance(found, dict) else {}


def parts(document: Document, name: str) -> list[Document]:
    found = document.get(name)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def words(document: Document, name: str) -> list[str]:
    found = document.get(name)
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def text(document: Document, name: str) -> str:
    found = document.get(name)
    return found if isinstance(found, str) else ""


def number(document: Document, name: str) -> float:
    found = document.get(name)
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else 0.0


def seconds_of(stamp: str) -> float:
    """Of a time as Kubernetes writes it, since the epoch; 0 if there is none."""
    try:
        return dt.datetime.fromisoformat(stamp).timestamp() if stamp else 0.0
    except ValueError:
        return 0.0


def stamp_of(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
