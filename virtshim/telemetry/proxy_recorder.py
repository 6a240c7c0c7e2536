"""The proxy's own metrics. Implements `virtshim.proxy.measuring.ProxyMeter`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric

from virtshim.telemetry import catalogue
from virtshim.telemetry.recorder import counter, histogram


class ProxyRecorder:
    def __init__(self, registry: CollectorRegistry, up: Callable[[], Mapping[str, bool]]) -> None:
        """`up`: whether each runtime, by its name, has answered last time."""
        self._calls = histogram(registry, catalogue.PROXY_SECONDS)
        self._added = histogram(registry, catalogue.PROXY_ADDED)
        self._runtimes = histogram(registry, catalogue.PROXY_RUNTIME_SECONDS)
        self._spans = counter(registry, catalogue.SPANS)
        registry.register(_Up(up))

    def call_took(self, method: str, code: str, seconds: float, added: float | None) -> None:
        self._calls.labels(method, code).observe(seconds)
        if added is not None:
            self._added.observe(max(0.0, added))

    def runtime_took(self, runtime: str, method: str, code: str, seconds: float) -> None:
        self._runtimes.labels(runtime, method, code).observe(seconds)

    def spans(self, result: str, number: int) -> None:
        self._spans.labels(result).inc(number)


class _Up:
    def __init__(self, up: Callable[[], Mapping[str, bool]]) -> None:
        self._up = up

    def collect(self) -> Iterable[Metric]:
        of = catalogue.PROXY_UP
        family = GaugeMetricFamily(of.name, of.help, labels=of.labels)
        for runtime, is_up in self._up().items():
            family.add_metric([runtime], int(is_up))
        yield family
