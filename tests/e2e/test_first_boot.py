"""Guests without cloud-init get their configuration from an Ignition file in the firmware, or from Windows' answer file
on a CD-ROM. Debian's cloud kernels have no CD-ROM driver, so the test asks QEMU about the CD-ROM."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.kubelet_writer import WrittenVolume
from guest import BOOT, READY
from node import Node
from podclient import PodClient, container_config, pod_config, wait_for_log

from virtshim.seed.sources import IGNITION_FIRMWARE_NAMES

pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.volumes]

IGNITION = """{
  "ignition": {"version": "3.3.0"},
  "storage": {"files": [{"path": "/etc/motd", "contents": {"source": "data:,hello"}}]}
}
"""
ANNOTATIONS = {"virtshim.io/sysprep": "/sysprep", "virtshim.io/ignition": IGNITION}


@pytest.fixture
def answers(tmp_path: Path) -> Callable[[str], Path]:
    """The directory of a secret of the pod with that UID, as kubelet writes it: Windows' answer file and a script."""

    def written(uid: str) -> Path:
        secret = WrittenVolume(tmp_path, uid, "secret", "answers")
        secret.write({"Autounattend.xml": b"<unattend/>\n", "set-up.ps1": b""})
        return secret.path

    return written


def started(cri: PodClient, node: Node, image: str, answers: Callable[[str], Path]) -> tuple[str, str]:
    """Starts a pod and its container."""
    config = pod_config("first-boot", f"{node.directory}/logs/first-boot", annotations=ANNOTATIONS)
    pod = cri.run_pod(config)
    wanted = container_config(cri.pull(image))
    wanted.mounts.add(container_path="/sysprep", host_path=str(answers(config.metadata.uid)), readonly=True)
    made = cri.create(pod, wanted, config)
    cri.start(made)
    return pod, made


def test_qemu_has_the_sysprep_cdrom_and_no_other_user_can_read_it(
    cri: PodClient, node: Node, image_url: str, null_image: Path, answers: Callable[[str], Path]
) -> None:
    pod, made = started(cri, node, f"{image_url}/{null_image.name}", answers)
    directory = Path(node.directory, "state", "containers", made)
    (qemu,) = node.qemu_pids()
    assert str(directory / "sysprep.iso") in {os.readlink(one) for one in Path(f"/proc/{qemu}/fd").iterdir()}
    for name in ("sysprep.iso", "ignition.json", "seed.iso"):
        found = (directory / name).stat()
        assert stat.S_IMODE(found.st_mode) & 0o077 == 0, name
        assert found.st_uid == Path(f"/proc/{qemu}").stat().st_uid, name
    cri.remove_pod(pod)
    assert not directory.exists()


@pytest.mark.full  # test_debian_guest.py reads the firmware, too
def test_a_guest_reads_its_configuration_in_the_firmware(
    cri: PodClient, node: Node, image_url: str, answers: Callable[[str], Path]
) -> None:
    _, made = started(cri, node, f"{image_url}/guest.qcow2", answers)
    wait_for_log(cri.status(made).log_path, READY, BOOT)
    for name in IGNITION_FIRMWARE_NAMES:
        script = f"modprobe qemu_fw_cfg && cat /sys/firmware/qemu_fw_cfg/by_name/{name}/raw"
        found = cri.exec_sync(made, "sh", "-c", script)
        assert (found.exit_code, found.stdout.decode()) == (0, IGNITION), found.stderr
        refuse_what_ignition_refuses(found.stdout)
    assert cri.exec_sync(made, "ls", "/sysprep").exit_code != 0, "it is no volume as well"


def refuse_what_ignition_refuses(config: bytes) -> None:
    validator = shutil.which("ignition-validate")
    assert validator, "needs Debian's package ignition; run make setup"
    subprocess.run([validator, "-"], input=config, check=True, timeout=60)
