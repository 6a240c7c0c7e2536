"""A VM's cgroup follows from the cgroup_parent that kubelet, crictl and critest write."""

import pytest

from virtshim.model.cgroup import DEFAULT_PARENT, beside, is_pods_own, libvirt_partition, parent_path, vm_cgroup_path
from virtshim.model.errors import InvalidRequest
from virtshim.model.ids import ContainerId

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
def test_a_parent_that_is_no_cgroup_is_refused_and_the_field_is_named(bad: str) -> None:
    with pytest.raises(InvalidRequest, match=r"config\.linux\.cgroup_parent"):
        parent_path(bad)


def test_a_container_has_its_own_cgroup_below_its_pods() -> None:
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


# The cgroups that kubelet makes for each QoS class, with both drivers, and below a `cgroupRoot`; and the cgroup of a
# VM beside each.
BY_KUBELET = [
    ("/kubepods/pod0f-1", "/kubepods"),
    ("/kubepods/burstable/pod0f-1", "/kubepods/burstable"),
    ("/kubepods/besteffort/pod0f-1/", "/kubepods/besteffort"),
    ("/root-of/all/kubepods/burstable/pod0f-1", "/root-of/all/kubepods/burstable"),
    ("/kubepods.slice/kubepods-pod0f_1.slice", "/kubepods.slice"),
    (POD, "/kubepods.slice/kubepods-burstable.slice"),
    ("kubepods-besteffort-pod0f_1.slice", "/kubepods.slice/kubepods-besteffort.slice"),
]


@pytest.mark.parametrize(("own", "qos_class"), BY_KUBELET)
def test_the_cgroup_above_a_pods_own_is_that_of_its_qos_class(own: str, qos_class: str) -> None:
    assert is_pods_own(own)
    assert beside(own) == qos_class
    assert vm_cgroup_path(beside(own), ID) == f"{qos_class}/virtshim-{ID}"


@pytest.mark.parametrize(
    "other", ["", "/", "-.slice", "/test.slice", "test.slice", "/kubepods", "/pods/x", "/a/pod", "/k/my-pod1"]
)
def test_a_cgroup_that_kubelet_did_not_make_for_one_pod_is_not_a_pods_own(other: str) -> None:
    assert not is_pods_own(other)


def test_the_group_of_a_qos_class_has_a_libvirt_partition() -> None:
    assert libvirt_partition(beside(POD)) == "/kubepods/burstable"
    assert libvirt_partition(beside("/kubepods.slice/kubepods-pod0f_1.slice")) == "/kubepods"
