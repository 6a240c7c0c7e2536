"""libvirt's `<emulator>`: fetches this VM's taps from tapmanager, gives up what QEMU does not need, and becomes QEMU.

libvirt also runs its emulator to learn what it can do, with none of our variables set: then the real emulator is run
unchanged.

    VIRTSHIM_EMULATOR    the real QEMU; default: the distribution's
    VIRTSHIM_SANDBOX     whose network
    VIRTSHIM_FETCH_KEY   the secret that opens it; empty or unset: a VM without network
    VIRTSHIM_TAPMANAGER  tapmanager's socket
    VIRTSHIM_NICS        numbers of the NICs' places, with commas, which its guest knows them by; unset: in order
    VIRTSHIM_NIC_MODEL   what they are to the guest; unset: virtio
    VIRTSHIM_CONFINE     what holds QEMU back, beside its user: words of landlock, seccomp, core-scheduling, with commas; unset: a
                         VM that an earlier version has defined, which nothing holds back
    VIRTSHIM_PARTS       paths that it may read and run besides, with colons
    VIRTSHIM_OUTPUT      a pipe with a name, for all that QEMU says; unset: what libvirt gave it
    VIRTSHIM_THREADS     how many its user may have, who is this VM's alone

The domain XML sets them (<qemu:env>); QEMU itself does not get them. Python takes 10 ms to start, this program must not double
that: it imports almost nothing, and bundle.py gives it the C parts of `json` and `socket` alone.
"""

from __future__ import annotations

import os
import resource
import select
import sys
import time

from tapmanager import protocol
from vmwrapper import argv_plan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PREFIX = "VIRTSHIM_"
_DEFAULT_SOCKET = "/run/virtshim/tapmanager.sock"
# Seconds between two looks for tapmanager.
_RETRY_EVERY = 0.05
_LONGEST_MESSAGE = 2000
# Bytes of a core dump: a file has at least a page, and of one byte the kernel starts no program that takes dumps either.
_NO_DUMP = 1


class CannotStart(Exception):
    """The message goes to libvirt's log and error: what, why, what to do."""


def main() -> None:
    """Does not return on success."""
    try:
        _become_qemu(sys.argv[1:], dict(os.environ))
    except (CannotStart, argv_plan.PlanError, OSError) as exc:
        # libvirt puts it into its own error and log: one line, whoever worded it.
        why = "".join(char if char.isprintable() else "?" for char in str(exc)[:_LONGEST_MESSAGE])
        sys.stderr.write(f"virtshim vmwrapper: cannot start the virtual machine: {why}\n")
        sys.exit(1)


def _become_qemu(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    emulator = environ.get("VIRTSHIM_EMULATOR") or _default_emulator()
    args = [emulator, *argv]
    if environ.get("VIRTSHIM_FETCH_KEY"):
        nics, fds = fetch(environ)
        numbers = [int(number) for number in environ.get("VIRTSHIM_NICS", "").split(",") if number]
        args += argv_plan.QUIET_PORTS
        args += argv_plan.nic_arguments(argv, nics, fds, numbers, environ.get("VIRTSHIM_NIC_MODEL") or "virtio")
        for fd in fds:
            os.set_inheritable(fd, True)
    if environ.get("VIRTSHIM_OUTPUT"):
        _say_into(environ["VIRTSHIM_OUTPUT"])
    if "VIRTSHIM_CONFINE" in environ:
        argv = _call_servers(argv)
        args[1 : len(argv) + 1] = argv
        _confine(argv, emulator, environ)
    # libvirt hands a library that is loaded into the daemon on; it is none of QEMU's, and may need what QEMU gave up.
    environment = {
        name: value for name, value in environ.items() if not name.startswith(_PREFIX) and name != "LD_PRELOAD"
    }
    try:
        os.execve(emulator, args, environment)  # noqa: S606  becoming QEMU, under libvirt's eyes, is what this program is for
    except OSError as exc:
        remedy = "install QEMU, or correct the emulator's path in the config"
        raise CannotStart(f"{emulator}: {exc.strerror}; {remedy}") from exc


def _say_into(path: str) -> None:
    """From here on. Both ends of the pipe are QEMU's: nobody else need be there, and what does not fit is lost without a wait."""
    try:
        pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        raise CannotStart(f"{path}, for what QEMU says: {exc.strerror}; virtshim alone can start this VM") from exc
    for descriptor in (1, 2):
        os.dup2(pipe, descriptor)
    os.close(pipe)


def _call_servers(argv: Sequence[str]) -> Sequence[str]:
    from vmwrapper import calls

    try:
        return calls.call_servers(argv)
    except OSError as exc:
        why = "what serves one of its devices (virtiofsd, swtpm) has ended; start the VM again"
        raise CannotStart(f"{exc.filename}: {exc.strerror}; {why}") from exc


def _confine(argv: Sequence[str], emulator: str, environ: Mapping[str, str]) -> None:
    """For good, for this process and the QEMU that it becomes."""
    from vmwrapper import jail
    from vmwrapper.confine import kernel, landlock, seccomp

    wanted = environ["VIRTSHIM_CONFINE"].split(",")
    parts = [path for path in environ.get("VIRTSHIM_PARTS", "").split(":") if path]
    _limit(resource.RLIMIT_CORE, _NO_DUMP)
    _leave_out_of_dumps()
    if threads := environ.get("VIRTSHIM_THREADS"):
        _limit(resource.RLIMIT_NPROC, int(threads))
    if "core-scheduling" in wanted:
        try:  # noqa: SIM105  contextlib would take 5 ms
            kernel.share_no_core()
        except OSError:
            pass  # the kernel has none, or cores have no siblings: `virtshim check` says so
    kernel.forbid_new_privileges()
    try:
        if "landlock" in wanted:
            landlock.restrict(jail.files(argv, emulator, parts))
        if "seccomp" in wanted:
            seccomp.install(jail.refused_calls(argv))
    except OSError as exc:
        raise CannotStart(
            f"it cannot be confined: {exc.strerror}; libvirt.confine in virtshim's config says by what"
        ) from exc


def _limit(kind: int, most: int) -> None:
    """Never more than it is already."""
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def _leave_out_of_dumps() -> None:
    """All memory: with a limit of 0, which libvirt may have set and nobody here can raise, the kernel still starts a program that
    takes dumps."""
    try:
        file = os.open("/proc/self/coredump_filter", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return  # this kernel makes none
    os.write(file, b"0")
    os.close(file)


def _default_emulator() -> str:
    machine = os.uname().machine
    found = [f"/usr/bin/qemu-system-{machine}", "/usr/libexec/qemu-kvm", "/usr/bin/qemu-kvm"]
    return next((path for path in found if os.access(path, os.X_OK)), found[0])


def fetch(environ: Mapping[str, str], patience: float = 10.0) -> tuple[list[dict[str, object]], list[int]]:
    """This VM's interfaces and tap descriptors (close-on-exec still). `patience`: seconds tapmanager may be away (an upgrade, a
    restart) before the VM's start fails."""
    path = environ.get("VIRTSHIM_TAPMANAGER") or _DEFAULT_SOCKET
    args = {"sandbox": environ.get("VIRTSHIM_SANDBOX", ""), "key": environ["VIRTSHIM_FETCH_KEY"]}
    ok, fds = _call(path, args, patience)
    nics = ok.get("interfaces")
    if not isinstance(nics, list) or not all(isinstance(nic, dict) for nic in nics):
        raise CannotStart("tapmanager's answer has no interfaces; virtshim and tapmanager must be of the same version")
    return nics, fds


def _call(path: str, args: dict[str, str], patience: float) -> tuple[dict[str, object], list[int]]:
    """fetch may be repeated by the same process as often as the connection breaks."""
    until = time.monotonic() + patience
    while True:
        try:
            return protocol.call(path, "fetch", args, max(until - time.monotonic(), 1.0))
        except protocol.FrameError as exc:
            raise CannotStart(f"tapmanager at {path}: {exc}") from exc
        except protocol.RemoteError as exc:
            if exc.kind != "unavailable" or time.monotonic() >= until:
                raise CannotStart(f"tapmanager: {exc}") from exc
        except OSError as exc:
            if isinstance(exc, PermissionError):
                why = "QEMU's user may not use it; set tapmanager's qemu_user to the user of libvirt's qemu.conf"
                raise CannotStart(f"tapmanager at {path}: {exc.strerror}; {why}") from exc
            if time.monotonic() >= until:
                remedy = "check whether tapmanager is running (systemctl status tapmanager)"
                raise CannotStart(
                    f"tapmanager at {path} did not answer within {patience:.0f} s: {exc}; {remedy}"
                ) from exc
        select.select([], [], [], _RETRY_EVERY)


if __name__ == "__main__":
    main()
