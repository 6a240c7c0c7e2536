"""Objects and changes of objects for the API server. Pure."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from virtshim.annotations.names import ON_STOP_ANNOTATION, RESTORE_FROM_ANNOTATION
from virtshim.cluster.reading import number, part, parts, stamp_of, text
from virtshim.cluster.status import Shown, fingerprint
from virtshim.cluster.steps import Create
from virtshim.cluster.values import (
    API_VERSION,
    ARRIVED,
    ASKED_TO_PAUSE,
    GATE,
    KIND,
    MOVE_TO,
    RESTARTED_AT,
    TEMPLATE,
    VM_LABEL,
    Eviction,
    PodRef,
    PodSeen,
    Record,
    Refusal,
    VmSeen,
    budget_name,
)

_NAME: Final = "metadata.name"
_RUNTIME_CLASS: Final = "virtshim"
# Seconds.
_LONGEST_MOVE: Final = 86400


def owner(vm: VmSeen) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": vm.name,
        "uid": vm.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def pod(vm: VmSeen, made: Create) -> dict[str, Any]:
    """A pod from the VM's template, behind a gate."""
    template = copy.deepcopy(dict(vm.spec.template))
    spec, metadata = dict(part(template, "spec")), part(template, "metadata")
    annotations = {**part(metadata, "annotations"), VM_LABEL: vm.name, TEMPLATE: fingerprint(vm.spec.template)}
    if vm.spec.stop_saves:
        annotations[ON_STOP_ANNOTATION] = "save"
    own = {RESTORE_FROM_ANNOTATION: made.restore_from, MOVE_TO: made.move_to, RESTARTED_AT: vm.spec.restarted_at}
    annotations |= {name: value for name, value in own.items() if value}
    spec.setdefault("runtimeClassName", _RUNTIME_CLASS)
    spec["hostname"] = vm.name
    spec["schedulingGates"] = [*parts(spec, "schedulingGates"), {"name": GATE}]
    if made.restore_from:
        spec["readinessGates"] = [*parts(spec, "readinessGates"), {"conditionType": ARRIVED}]
        spec.pop("initContainers", None)  # the guest has had them
        spec["containers"] = [_awaiting(one) for one in parts(spec, "containers")]
    if affinity := _affinity(part(spec, "affinity"), made):
        spec["affinity"] = affinity
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": f"{vm.name}-",
            "namespace": vm.namespace,
            "labels": {**part(metadata, "labels"), VM_LABEL: vm.name},
            "annotations": annotations,
            "ownerReferences": [owner(vm)],
        },
        "spec": spec,
    }


def _awaiting(container: Mapping[str, Any]) -> dict[str, Any]:
    """The container of a guest that has yet to arrive, and has started long ago. Until then the guest answers neither hooks nor
    probes, and kubelet would kill the container for it. kubelet asks a liveness probe only after the startup probe."""
    made = {name: value for name, value in container.items() if name != "lifecycle"}
    if hooks := {name: hook for name, hook in part(container, "lifecycle").items() if name != "postStart"}:
        made["lifecycle"] = hooks
    if probe := part(container, "startupProbe") or part(container, "livenessProbe"):
        period = int(number(probe, "periodSeconds")) or 10  # 10: Kubernetes' default
        made["startupProbe"] = {**probe, "failureThreshold": -(-_LONGEST_MOVE // period)}
    return made


def _affinity(own: Mapping[str, Any], made: Create) -> dict[str, Any]:
    """The template's own affinity, and the place. Terms of a required affinity are alternatives, so that each gets the place."""
    place, node = made.place, dict(part(own, "nodeAffinity"))
    fields = []
    if place.only:
        fields.append({"key": _NAME, "operator": "In", "values": [place.only]})
    elif place.never:
        fields.append({"key": _NAME, "operator": "NotIn", "values": [place.never]})
    if fields:
        required = part(node, "requiredDuringSchedulingIgnoredDuringExecution")
        terms = parts(required, "nodeSelectorTerms") or [{}]
        node["requiredDuringSchedulingIgnoredDuringExecution"] = {
            "nodeSelectorTerms": [{**term, "matchFields": [*parts(term, "matchFields"), *fields]} for term in terms]
        }
    if place.rather:
        preference = {"matchFields": [{"key": _NAME, "operator": "In", "values": [place.rather]}]}
        node["preferredDuringSchedulingIgnoredDuringExecution"] = [
            *parts(node, "preferredDuringSchedulingIgnoredDuringExecution"),
            {"weight": 100, "preference": preference},
        ]
    return {**own, "nodeAffinity": node} if node else dict(own)


def budget(vm: VmSeen) -> dict[str, Any]:
    """Refuses every eviction of the VM's pods when nobody answers for the controller. A move has two pods, so that two may be
    healthy; a smaller number would allow one of them to be evicted."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {
            "name": budget_name(vm.name),
            "namespace": vm.namespace,
            "labels": {VM_LABEL: vm.name},
            "ownerReferences": [owner(vm)],
        },
        "spec": {"minAvailable": 2, "selector": {"matchLabels": {VM_LABEL: vm.name}}},
    }


def ungated(seen: PodSeen, document: Mapping[str, Any]) -> dict[str, Any]:
    """A merge patch that leaves the gates of others."""
    left = [one for one in parts(part(document, "spec"), "schedulingGates") if text(one, "name") != GATE]
    return {"metadata": _guard(seen), "spec": {"schedulingGates": left}}


def pause_asked(seen: PodSeen, *, paused: bool) -> dict[str, Any]:
    return {"metadata": {**_guard(seen), "annotations": {ASKED_TO_PAUSE: "true" if paused else None}}}


def deletion(seen: PodSeen) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "preconditions": {"uid": seen.uid, "resourceVersion": seen.version},
        "propagationPolicy": "Background",
    }


def _guard(seen: PodSeen) -> dict[str, Any]:
    return {"uid": seen.uid, "resourceVersion": seen.version}


def record(made: Record) -> dict[str, Any]:
    """For a merge patch, in which None removes a field."""
    return {
        "pod": _ref(made.pod),
        "target": _ref(made.target),
        "node": made.node or None,
        "movedTo": made.moved_to or None,
        "restartedAt": made.restarted_at or None,
        "failures": made.failures or None,
        "endedAt": made.ended_at or None,
        "podRefusal": _refusal(made.pod_refusal),
        "budgetRefusal": _refusal(made.budget_refusal),
    }


def _refusal(found: Refusal | None) -> dict[str, Any] | None:
    return dataclasses.asdict(found) if found is not None else None


def _ref(found: PodRef | None) -> dict[str, str] | None:
    return {"name": found.name, "uid": found.uid} if found is not None else None


def eviction(made: Eviction) -> dict[str, Any]:
    return {"podUID": made.pod, "at": made.at, "cordoned": made.cordoned}


def status_change(vm: VmSeen, document: Mapping[str, Any], shown: Shown, now: float) -> dict[str, Any]:
    """The fields of the status that people read and that are not so yet, for a merge patch; {} if all are."""
    wanted: dict[str, Any] = {
        "observedGeneration": part(document, "metadata").get("generation"),
        "phase": shown.phase,
        "podName": shown.pod or None,
        "nodeName": shown.node or None,
        "moveProgress": shown.progress or None,
        "templateWaits": shown.waits_for_restart or None,
        "savedState": _saved_state(vm, shown.saved_on),
        "conditions": _conditions(vm, shown, now),
    }
    return {name: value for name, value in wanted.items() if vm.shown.get(name) != value}


def _saved_state(vm: VmSeen, node: str) -> dict[str, Any] | None:
    kept = vm.kept.get(node)
    if kept is None:
        return None
    return {
        "nodeName": node,
        "bytes": kept.saved_bytes,
        "savedAt": stamp_of(kept.saved_at),
        "lapsesAt": stamp_of(kept.lapses_at),
    }


def _conditions(vm: VmSeen, shown: Shown, now: float) -> list[dict[str, str]]:
    had = {text(one, "type"): one for one in parts(vm.shown, "conditions")}
    made = []
    for one in shown.conditions:
        before = had.get(one.type, {})
        is_same = text(before, "status") == one.status
        made.append(
            {
                "type": one.type,
                "status": one.status,
                "reason": one.reason,
                "message": one.message,
                "lastTransitionTime": text(before, "lastTransitionTime") if is_same else stamp_of(now),
            }
        )
    return made
