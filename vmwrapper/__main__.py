"""libvirt's `<emulator>`: fetches this VM's taps from tapmanager, drops the rights that QEMU does not need, and becomes QEMU.

libvirt also runs its emulator to learn its features, with none of our variables set. Then this runs the real emulator unchanged.

    VIRTSHIM_EMULATOR    the real QEMU; default: the distribution's
    VIRTSHIM_SANDBOX     the sandbox whose network the VM gets
    VIRTSHIM_FETCH_KEY   the secret for that network; empty or unset: a VM without network
    VIRTSHIM_TAPMANAGER  tapmanager's socket
    VIRTSHIM_NICS        the numbers of the NICs' slots, separated by commas; unset: in order
    VIRTSHIM_NIC_MODEL   the NICs' model; unset: virtio
    VIRTSHIM_MEMORY      a socket that offers the guest's memory as a descriptor; unset: memory of its own
    VIRTSHIM_CONFINE     how QEMU is confined, in addition to its user: landlock (rules: landlock_rules.py), seccomp,
                         core-scheduling, separated by commas; unset: not at all, for a VM that an earlier version has defined
    VIRTSHIM_PARTS       further paths that QEMU may read and run, separated by colons
    VIRTSHIM_OUTPUT      a named pipe for QEMU's output; unset: what libvirt gave QEMU
    VIRTSHIM_THREADS     the most threads of QEMU's user, which no other VM has

The domain XML sets them (<qemu:env>), and QEMU itself does not get them. Python takes 10 ms to start, and this program must not
double that. So it imports almost nothing, and each module only where it is needed; bundle.py gives it only the C parts of `json`
and `socket`; and it confines itself while tapmanager opens the taps.
"""

from __future__ import annotations

import os
import sys
import time

from tapmanager import protocol
from vmwrapper import argv_plan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_PREFIX = "VIRTSHIM_"
_DEFAULT_SOCKET = "/run/virtshim/tapmanager.sock"
# Seconds between attempts to reach tapmanager.
_RETRY_EVERY = 0.05
_LONGEST_MESSAGE = 2000
# For virtshim to offer the memory; it waits for this program.
_OFFER_SECONDS = 5.0
# The limit of a core dump in bytes. A file has at least a page, and with a limit of 1 the kernel starts no program for dumps.
_NO_DUMP = 1


class CannotStart(Exception):
    """The message goes to libvirt's log and error: what, why, what to do."""


def main() -> None:
    """Does not return on success."""
    try:
        _become_qemu(sys.argv[1:], dict(os.environ))
    except (CannotStart, argv_plan.PlanError, OSError) as exc:
        # One printable line, because libvirt puts it into its own error and log.
        why = "".join(char if char.isprintable() else "?" for char in str(exc)[:_LONGEST_MESSAGE])
        sys.stderr.write(f"virtshim vmwrapper: cannot start the virtual machine: {why}\n")
        sys.exit(1)


def _become_qemu(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    emulator = environ.get("VIRTSHIM_EMULATOR") or _default_emulator()
    output = _pipe(environ["VIRTSHIM_OUTPUT"]) if environ.get("VIRTSHIM_OUTPUT") else None
    if environ.get("VIRTSHIM_MEMORY"):
        argv = _on_memory(argv, environ["VIRTSHIM_MEMORY"])
    own, refused = argv, b""
    is_prepared = "VIRTSHIM_CONFINE" not in environ

    def prepare() -> None:
        nonlocal own, refused, is_prepared
        if not is_prepared:
            own = _call_servers(argv)
            refused = _confine(own, emulator, environ)
            is_prepared = True

    added: Sequence[str] = ()
    if environ.get("VIRTSHIM_FETCH_KEY"):
        nics, fds = fetch(environ, meanwhile=prepare)
        numbers = [int(number) for number in environ.get("VIRTSHIM_NICS", "").split(",") if number]
        model = environ.get("VIRTSHIM_NIC_MODEL") or "virtio"
        added = [*argv_plan.QUIET_PORTS, *argv_plan.nic_arguments(argv, nics, fds, numbers, model)]
        for fd in fds:
            os.set_inheritable(fd, True)
    prepare()
    if refused:
        _refuse(refused)
    if output is not None:
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
    args = [emulator, *own, *added]
    # libvirt passes LD_PRELOAD on. QEMU must not load the daemon's libraries, which may need rights that QEMU has dropped.
    environment = {
        name: value for name, value in environ.items() if not name.startswith(_PREFIX) and name != "LD_PRELOAD"
    }
    try:
        os.execve(emulator, args, environment)  # noqa: S606  becoming QEMU is the purpose of this program
    except OSError as exc:
        remedy = "install QEMU, or correct the emulator's path in the config"
        raise CannotStart(f"{emulator}: {exc.strerror}; {remedy}") from exc


def _pipe(path: str) -> int:
    """The pipe for all output. QEMU holds both ends, so it needs no reader, and output that does not fit is dropped at once."""
    try:
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        raise CannotStart(
            f"{path}, the pipe for QEMU's output: {exc.strerror}; only virtshim can start this VM"
        ) from exc


def _on_memory(argv: Sequence[str], path: str) -> list[str]:
    """With the memory that virtshim offers while it starts this VM."""
    try:
        ok, fds = protocol.call(path, "memory", {}, _OFFER_SECONDS)
    except (protocol.FrameError, protocol.RemoteError, OSError) as exc:
        raise CannotStart(f"{path}, which offers the guest's memory: {exc}; only virtshim can start this VM") from exc
    if len(fds) != 1:
        raise CannotStart("virtshim sent no memory; virtshim and vmwrapper must be of the same version")
    os.set_inheritable(fds[0], True)
    return argv_plan.memory_arguments(argv, fds[0], shared=ok.get("shared") is True)


def _call_servers(argv: Sequence[str]) -> Sequence[str]:
    from vmwrapper import calls

    try:
        return calls.call_servers(argv)
    except OSError as exc:
        why = "a program that serves one of its devices (virtiofsd, swtpm) has ended; start the VM again"
        raise CannotStart(f"{exc.filename}: {exc.strerror}; {why}") from exc


def _confine(argv: Sequence[str], emulator: str, environ: Mapping[str, str]) -> bytes:
    """Confines this process, and the QEMU that it becomes, for good. Returns the filter for `_refuse`, b"" for none: it would
    also refuse what this process needs to reach tapmanager."""
    from vmwrapper import landlock_rules
    from vmwrapper.confine import kernel, landlock

    wanted = environ["VIRTSHIM_CONFINE"].split(",")
    parts = [path for path in environ.get("VIRTSHIM_PARTS", "").split(":") if path]
    try:
        _limit("RLIMIT_CORE", _NO_DUMP)
        _leave_out_of_dumps()
        if threads := environ.get("VIRTSHIM_THREADS"):
            _limit("RLIMIT_NPROC", int(threads))
        if "core-scheduling" in wanted:
            _share_no_core()
        kernel.forbid_new_privileges()
        if "landlock" in wanted:
            landlock.restrict(landlock_rules.files(argv, emulator, parts))
    except OSError as exc:  # not as an OSError, which `_call` takes for trouble with tapmanager
        raise _not_confined(exc) from exc
    return landlock_rules.refused_calls(argv) if "seccomp" in wanted else b""


def _share_no_core() -> None:
    from vmwrapper.confine import kernel

    try:  # noqa: SIM105  contextlib would take 5 ms
        kernel.share_no_core()
    except OSError:
        pass  # no core scheduling in the kernel, or no sibling threads: `virtshim check` says so


def _refuse(calls: bytes) -> None:
    from vmwrapper.confine import seccomp

    try:
        seccomp.install(calls)
    except OSError as exc:
        raise _not_confined(exc) from exc


def _not_confined(exc: OSError) -> CannotStart:
    return CannotStart(f"QEMU cannot be confined: {exc.strerror}; see libvirt.confine in virtshim's config")


def _limit(kind: str, most: int) -> None:
    """Only ever lowers the limit."""
    import resource

    number = getattr(resource, kind)
    _, hard = resource.getrlimit(number)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(number, (most, most))


def _leave_out_of_dumps() -> None:
    """Excludes all memory from dumps. With a limit of 0, which libvirt may have set and this program cannot raise, the
    kernel still starts a program for dumps."""
    try:
        file = os.open("/proc/self/coredump_filter", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return  # a kernel without core dumps
    os.write(file, b"0")
    os.close(file)


def _default_emulator() -> str:
    machine = os.uname().machine
    found = [f"/usr/bin/qemu-system-{machine}", "/usr/libexec/qemu-kvm", "/usr/bin/qemu-kvm"]
    return next((path for path in found if os.access(path, os.X_OK)), found[0])


def fetch(
    environ: Mapping[str, str], patience: float = 10.0, meanwhile: Callable[[], None] | None = None
) -> tuple[list[dict[str, object]], list[int]]:
    """This VM's interfaces and tap descriptors (still close-on-exec). `patience`: seconds to wait for tapmanager, which may be
    restarting. `meanwhile`: what to do while tapmanager works; called at each attempt."""
    path = environ.get("VIRTSHIM_TAPMANAGER") or _DEFAULT_SOCKET
    args = {"sandbox": environ.get("VIRTSHIM_SANDBOX", ""), "key": environ["VIRTSHIM_FETCH_KEY"]}
    ok, fds = _call(path, args, patience, meanwhile)
    nics = ok.get("interfaces")
    if not isinstance(nics, list) or not all(isinstance(nic, dict) for nic in nics):
        raise CannotStart("tapmanager's answer has no interfaces; virtshim and tapmanager must be of the same version")
    return nics, fds


def _call(
    path: str, args: dict[str, str], patience: float, meanwhile: Callable[[], None] | None
) -> tuple[dict[str, object], list[int]]:
    """Repeats fetch as often as the connection breaks, which tapmanager allows to the same process."""
    until = time.monotonic() + patience
    while True:
        try:
            return protocol.call(path, "fetch", args, max(until - time.monotonic(), 1.0), meanwhile=meanwhile)
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
        import select

        select.select([], [], [], _RETRY_EVERY)


if __name__ == "__main__":
    main()
