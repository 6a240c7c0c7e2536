"""cloud-init reads the seeds of Virtlet's 20 cases, in the oldest supported version, Debian 12's and the newest.

e2e/test_debian_guest.py boots a guest from one, with variables and user-data at once."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes.virtlet_seeds import CASES, CONTAINER, KEPT_DISK, KEYS

from virtshim.annotations.parse import parse_vm_options
from virtshim.seed.documents import seed_documents
from virtshim.seed.ports import SeedRequest

pytestmark = [pytest.mark.guest, pytest.mark.cloudinit]

HERE = Path(__file__).parent / "cloudinit"
BUILT = Path(__file__).parents[3] / "build" / "cloud-init"
WITH_KEYS = ("SSH keys", "SSH keys, and meta-data of its own", "user-data", "script")
SCRIPTS = ("script", "mounts in a script", "mounts and block volumes in a script")
IDS = {"SSH keys, and meta-data of its own": "mine", "persistent root disk": f"i-{KEPT_DISK}"}
NETWORKS = [case for case in CASES if case.startswith(("network", "several", "persistent"))]


FQDN = "foo.team.svc.cluster.local"
SCRIPT = {"VirtletCloudInitUserDataScript": "#!/bin/sh\n"}
# Cases beside Virtlet's: name -> the guest's name in the end, and its seed.
NAMED = {
    "a name": ("foo", {}),
    "a name with dots": (FQDN, {}),
    "a name with dots, and a script": (FQDN, SCRIPT),
    "a name with dots, and one of the pod's own": ("mine", {"VirtletCloudInitUserData": "hostname: mine"}),
}
VERSIONS = ["oldest", "usual", pytest.param("newest", marks=pytest.mark.full)]


@pytest.fixture(scope="module", params=VERSIONS)
def read(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """That version's result for each, and the directory with the files of user-data."""
    return read_by(request.param, CASES, tmp_path_factory)


def read_by(
    version: str, cases: Mapping[str, SeedRequest], directories: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    seeds, out = directories.mktemp("seeds"), directories.mktemp("roots")
    for case, asked in cases.items():
        for name, text in seed_documents(asked).files.items():
            path = seeds / case / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    path = [str(root / "usr/lib/python3/dist-packages") for root in (BUILT / version, BUILT / "tools")]
    environment = {**os.environ, "PYTHONPATH": ":".join(path), "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, HERE / "seeds.py", seeds, out]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), out


def test_every_seed_sets_the_hostname_and_the_ssh_keys(read: tuple[dict[str, Any], Path]) -> None:
    told, _ = read
    assert sorted(told) == sorted(CASES)
    for case, one in told.items():
        assert (one["found"], one["hostname"]) == (True, "foo"), case
        assert one["id"] == IDS.get(case, f"i-{CONTAINER.short}"), case
        assert one["keys"] == (list(KEYS) if case in WITH_KEYS else []), case
        assert one["has_network"] == (case in NETWORKS), case
        assert one["type"] == ("text/x-shellscript" if case in SCRIPTS else "text/cloud-config"), case


def test_environment_variables_are_written_beside_the_pods_own_files(read: tuple[dict[str, Any], Path]) -> None:
    _, out = read
    for case in ("variables", "variables and user-data"):
        assert (out / case / "etc/cloud/environment").read_text() == "GREETING=hello\nWORDS=two words\n"
    assert (out / "variables and user-data" / "etc/own").read_text() == "mine"


def test_volume_commands_are_a_valid_shell_script(read: tuple[dict[str, Any], Path]) -> None:
    told, _ = read
    for case in ("disks to mount", "shared directory", "block volumes", "block volumes, and disks to mount"):
        assert told[case]["boot"].startswith("#!/bin/sh")
        subprocess.run(["sh", "-n"], input=told[case]["boot"], text=True, check=True)
    assert told["block volumes, and disks to mount"]["mounts"][1] == ["/dev/disk/by-id/virtio-dev-disk-a", "/b"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_hostname_is_the_full_pod_name_unless_the_pod_sets_another(
    version: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    seeds = {
        case: dataclasses.replace(
            CASES["plain"],
            hostname=FQDN if "dots" in case else "foo",
            options=parse_vm_options(annotations),
        )
        for case, (_, annotations) in NAMED.items()
    }
    told, _ = read_by(version, seeds, tmp_path_factory)
    assert {case: one["called"] for case, one in told.items()} == {case: name for case, (name, _) in NAMED.items()}


def test_the_file_that_mounts_volumes_is_a_valid_shell_script(read: tuple[dict[str, Any], Path]) -> None:
    _, out = read
    for case in ("disks to mount", "shared directory", "block volumes", "block volumes, and disks to mount"):
        file = out / case / "etc/cloud/mount-volumes.sh"
        assert (stat.S_IMODE(file.stat().st_mode), file.read_text()[:10]) == (0o755, "#!/bin/sh\n")
        subprocess.run(["sh", "-n", file], check=True)
