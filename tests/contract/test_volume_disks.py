"""virtshim reads the files that the flexVolume driver leaves on the node, and turns such volumes into disks of the
guest."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.volume_disks import FakeVolumeDisks

from virtshim.model.errors import InvalidRequest, NotFound
from virtshim.volumes.disk_images import FILE, MAX_BYTES, flex_volumes_parse
from virtshim.volumes.disks_on_node import VolumeDisksOnNode
from virtshim.volumes.ports import VolumeDiskFiles

pytestmark = pytest.mark.volumes

DRIVER = Path(__file__).parents[2] / "deploy" / "flexvolume_driver"
OPTIONS = '{"capacity": "1GiB", "kubernetes.io/readwrite": "rw", "type": "qcow2"}'


def driver(*words: str) -> dict[str, object]:
    done = subprocess.run([str(DRIVER), *words], capture_output=True, text=True, timeout=60, check=False)
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    assert (done.returncode == 0) == (answer["status"] == "Success")
    return answer


def on_node(directory: Path) -> VolumeDiskFiles:
    (directory / FILE).write_text(OPTIONS)
    os.truncate(os.open(directory / "disk.img", os.O_CREAT | os.O_WRONLY), 1 << 20)
    return VolumeDisksOnNode()


def in_memory(directory: Path) -> VolumeDiskFiles:
    fake = FakeVolumeDisks()
    fake.options[str(directory)] = OPTIONS.encode()
    fake.images[str(directory)] = "one"
    return fake


@pytest.mark.parametrize("made", [on_node, in_memory])
def test_a_flex_volume_has_the_options_that_its_driver_wrote(
    made: Callable[[Path], VolumeDiskFiles], tmp_path: Path
) -> None:
    files = made(tmp_path)
    assert files.flex_options(str(tmp_path)) == OPTIONS.encode()
    with pytest.raises(NotFound, match=f"{FILE} is not there"):
        files.flex_options(str(tmp_path / "other"))


@pytest.mark.parametrize("made", [on_node, in_memory])
def test_a_disk_image_in_a_volume_always_has_the_same_name(
    made: Callable[[Path], VolumeDiskFiles], tmp_path: Path
) -> None:
    files = made(tmp_path)
    assert files.image(str(tmp_path), readonly=False) == files.image(str(tmp_path), readonly=True) != ""
    with pytest.raises(NotFound, match=r"disk.img is not there: put a raw disk image there"):
        files.image(str(tmp_path / "other"), readonly=False)


def test_a_disk_image_is_identified_independently_of_its_path(tmp_path: Path) -> None:
    files = VolumeDisksOnNode()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "disk.img").write_bytes(bytes(512))
    (tmp_path / "c").symlink_to("a")
    (tmp_path / "a" / "disk.img").chmod(0o400)
    assert files.image(f"{tmp_path}/a", readonly=False) == files.image(f"{tmp_path}/c", readonly=True)
    assert files.image(f"{tmp_path}/a", readonly=False) != files.image(f"{tmp_path}/b", readonly=False)
    assert (tmp_path / "a" / "disk.img").stat().st_mode & 0o777 == 0o400, "it stays whose it was, as it was"


@pytest.mark.hostile
@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "empty"])
def test_a_file_that_is_not_a_disk_image_is_refused(tmp_path: Path, kind: str) -> None:
    image = tmp_path / "disk.img"
    {
        "link": lambda: image.symlink_to("/etc/shadow"),
        "fifo": lambda: os.mkfifo(image),
        "directory": image.mkdir,
        "empty": image.touch,
    }[kind]()
    with pytest.raises(InvalidRequest, match="give it the disk's size" if kind == "empty" else "not a regular file"):
        VolumeDisksOnNode().image(str(tmp_path), readonly=kind == "link")


def test_the_driver_reports_its_capabilities() -> None:
    assert driver("init")["capabilities"] == {"attach": False, "selinuxRelabel": False, "fsGroup": False}
    assert driver("attach", "{}", "node") == {"status": "Not supported"}


def test_the_drivers_volume_holds_the_options_only_and_can_be_unmounted(tmp_path: Path) -> None:
    volume, seen = tmp_path / "scratch", tmp_path / "seen"
    script = f"""
    set -e
    {DRIVER} mount {volume} {shlex.quote(OPTIONS)}
    {DRIVER} mount {volume} '{{}}'
    mountpoint -q {volume}
    cp -r {volume} {seen}
    if touch {volume}/data; then exit 1; fi
    {DRIVER} unmount {volume}
    {DRIVER} unmount {volume}
    """
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"status": "Success"}] * 4
    assert not volume.exists()
    assert flex_volumes_parse(VolumeDisksOnNode().flex_options(str(seen)), "scratch", "/data").size_bytes == 1 << 30


def test_the_driver_reports_errors_in_kubelets_format(tmp_path: Path) -> None:
    (tmp_path / 'a "file"').write_text("")
    answer = driver("mount", str(tmp_path / 'a "file"' / "below"), OPTIONS)
    assert answer["status"] == "Failure"
    assert "a file" in str(answer["message"])


def test_missing_options_are_reported_with_the_driver_to_install(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(NotFound, match=f"{FILE} is not there.*/usr/share/virtshim/flexvolume_driver"):
            VolumeDisksOnNode().flex_options(str(place))


def test_options_are_read_only_from_a_regular_file_of_limited_size(tmp_path: Path) -> None:
    files, file = VolumeDisksOnNode(), tmp_path / FILE
    file.write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(InvalidRequest, match="shorten the flexVolume's options"):
        files.flex_options(str(tmp_path))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(InvalidRequest, match="not a regular file"):
        files.flex_options(str(tmp_path))
    file.unlink()
    file.symlink_to("/etc/hostname")
    with pytest.raises(InvalidRequest, match="not a regular file"):
        files.flex_options(str(tmp_path))
