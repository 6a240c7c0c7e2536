"""The fake and the reader of QEMU's raw console log fulfil the contract of BootOutput."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.boot_output import FakeBootOutput

from virtshim.logs.entrypoint_log import RawBootOutput
from virtshim.logs.ports import BootOutput
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout

A = ContainerId("a" * 64)

Written = Callable[[bytes], BootOutput]


@pytest.fixture
def real(tmp_path: Path) -> Written:
    def written(output: bytes) -> BootOutput:
        layout = Layout(str(tmp_path / "state"), str(tmp_path / "run"))
        log = Path(layout.console_log(A))
        log.parent.mkdir(parents=True)
        log.write_bytes(output)
        return RawBootOutput(layout)

    return written


def fake(output: bytes) -> BootOutput:
    consoles = FakeBootOutput()
    consoles.shown[A] = output
    if b"Linux version" not in output:
        consoles.before_kernel.add(A)
    return consoles


@pytest.mark.parametrize("part", ["fake", "real"])
def test_output_of_firmware_and_boot_loaders_does_not_count_as_a_kernel(part: str, real: Written) -> None:
    written = real if part == "real" else fake
    consoles = written(b"SeaBIOS (version 1.16.2)\r\nBooting from Hard Disk...\r\nWelcome to GRUB!\r\n\r\n")
    assert not consoles.shows_kernel(A)


@pytest.mark.parametrize("part", ["fake", "real"])
def test_output_of_a_linux_kernel_counts_as_a_kernel(part: str, real: Written) -> None:
    written = real if part == "real" else fake
    assert written(b"Welcome to GRUB!\r\n[    0.000000] Linux version 6.1.0-18-cloud-amd64\r\n").shows_kernel(A)


@pytest.mark.parametrize(
    "output",
    [
        b"Booting...\r\n[    0.012345] Command line: quiet\r\n",
        b"EFI stub: Loaded initrd from command line option\r\n",
        b"Copyright (c) 1992-2023 The FreeBSD Project.\r\n",
        b"x" * (1 << 17),
    ],
)
def test_output_of_other_kernels_and_any_long_output_counts_as_a_kernel(output: bytes, real: Written) -> None:
    assert real(output).shows_kernel(A)


def test_an_unreadable_console_may_show_a_kernel(tmp_path: Path) -> None:
    assert RawBootOutput(Layout(str(tmp_path), str(tmp_path))).shows_kernel(A)
    assert FakeBootOutput().shows_kernel(A)


@pytest.mark.parametrize("part", ["fake", "real"])
def test_a_console_is_read_piece_by_piece(part: str, real: Written) -> None:
    written = real if part == "real" else fake
    consoles = written(b"0123456789")
    assert [consoles.piece(A, start, 4) for start in (0, 4, 8, 10)] == [b"0123", b"4567", b"89", b""]


def test_an_unreadable_console_has_no_pieces(tmp_path: Path) -> None:
    assert RawBootOutput(Layout(str(tmp_path), str(tmp_path))).piece(A, 0, 4) == b""
    assert FakeBootOutput().piece(A, 0, 4) == b""
