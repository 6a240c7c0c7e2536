"""If vhost-net is missing or unusable, QEMU moves the frames, and the log says so once."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from tapmanager.links import tap
from tapmanager.links.tap import VhostNet


def test_a_node_that_is_not_vhost_net_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "vhost-net").touch()
    assert "does not answer as vhost-net" in tap.vhost_trouble(str(tmp_path / "vhost-net"))
    assert "No such file" in tap.vhost_trouble(str(tmp_path / "missing"))


def test_a_failure_is_logged_once_and_again_when_the_reason_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    offered = VhostNet(device=str(tmp_path / "vhost-net"))
    assert [offered.open(2) for _ in range(3)] == [[], [], []]
    assert [line.split(" ")[0] for line in caplog.messages] == ["vhost_net.not_used"]
    (tmp_path / "vhost-net").touch()
    assert offered.open(2) == []
    assert len(caplog.messages) == 2


def test_a_partial_open_leaves_no_descriptor_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To run out of descriptors for real would take all those of this process."""
    device = tmp_path / "vhost-net"
    device.touch()
    opened: list[int] = []
    real = os.open

    def until_three(path: str, flags: int) -> int:
        if len(opened) == 3:
            raise OSError(24, "Too many open files")
        opened.append(real(path, flags))
        return opened[-1]

    monkeypatch.setattr(tap.os, "open", until_three)
    assert VhostNet(device=str(device), trouble=lambda _device: "").open(4) == []
    for fd in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_vhost_net_is_found_when_it_appears_later_and_can_be_switched_off(tmp_path: Path) -> None:
    device = tmp_path / "vhost-net"
    offered = VhostNet(device=str(device), trouble=lambda _device: "" if device.exists() else "it is not there")
    assert offered.open(1) == []
    device.touch()
    (fd,) = offered.open(1)
    os.close(fd)
    offered.wanted = False
    assert offered.open(1) == []
