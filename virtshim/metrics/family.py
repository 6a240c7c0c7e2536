"""What a metric is: its name, its help text, its labels, and how its samples are computed from a reading. Pure.

The same families are what CRI carries, in whole numbers and with all of BASE_LABELS, and what `/metrics` serves.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from virtshim.metrics.usage import ContainerUsage, SandboxUsage
from virtshim.model.sandbox import Sandbox

S_contra = TypeVar("S_contra", contravariant=True)

# Those of cAdvisor in kubelet, so that dashboards made for it find their pods. `name` is libvirt's name of the VM.
BASE_LABELS = ("container", "id", "image", "name", "namespace", "pod")

SECOND = 1_000_000_000


class Kind(enum.Enum):
    """COUNTER: only grows while the VM runs."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Sample:
    """`labels` are the values of the family's own labels, in their order."""

    value: float
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Family(Generic[S_contra]):
    """`labels` come after BASE_LABELS. `read` gives no sample where the number is not known."""

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


def of_pod(families: Iterable[Family[SandboxUsage]], use: SandboxUsage) -> list[LabelledSample]:
    sandbox = use.sandbox
    base = ("", sandbox.id.value, "", "", sandbox.key.namespace, sandbox.key.name)
    return [_measured(family, base, sample) for family in families for sample in family.read(use)]


def of_container(
    families: Iterable[Family[ContainerUsage]], sandbox: Sandbox, use: ContainerUsage
) -> list[LabelledSample]:
    """Nothing for a container that does not run: its series end, as cAdvisor's do."""
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
    """The sample of a family without labels of its own; none if the value is not known."""
    return () if value is None else (Sample(value),)


def _measured(family: Family[S_contra], base: tuple[str, ...], sample: Sample) -> LabelledSample:
    return LabelledSample(family.name, family.kind, base + sample.labels, sample.value)


# The metric of limits that pods meet.

# Conformance wants a sample of all that is described from every running pod.
_LIMITS: Final = ("commands", "connections", "sessions", "urls")


def _refused(use: SandboxUsage) -> Iterable[Sample]:
    return [Sample(use.refused.get(limit, 0), (limit,)) for limit in _LIMITS]


LIMIT_METRICS_POD = (
    Family(
        "virtshim_refused_total",
        Kind.COUNTER,
        "Requests of the pod beyond a limit, since virtshim was started: commands of ExecSync, forwarded connections, sessions, "
        "or URLs for them.",
        _refused,
        ("limit",),
    ),
)
