"""The package works on a separate machine, a real Debian with systemd, AppArmor and libvirt. `make e2e-install` shows
each step."""

import subprocess
import sys

import pytest

from install.outer import missing

pytestmark = [pytest.mark.operator, pytest.mark.full, pytest.mark.timeout(3600)]


def test_the_package_survives_install_upgrade_with_a_vm_reboot_and_purge(pytestconfig):
    if lacks := missing():
        pytest.skip(f"AREA operator NOT TESTED: {lacks}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.install"], cwd=pytestconfig.rootpath, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-40000:] + done.stderr[-2000:]
