"""A name, or the beginning of an id, finds one VM or is refused."""

import pytest

from virtshim.cli.vm_lookup import running_vm
from virtshim.cri.client import PodSummary, VmSummary
from virtshim.model.errors import InvalidRequest, NotFound, ShimError, WrongState


def pod(id_: str, name: str, namespace: str = "default", *, is_ready: bool = True) -> PodSummary:
    return PodSummary(id_ * 32, namespace, name, is_ready, 0.0)


def vm(id_: str, of: PodSummary, state: str = "running") -> VmSummary:
    return VmSummary(id_ * 32, of.id, "debian", 0, state, "image", 0.0)


WEB, OTHER_WEB, DB, OLD_DB = (
    pod("a1", "web"),
    pod("b2", "web", "test"),
    pod("c3", "db"),
    pod("c4", "db", is_ready=False),
)
EMPTY, FACE = pod("d5", "empty"), pod("e6", "face")
PODS = [WEB, OTHER_WEB, DB, OLD_DB, EMPTY, FACE]
VMS = [vm("11", WEB), vm("22", OTHER_WEB, "exited"), vm("34", DB, "exited"), vm("33", DB), vm("fa", FACE)]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("default/web", "11"),
        ("db", "33"),  # the sandbox that is ready, and in it the VM that runs
        ("c3", "33"),
        ("33" * 32, "33"),
        ("1", "11"),
        ("face", "fa"),  # a name before the beginning of an id
        ("fafa", "fa"),
    ],
)
def test_a_name_or_the_beginning_of_an_id_finds_the_running_vm(wanted: str, found: str) -> None:
    assert running_vm(wanted, PODS, VMS).id == found * 32


@pytest.mark.parametrize(
    ("wanted", "error", "says"),
    [
        ("web", InvalidRequest, r"default/web \(a1a1a1a1a1a1\), test/web"),
        ("3", InvalidRequest, "matches more than one: 343434343434, 333333333333"),
        ("", InvalidRequest, "empty"),
        ("nothing", NotFound, "virtshim ps"),
        ("test/web", WrongState, r"debian \(222222222222\) is exited, not running"),
        ("34", WrongState, "exited"),
        ("empty", WrongState, "has no VM"),
    ],
)
def test_a_name_that_is_not_one_running_vm_is_refused_with_the_candidates(
    wanted: str, error: type[ShimError], says: str
) -> None:
    with pytest.raises(error, match=says):
        running_vm(wanted, PODS, VMS)
