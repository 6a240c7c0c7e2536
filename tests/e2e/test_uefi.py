"""UEFI variables and a TPM stay with the root disk and are removed with it. Secure boot refuses unsigned programs;
test_debian_guest.py starts signed ones."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import uefi_disk
from guest import BOOT, READY
from imageserver import serve_directory
from node import Node
from podclient import PodClient, container_config, log_lines, pod_config, wait_for_log, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.timeout(900)]

ANNOTATIONS = {"virtshim.io/firmware": "uefi", "virtshim.io/tpm": "true", "virtshim.io/root-disk": "pod"}
# TPM2_ReadClock; of the answer, how often that TPM has been reset in its life.
RESETS = r"""exec 3<>/dev/tpm0
printf '\200\001\0\0\0\012\0\0\001\201' >&3
head -c 35 <&3 | tail -c 9 | head -c 4 | hexdump -ve '1/1 "%02x"'"""


def test_uefi_variables_and_tpm_stay_with_the_root_disk(
    cri: PodClient, node: Node, guest_image: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """With `--all`, it boots once more on the same disk."""
    uefi_disk.make(guest_image, tmp_path / "uefi.qcow2")
    config = pod_config("uefi", f"{node.directory}/logs/uefi", annotations=ANNOTATIONS)
    with serve_directory(tmp_path) as url:
        image = cri.pull(f"{url.removeprefix('http://')}/uefi.qcow2")
    pod = cri.run_pod(config)
    beside = Path(node.directory, "state", "pods")
    tpms = Path(node.directory, "libvirt", "lib", "swtpm")
    seen = []
    for attempt in range(2 if request.config.getoption("--all") else 1):
        container = cri.create(pod, container_config(image, memory=256 << 20, attempt=attempt), config)
        cri.start(container)
        wait_for_log(cri.status(container).log_path, READY, 3 * BOOT)
        assert cri.exec_sync(container, "test", "-d", "/sys/firmware/efi").exit_code == 0
        told = cri.exec_sync(container, "sh", "-c", RESETS)
        assert told.exit_code == 0, told.stderr
        (variables,) = beside.glob("*/*.nvram")
        seen.append((int(told.stdout, 16), variables, os.listdir(tpms)))
        assert len(list(beside.glob("*/*.places"))) == 1
        cri.stop(container, 0)
    assert [one[0] for one in seen] == sorted({one[0] for one in seen}), "the same TPM counts on"
    assert len({(variables, *tpm) for _, variables, tpm in seen}) == 1
    cri.remove_pod(pod)
    assert not variables.exists()
    assert os.listdir(tpms) == []


# OVMF's message about a boot entry that it may not start.
REFUSED = re.compile("failed to (load|start) Boot[0-9A-F]{4} .*: (Access Denied|Security Violation)")


def test_secure_boot_starts_signed_programs_only(cri: PodClient, node: Node, guest_image: Path, tmp_path: Path) -> None:
    uefi_disk.make(guest_image, tmp_path / "unsigned.qcow2")
    config = pod_config("secure", f"{node.directory}/logs/secure", annotations={"virtshim.io/firmware": "uefi-secure"})
    with serve_directory(tmp_path) as url:
        image = cri.pull(f"{url.removeprefix('http://')}/unsigned.qcow2")
    pod = cri.run_pod(config)
    container = cri.create(pod, container_config(image, memory=256 << 20), config)
    cri.start(container)
    log = cri.status(container).log_path
    wait_until(lambda: REFUSED.search("\n".join(log_lines(log))) is not None, 3 * BOOT, "the firmware has refused it")
    assert "Linux version" not in "\n".join(log_lines(log))
