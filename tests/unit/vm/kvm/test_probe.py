"""A probe guest decides between KVM and TCG, and its result is remembered."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from virtshim.model.errors import DeadlineExceeded, InternalError
from virtshim.system.process import Finished
from virtshim.vm import kvm_probe
from virtshim.vm.elements.processors import DomainType
from virtshim.vm.kvm_probe import PROBE_GUEST_PASSED, probe_guest_rom

QEMU = "/usr/bin/qemu-system-x86_64"
SOURCE = Path(kvm_probe.__file__).with_name("probe_guest.S")


class Program:
    """Answers instead of QEMU."""

    def __init__(self, answer: Finished | Exception) -> None:
        self.answer = answer
        self.calls: list[list[str]] = []

    def __call__(self, argv: list[str], *, timeout: float) -> Finished:
        self.calls.append(argv)
        rom = Path(argv[argv.index("-bios") + 1])
        assert rom.read_bytes() == probe_guest_rom()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def _choose(tmp_path: Path, program: Program, wanted: str = "auto", kvm: str = "/dev/null") -> kvm_probe.Verdict:
    return kvm_probe.probe_choose(wanted, QEMU, str(tmp_path / "kvm.json"), run_program=program, kvm=kvm)


def test_a_probe_guest_that_succeeds_means_kvm_and_runs_once(tmp_path: Path) -> None:
    program = Program(Finished(PROBE_GUEST_PASSED, b"PL", b""))
    for _ in range(2):
        assert _choose(tmp_path, program).domain_type is DomainType.KVM
    assert len(program.calls) == 1


def test_a_probe_guest_that_fails_means_tcg_with_qemus_message(tmp_path: Path) -> None:
    program = Program(Finished(-6, b"P", b"failed to set MSR"))
    for _ in range(2):
        verdict = _choose(tmp_path, program)
        assert verdict.domain_type is DomainType.QEMU
        assert "failed to set MSR" in verdict.why
    assert len(program.calls) == 1


@pytest.mark.parametrize("error", [DeadlineExceeded("took too long"), InternalError("cannot run")])
def test_no_answer_means_tcg_until_the_next_probe(tmp_path: Path, error: Exception) -> None:
    program = Program(error)
    for _ in range(2):
        assert _choose(tmp_path, program).domain_type is DomainType.QEMU
    assert len(program.calls) == 2


def test_another_qemu_is_probed_again(tmp_path: Path) -> None:
    program = Program(Finished(PROBE_GUEST_PASSED, b"", b""))
    _choose(tmp_path, program)
    kvm_probe.probe_choose("auto", "/other/qemu", str(tmp_path / "kvm.json"), run_program=program, kvm="/dev/null")
    assert len(program.calls) == 2


@pytest.mark.parametrize("kept", ["", "{}", "[]", '{"key": 1, "domain_type": "x"}'])
def test_a_damaged_probe_result_is_ignored(tmp_path: Path, kept: str) -> None:
    (tmp_path / "kvm.json").write_text(kept)
    program = Program(Finished(PROBE_GUEST_PASSED, b"", b""))
    assert _choose(tmp_path, program).domain_type is DomainType.KVM


@pytest.mark.parametrize("wanted", ["kvm", "qemu"])
def test_a_configured_domain_type_is_not_probed(tmp_path: Path, wanted: str) -> None:
    program = Program(InternalError("not to be called"))
    assert _choose(tmp_path, program, wanted).domain_type is DomainType(wanted)
    assert not program.calls


def test_without_the_device_there_is_nothing_to_probe(tmp_path: Path) -> None:
    program = Program(InternalError("not to be called"))
    assert _choose(tmp_path, program, kvm=str(tmp_path / "none")).domain_type is DomainType.QEMU
    assert not program.calls


def test_the_bytes_are_what_the_source_assembles_to(tmp_path: Path) -> None:
    if not (shutil.which("as") and shutil.which("ld")):
        pytest.skip("NOT TESTED: needs binutils; run make setup")
    subprocess.run(["as", "--64", str(SOURCE), "-o", str(tmp_path / "p.o")], check=True)
    link = ["ld", "-Ttext", "0xf0000", "--oformat", "binary", "p.o", "-o", "p.bin"]
    subprocess.run(link, cwd=tmp_path, check=True)
    assert (tmp_path / "p.bin").read_bytes() == probe_guest_rom()


def test_the_probe_guest_succeeds_under_tcg(tmp_path: Path) -> None:
    """Under TCG, which runs everything."""
    if not os.path.exists(QEMU):
        pytest.skip(f"NOT TESTED: needs {QEMU}; run make setup")
    rom = tmp_path / "rom"
    rom.write_bytes(probe_guest_rom())
    argv = [
        "tcg" if word == "kvm" else "max" if word == "host" else word
        for word in kvm_probe.probe_command_line(QEMU, str(rom))
    ]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (PROBE_GUEST_PASSED, b"PL")
