"""All checks, in the order of the report, and what runs them. A check takes the settings and returns findings."""

from __future__ import annotations

import dataclasses
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from tapmanager.links.tap import vhost_trouble
from tapmanager.shares.passt import PROGRAM as PASST
from tapmanager.shares.plan import PROGRAMS
from virtshim.config.settings import Settings
from virtshim.images.confinement import Bounds, account, command
from virtshim.model.errors import ShimError, WrongState
from virtshim.model.hardware import Firmware
from virtshim.model.ids import ContainerId
from virtshim.model.layout import share_dir
from virtshim.moves.state_volume import state_key
from virtshim.peers.certificates import PeerFiles, read_certificate
from virtshim.preflight import confinement, host_facts, machine, network, runtimes, virtualization
from virtshim.preflight import node_checks as node
from virtshim.preflight.access import UserAccount
from virtshim.preflight.confinement import no_parser_user, parser_confinement
from virtshim.preflight.finding import Finding, error, ok, warning
from virtshim.preflight.machine import FreeSpace
from virtshim.system.machine import memory, systemd_runs
from virtshim.vm.elements.processors import DomainType
from virtshim.vm.embed import is_embedded
from virtshim.vm.firmware import firmware_kinds, missing_tpm_programs
from virtshim.vm.kvm_probe import probe
from virtshim.vm.node_profile import systemd_cgroups

Check = Callable[[Settings], Sequence[Finding]]

_TAPMANAGER_LIMIT = 3.0
_QEMU_CONF = "/etc/libvirt/qemu.conf"
_READ_ONLY_SOCKETS = ("/run/libvirt/libvirt-sock-ro", "/run/libvirt/virtqemud-sock-ro")
_LIBVIRT = "/var/lib/libvirt/qemu"
_SMT = "/sys/devices/system/cpu/smt/active"
_FORWARDING = ("net.ipv4.ip_forward",)
_PARSER = Bounds(memory=256 << 20, cpu_seconds=5)
_SOME_CONTAINER = ContainerId("0" * 64)


def _qemu_user(settings: Settings) -> UserAccount:
    """The user that QEMU runs as. If it does not exist, a user without any rights: another check reports that."""
    return host_facts.user(settings.libvirt.qemu_user, settings.libvirt.qemu_group) or UserAccount(
        "QEMU's user", -1, frozenset()
    )


def _vm_user(settings: Settings) -> UserAccount:
    """The first user that VMs run as. All of them have only the group of QEMU's user."""
    qemu, mine = _qemu_user(settings), settings.libvirt
    group = host_facts.group(mine.qemu_user, mine.qemu_group)
    return UserAccount("a VM's user", mine.first_vm_uid, group) if mine.vm_uids else qemu


def root(_settings: Settings) -> Sequence[Finding]:
    return [machine.root(os.geteuid())]


def qemu(settings: Settings) -> Sequence[Finding]:
    path = settings.libvirt.emulator
    return [virtualization.qemu(path, host_facts.program_output([path, "--version"]))]


def qemu_img(_settings: Settings) -> Sequence[Finding]:
    return [virtualization.qemu_img(host_facts.program_output(["qemu-img", "--version"]))]


def volumes(settings: Settings) -> Sequence[Finding]:
    places = (settings.shares.virtiofsd,) if settings.shares.virtiofsd else PROGRAMS
    return [virtualization.volumes(places, next((one for one in places if os.access(one, os.X_OK)), ""))]


def passt(settings: Settings) -> Sequence[Finding]:
    place = settings.shares.passt or PASST
    if not os.access(place, os.X_OK):
        return [virtualization.passt(place, None)]
    version, options = (host_facts.program_output([place, word]) for word in ("--version", "--help"))
    return [virtualization.passt(place, version, options.text)]


def firmware(_settings: Settings) -> Sequence[Finding]:
    found = firmware_kinds()
    return [
        virtualization.firmware(Firmware.UEFI in found, Firmware.SECURE in found, missing_tpm_programs()),
    ]


def image_parsers(settings: Settings) -> Sequence[Finding]:
    wanted = settings.images.parser_user
    try:
        who = account(wanted)
    except ShimError as exc:
        return [no_parser_user(str(exc))]
    return [parser_confinement(who, wanted, host_facts.program_output(command("tell", who, _PARSER)))]


def qemu_user(settings: Settings) -> Sequence[Finding]:
    user, group = settings.libvirt.qemu_user, settings.libvirt.qemu_group
    taps = settings.tapmanager
    wanted = ":".join(part for part in (user, group) if part)
    of_vms = host_facts.group(user, group) if settings.libvirt.vm_uids else frozenset[int]()
    served = virtualization.Served(host_facts.user(taps.qemu_user), host_facts.group(taps.qemu_user, taps.qemu_group))
    return [virtualization.qemu_user(wanted, host_facts.user(user, group), of_vms, served)]


def libvirt(settings: Settings) -> Sequence[Finding]:
    return [virtualization.libvirt(settings.libvirt.uri, _ask(settings, "version"))]


def libvirt_user(settings: Settings) -> Sequence[Finding]:
    """Skips the embedded driver, whose configuration virtshim writes itself, and a libvirt that cannot be reached."""
    if is_embedded(settings.libvirt.uri):
        return []
    program_output = _ask(settings, "owner")
    return [virtualization.runs_qemu_as(program_output, _qemu_user(settings))] if program_output.reached else []


def read_only_socket(settings: Settings) -> Sequence[Finding]:
    """The read-only socket of the system's libvirt. The embedded driver has none."""
    if settings.libvirt.uri != "qemu:///system":
        return []
    served = filter(host_facts.is_served, _READ_ONLY_SOCKETS)
    there = [node for path in served if (node := host_facts.node(path)) is not None]
    return [
        virtualization.read_only_sockets([(node, host_facts.directories(os.path.dirname(node.path))) for node in there])
    ]


def libvirt_directory(settings: Settings) -> Sequence[Finding]:
    """The directory in which the system's libvirt keeps the files that it passes to each QEMU."""
    if settings.libvirt.uri != "qemu:///system":
        return []
    return [virtualization.directory(_LIBVIRT, host_facts.directories(_LIBVIRT), _vm_user(settings))]


def vmwrapper(settings: Settings) -> Sequence[Finding]:
    path = settings.libvirt.vmwrapper
    way = host_facts.directories(os.path.dirname(path))
    return [virtualization.vmwrapper(path, host_facts.node(path), way, _vm_user(settings))]


def emulator(settings: Settings) -> Sequence[Finding]:
    """Returns nothing if vmwrapper is missing or libvirt cannot be reached: other checks report that."""
    if host_facts.node(settings.libvirt.vmwrapper) is None:
        return []
    program_output = _ask(settings, "emulator")
    return [virtualization.emulator(settings.libvirt.vmwrapper, program_output)] if program_output.reached else []


def kvm(settings: Settings) -> Sequence[Finding]:
    return [virtualization.kvm(settings.libvirt.domain_type, host_facts.node("/dev/kvm"), _vm_user(settings))]


def boot(settings: Settings) -> Sequence[Finding]:
    """Boots a real guest, as `libvirt.domain_type = "auto"` does. Returns nothing if no VM would run under KVM."""
    wanted = settings.libvirt.domain_type
    if wanted == "qemu" or host_facts.node("/dev/kvm") is None:
        return []
    verdict = probe(settings.libvirt.emulator)
    return [virtualization.boot(wanted, verdict.domain_type is DomainType.KVM, verdict.why)]


def apparmor(settings: Settings) -> Sequence[Finding]:
    sockets = (settings.tapmanager.socket, f"{share_dir(settings.layout())}/*/fs.sock")
    return [virtualization.apparmor(host_facts.apparmor(), settings.libvirt.vmwrapper, *sockets)]


def vm_users(settings: Settings) -> Sequence[Finding]:
    mine = settings.libvirt
    taken = confinement.taken_by(host_facts.text("/etc/passwd"), host_facts.text("/etc/subuid"))
    return [confinement.users(mine.first_vm_uid, mine.vm_uids, taken)]


def confined(settings: Settings) -> Sequence[Finding]:
    chosen = settings.libvirt.confine
    return [
        confinement.landlock(chosen, host_facts.landlock()),
        confinement.seccomp(chosen, host_facts.text("/proc/sys/kernel/seccomp/actions_avail")),
        confinement.core_scheduling(
            chosen, has_it=host_facts.core_scheduling(), has_siblings=host_facts.text(_SMT) == "1"
        ),
    ]


def svirt(settings: Settings) -> Sequence[Finding]:
    embedded, modules = is_embedded(settings.libvirt.uri), host_facts.security_modules()
    said = _ask(settings, "labels") if modules and not embedded else None
    labelled_by = said.text.split() if said is not None and not said.trouble else None
    return [confinement.svirt(modules, labelled_by, embedded=embedded)]


def state_dir(settings: Settings) -> Sequence[Finding]:
    way = host_facts.directories(settings.layout().containers)
    return [machine.reach("paths.state_dir", settings.paths.state_dir, way, _vm_user(settings))]


def run_dir(settings: Settings) -> Sequence[Finding]:
    way = host_facts.directories(settings.layout().sockets)
    return [machine.reach("paths.run_dir", settings.paths.run_dir, way, _vm_user(settings))]


def room(settings: Settings, of: Callable[[str], FreeSpace] = host_facts.room) -> Sequence[Finding]:
    try:
        return [machine.room(of(settings.paths.state_dir))]
    except OSError as exc:
        trouble = f"{settings.paths.state_dir}: {exc.strerror}"
        return [error("disk space", trouble, "correct paths.state_dir")]


def saved_vms(settings: Settings, of: Callable[[str], FreeSpace] = host_facts.room) -> Sequence[Finding]:
    try:
        return [
            machine.saved_vms(of(settings.paths.state_dir).bytes, settings.saved.max_bytes),
            _state_volumes(settings),
        ]
    except OSError:
        return []  # `room` tells it


def _state_volumes(settings: Settings) -> Finding:
    if not settings.saved.key_file:
        return ok(
            "state volumes", "saved VMs stay on this node: saved.key_file names no key that seals states on volumes"
        )
    try:
        state_key(settings.saved.key_file)
    except WrongState as exc:
        remedy = "write the key that the cluster's other nodes have; until then, pods with virtshim.io/state-volume are refused"
        return warning("state volumes", str(exc), remedy)
    return ok("state volumes", "saved VMs without a TPM can move to nodes with the same key")


def templates(settings: Settings) -> Sequence[Finding]:
    found = [machine.templates(memory(), settings.templates.max_bytes)]
    if settings.templates.max_bytes and (told := runtimes.info(settings.cri_socket).get("templates")):
        found += machine.kept_templates(told["kept"], told["unfit"])
    return found


def sockets(settings: Settings) -> Sequence[Finding]:
    console = settings.layout().console_socket(_SOME_CONTAINER)
    return [machine.sockets((settings.cri_socket, settings.tapmanager.socket, settings.shares.socket, console))]


def tun(_settings: Settings) -> Sequence[Finding]:
    return [machine.tun(host_facts.is_character_device("/dev/net/tun"))]


def vhost_net(settings: Settings) -> Sequence[Finding]:
    """Tests vhost-net in the same way as tapmanager."""
    wanted = settings.tapmanager.vhost_net
    return [machine.vhost_net(wanted, vhost_trouble() if wanted else "")]


def forwarding(_settings: Settings) -> Sequence[Finding]:
    switches = {name: host_facts.text(f"/proc/sys/{name.replace('.', '/')}") for name in _FORWARDING}
    return [machine.forwarding(switches)]


def cni(settings: Settings) -> Sequence[Finding]:
    directory, places = settings.tapmanager.cni_conf_dir, settings.tapmanager.cni_bin_dir
    name = network.first_configuration(host_facts.file_names(directory))
    if not name:
        return [network.no_configuration(directory)]
    path = os.path.join(directory, name)
    text = host_facts.text(path)
    if not text:
        return [network.bad_configuration(path, "the file is empty or cannot be read")]
    try:
        found = network.parsed(text)
    except (ValueError, RecursionError) as exc:
        return [network.bad_configuration(path, str(exc))]
    missing = host_facts.not_executable(found.programs, places)
    return [network.plugins(path, found, missing, places), network.kept_addresses(found)]


def tapmanager(settings: Settings) -> Sequence[Finding]:
    socket = settings.tapmanager.socket
    return [network.tapmanager(socket, *host_facts.tapmanager(socket, _TAPMANAGER_LIMIT))]


def peers(settings: Settings) -> Sequence[Finding]:
    mine = settings.peers
    if not mine.certificate:
        return [ok("peers", "no VM moves to another node or from one: peers.certificate is not set")]
    try:
        own = read_certificate(PeerFiles(mine.certificate, mine.key, mine.ca))
    except WrongState as exc:
        text, _, remedy = str(exc).partition("; ")
        return [warning("peers", text, remedy)]
    left, lasts = own.until - time.time(), own.until - own.since
    return [network.peers(own.node, left, lasts, os.uname().nodename.lower(), mine.listen)]


def cgroups(settings: Settings) -> Sequence[Finding]:
    driver = "systemd" if systemd_cgroups(settings) else "cgroupfs"
    found = [machine.cgroups(host_facts.cgroups(), driver, systemd_runs())]
    if driver == "cgroupfs" and settings.libvirt.uri == "qemu:///system":
        found.append(machine.libvirt_cgroups(host_facts.text(_QEMU_CONF)))
    return found


def proxy(settings: Settings) -> Sequence[Finding]:
    """Only on a node where the proxy ran or was started once: its lock file remains when it ends."""
    if host_facts.node(f"{settings.proxy_socket}.lock") is None:
        return []
    mine = settings.proxy
    asked = [(mine.primary.name, mine.primary.socket)]
    asked += [(one.name, one.socket or settings.cri_socket) for one in mine.others]
    with ThreadPoolExecutor(len(asked)) as pool:
        told = list(pool.map(lambda one: runtimes.ask(*one), asked))
    found = runtimes.findings(told)
    if settings.cri_socket in [socket for _, socket in asked[1:]]:
        own = runtimes.OwnStore(settings.paths.state_dir, settings.images.gc_high_percent)
        found += runtimes.watched(told[0], own, host_facts.device_of)
    return found


def _ask(settings: Settings, question: str) -> virtualization.ProgramOutput:
    mine = settings.libvirt
    return host_facts.ask_libvirt(question, mine.uri, mine.vmwrapper, mine.qemu_user, mine.qemu_group)


ALL: tuple[Check, ...] = (
    root,
    qemu,
    qemu_img,
    volumes,
    passt,
    firmware,
    image_parsers,
    qemu_user,
    libvirt,
    libvirt_user,
    libvirt_directory,
    read_only_socket,
    vmwrapper,
    emulator,
    kvm,
    boot,
    apparmor,
    vm_users,
    confined,
    svirt,
    state_dir,
    run_dir,
    room,
    saved_vms,
    templates,
    sockets,
    node.clock_synchronised,
    node.clock_source,
    tun,
    vhost_net,
    forwarding,
    cni,
    tapmanager,
    peers,
    node.virtshim,
    node.shares,
    cgroups,
    node.kubelet_configuration,
    node.kubelet_cgroups,
    node.kubelet_runtime,
    node.swap,
    node.container_runtimes,
    proxy,
    node.cluster_objects,
    node.cluster_agent,
    node.qemu_overhead,
)


# What `virtshim up` cannot do without. They need no daemon and a fraction of a second.
BEFORE_UP: tuple[Check, ...] = (qemu, qemu_img, qemu_user, image_parsers, tun, cgroups)

# Running the checks: all at the same time, each on its own thread with a time limit. The findings keep the order of the checks.

# Seconds for one check. On an emulated node libvirt needs half a minute to examine a QEMU.
LIMIT = 60.0


def findings(checks: Sequence[Check], settings: Settings, limit: float = LIMIT) -> Iterator[Finding]:
    """Yields the findings of all checks, within little more than `limit` seconds. A check that hangs is left on its thread."""
    until = time.monotonic() + limit
    for check, answer in [(check, _started(check, settings)) for check in checks]:
        name = check.__name__
        try:
            found = answer.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            remedy = "run the command again with strace -f to see what hangs"
            found = [error(name.replace("_", " "), f"no answer within {limit:g} s", remedy)]
        yield from (dataclasses.replace(one, check=name) for one in found)


def _started(check: Check, settings: Settings) -> queue.SimpleQueue[Sequence[Finding]]:
    answer: queue.SimpleQueue[Sequence[Finding]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put(check(settings))
        except Exception as exc:  # noqa: BLE001  the edge of a thread: one broken check must not hide the others
            subject = check.__name__.replace("_", " ")
            answer.put([error(subject, f"the check itself failed: {type(exc).__name__}: {exc}", "please report this")])

    threading.Thread(target=run, name=f"check-{check.__name__}", daemon=True).start()
    return answer
