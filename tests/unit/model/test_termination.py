"""The mount that kubelet names decides which file gets a container's termination message."""

import pytest

from virtshim.guest.command import PATH_ANNOTATION, TerminationFile, termination_file
from virtshim.model.container import Mount

MOUNTS = (Mount("/etc/hosts", "/x"), Mount("/dev/termination-log", "/pods/u/containers/vm/1"))


@pytest.mark.parametrize("path", ["/dev/termination-log", "/dev//termination-log", "/dev/./termination-log"])
def test_the_termination_file_is_the_mount_that_kubelet_names(path: str) -> None:
    found = termination_file({PATH_ANNOTATION: path}, MOUNTS)
    assert found == TerminationFile("/dev/termination-log", "/pods/u/containers/vm/1")


@pytest.mark.parametrize("path", ["", "/dev/other", "dev/termination-log", "/dev/termination-log\n", "/dev/\0"])
def test_a_container_without_kubelets_mount_has_no_termination_file(path: str) -> None:
    assert termination_file({PATH_ANNOTATION: path}, MOUNTS) is None


def test_a_relative_host_path_is_no_termination_file() -> None:
    assert termination_file({PATH_ANNOTATION: "/t"}, (Mount("/t", "relative"),)) is None


@pytest.mark.hostile
def test_a_volume_at_the_termination_path_is_no_termination_file() -> None:
    """virtshim, which is root, would write the guest's words into it: a file of the node that the pod may only read, say."""
    volume = Mount("/dev/termination-log", "/etc/passwd", readonly=True)
    found = termination_file({PATH_ANNOTATION: "/dev/termination-log"}, (volume, *MOUNTS))
    assert found == TerminationFile("/dev/termination-log", "/pods/u/containers/vm/1")


@pytest.mark.hostile
def test_a_read_only_mount_is_not_written() -> None:
    volume = Mount("/dev/termination-log", "/etc/passwd", readonly=True)
    assert termination_file({PATH_ANNOTATION: "/dev/termination-log"}, (*MOUNTS, volume)) is None
