"""Identifiers, deadlines, paths and errors have the right form."""

import uuid

import pytest
from grpc import StatusCode
from hypothesis import given
from hypothesis import strategies as st

from virtshim.cri.error_codes import GRPC_CODES, kind_of
from virtshim.model import errors
from virtshim.model.deadline import Deadline
from virtshim.model.errors import DeadlineExceeded, InvalidRequest, Kind, ShimError
from virtshim.model.ids import ContainerId, ImageDigest, SandboxId
from virtshim.model.image import Credentials
from virtshim.model.layout import Layout

HEX = "0123456789abcdef" * 4


@pytest.mark.parametrize("kind", [SandboxId, ContainerId])
@pytest.mark.parametrize("text", ["", HEX[:-1], HEX + "0", HEX.upper(), HEX[:-1] + "g", HEX + "\n", "../" + HEX[3:]])
def test_an_id_is_64_lower_case_hex_digits(kind: type, text: str) -> None:
    with pytest.raises(InvalidRequest):
        kind(text)
    assert str(kind(HEX)) == HEX


@pytest.mark.parametrize("text", [HEX, f"sha512:{HEX}", f"sha256:{HEX[:-1]}", f"sha256:{HEX}\n", "sha256:"])
def test_an_image_digest_is_sha256_and_64_hex_digits(text: str) -> None:
    with pytest.raises(InvalidRequest):
        ImageDigest(text)
    assert ImageDigest(f"sha256:{HEX}").hex == HEX


@given(st.text(max_size=200))
def test_an_arbitrary_text_is_an_id_or_refused(text: str) -> None:
    for kind in (SandboxId, ContainerId, ImageDigest):
        try:
            assert kind(text).value == text
        except InvalidRequest as refused:
            assert len(str(refused)) < 600  # at most 80 characters of it are shown


def test_the_uuid_of_a_domain_follows_from_the_id_for_ever() -> None:
    """A change here would orphan every VM that runs while virtshim is upgraded."""
    assert ContainerId(HEX).domain_uuid() == uuid.UUID("a68c5deb-9879-5ced-8aa1-34de1938d60d")


def test_socket_paths_fit_into_a_socket_address() -> None:
    layout = Layout("/var/lib/virtshim", "/" + "r" * 59)
    container = ContainerId(HEX)
    assert len(layout.console_socket(container)) <= 107
    assert len(layout.agent_socket(container)) <= 107


def test_everything_of_a_container_lies_in_its_two_directories() -> None:
    layout, container = Layout("/state", "/run/virtshim"), ContainerId(HEX)
    for path in (layout.root_disk, layout.seed_iso, layout.console_log, layout.console_position):
        assert path(container).startswith(f"/state/containers/{HEX}/")
    for path in (layout.console_socket, layout.agent_socket):
        assert path(container).startswith(f"/run/virtshim/vm/{HEX[:20]}/")
    assert (layout.database, layout.images) == ("/state/state.db", "/state/images")


def test_a_deadline_counts_down_to_zero_and_not_below() -> None:
    deadline = Deadline.after(100, 5)
    assert [deadline.left(now) for now in (100, 103, 105, 200)] == [5, 2, 0, 0]


def test_a_deadline_that_passed_names_what_was_about_to_be_done() -> None:
    deadline = Deadline.after(100, 5)
    deadline.check(104.9, "lunch")
    with pytest.raises(DeadlineExceeded, match="before lunch"):
        deadline.check(105, "lunch")


def test_credentials_are_never_in_text() -> None:
    secret = Credentials("user", "hunter2", "auth", "host", "identity", "registry")
    assert repr(secret) == str(secret) == f"{secret}" == "Credentials(<hidden>)"


def test_every_kind_of_error_has_its_own_grpc_code() -> None:
    """But for those that kubelet tells apart by their words, and only where the code says nothing."""
    assert set(GRPC_CODES) == set(Kind)
    worded = {kind for kind, code in GRPC_CODES.items() if code is StatusCode.UNKNOWN}
    assert worded == {Kind.REGISTRY, Kind.SIGNATURE}
    assert len(set(GRPC_CODES.values())) == len(Kind) - len(worded) + 1


@pytest.mark.parametrize("kind", Kind)
def test_a_client_gets_the_same_kind_of_error_as_the_node_raised(kind: Kind) -> None:
    beginning = {Kind.REGISTRY: "RegistryUnavailable: ", Kind.SIGNATURE: "SignatureValidationFailed: "}.get(kind, "")
    assert kind_of(GRPC_CODES[kind], f"{beginning}what is wrong") is kind


def test_a_grpc_code_that_a_node_never_sends_means_an_internal_error() -> None:
    assert kind_of(StatusCode.UNKNOWN, "Exception calling application") is Kind.INTERNAL
    assert kind_of(StatusCode.CANCELLED, "") is Kind.INTERNAL


def test_every_kind_has_an_error_and_the_tree_in_the_docstring_is_the_tree() -> None:
    found = [error for error in vars(errors).values() if isinstance(error, type) and issubclass(error, ShimError)]
    kinds = {error.__name__: error.kind for error in found if error is not ShimError}
    assert set(kinds.values()) == set(Kind)
    drawn = [line.split() for line in (errors.__doc__ or "").splitlines() if line.startswith("      ")]
    assert {words[0]: Kind[words[1]] for words in drawn} == kinds
