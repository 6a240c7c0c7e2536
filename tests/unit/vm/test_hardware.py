"""virtshim finds a node's firmware and swtpm, and makes the directory of the TPMs' sockets."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from virtshim.model.errors import AlreadyExists, InternalError, InvalidRequest, Unimplemented, WrongState
from virtshim.model.hardware import Cache, Firmware, FirmwareFiles, HardwareOptions
from virtshim.model.image import DiskFormat
from virtshim.model.vm import Disk
from virtshim.vm.file_owner import QemuIds
from virtshim.vm.firmware import (
    end_abandoned_swtpms,
    firmware_kinds,
    first_uefi,
    let_qemu_reach_tpm_sockets,
    refuse_foreign_tpm_state,
    refuse_missing_programs,
    refuse_missing_uefi,
    refuse_without_direct_io,
    remove_tpm_state,
    tpm_log_directory,
    tpm_socket_directory,
    tpm_state_directory,
)


def described(
    directory: Path, name: str, *features: str, machines: str = "pc-q35-*", kind: str = "uefi", **mapping: str
) -> None:
    directory.mkdir(exist_ok=True)
    target = {"architecture": "x86_64", "machines": [machines]}
    file = {"format": mapping.pop("format", "raw")}
    files = {
        "device": "flash",
        "executable": {"filename": f"/fw/{name}.code", **file},
        "nvram-template": {"filename": f"/fw/{name}.vars", **file},
    }
    text = {"interface-types": [kind], "mapping": files | mapping, "targets": [target], "features": list(features)}
    (directory / name).write_text(json.dumps(text))


def test_firmware_is_found_by_the_packages_descriptors(tmp_path: Path) -> None:
    packages, own = tmp_path / "packages", tmp_path / "own"
    assert firmware_kinds((str(packages), str(own))) == {Firmware.BIOS}
    described(packages, "40.json", "secure-boot", "enrolled-keys", "requires-smm")
    assert firmware_kinds((str(packages), str(own))) == {Firmware.BIOS, Firmware.SECURE}
    described(packages, "60.json", "acpi-s3")
    described(packages, "70.json", machines="virt-*")
    (packages / "80.json").write_text("{")
    assert firmware_kinds((str(packages), str(own))) == set(Firmware)
    described(own, "60.json", "secure-boot")
    assert firmware_kinds((str(packages), str(own))) == {Firmware.BIOS, Firmware.SECURE}


def test_a_new_disk_has_the_files_of_the_first_descriptor_of_their_kind(tmp_path: Path) -> None:
    packages, own = tmp_path / "packages", tmp_path / "own"
    places = (str(packages), str(own))
    assert first_uefi(Firmware.UEFI, places) is None
    described(packages, "40.json", "secure-boot", "enrolled-keys", "requires-smm")
    described(packages, "60.json")
    described(own, "70.json")
    assert first_uefi(Firmware.UEFI, places) == FirmwareFiles("/fw/60.json.code", "/fw/60.json.vars")
    assert first_uefi(Firmware.SECURE, places) == FirmwareFiles("/fw/40.json.code", "/fw/40.json.vars")
    described(own, "50.json")
    assert first_uefi(Firmware.UEFI, places) == FirmwareFiles("/fw/50.json.code", "/fw/50.json.vars")


@pytest.mark.parametrize("mapping", [{"format": "qcow2"}, {"device": "memory"}, {"mode": "stateless"}])
def test_firmware_that_is_no_raw_pair_is_left_to_libvirt(tmp_path: Path, mapping: dict[str, str]) -> None:
    described(tmp_path, "50.json", **mapping)
    described(tmp_path, "60.json")
    assert first_uefi(Firmware.UEFI, (str(tmp_path),)) is None


@pytest.fixture
def known(tmp_path: Path) -> FirmwareFiles:
    (tmp_path / "code").touch()
    (tmp_path / "vars").write_bytes(bytes(8))
    return FirmwareFiles(str(tmp_path / "code"), str(tmp_path / "vars"))


@pytest.mark.parametrize(
    ("gone", "has_run", "words"),
    [
        (
            "code",
            True,
            "/code, with which this disk first started, is gone; install the earlier version .* remove .*/d.nvram ",
        ),
        ("code", False, "/code, which a descriptor of this node names .*, does not exist; install its package again"),
        ("vars", False, "/vars, which a descriptor of this node names .*, does not exist; install its package again"),
    ],
)
def test_a_disk_whose_firmware_is_gone_is_refused_and_the_file_named(
    tmp_path: Path, known: FirmwareFiles, gone: str, has_run: bool, words: str
) -> None:
    wanted, nvram = HardwareOptions(Firmware.SECURE), tmp_path / "d.secure.nvram"
    if has_run:
        nvram.write_bytes(bytes(8))
    refuse_missing_programs(wanted, known, str(nvram))
    (tmp_path / gone).unlink()
    with pytest.raises(WrongState, match=words.replace("d.nvram", "d.secure.nvram")):
        refuse_missing_programs(wanted, known, str(nvram))


def test_the_variables_template_is_not_needed_once_variables_exist(tmp_path: Path, known: FirmwareFiles) -> None:
    nvram = tmp_path / "d.nvram"
    nvram.write_bytes(bytes(8))
    Path(known.variables).unlink()
    refuse_missing_uefi(known, str(nvram))


def test_another_firmware_build_is_refused_if_its_variables_have_another_size(
    tmp_path: Path, known: FirmwareFiles
) -> None:
    nvram = tmp_path / "d.nvram"
    nvram.write_bytes(bytes(4))
    with pytest.raises(WrongState, match=f"{known.variables} has another size .* remove {nvram} "):
        refuse_missing_uefi(known, str(nvram))


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (HardwareOptions(Firmware.UEFI), "annotation virtshim.io/firmware: this node has no firmware for uefi; .*ovmf"),
        (HardwareOptions(tpm=True), "annotation virtshim.io/tpm: this node has no swtpm; .*swtpm-tools"),
    ],
)
def test_missing_firmware_or_swtpm_is_refused_with_the_package_to_install(wanted: HardwareOptions, words: str) -> None:
    def refuse_missing(wanted: HardwareOptions) -> None:
        refuse_missing_programs(wanted, kinds=lambda: {Firmware.BIOS}, missing_programs=lambda: ["swtpm"])

    with pytest.raises(Unimplemented, match=words):
        refuse_missing(wanted)
    refuse_missing(HardwareOptions())


def test_libvirts_directories_are_where_its_driver_has_them() -> None:
    assert [name("/run/libvirt/qemu") for name in (tpm_state_directory, tpm_log_directory, tpm_socket_directory)] == [
        "/var/lib/libvirt/swtpm", "/var/log/swtpm/libvirt/qemu", "/run/libvirt/qemu/swtpm",
    ]  # fmt: skip
    assert tpm_state_directory("/d/libvirt/run/qemu") == "/d/libvirt/lib/swtpm"
    assert tpm_state_directory("") == ""


def test_a_tpm_of_a_vm_that_is_gone_is_named_by_its_directory(tmp_path: Path) -> None:
    vm, other = uuid.uuid4(), uuid.uuid4()
    (tmp_path / str(vm)).mkdir()
    with pytest.raises(
        AlreadyExists, match=f"VirtletSystemUUID {vm}: the TPM .* still in {tmp_path}/{vm}; choose another"
    ):
        refuse_foreign_tpm_state(str(tmp_path), vm)
    refuse_foreign_tpm_state(str(tmp_path), other)
    refuse_foreign_tpm_state("", vm)


@pytest.mark.parametrize(
    ("devices", "stays"),
    [
        ("<tpm><backend type='emulator'/></tpm>", False),
        ("<tpm><backend type='emulator' persistent_state='no'/></tpm>", False),
        ("<tpm><backend type='emulator' persistent_state='yes'/></tpm>", True),
        ("", True),
    ],
)
def test_a_tpms_state_is_removed_unless_it_is_kept_or_another_vms(tmp_path: Path, devices: str, stays: bool) -> None:
    """Of a VM without a TPM it is not: an operator has kept it."""
    vm, other = uuid.uuid4(), uuid.uuid4()
    for one in (vm, other):
        (tmp_path / str(one) / "tpm2").mkdir(parents=True)
        (tmp_path / str(one) / "tpm2/tpm2-00.permall").touch()
    definition = f"<domain><devices>{devices}</devices></domain>"
    for _ in range(2):
        remove_tpm_state(str(tmp_path), vm, definition)
        assert (tmp_path / str(vm)).exists() == stays
    assert (tmp_path / str(other) / "tpm2/tpm2-00.permall").exists()
    remove_tpm_state("", other, definition)
    assert (tmp_path / str(other)).exists()


def test_a_tpms_directory_that_cannot_be_removed_is_named_and_its_vm_stays(tmp_path: Path) -> None:
    damaged = tmp_path / "swtpm"
    damaged.touch()  # and is no directory
    definition = "<domain><devices><tpm><backend type='emulator'/></tpm></devices></domain>"
    with pytest.raises(InternalError, match=f"cannot be removed from {damaged}: Not a directory"):
        remove_tpm_state(str(damaged), uuid.uuid4(), definition)


@pytest.mark.skipif(os.geteuid() != 0, reason="AREA guest NOT TESTED: needs root")
def test_a_vms_own_user_may_traverse_but_not_list_the_socket_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    for parent in tmp_path.parents[:-2]:
        parent.chmod(parent.stat().st_mode | 0o111)
    place = tmp_path / "swtpm"
    let_qemu_reach_tpm_sockets(str(place), QemuIds(64055, 64055).for_vm(2130706433))
    place.chmod(0o770)  # as libvirt does at each start
    (place / "vm.sock").touch()
    os.chown(place / "vm.sock", 2130706433, 64055)

    def may(*command: str, group: int = 64055) -> bool:
        done = subprocess.run(command, user=2130706433, group=group, extra_groups=[], capture_output=True, check=False)
        return done.returncode == 0

    assert may("stat", f"{place}/vm.sock")
    assert not may("ls", str(place))
    assert not may("touch", f"{place}/other")
    assert not may("stat", f"{place}/vm.sock", group=65534)


@pytest.fixture
def waits() -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Processes with a word on their command lines."""
    with contextlib.ExitStack() as stack:

        def begin(word: str) -> subprocess.Popen[bytes]:
            process = stack.enter_context(
                subprocess.Popen(
                    ["sh", "-c", "echo; read _", "sh", word], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()  # Popen returns before /proc has the command line
            return process

        yield begin


def test_an_swtpm_without_a_qemu_is_ended(tmp_path: Path, waits: Callable[[str], subprocess.Popen[bytes]]) -> None:
    """Killed between the two, libvirt knows nothing of it, and it would keep the TPM from the VM's next start."""
    alone, used, also = (
        waits(f"type=unixio,path={tmp_path}/{name}-swtpm.sock,mode=0600") for name in ("1-alone", "2-used", "3-also")
    )
    other = waits("another that has this number now")
    for name, process in {"1-alone": alone, "2-used": used, "3-also": also, "4-gone": other}.items():
        (tmp_path / f"{name}-swtpm.pid").write_text(str(process.pid))
    (tmp_path / "5-half-swtpm.pid").write_text("")
    waits(f"socket,id=chrtpm,path={tmp_path}/2-used-swtpm.sock")
    waits(f"{tmp_path}/domain-3-also/monitor.sock")
    end_abandoned_swtpms(str(tmp_path))
    assert alone.wait(60) == -signal.SIGTERM
    assert [process.poll() for process in (used, also, other)] == [None] * 3
    end_abandoned_swtpms(str(tmp_path / "not there"))


def test_a_vm_with_libvirts_common_user_needs_no_change(tmp_path: Path) -> None:
    let_qemu_reach_tpm_sockets(str(tmp_path / "swtpm"), QemuIds(64055, 64055))
    let_qemu_reach_tpm_sockets(str(tmp_path / "swtpm"), None)
    assert not (tmp_path / "swtpm").exists()


def test_a_file_system_without_o_direct_is_named() -> None:
    disks = [Disk("/proc/sys/kernel/ostype", DiskFormat.RAW, "root")]
    refuse_without_direct_io(Cache.WRITETHROUGH, disks)
    with pytest.raises(InvalidRequest, match=r"virtshim.io/disk-cache: none needs O_DIRECT.* of /proc/sys/kernel does"):
        refuse_without_direct_io(Cache.NONE, disks)
    refuse_without_direct_io(Cache.NONE, [Disk("/not/there", DiskFormat.QCOW2, "root")])
