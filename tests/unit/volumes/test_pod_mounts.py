"""virtshim tells the pod's volumes from the mounts that kubelet adds by itself."""

import pytest

from virtshim.guest.command import PATH_ANNOTATION
from virtshim.model.container import Mount
from virtshim.volumes.copies import CopiedVolume
from virtshim.volumes.pod_mounts import Origin, origins, subpath_sources, there, volumes_of
from virtshim.volumes.shares import SharedVolume, check_shares

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
POD = "/data/kubelet/pods/0b5e"
TOKEN = f"{POD}/volumes/kubernetes.io~projected/kube-api-access-7xk2p"
MESSAGE = Mount("/dev/termination-log", f"{POD}/containers/vm/7f")
TOLD = {PATH_ANNOTATION: "/dev/termination-log"}


@pytest.mark.parametrize(
    "mount",
    [
        Mount("/etc/hosts", f"{POD}/etc-hosts"),
        Mount("/etc/hosts", f"{POD}/etc-hosts", readonly=True),
        Mount("/etc/hosts", "/srv/pods/x/var/lib/kubelet/pods/0b5e/etc-hosts"),
    ],
)
def test_kubelets_hosts_file_is_recognised_by_both_its_paths_and_copied(mount: Mount) -> None:
    assert origins([mount], {}) == [(mount, Origin.HOSTS)]
    assert origins([mount], {}, "another pod's") == [(mount, Origin.KUBELETS)]
    hosts = CopiedVolume("/etc/hosts", mount.host_path, mount.readonly, written=True)
    assert volumes_of([mount], {}, "0b5e", share=True) == ((), (hosts,))
    assert there([mount], {}, [hosts]) == [mount]


def test_other_mounts_that_kubelet_adds_are_recognised_by_their_path() -> None:
    mount = Mount("/not\nprintable", f"{POD}/containers/vm/7f")
    assert origins([mount], {}) == [(mount, Origin.KUBELETS)]


@pytest.mark.parametrize(
    "mount",
    [
        Mount(SERVICE_ACCOUNT, f"{POD}/volumes/kubernetes.io~csi/claim/mount", readonly=True),
        Mount("/etc/hosts", "/etc/hosts"),
        Mount("/etc/hosts", f"{POD}/volume-subpaths/texts/vm/0"),
        Mount("/etc/hosts", f"{POD}/etc-hosts/x"),
        Mount("/dev/termination-log", "/var/log/x"),
    ],
)
def test_a_volume_mounted_at_one_of_kubelets_paths_is_a_volume(mount: Mount) -> None:
    assert origins([mount], {}) == [(mount, Origin.VOLUME)]


def test_a_mount_without_a_host_path_is_no_host_volume() -> None:
    image = Mount("/data", "", readonly=True, image="registry.test/files")
    assert origins([image], {}) == [(image, Origin.IMAGE)]


def test_the_guest_has_its_termination_message_and_the_volumes_of_its_creation() -> None:
    hosts, data = Mount("/etc/hosts", f"{POD}/etc-hosts"), Mount("//data/", "/srv/data")
    mounts = [hosts, data, MESSAGE]
    assert there(mounts, TOLD, ()) == [MESSAGE]
    assert there(mounts, {}, ()) == []
    shared, _ = volumes_of(mounts, TOLD)
    assert there(mounts, TOLD, shared) == [data, MESSAGE]


def test_a_volume_below_another_one_is_mounted_later() -> None:
    mounts = [Mount("/a/b/c", "/1"), Mount("/a", "/2", readonly=True), Mount("/z/../a/b/", "/3", follows=True)]
    shared = (
        SharedVolume("/a", "/2", readonly=True),
        SharedVolume("/a/b", "/3", follows=True),
        SharedVolume("/a/b/c", "/1"),
    )
    assert volumes_of(mounts, {}) == (shared, ())


@pytest.mark.parametrize(
    "path", ["/", "/proc", "/sys/fs/cgroup", "/dev", "/run", "relative", "/a\0b", "/" + "x" * 5000]
)
def test_a_reserved_or_malformed_mount_path_is_refused_by_name(path: str) -> None:
    (fault,) = check_shares(volumes_of([Mount(path, "/srv")], {})[0])
    assert fault.startswith("config.mounts[")


def test_duplicate_mount_paths_and_too_many_volumes_are_refused() -> None:
    (fault,) = check_shares([SharedVolume("/a", "/1"), SharedVolume("/a", "/2")])
    assert fault == "config.mounts[/a] is requested twice; remove one"
    (fault,) = check_shares(SharedVolume(f"/{n}", "/1") for n in range(257))
    assert "at most 256" in fault
    assert check_shares(SharedVolume(f"/,\n{n}", "/1") for n in range(256)) == []


def test_a_volume_at_the_termination_message_path_is_not_the_message() -> None:
    volume = Mount("/dev/termination-log", "/etc")
    assert origins([volume, MESSAGE], TOLD) == [(volume, Origin.VOLUME), (MESSAGE, Origin.TERMINATION)]
    same_file = Mount("/data", MESSAGE.host_path)
    assert there([same_file, MESSAGE], TOLD, ()) == [MESSAGE]


@pytest.mark.parametrize("kind", ["configmap", "secret", "downward-api", "projected"])
def test_the_guest_gets_copies_of_the_volumes_that_kubelet_writes_for_this_pod(kind: str) -> None:
    host = f"{POD}/volumes/kubernetes.io~{kind}/texts"
    whole = Mount("/t/", host, readonly=True)
    assert origins([whole], {}) == [(whole, Origin.COPY)]
    assert volumes_of([whole], {}, "0b5e") == ((), (CopiedVolume("/t", host),))
    assert volumes_of([whole], {}, "another") == ((SharedVolume("/t", host, readonly=True),), ())
    assert there([whole], {}, [CopiedVolume("/t", host)]) == [whole]


def test_the_service_account_token_is_copied_wherever_it_is_mounted() -> None:
    token, moved = Mount(SERVICE_ACCOUNT, TOKEN, readonly=True), Mount("/var/run/token", TOKEN)
    assert origins([token, moved], {}) == [(token, Origin.COPY), (moved, Origin.COPY)]
    assert volumes_of([moved], {}, "0b5e")[1] == (CopiedVolume("/var/run/token", TOKEN, readonly=False),)


@pytest.mark.parametrize(
    "host",
    [
        f"{POD}/volumes/kubernetes.io~empty-dir/kubernetes.io~configmap",
        f"{POD}/volumes/kubernetes.io~empty-dir/x/volumes/kubernetes.io~secret/y",
        f"{POD}/volumes/kubernetes.io~configmap",
        f"{POD}/volumes/kubernetes.io~configmap/a/b",
        f"{POD}/volumes/kubernetes.io~configmaps/a",
        "/srv/volumes/kubernetes.io~configmap/a",
        f"{POD}/volume-subpaths/kubernetes.io~configmap/vm/0",
    ],
)
def test_an_empty_dir_is_never_copied(host: str) -> None:
    mount = Mount("/t", host)
    assert volumes_of([mount], {}, "0b5e") == ((SharedVolume("/t", host),), ())


def test_a_sub_path_is_copied_once_and_not_updated() -> None:
    part, other = f"{POD}/volume-subpaths/texts/vm/0", f"{POD}/volume-subpaths/claim/vm/1"
    mounts = [Mount("/a", part, readonly=True), Mount("/b", other)]
    assert volumes_of(mounts, {}, "0b5e", lambda path: path == part) == (
        (SharedVolume("/b", other),),
        (CopiedVolume("/a", part, renewed=False),),
    )


def test_where_the_whole_of_a_part_would_be_follows_from_its_path() -> None:
    part = f"{POD}/volume-subpaths/texts/vm/0"
    assert f"{POD}/volumes/kubernetes.io~configmap/texts" in subpath_sources(part, "0b5e")
    assert len(subpath_sources(part, "0b5e")) == 4
    for other in (f"{POD}/volumes/kubernetes.io~configmap/texts", f"{part}/x", "/srv/x"):
        assert subpath_sources(other, "0b5e") == ()
    assert subpath_sources(part, "another") == ()
