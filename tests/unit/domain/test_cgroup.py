"""Where a VM's cgroup is: what kubelet, crictl and critest write as cgroup_parent."""

import pytest

from virtshim.domain.cgroup import DEFAULT_PARENT, libvirt_partition, parent_path, vm_cgroup_path
from virtshim.domain.errors import InvalidRequest
from virtshim.domain.ids import ContainerId

ID = ContainerId("ab" * 32)
POD = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice"


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("", ""),
        ("/", "/"),
        ("/kubepods/burstable/pod1", "/kubepods/burstable/pod1"),
        ("/kubepods/pod1/", "/kubepods/pod1"),
        ("kubepods-burstable-pod1_2.slice", POD),
        (POD, POD),
        ("/test.slice", "/test.slice"),
        ("test.slice", "/test.slice"),
        ("-.slice", "/"),
    ],
)
def test_a_parent_is_a_path_or_a_slice(given: str, path: str) -> None:
    assert parent_path(given) == path


@pytest.mark.parametrize(
    "bad",
    ["kubepods", "../x", "/a/../b", "/a//b", "/a/./b", "/a\nb", "/a\0b", "a-.slice", "a--b.slice", "x/y.slice", "/" + "a" * 3000,
     "/kubepods/" + "ä" * 128],
)  # fmt: skip
def test_other_parents_are_refused_and_the_field_is_named(bad: str) -> None:
    with pytest.raises(InvalidRequest, match=r"config\.linux\.cgroup_parent"):
        parent_path(bad)


def test_a_container_has_a_group_of_its_own_below_its_pods() -> None:
    assert vm_cgroup_path("/kubepods/pod1", ID) == f"/kubepods/pod1/virtshim-{ID}"
    assert vm_cgroup_path("kubepods-pod1.slice", ID) == f"/kubepods.slice/kubepods-pod1.slice/virtshim-{ID}"
    assert vm_cgroup_path("/", ID) == f"/virtshim-{ID}"
    assert vm_cgroup_path("", ID) == f"{DEFAULT_PARENT}/virtshim-{ID}"


@pytest.mark.parametrize(
    ("given", "partition"),
    [("", ""), (POD, "/kubepods/burstable/pod1_2"), ("test.slice", "/test"), ("-.slice", "/")],
)
def test_a_slice_has_a_libvirt_partition(given: str, partition: str) -> None:
    assert libvirt_partition(given) == partition


def test_a_path_that_is_no_slice_has_no_libvirt_partition() -> None:
    with pytest.raises(InvalidRequest, match="cgroup driver is systemd"):
        libvirt_partition("/kubepods/pod1")
