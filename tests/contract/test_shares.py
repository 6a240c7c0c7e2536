"""The fake, and virtiofsd started by virtshim-shares, fulfil the contract of share daemons."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from fakes.changed import changed
from fakes.full_records import CONTAINER
from fakes.shares import FakeVmShares
from others_namespace import OthersNamespace, others_namespace

from tapmanager import server
from tapmanager.cgroups.tree import VmCgroups
from tapmanager.shares import verbs
from tapmanager.shares.daemons import ShareDaemons
from virtshim.model.container import Container
from virtshim.model.errors import InvalidRequest, NotFound, Unavailable
from virtshim.model.network import Dns, GuestPorts, Interface, PodNetwork
from virtshim.pods.tapmanager_connection import SHARES, TapmanagerConnection
from virtshim.volumes.ports import VmNetwork, VmShares
from virtshim.volumes.share_client import VmShareClient
from virtshim.volumes.shares import SharedVolume

pytestmark = pytest.mark.volumes
LIMIT = 60.0


@pytest.fixture(params=["fake", "real"])
def shares(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[VmShares]:
    if request.param == "fake":
        fake = FakeVmShares()
        fake.missing.add(str(tmp_path / "gone"))
        fake.hugetlbfs.add(str(tmp_path / "huge"))
        yield fake
        return
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: only root can mount")
    serving = server.Server(
        server.listen(f"{tmp_path}/s", 0), partial(verbs.perform, ShareDaemons(VmCgroups([]), passt=PASST)), None
    )
    serving.start()
    client = VmShareClient(TapmanagerConnection(f"{tmp_path}/s", SHARES), f"{tmp_path}/shares", lambda: 1)
    try:
        yield client
        for name in client.served(LIMIT):
            client.end(name, LIMIT)
    finally:
        serving.stop(5.0)


def container(*hosts: Path) -> Container:
    volumes = tuple(SharedVolume(f"/{number}", str(host)) for number, host in enumerate(hosts))
    return changed(CONTAINER, volumes=volumes)


def test_a_share_is_served_until_it_is_ended(shares: VmShares, tmp_path: Path) -> None:
    made = container(tmp_path)
    assert shares.served(LIMIT) == {}
    shares.start(made, "", LIMIT)
    assert shares.served(LIMIT) == {made.id.short: True}
    shares.start(made, "", LIMIT)
    shares.end(made.id.short, LIMIT)
    shares.end(made.id.short, LIMIT)
    assert shares.served(LIMIT) == {}


def test_a_missing_volume_is_named_and_leaves_nothing(shares: VmShares, tmp_path: Path) -> None:
    gone = container(tmp_path, tmp_path / "gone")
    for ask in (lambda: shares.check(gone.spec.volumes, LIMIT), lambda: shares.start(gone, "", LIMIT)):
        with pytest.raises(NotFound, match=f"{tmp_path}/gone does not exist"):
            ask()
    shares.check(container(tmp_path).spec.volumes, LIMIT)
    assert shares.served(LIMIT) == {}


PASST = os.environ.get("VIRTSHIM_TEST_PASST", shutil.which("passt") or "")


@pytest.fixture
def others() -> Iterator[OthersNamespace]:
    if os.geteuid() != 0 or not PASST:
        pytest.skip("NOT TESTED: no passt, or not root")
    with others_namespace("10.90.7.5/24") as made:
        yield made


def test_a_vm_is_connected_until_its_share_is_ended(shares: VmShares, others: OthersNamespace, tmp_path: Path) -> None:
    nic = Interface("eth0", "02:00:00:00:07:05", 65520, ("10.90.7.5/24",))
    pod = PodNetwork(others.path, (nic,), ("10.90.7.5",), Dns(("10.96.0.10",), ("cluster.local",)), "k", others.inode)
    network = VmNetwork(pod, GuestPorts((80,), (53,)))
    shares.check_passt(LIMIT)
    for made in (container(), container(tmp_path)):
        shares.start(made, "", LIMIT, network)
        assert shares.connected(LIMIT) == {made.id.short: True}
        assert shares.passt_socket(made.id).endswith(f"/{made.id.short}/net/sock")
        shares.end(made.id.short, LIMIT)
        assert (shares.connected(LIMIT), shares.served(LIMIT)) == ({}, {})
    shares.start(container(tmp_path), "", LIMIT)
    assert shares.connected(LIMIT) == {}


@pytest.fixture
def hugetlbfs(tmp_path: Path) -> Iterator[Path]:
    """As kubelet mounts it for an emptyDir with medium HugePages."""
    if os.geteuid() != 0 or "\thugetlbfs\n" not in Path("/proc/filesystems").read_text():
        pytest.skip("NOT TESTED: only root can mount, and this kernel may have no hugetlbfs")
    made = tmp_path / "huge"
    made.mkdir()
    subprocess.run(["mount", "-t", "hugetlbfs", "none", made], check=True)
    yield made
    subprocess.run(["umount", made], check=True)


def test_an_empty_dir_of_huge_pages_is_refused_with_the_remedy(shares: VmShares, hugetlbfs: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"huge is a hugetlbfs.*remove the volume.*resources\.limits"):
        shares.check(container(hugetlbfs).spec.volumes, LIMIT)


def test_a_missing_share_program_is_reported_with_the_remedy(tmp_path: Path) -> None:
    client = VmShareClient(TapmanagerConnection(f"{tmp_path}/s", SHARES), f"{tmp_path}/shares", lambda: 1)
    with pytest.raises(Unavailable, match="systemctl status virtshim-shares"):
        client.served(LIMIT)
