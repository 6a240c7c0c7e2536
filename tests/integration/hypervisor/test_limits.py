"""libvirt's own cgroups, and memory of huge pages, with the real kernel."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hugepages import PAGES, number, reserved

LIMITS = """
from virtshim.domain.cgroup import CgroupLimits

def there(controller, name):
    line = next(l for l in Path(f"/proc/{qemu_pid()}/cgroup").read_text().splitlines() if controller in l.split(":")[1])
    group = line.split(":", 2)[2].removesuffix("/emulator")
    return Path(f"/sys/fs/cgroup/{controller}{group}/{name}").read_text().strip()

def all_there():
    numbers = [there("cpu", "cpu.cfs_quota_us"), there("cpu", "cpu.shares"), there("memory", "memory.limit_in_bytes")]
    return [*map(int, numbers), there("cpuset", "emulator/cpuset.cpus")]
"""
UNLIMITED = (1 << 63) - 4096


@pytest.fixture
def huge_pages() -> Iterator[None]:
    """64 MiB of them, and their file system where libvirt looks for it."""
    with reserved(32):
        Path("/dev/hugepages").mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "hugetlbfs", "none", "/dev/hugepages"], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "/dev/hugepages"], check=True)


@pytest.mark.skipif(not Path("/sys/fs/cgroup/cpu").exists(), reason="NOT TO BE HAD HERE: reads cgroup v1 files")
def test_where_libvirt_makes_the_cgroup_it_is_told_the_limits_at_the_start_and_later(place):
    """As below systemd's slices, but for systemd. No memory limit at the start: libvirt raises RLIMIT_MEMLOCK with it,
    which takes CAP_SYS_RESOURCE."""
    said = place.run(
        LIMITS
        + """
boot(dataclasses.replace(SPEC, size=dataclasses.replace(SPEC.size, max_vcpus=2), limits=CgroupLimits(512, 50_000, 100_000, "0")))
say(all_there())
resizing.set_limits(SPEC.uuid, CgroupLimits(1024, 80_000, 100_000, "", "", 400 << 20))
say(all_there())
resizing.set_limits(SPEC.uuid, CgroupLimits())
say(all_there())
resizing.add_vcpus(SPEC.uuid, 2)
hypervisor.destroy(SPEC.uuid, SPEC.container_id)
""",
        "libvirt-cgroups",
    )
    assert said == [[50_000, 512, UNLIMITED, "0"], [80_000, 1024, 400 << 20, "0"], [-1, 1024, UNLIMITED, "0"]]


@pytest.mark.usefixtures("huge_pages")
def test_a_guests_memory_is_of_huge_pages(place):
    free = number("free_hugepages")
    said = place.run(
        "boot(dataclasses.replace(SPEC, size=dataclasses.replace(SPEC.size, page_bytes=2 << 20))); "
        f"say(int(Path('{PAGES}/free_hugepages').read_text()))"
        "; hypervisor.destroy(SPEC.uuid, SPEC.container_id)"
    )
    assert said == [free - 16]
