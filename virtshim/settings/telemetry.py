"""Settings of what is told about the daemons: to Prometheus, and to a collector of traces."""

from __future__ import annotations

from virtshim.settings.texts import AddressText, Section, setting

_ALLOWED = "IP address and port, or `unix:/a/path`"


class Metrics(Section):
    """[metrics]: `/metrics` of the daemons, for Prometheus; see metrics.md."""

    address: AddressText = setting(
        "127.0.0.1:10011",
        "where `/metrics` of `virtshim serve` is; empty: nowhere",
        allowed=_ALLOWED,
        why="loopback: there is no TLS, and the names of pods are told",
    )
    proxy_address: AddressText = setting(
        "127.0.0.1:10012",
        "where `/metrics` of `virtshim proxy` is; empty: nowhere",
        allowed=_ALLOWED,
        why="a program of its own needs an address of its own",
    )


class Tracing(Section):
    """[tracing]: OpenTelemetry traces of `virtshim serve` and `virtshim proxy`; see tracing.md."""

    endpoint: str = setting(
        "",
        "collector that spans are sent to by OTLP over gRPC; empty: none is made",
        allowed="`host:port` or `http://host:port` without TLS, `https://host:port` with it",
        pattern=r"^$|^(https?://)?[^/\s]+:\d+$",
        why="nothing of it is loaded then",
    )
    sampling: float = setting(
        1.0,
        "share of calls that begin a trace, of those that come without one",
        ge=0,
        le=1,
        why="kubelet decides for its own calls; those that it repeats all the time never begin one here",
    )
