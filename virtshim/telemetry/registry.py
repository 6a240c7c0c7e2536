"""What one process tells Prometheus, and in which form. Not in prometheus-client's own registry, which others may use."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import choose_encoder


def process_registry() -> CollectorRegistry:
    """With the numbers of this process."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each counter, which nothing here reads
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    return registry


def renderer(registry: CollectorRegistry) -> Callable[[str], tuple[str, bytes]]:
    """Of what a client accepts: content type, and all that there is to tell now."""

    def render(accepted: str) -> tuple[str, bytes]:
        encode, kind = choose_encoder(accepted)
        return kind, encode(registry)

    return render
