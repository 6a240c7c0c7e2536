"""Which file holds a container's last words."""

import pytest

from virtshim.guest.command import PATH_ANNOTATION, TerminationFile, termination_file
from virtshim.model.container import Mount

MOUNTS = (Mount("/etc/hosts", "/x"), Mount("/dev/termination-log", "/pods/u/containers/vm/1"))


@pytest.mark.parametrize("path", ["/dev/termination-log", "/dev//termination-log", "/dev/./termination-log"])
def test_it_is_the_mount_that_kubelet_names(path: str) -> None:
    found = termination_file({PATH_ANNOTATION: path}, MOUNTS)
    assert found == TerminationFile("/dev/termination-log", "/pods/u/containers/vm/1")


@pytest.mark.parametrize("path", ["", "/dev/other", "dev/termination-log", "/dev/termination-log\n", "/dev/\0"])
def test_without_such_a_mount_there_is_none(path: str) -> None:
    assert termination_file({PATH_ANNOTATION: path}, MOUNTS) is None


def test_a_host_path_that_is_not_absolute_is_none() -> None:
    assert termination_file({PATH_ANNOTATION: "/t"}, (Mount("/t", "relative"),)) is None


@pytest.mark.hostile
def test_a_volume_at_its_path_is_not_taken_for_it() -> None:
    """virtshim, which is root, would write the guest's words into it: a file of the node that the pod may only read, say."""
    volume = Mount("/dev/termination-log", "/etc/passwd", readonly=True)
    found = termination_file({PATH_ANNOTATION: "/dev/termination-log"}, (volume, *MOUNTS))
    assert found == TerminationFile("/dev/termination-log", "/pods/u/containers/vm/1")


@pytest.mark.hostile
def test_what_may_only_be_read_is_not_written() -> None:
    volume = Mount("/dev/termination-log", "/etc/passwd", readonly=True)
    assert termination_file({PATH_ANNOTATION: "/dev/termination-log"}, (*MOUNTS, volume)) is None
