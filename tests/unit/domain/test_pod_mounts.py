"""Which mounts are the pod's volumes, and which kubelet adds by itself."""

import pytest

from virtshim.domain.container import Mount
from virtshim.domain.guest.termination_message import PATH_ANNOTATION
from virtshim.domain.volumes.pod_mounts import SERVICE_ACCOUNT, Origin, origins, there, volumes_of, why_not_yet
from virtshim.domain.volumes.shares import SharedVolume, check_shares

POD = "/data/kubelet/pods/0b5e"
TOKEN = f"{POD}/volumes/kubernetes.io~projected/kube-api-access-7xk2p"
MESSAGE = Mount("/dev/termination-log", f"{POD}/containers/vm/7f")
TOLD = {PATH_ANNOTATION: "/dev/termination-log"}


@pytest.mark.parametrize(
    "mount",
    [
        Mount(SERVICE_ACCOUNT, TOKEN, readonly=True),
        Mount(SERVICE_ACCOUNT + "/", f"{POD}/volumes/kubernetes.io~secret/default-token-x", readonly=True),
        Mount("/etc/hosts", f"{POD}/etc-hosts"),
        Mount("/etc/hosts", f"{POD}/etc-hosts", readonly=True),
        Mount("/not\nprintable", f"{POD}/containers/vm/7f"),
        Mount("/etc/hosts", "/srv/pods/x/var/lib/kubelet/pods/0b5e/etc-hosts"),
    ],
)
def test_what_kubelet_adds_to_every_pod_is_known_by_both_its_paths(mount: Mount) -> None:
    assert origins([mount], {}) == [(mount, Origin.KUBELETS)]


@pytest.mark.parametrize(
    "mount",
    [
        Mount(SERVICE_ACCOUNT, TOKEN),
        Mount(SERVICE_ACCOUNT, f"{POD}/volumes/kubernetes.io~csi/claim/mount", readonly=True),
        Mount("/etc/hosts", "/etc/hosts"),
        Mount("/etc/hosts", f"{POD}/volume-subpaths/texts/vm/0"),
        Mount("/etc/hosts", f"{POD}/etc-hosts/x"),
        Mount("/var/run/secrets/other", TOKEN, readonly=True),
        Mount("/dev/termination-log", "/var/log/x"),
    ],
)
def test_a_volume_at_a_path_of_kubelets_is_a_volume(mount: Mount) -> None:
    ((_, origin),) = origins([mount], {})
    assert origin is (Origin.NOT_YET if "~projected" in mount.host_path else Origin.VOLUME)


def test_what_has_no_path_on_the_node_is_no_volume_of_it() -> None:
    image = Mount("/data", "", readonly=True)
    assert origins([image], {}) == [(image, Origin.NOT_YET)]


def test_the_guest_has_the_termination_message_and_the_volumes_that_its_vm_was_made_with() -> None:
    hosts, data = Mount("/etc/hosts", f"{POD}/etc-hosts"), Mount("//data/", "/srv/data")
    mounts = [hosts, data, MESSAGE]
    assert there(mounts, TOLD, ()) == [MESSAGE]
    assert there(mounts, {}, ()) == []
    assert there(mounts, TOLD, volumes_of(mounts, TOLD)) == [data, MESSAGE]


def test_a_volume_below_another_one_is_mounted_after_it() -> None:
    mounts = [Mount("/a/b/c", "/1"), Mount("/a", "/2", readonly=True), Mount("/z/../a/b/", "/3", follows=True)]
    assert volumes_of(mounts, {}) == (
        SharedVolume("/a", "/2", readonly=True),
        SharedVolume("/a/b", "/3", follows=True),
        SharedVolume("/a/b/c", "/1"),
    )


@pytest.mark.parametrize(
    "path", ["/", "/proc", "/sys/fs/cgroup", "/dev", "/run", "relative", "/a\0b", "/" + "x" * 5000]
)
def test_a_place_that_is_the_guests_own_or_no_path_is_refused_by_name(path: str) -> None:
    (fault,) = check_shares(volumes_of([Mount(path, "/srv")], {}))
    assert fault.startswith("config.mounts[")


def test_the_same_place_twice_and_too_many_are_refused() -> None:
    (fault,) = check_shares([SharedVolume("/a", "/1"), SharedVolume("/a", "/2")])
    assert fault == "config.mounts[/a] is asked for twice; remove one"
    (fault,) = check_shares(SharedVolume(f"/{n}", "/1") for n in range(257))
    assert "at most 256" in fault
    assert check_shares(SharedVolume(f"/,\n{n}", "/1") for n in range(256)) == []


def test_a_volume_at_the_termination_messages_path_is_not_taken_for_it() -> None:
    volume = Mount("/dev/termination-log", "/etc")
    assert origins([volume, MESSAGE], TOLD) == [(volume, Origin.VOLUME), (MESSAGE, Origin.TERMINATION)]
    same_file = Mount("/data", MESSAGE.host_path)
    assert there([same_file, MESSAGE], TOLD, ()) == [MESSAGE]


@pytest.mark.parametrize(
    ("directory", "kind"),
    [
        ("configmap", "a configMap"),
        ("secret", "a secret"),
        ("downward-api", "a downwardAPI"),
        ("projected", "a projected"),
    ],
)
def test_what_kubelet_writes_is_called_as_the_pods_author_calls_it(directory: str, kind: str) -> None:
    whole = Mount("/t", f"{POD}/volumes/kubernetes.io~{directory}/texts", readonly=True)
    assert origins([whole], {}) == [(whole, Origin.NOT_YET)]
    assert why_not_yet(whole).startswith(f"{kind} volume is not passed")
    assert "VirtletCloudInitUserData" in why_not_yet(whole)
