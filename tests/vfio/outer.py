"""Emulates a machine with an IOMMU and SR-IOV in software, with this machine's root file system read-only.

No machine that tests run on has such hardware to give away. QEMU emulates all that VFIO needs: VT-d, an NVMe controller with
virtual functions, QEMU's educational device, and a conventional bridge whose devices share a group. Inside, a node runs as
anywhere, and its VMs are emulated once more."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
_BUILT = PROJECT / "build" / "vfio"
REPORT = _BUILT / "report.json"
_MEMORY_MIB = 3072
# One thread for all processors. With a thread for each, one may still use a memory map that another has just
# replaced, as devices come and go here: "iotlb_to_section: Assertion `section_index < d->map.sections_nb' failed"
# (seen with QEMU 10.0.2).
_ACCELERATOR = "tcg,thread=single"
# Several processors would take turns on one thread, and wait for each other.
_PROCESSORS = 1
_VIRTIOFSD = ("/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd")

_SRIOV = "sriov_max_vfs=4,sriov_vq_flexible=8,sriov_vi_flexible=4,max_ioqpairs=10,msix_qsize=6"
# The first device on the root bus has slot 1. hardware.py derives all places from this order.
_DEVICES = (
    "intel-iommu,caching-mode=on",
    "vhost-user-fs-pci,chardev=root,tag=root",
    "pcie-root-port,id=express,chassis=1,slot=1",
    "edu",
    "pcie-pci-bridge,id=conventional",
    "nvme-subsys,id=subsystem",
    f"nvme,serial=outer,subsys=subsystem,bus=express,{_SRIOV}",
    "edu,bus=conventional,addr=1",
    "virtio-rng-pci,bus=conventional,addr=2",
    # A device that can report errors; its port is the last on the root bus, so that it moves no other.
    "pcie-root-port,id=faulty,chassis=9,slot=9,addr=1e.0",
    "e1000e,bus=faulty,romfile=",
)

_CRASHES = (-signal.SIGABRT, -signal.SIGSEGV)

# A USB stick, in a file of its own, and an empty hub, if the kernel supports USB.
_USB = (
    "qemu-xhci,id=usb",
    "usb-storage,bus=usb.0,port=1,drive=stick,serial=OUTER-STICK",
    "usb-hub,bus=usb.0,port=2,serial=OUTER-HUB",
)
_STICK_BYTES = 1 << 20
_FOR_USB_AND_VDPA = ("xhci-pci", "usb-storage", "sd_mod", "vdpa", "vduse", "vhost_vdpa")

# A network card with virtual functions, and a card at the other end of its wire, if QEMU and the kernel support them.
_CARD = (
    "pcie-root-port,id=network,chassis=2,slot=2",
    "igb,bus=network,netdev=card,mac=52:54:00:0c:00:00",
    "virtio-net-pci,netdev=wire,mac=52:54:00:0c:00:ff,romfile=",
)
_WIRE = ("hubport,id=card,hubid=1", "hubport,id=wire,hubid=1")

# Serves the root file system and the project, which may be a separate mount, both read-only, from a mount namespace
# of its own.
_SERVE = """
set -e
mount --make-rprivate /
mount --bind / "$1" && mount --bind "$2" "$1$2"
mount -o remount,bind,ro "$1" && mount -o remount,bind,ro "$1$2"
shift 2
exec "$@"
"""


class NoReport(Exception):
    """The machine ended, or had to be killed, before its story did."""


class EmulatorCrashed(NoReport):
    """QEMU aborted, which is its own fault whatever runs in its machine."""


def missing() -> str:
    """What this machine lacks for it, "" if nothing."""
    if not any(map(os.path.exists, _VIRTIOFSD)):
        return "needs virtiofsd (package qemu-system-common, elsewhere virtiofsd)"
    if not (_BUILT / "inputs").exists():
        return "needs build/vfio; run make vfio-machine"
    return ""


def no_usb_or_vdpa() -> str:
    """What the machine lacks for its USB devices and for a vDPA device, "" if nothing."""
    has = {file.name.partition(".")[0] for file in (_BUILT / "modules").rglob("*.ko*")}
    lacks = [name for name in _FOR_USB_AND_VDPA if name not in has]
    if lacks:
        return f"the machine's kernel has no {', '.join(lacks)} (machine/packages.sh could not bring one that has)"
    return "" if shutil.which("vdpa") else "no program vdpa (package iproute2)"


def no_card() -> str:
    """What the machine lacks for its network card with virtual functions, "" if nothing."""
    if not list((_BUILT / "modules").glob("kernel/drivers/net/ethernet/intel/igb/igb.ko*")):
        return "the kernel has no driver for it (machine/packages.sh could not bring one that has)"
    asked = subprocess.run([*_emulator(), "-device", "igb,help"], capture_output=True, check=False)
    return "" if asked.stdout else "QEMU has no such card (it is older than 8.0)"


def run_story(chapters: list[str], *, full: bool, seconds: float) -> dict[str, dict[str, Any]]:
    """Boots the machine and waits until it has powered itself off. Returns story.py's report by step. Raises NoReport.

    If QEMU itself crashes, the story runs once more from its beginning.
    """
    _compile_modules()
    wanted = f"chapters={','.join(chapters)}" + (" full" if full else "")
    try:
        return _tell(wanted, seconds)
    except EmulatorCrashed as crash:
        print(f"THE EMULATED MACHINE CRASHED AND IS BOOTED AGAIN: {str(crash)[-2000:]}")
        return _tell(wanted, seconds)


def _compile_modules() -> None:
    """The machine cannot write bytecode to its read-only disk: each daemon would compile all its modules there, for a minute."""
    directories = [
        str(PROJECT / name) for name in ("criproto", "virtshim", "tapmanager", "vmwrapper", "deploy", "tests")
    ]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *directories], check=True)


def _tell(wanted: str, seconds: float) -> dict[str, dict[str, Any]]:
    directory = tempfile.mkdtemp(prefix="virtshim-vfio-", dir="/var/tmp")
    try:
        return _run(Path(directory), wanted, seconds)
    finally:
        shutil.rmtree(directory)


def _run(directory: Path, wanted: str, seconds: float) -> dict[str, dict[str, Any]]:
    root = directory / "root"
    root.mkdir()
    for name in ("console", "report", "output"):
        (directory / name).touch()
    with socket.socket(socket.AF_UNIX) as listener, (directory / "output").open("ab") as output:
        listener.bind(f"{directory}/root.sock")
        listener.listen(1)
        number = str(listener.fileno())
        virtiofsd = next(filter(os.path.exists, _VIRTIOFSD))
        files = subprocess.Popen(
            [
                "unshare", "--mount", "sh", "-c", _SERVE, "sh", str(root), str(PROJECT),
                virtiofsd, f"--fd={number}", "-o", f"source={root}", "-o", "cache=always,sandbox=chroot",
                "--rlimit-nofile=0",
            ],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[listener.fileno()],
        )  # fmt: skip
        try:
            ended = subprocess.run(
                _qemu(directory, wanted),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            ended = None
        finally:
            files.terminate()
            files.wait(10)
    report = [json.loads(line) for line in (directory / "report").read_text().splitlines() if line.startswith("{")]
    steps = {step.pop("step"): step for step in report}
    if "end" not in steps:
        how = f"not within {seconds:g} s" if ended is None else f"QEMU ended with {ended}"
        kind = EmulatorCrashed if ended in _CRASHES else NoReport
        raise kind(
            f"report: {json.dumps(steps, indent=1)}\nconsole:\n{_tail(directory / 'console')}"
            f"\noutput:\n{_tail(directory / 'output')}\n{how}; last step told: {next(reversed(steps), None)}"
        )
    return steps


def _qemu(directory: Path, wanted: str) -> list[str]:
    """`wanted`: words for run.sh."""
    # The check counts timer interrupts while a processor spins, and an emulated one may not run meanwhile.
    words = "console=ttyS0 quiet panic=-1 intel_iommu=on mitigations=off audit=0 random.trust_cpu=on no_timer_check"
    arguments = [
        # It never outlives the tests.
        "setpriv", "--pdeathsig", "KILL", "--",
        *_emulator(), "-machine", "q35", "-accel", _ACCELERATOR, "-cpu", "max", "-smp", str(_PROCESSORS),
        "-m", str(_MEMORY_MIB),
        # virtiofsd reads and writes the machine's memory.
        "-object", f"memory-backend-memfd,id=memory,size={_MEMORY_MIB}M,share=on", "-numa", "node,memdev=memory",
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-serial", f"file:{directory}/console", "-serial", f"file:{directory}/report",
        "-kernel", f"{_BUILT}/vmlinuz", "-initrd", f"{_BUILT}/initramfs",
        "-append", f"{words} project={PROJECT} {wanted}",
        "-chardev", f"socket,id=root,path={directory}/root.sock",
    ]  # fmt: skip
    for device in _DEVICES:
        arguments += ["-device", device]
    if not no_card():
        for end in _WIRE:
            arguments += ["-netdev", end]
        for device in _CARD:
            arguments += ["-device", device]
    if not no_usb_or_vdpa():
        stick = directory / "stick"
        stick.touch()
        os.truncate(stick, _STICK_BYTES)
        arguments += ["-drive", f"if=none,id=stick,format=raw,file={stick}"]
        for device in _USB:
            arguments += ["-device", device]
    return arguments


def _emulator() -> list[str]:
    """The QEMU that machine/packages.sh brought; where the installed one is new enough, it brought none. Never with the other's
    modules or firmware: they are of one build."""
    brought = _BUILT / "qemu"
    if not brought.exists():
        return ["qemu-system-x86_64"]
    return [
        "env", f"QEMU_MODULE_DIR={next(brought.glob('lib/*/qemu'))}",
        f"{brought}/bin/qemu-system-x86_64", "-L", f"{brought}/share/qemu", "-L", "/usr/share/seabios",
    ]  # fmt: skip


def _tail(file: Path) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-60:])
