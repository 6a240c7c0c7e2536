"""Builds the JSON values for the pages. Texts from outside stay text, and the page shows them as text. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from criproto.operator_v1 import operator_pb2
from criproto.runtime_v1 import api_pb2 as pb
from virtshim.dashboard.node_calls import Pod, Seen
from virtshim.dashboard.readings import Event, Reading, Sample

# Most characters of one label or annotation: user-data may be half a MiB.
_LONGEST: Final = 4096


def node(seen: Seen | None, host: Mapping[str, object], trouble: str) -> dict[str, Any]:
    """`trouble`: why the node does not answer."""
    return {
        "trouble": trouble,
        "seen": seen.at if seen else None,
        "version": seen.version if seen else "",
        "conditions": dict(seen.conditions) if seen else {},
        "facts": dict(seen.facts) if seen else {},
        "host": dict(host),
    }


def pod(one: Pod, addresses: Sequence[str], reading: Reading | None) -> dict[str, Any]:
    return {
        **dataclasses.asdict(one),
        "vms": [
            {**dataclasses.asdict(vm), "state": vm.shown_state, "trouble": vm.trouble[:_LONGEST]} for vm in one.vms
        ],
        "addresses": list(addresses),
        "memoryGiven": reading.memory_given if reading else 0,
        "vcpus": reading.vcpus if reading else 0,
    }


def event(one: Event) -> dict[str, Any]:
    return dataclasses.asdict(one)


def tick(seen: Seen, samples: Mapping[str, Sample]) -> dict[str, Any]:
    return {"type": "tick", "at": seen.at, "samples": {name: rounded(sample) for name, sample in samples.items()}}


def graph(samples: Sequence[Sample]) -> list[list[float | None]]:
    """One row per sample: the time, then the values."""
    return [[round(one.at, 2), *rounded(one)] for one in samples]


def spark(samples: Sequence[Sample]) -> list[float | None]:
    return [rounded(one)[0] for one in samples]


def rounded(sample: Sample) -> list[float | None]:
    """CPUs rounded to thousandths, other values to whole bytes."""
    cpu, *others = sample.values()
    return [None if cpu is None else round(cpu, 4), *(None if one is None else round(one) for one in others)]


def phases(told: Sequence[operator_pb2.Phase]) -> list[dict[str, Any]]:
    """The phases of a pod's start. `vm` is "" for a phase of the pod itself."""
    return [
        {
            "name": one.name,
            "vm": one.container_id,
            "began": one.began_at / 1e9,
            "seconds": one.duration / 1e9,
            "over": one.is_over,
            "error": one.error[:_LONGEST],
        }
        for one in told
    ]


def detail(
    pod: pb.PodSandboxStatusResponse, vms: Sequence[pb.ContainerStatusResponse], start: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """All data of the node about one pod."""
    status = pod.status
    return {
        "id": status.id,
        "uid": status.metadata.uid,
        "attempt": status.metadata.attempt,
        "labels": _texts(status.labels),
        "annotations": _texts(status.annotations),
        "facts": _parsed(pod.info),
        "vms": [_vm(one) for one in vms],
        "start": list(start),
    }


def _vm(answer: pb.ContainerStatusResponse) -> dict[str, Any]:
    status = answer.status
    return {
        "id": status.id,
        "name": status.metadata.name,
        "attempt": status.metadata.attempt,
        "state": pb.ContainerState.Name(status.state).removeprefix("CONTAINER_").lower(),
        "created": _seconds(status.created_at),
        "started": _seconds(status.started_at),
        "finished": _seconds(status.finished_at),
        "exitCode": status.exit_code,
        "reason": status.reason,
        "message": status.message[:_LONGEST],
        "image": status.image.image,
        "imageId": status.image_id,
        "logPath": status.log_path,
        "labels": _texts(status.labels),
        "annotations": _texts(status.annotations),
        "mounts": [
            {"container": one.container_path, "host": one.host_path, "readonly": one.readonly} for one in status.mounts
        ],
        "facts": _parsed(answer.info),
    }


def _seconds(nanoseconds: int) -> float | None:
    return nanoseconds / 1e9 if nanoseconds else None


def _texts(values: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value if len(value) <= _LONGEST else f"{value[:_LONGEST]} ... ({len(value)} characters)"
        for name, value in sorted(values.items())
    }


def _parsed(info: Mapping[str, str]) -> dict[str, Any]:
    """The JSON values in a verbose status, by name. A text that is not JSON stays text."""
    found: dict[str, Any] = {}
    for name, text in info.items():
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text[:_LONGEST]
    return found
