"""Which mounts are the pod's volumes, and which kubelet adds by itself."""

import pytest

from virtshim.domain.container import Mount
from virtshim.domain.guest.termination_message import PATH_ANNOTATION
from virtshim.domain.volumes.pod_mounts import SERVICE_ACCOUNT, Origin, origins, there, why_not

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
        Mount("/data", "", readonly=True),
    ],
)
def test_a_volume_at_a_path_of_kubelets_is_a_volume(mount: Mount) -> None:
    assert origins([mount], {}) == [(mount, Origin.VOLUME)]


def test_the_termination_message_is_the_one_mount_that_the_guest_has() -> None:
    hosts = Mount("/etc/hosts", f"{POD}/etc-hosts")
    assert there([hosts, MESSAGE], TOLD) == [MESSAGE]
    assert there([hosts, MESSAGE], {}) == []


def test_a_volume_at_the_termination_messages_path_is_not_taken_for_it() -> None:
    volume = Mount("/dev/termination-log", "/etc")
    assert origins([volume, MESSAGE], TOLD) == [(volume, Origin.VOLUME), (MESSAGE, Origin.TERMINATION)]
    same_file = Mount("/data", MESSAGE.host_path)
    assert there([same_file, MESSAGE], TOLD) == [MESSAGE]


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
    assert why_not(whole).startswith(f"{kind} volume is not passed")
    assert "VirtletCloudInitUserData" in why_not(whole)


def test_other_volumes_are_sent_to_block_devices() -> None:
    for path in ("/srv/data", f"{POD}/volumes/kubernetes.io~empty-dir/scratch", f"{POD}/volume-subpaths/claim/vm/0"):
        assert "volumeDevices" in why_not(Mount("/data", path))
