"""Counts what happens, as it happens. Implements `virtshim.primitives.observed.Meter`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from virtshim.domain.container import ExitReason
from virtshim.primitives.observed import Exited, Fact, ImagesRemoved, Leftover, Pulled, Reconciled, Step
from virtshim.telemetry import catalogue
from virtshim.telemetry.catalogue import Described


def counter(registry: CollectorRegistry, of: Described) -> Counter:
    return Counter(of.name, of.help, of.labels, registry=registry)


def gauge(registry: CollectorRegistry, of: Described) -> Gauge:
    return Gauge(of.name, of.help, of.labels, registry=registry)


def histogram(registry: CollectorRegistry, of: Described) -> Histogram:
    return Histogram(of.name, of.help, of.labels, registry=registry, buckets=of.buckets)


class Recorder:
    """Labels come from closed sets: methods of CRI, gRPC's codes, kinds of errors, the product's own words."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._calls = histogram(registry, catalogue.RPC_SECONDS)
        self._running = gauge(registry, catalogue.RPCS_RUNNING)
        self._steps = histogram(registry, catalogue.START_STEP_SECONDS)
        self._pulls = histogram(registry, catalogue.PULL_SECONDS)
        self._pulled = counter(registry, catalogue.PULL_BYTES)
        self._pulling = gauge(registry, catalogue.PULLS_RUNNING)
        self._images_removed = counter(registry, catalogue.IMAGES_REMOVED)
        self._reconciled = histogram(registry, catalogue.RECONCILE_SECONDS)
        self._leaks = counter(registry, catalogue.LEAKS)
        self._spans = counter(registry, catalogue.SPANS)
        self._exits = counter(registry, catalogue.EXITS)
        for reason in ExitReason:  # from 0 on, or the first of them would not be seen as an increase
            self._exits.labels(reason.value)

    def took(self, step: Step, result: str, seconds: float) -> None:
        self._steps.labels(step.value, result).observe(seconds)

    def call_took(self, method: str, code: str, seconds: float) -> None:
        self._calls.labels(method, code).observe(seconds)

    def calls_under_way(self, change: int) -> None:
        self._running.inc(change)

    def pulls_under_way(self, change: int) -> None:
        self._pulling.inc(change)

    def spans(self, result: str, number: int) -> None:
        self._spans.labels(result).inc(number)

    def tell(self, fact: Fact) -> None:
        match fact:
            case Pulled():
                self._pulls.labels(fact.result).observe(fact.seconds)
                self._pulled.inc(fact.size)
            case Exited():
                self._exits.labels(fact.reason.value).inc()
            case Reconciled():
                self._reconciled.labels(fact.result).observe(fact.seconds)
            case Leftover():
                self._leaks.labels(fact.what.replace(" ", "_")).inc()
            case ImagesRemoved():
                self._images_removed.inc(fact.number)
