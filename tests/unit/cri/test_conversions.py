"""CRI's messages and virtshim's own values are converted both ways."""

import dataclasses

import pytest
from fakes.changed import changed
from fakes.cri import container as container_message
from fakes.world import container_config, pod_key, sandbox_config
from hypothesis import given
from hypothesis import strategies as st

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cri import to_domain, to_proto
from virtshim.cri.error_codes import on_the_wire
from virtshim.model.container import (
    Container,
    ContainerName,
    ContainerPhase,
    ContainerSpec,
    Exit,
    ExitReason,
    Resources,
)
from virtshim.model.ids import ContainerId, ImageDigest, SandboxId
from virtshim.model.network import Dns, PodNetwork
from virtshim.model.sandbox import PortMapping, Sandbox, SandboxPhase

ENDED = Exit(137, ExitReason.OOM_KILLED, 9, "out of memory")
CONTAINER = Container(
    ContainerSpec(
        id=ContainerId("c" * 64),
        sandbox_id=SandboxId("a" * 64),
        name=ContainerName("vm", 2),
        config=container_config(),
        image=ImageDigest(f"sha256:{'1' * 64}"),
        image_ref="ref",
        domain_uuid="u",
        created_at=5,
    ),
)
SANDBOX = Sandbox(SandboxId("a" * 64), pod_key(), sandbox_config(), 5)


@pytest.mark.parametrize(
    ("phase", "ended", "state"),
    [
        (ContainerPhase.CREATED, None, pb.CONTAINER_CREATED),
        (ContainerPhase.RUNNING, None, pb.CONTAINER_RUNNING),
        (ContainerPhase.EXITED, ENDED, pb.CONTAINER_EXITED),
        (ContainerPhase.REMOVING, ENDED, pb.CONTAINER_EXITED),
        (ContainerPhase.REMOVING, None, pb.CONTAINER_UNKNOWN),
    ],
)
def test_each_phase_of_a_container_has_its_state(
    phase: ContainerPhase, ended: Exit | None, state: pb.ContainerState.ValueType
) -> None:
    container = changed(CONTAINER, phase=phase, exit=ended)
    assert to_proto.container_item(container).state == to_proto.container_status(container).state == state


@pytest.mark.parametrize("phase", list(SandboxPhase))
def test_only_a_ready_sandbox_is_shown_as_ready(phase: SandboxPhase) -> None:
    sandbox = dataclasses.replace(SANDBOX, phase=phase)
    state = pb.SANDBOX_READY if phase is SandboxPhase.READY else pb.SANDBOX_NOTREADY
    assert to_proto.sandbox_item(sandbox).state == to_proto.sandbox_status(sandbox).state == state


@pytest.mark.parametrize("reason", list(ExitReason))
def test_an_exit_is_shown_with_code_reason_message_and_time(reason: ExitReason) -> None:
    ended = changed(CONTAINER, phase=ContainerPhase.EXITED, exit=Exit(3, reason, 9, "why"))
    status = to_proto.container_status(ended)
    assert (status.exit_code, status.reason, status.message, status.finished_at) == (3, reason.value, "why", 9)


@pytest.mark.parametrize(
    ("ips", "first", "others"), [((), "", []), (("1.2.3.4",), "1.2.3.4", []), (("::1", "1.2.3.4"), "::1", ["1.2.3.4"])]
)
def test_the_first_address_is_the_ip_and_the_rest_are_additional(
    ips: tuple[str, ...], first: str, others: list[str]
) -> None:
    network = PodNetwork("/run/netns/x", (), ips, Dns(), "key")
    status = to_proto.sandbox_status(dataclasses.replace(SANDBOX, network=network)).network
    assert (status.ip, [ip.ip for ip in status.additional_ips]) == (first, others)


def test_a_container_without_the_pod_specs_image_text_shows_the_requested_image() -> None:
    config = dataclasses.replace(CONTAINER.config, user_image="")
    assert to_proto.container_status(changed(CONTAINER, config=config)).image.image == config.image


NATURAL = st.integers(0, 2**63 - 1)


@given(
    resources=st.builds(
        pb.LinuxContainerResources,
        cpu_period=st.sampled_from([0, 1000, 100_000, 1_000_000]),
        cpu_quota=st.one_of(st.sampled_from([-1, 0]), st.integers(1000, 2**63 - 1)),
        cpu_shares=NATURAL,
        memory_limit_in_bytes=st.integers(0, 2**62),
        oom_score_adj=st.integers(-1000, 1000),
        cpuset_cpus=st.sampled_from(["", "0", "0-0"]),
        cpuset_mems=st.sampled_from(["", "0"]),
        hugepage_limits=st.lists(
            st.builds(pb.HugepageLimit, page_size=st.just("2MB"), limit=st.integers(0, 2**40).map(lambda n: n << 21)),
            max_size=1,
        ),
        unified=st.dictionaries(
            st.sampled_from(["memory.high", "memory.swap.max"]), st.sampled_from(["max", "0", "4096"]), max_size=2
        ),
        memory_swap_limit_in_bytes=st.sampled_from([-1, 0, 2**62]),
    )
)
def test_resources_come_back_as_they_were_sent(resources: pb.LinuxContainerResources) -> None:
    linux = pb.LinuxContainerConfig(resources=resources)
    config = to_domain.container_config(container_message(linux=linux))
    shown = to_proto.container_status(changed(CONTAINER, config=config)).resources.linux
    assert shown == resources


def test_absent_resources_are_all_unset() -> None:
    assert to_domain.container_config(container_message()).resources == Resources()


def test_every_used_field_of_a_sandbox_config_is_converted() -> None:
    message = pb.PodSandboxConfig(
        hostname="h",
        log_directory="/logs",
        dns_config=pb.DNSConfig(servers=["1.1.1.1"], searches=["a.b"], options=["ndots:5"]),
        port_mappings=[pb.PortMapping(protocol=pb.SCTP, container_port=1, host_port=2, host_ip="::1")],
        labels={"a": "b"},
        annotations={"c": "d"},
        linux=pb.LinuxPodSandboxConfig(
            cgroup_parent="/kubepods",
            overhead=pb.LinuxContainerResources(memory_limit_in_bytes=7),
            resources=pb.LinuxContainerResources(cpu_quota=5000),
        ),
    )
    config = to_domain.sandbox_config(message, "handler")
    assert config.dns == Dns(("1.1.1.1",), ("a.b",), ("ndots:5",))
    assert config.port_mappings == (PortMapping("sctp", 1, 2, "::1"),)
    assert (config.hostname, config.log_directory, config.cgroup_parent) == ("h", "/logs", "/kubepods")
    assert (config.overhead.memory_limit_bytes, config.resources.cpu_quota) == (7, 5000)
    assert (config.labels, config.annotations, config.runtime_handler) == ({"a": "b"}, {"c": "d"}, "handler")


def test_a_later_change_of_the_message_does_not_change_the_domain_value() -> None:
    message = container_message(labels={"a": "b"}, args=["x"])
    config = to_domain.container_config(message)
    message.labels["a"] = "changed"
    message.args.append("more")
    assert (config.labels, config.args) == ({"a": "b"}, ("x",))


@given(st.text())
def test_an_error_message_fits_into_the_trailers_of_a_reply(text: str) -> None:
    message = on_the_wire(text * 500)
    size = sum(1 if 32 <= byte < 127 and byte != 37 else 3 for byte in message.encode())
    assert size < 7000


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=400))
def test_an_ordinary_error_message_is_not_changed(text: str) -> None:
    assert on_the_wire(text) == text or not text.isprintable()


@pytest.mark.hostile
@given(st.text(max_size=400))
def test_an_error_message_is_one_printable_line_whatever_the_request_contains(text: str) -> None:
    assert on_the_wire(text).isprintable()
