"""A metric family: name, help text, labels, and how to compute its samples from a reading. Pure.

CRI's answers and `/metrics` use the same families. CRI has whole numbers and all of BASE_LABELS.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from virtshim.metrics.usage import ContainerUsage, SandboxUsage
from virtshim.model.sandbox import Sandbox

S_contra = TypeVar("S_contra", contravariant=True)

# The labels of kubelet's cAdvisor metrics, so that dashboards for them work. `name` is libvirt's name of the VM.
BASE_LABELS = ("container", "id", "image", "name", "namespace", "pod")

SECOND = 1_000_000_000


class Kind(enum.StrEnum):
    """The value of a COUNTER never falls while the VM runs."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Sample:
    """`labels`: the values of the family's own labels, in their order."""

    value: float
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Family(Generic[S_contra]):
    """`labels` come after BASE_LABELS. `read` returns no sample for an unknown number."""

    name: str
    kind: Kind
    help: str
    read: Callable[[S_contra], Iterable[Sample]]
    labels: tuple[str, ...] = ()

    @property
    def label_keys(self) -> tuple[str, ...]:
        return BASE_LABELS + self.labels


@dataclass(frozen=True, slots=True)
class LabelledSample:
    """One sample of a family with all its label values."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    value: float


def counter(name: str, text: str, read: Callable[[S_contra], Iterable[Sample]], *labels: str) -> Family[S_contra]:
    return Family(name, Kind.COUNTER, text, read, labels)


def gauge(name: str, text: str, read: Callable[[S_contra], Iterable[Sample]], *labels: str) -> Family[S_contra]:
    return Family(name, Kind.GAUGE, text, read, labels)


def of_pod(families: Iterable[Family[SandboxUsage]], use: SandboxUsage) -> list[LabelledSample]:
    sandbox = use.sandbox
    base = ("", sandbox.id.value, "", "", sandbox.key.namespace, sandbox.key.name)
    return [_measured(family, base, sample) for family in families for sample in family.read(use)]


def of_container(
    families: Iterable[Family[ContainerUsage]], sandbox: Sandbox, use: ContainerUsage
) -> list[LabelledSample]:
    """[] for a container that does not run, so that its series end, as cAdvisor's do."""
    container = use.container
    if not container.is_running:
        return []
    base = (
        container.name.name,
        container.id.value,
        container.config.user_image or container.config.image,
        container.domain_name,
        sandbox.key.namespace,
        sandbox.key.name,
    )
    return [_measured(family, base, sample) for family in families for sample in family.read(use)]


def one(value: float | None) -> Iterable[Sample]:
    """The sample of a family without labels of its own; none if the value is unknown."""
    return () if value is None else (Sample(value),)


def _measured(family: Family[S_contra], base: tuple[str, ...], sample: Sample) -> LabelledSample:
    return LabelledSample(family.name, family.kind, base + sample.labels, sample.value)


# Always all of them: the conformance tests require a sample of every described metric from every running pod.
_LIMITS: Final = ("commands", "connections", "sessions", "urls")


def _refused(use: SandboxUsage) -> Iterable[Sample]:
    return [Sample(use.refused.get(limit, 0), (limit,)) for limit in _LIMITS]


LIMITS_OF_POD = (
    counter(
        "virtshim_refused_total",
        "Requests of the pod that exceeded a limit, since virtshim was started: commands of ExecSync, forwarded connections, "
        "sessions, or URLs for them.",
        _refused,
        "limit",
    ),
)
