"""Names that become lines of the guest's files, or arguments of CNI plugins."""

import pytest

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cri import to_domain
from virtshim.domain.errors import InvalidRequest


def config(**fields: object) -> pb.PodSandboxConfig:
    meta = pb.PodSandboxMetadata(name="web", namespace="default", uid="u-1")
    return pb.PodSandboxConfig(metadata=meta, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"hostname": "web-0.svc"},
        {"dns_config": pb.DNSConfig(servers=["10.0.0.10", "fd00::a"], searches=["svc.cluster.local", "_x.y."])},
        {"dns_config": pb.DNSConfig(searches=["."], options=["ndots:5", "edns0", "single-request-reopen"])},
    ],
)
def test_what_kubelet_sends_is_taken(fields: dict[str, object]) -> None:
    assert to_domain.sandbox_config(config(**fields), "").hostname == fields.get("hostname", "")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hostname": "web\nroot"}, "config.hostname"),
        ({"hostname": "-web"}, "config.hostname"),
        ({"dns_config": pb.DNSConfig(servers=["10.0.0.10\noptions rotate"])}, r"config.dns_config.servers\[0\]"),
        ({"dns_config": pb.DNSConfig(searches=["a", "svc\tlocal"])}, r"config.dns_config.searches\[1\]"),
        ({"dns_config": pb.DNSConfig(searches=[""])}, r"config.dns_config.searches\[0\]"),
        ({"dns_config": pb.DNSConfig(options=["ndots: 5"])}, r"config.dns_config.options\[0\]"),
        ({"dns_config": pb.DNSConfig(options=["ndots:5\x7f"])}, r"config.dns_config.options\[0\]"),
    ],
)
def test_what_would_write_other_lines_is_refused_by_its_field(fields: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        to_domain.sandbox_config(config(**fields), "")


@pytest.mark.parametrize("field", ["name", "namespace", "uid"])
@pytest.mark.parametrize("value", ["", "a;b=c", "a\nb", "-a", "x" * 254])
def test_a_pod_name_that_cni_cannot_be_given_is_refused_by_its_field(field: str, value: str) -> None:
    wanted = config()
    setattr(wanted.metadata, field, value)
    with pytest.raises(InvalidRequest, match=rf"config\.metadata\.{field}"):
        to_domain.sandbox_key(wanted)
