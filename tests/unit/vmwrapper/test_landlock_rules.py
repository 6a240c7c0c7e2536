"""A confined QEMU may open only what its command line, as libvirt writes it, allows."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from vmwrapper import bundle, landlock_rules
from vmwrapper.confine import landlock

QEMU = "/usr/bin/qemu-system-x86_64"


def rights(path: object, *argv: str) -> int:
    """All that is allowed for a path by name."""
    total = 0
    for allowed, given in landlock_rules.files(argv, QEMU, []):
        if allowed == str(path):
            total |= given
    return total


@pytest.mark.parametrize(
    "option",
    [
        '{{"driver":"file","filename":"{path}","node-name":"libvirt-1-storage"}}',
        '{{"driver":"qcow2","file":{{"driver":"file","filename":"{path}"}}}}',
        "file={path},format=raw,if=none",
        "id=x,path={path}",
        "{path}",
    ],
)
def test_a_file_that_the_command_line_names_may_be_read_and_written(option: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.touch()
    assert rights(disk, "-blockdev", option.format(path=disk)) == landlock.WRITE


def test_a_file_without_a_name_gets_no_rule() -> None:
    memory = os.memfd_create("memory")
    try:
        option = f'{{"qom-type":"memory-backend-file","mem-path":"/proc/self/fd/{memory}"}}'
        assert not rights(f"/proc/self/fd/{memory}", "-object", option)
    finally:
        os.close(memory)


def test_a_comma_in_a_path_is_doubled(tmp_path: Path) -> None:
    disk = tmp_path / "a,b"
    disk.touch()
    assert rights(disk, "-drive", f"file={tmp_path}/a,,b,format=raw") == landlock.WRITE


def test_a_device_node_also_gets_ioctl_rights(tmp_path: Path) -> None:
    assert rights("/dev/null", "-blockdev", '{"driver":"host_device","filename":"/dev/null"}') == landlock.DEVICE


def test_files_may_be_created_in_a_memory_directory(tmp_path: Path) -> None:
    assert rights(tmp_path, "-object", f'{{"qom-type":"memory-backend-file","mem-path":"{tmp_path}"}}') == landlock.MAKE


def test_only_the_vnc_sockets_directory_allows_new_files_and_no_disks_does(tmp_path: Path) -> None:
    disk = tmp_path / "disks" / "disk"
    disk.parent.mkdir()
    disk.touch()
    argv = ("-vnc", f"unix:{tmp_path}/vnc.sock", "-drive", f"file={disk}")
    assert rights(tmp_path, *argv) == landlock.MAKE
    assert rights(disk.parent, *argv) == 0


def test_the_guests_kernel_command_line_allows_no_path(tmp_path: Path) -> None:
    kernel = tmp_path / "kernel"
    kernel.write_bytes(b"kernel")
    argv = ["-kernel", str(kernel), "-append", f"root=/dev/null x={tmp_path},/etc", "-initrd", str(kernel)]
    plain = landlock_rules.files(["-kernel", str(kernel), "-initrd", str(kernel)], "/usr/bin/qemu", ())
    assert set(landlock_rules.files(argv, "/usr/bin/qemu", ())) == set(plain)


def test_arguments_that_are_no_paths_allow_nothing() -> None:
    before = landlock_rules.files((), QEMU, [])
    assert (
        landlock_rules.files(("-name", "guest=x,debug-threads=on", "-device", "{not json", "-m", "64"), QEMU, [])
        == before
    )


@pytest.mark.parametrize("file", ["mountinfo", "net/tcp", "net/unix", "cgroup", "environ", "root"])
def test_qemu_cannot_read_node_wide_files_through_proc_self(file: str) -> None:
    readable = [path for path, _ in landlock_rules.files(("-device", "virtio-rng-pci"), QEMU, [])]
    assert [path for path in readable if Path(f"/proc/self/{file}").is_relative_to(path)] == []


def test_only_a_vm_with_a_function_at_vfio_sees_the_hosts_devices(tmp_path: Path) -> None:
    plain = {path for path, _ in landlock_rules.files(("-device", "virtio-rng-pci"), QEMU, [])}
    with_function = {
        path for path, _ in landlock_rules.files(("-device", '{"driver":"vfio-pci","host":"0000:00:1f.0"}'), QEMU, [])
    }
    assert {"/dev/vfio/vfio", "/sys/bus/pci"} <= with_function - plain


def test_only_a_vm_with_a_usb_device_sees_the_hosts_usb(tmp_path: Path) -> None:
    plain = {path for path, _ in landlock_rules.files(("-device", "qemu-xhci"), QEMU, [])}
    with_usb = {
        path
        for path, _ in landlock_rules.files(
            ("-device", '{"driver":"usb-host","hostdevice":"/dev/bus/usb/001/002"}'), QEMU, []
        )
    }
    assert {"/sys/bus/usb", "/dev/bus/usb"} <= with_usb - plain


def test_an_emulator_in_another_directory_has_its_own_files(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    allowed = dict(landlock_rules.files((), f"{tmp_path}/bin/qemu", ["/opt/firmware"]))
    assert allowed[f"{tmp_path}/share/qemu"] == landlock.READ
    assert allowed["/opt/firmware"] == landlock.EXECUTE


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("-chardev", "socket,id=charmonitor,fd=22,server=on,wait=off"),
        ("-chardev", "socket,id=a,path=/run/a.sock,server=on"),
        ("-chardev", "socket,id=fs,path=/run/virtiofsd.sock"),
        ("-chardev", "socket,id=fs,path=/run/virtiofsd.sock", "-chardev", "socket,id=chrtpm,fd=23"),
    ],
)
def test_qemu_cannot_run_another_program_with_any_command_line(argv: tuple[str, ...], tmp_path: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "s"))
    server.listen()
    code = f"""
from vmwrapper.confine import kernel, seccomp
from vmwrapper import landlock_rules
import socket
kernel.forbid_new_privileges()
seccomp.install(landlock_rules.refused_calls({argv!r}))
try:
    socket.socket(socket.AF_UNIX).connect({str(tmp_path / "s")!r})
except PermissionError:
    print("refused")
"""
    done = subprocess.run(
        ["/usr/bin/python3", "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True
    )
    server.close()
    assert done.stdout.strip() == "refused"


STAND_IN = """#!/usr/bin/python3 -IS
import resource, socket, sys
def tried(what):
    try:
        what()
    except OSError as exc:
        return type(exc).__name__
    return "allowed"
print(tried(lambda: open(sys.argv[2])), tried(lambda: open("/etc/hostname")), tried(lambda: socket.socket(socket.AF_INET)),
      resource.getrlimit(resource.RLIMIT_CORE), int(open("/proc/self/coredump_filter").read(), 16),
      open("/proc/self/status").read().count("NoNewPrivs:\\t1"))
"""


def started(tmp_path: Path, **environment: str) -> str:
    """What a stand-in for QEMU, started by the written vmwrapper with one file on its command line, says of itself."""
    bundle.write(str(tmp_path / "vmwrapper"))
    emulator = tmp_path / "bin" / "qemu"
    emulator.parent.mkdir()
    emulator.write_text(STAND_IN)
    emulator.chmod(0o755)
    disk = tmp_path / "disk"
    disk.touch()
    done = subprocess.run(
        [str(tmp_path / "vmwrapper"), "-drive", str(disk)],
        env={
            "PATH": os.defpath,
            "VIRTSHIM_EMULATOR": str(emulator),
            "VIRTSHIM_PARTS": "/usr/bin:/usr/lib:/proc/self",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_bundled_vmwrapper_confines_the_emulator(tmp_path: Path) -> None:
    files = "PermissionError" if landlock.abi() else "allowed"
    found = started(tmp_path, VIRTSHIM_CONFINE="landlock,seccomp,core-scheduling")
    assert found == f"allowed {files} PermissionError (1, 1) 0 1"


def test_layers_that_the_settings_switch_off_are_left_out(tmp_path: Path) -> None:
    assert started(tmp_path, VIRTSHIM_CONFINE="") == "allowed allowed allowed (1, 1) 0 1"


def test_a_vm_that_an_earlier_version_defined_starts_as_it_did(tmp_path: Path) -> None:
    assert started(tmp_path).split(" (")[0] == "allowed allowed allowed"
