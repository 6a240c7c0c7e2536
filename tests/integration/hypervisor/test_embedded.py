"""Real QEMU with libvirt's embedded driver keeps consoles, ends and rights right, when the process is killed, too."""

from __future__ import annotations

import os
import re
import signal
import stat
from pathlib import Path

import pytest

from virtshim.model.errors import Unimplemented
from virtshim.model.hardware import Firmware, HardwareOptions
from virtshim.vm import embed
from virtshim.vm.firmware import refuse_missing_programs

KILLED = -signal.SIGKILL


def _words(log: Path) -> bytes:
    return log.read_bytes()


def test_guest_output_is_in_the_log_and_on_the_socket(place):
    place.run("boot(); type_into_console(b'x')")
    assert b"guest is up\nx" in _words(place.log)


def test_the_log_continues_after_another_start(place):
    place.run(
        "boot(); hypervisor.destroy(SPEC.uuid, SPEC.container_id); hypervisor.start(SPEC.uuid); wait_for_log(b'guest is up', 2)"
    )
    assert _words(place.log).count(b"guest is up") == 2


def test_each_end_of_a_vm_has_its_own_reason(place):
    said = place.run(
        "boot(); type_into_console(b'q'); wait_off(); say(state())\n"
        "hypervisor.start(SPEC.uuid); wait_for_log(b'guest is up', 2); type_into_console(b'p'); wait_off(); say(state())\n"
        "hypervisor.destroy(SPEC.uuid, SPEC.container_id)\n"
        "hypervisor.start(SPEC.uuid); hypervisor.destroy(SPEC.uuid, SPEC.container_id); say(state())\n"
    )
    assert said == [["off", "shutdown"], ["crashed", "unknown"], ["off", "destroyed"]]


@pytest.mark.parametrize("kind", ["disk", "nvram", "known firmware", "tpm"])
def test_resources_of_a_vm_are_free_once_it_is_destroyed(place, kind):
    """libvirt removes its own notes about the VM last."""
    hardware = {
        "disk": "",
        "nvram": "hardware=HardwareOptions(Firmware.UEFI), nvram=str(PLACE / 'vm/root.nvram')",
        "known firmware": "hardware=HardwareOptions(Firmware.SECURE), nvram=str(PLACE / 'vm/root.secure.nvram'), "
        "firmware_files=firmware.first_uefi(Firmware.SECURE)",
        "tpm": "hardware=HardwareOptions(tpm=True), keeps_tpm=True",
    }[kind]
    if why := missing(
        Firmware.SECURE if "UEFI" in hardware or "SECURE" in hardware else Firmware.BIOS, tpm=kind == "tpm"
    ):
        pytest.skip(why)
    said = place.run(
        "from virtshim.model.hardware import Firmware, HardwareOptions\n"
        "from virtshim.vm import driver\n"
        "from virtshim.vm import firmware\n"
        "driver._CLEANED_UP = 60.0\n"  # however slow this machine is
        f"hypervisor.define(dataclasses.replace(SPEC, {hardware}))\n"
        "for _ in range(2):\n"
        "    hypervisor.start(SPEC.uuid)\n"
        "    hypervisor.destroy(SPEC.uuid, SPEC.container_id)\n"
        "    say(sorted(file for file in os.listdir(PLACE / 'l/run/qemu') if file.startswith(SPEC.name)))\n"
    )
    assert said == [[], []]


def test_tpm_state_does_not_pass_to_another_vm_with_the_same_uuid(place):
    """An operator has undefined a VM by hand and kept its TPM. The TPM of an earlier attempt is removed with its
    definition."""
    if why := missing(Firmware.BIOS, tpm=True):
        pytest.skip(why)
    said = place.run(
        "import libvirt\n"
        "from virtshim.model.errors import AlreadyExists\n"
        "from virtshim.model.hardware import HardwareOptions\n"
        "def again(digit, **changes):\n"
        "    other = ContainerId(digit * 64)\n"
        "    spec = dataclasses.replace(SPEC, name='virtshim-' + digit, container_id=other, hardware=HardwareOptions(tpm=True), "
        "**changes)\n"
        "    try:\n"
        "        hypervisor.define(spec); hypervisor.start(spec.uuid); hypervisor.destroy(spec.uuid, other); say('ran')\n"
        "    except AlreadyExists as exc:\n"
        "        say(str(exc))\n"
        "again('c'); again('d')\n"
        "with connection.using('undefine') as conn:\n"
        "    conn.lookupByUUID(SPEC.uuid.bytes).undefineFlags(libvirt.VIR_DOMAIN_UNDEFINE_KEEP_TPM)\n"
        "again('e'); again('f', owns_tpm=True)\n"
        "hypervisor.undefine(SPEC.uuid, ContainerId('f' * 64))\n"
    )
    assert said[:2] == ["ran", "ran"]
    assert "which is not this pod's" in said[2]
    assert said[3] == "ran"


def test_tpm_state_is_removed_even_if_libvirt_is_killed_after_the_definition(place):
    """libvirt removes the TPM's state after the definition, so the next VM of that UUID would be refused."""
    if why := missing(Firmware.BIOS, tpm=True):
        pytest.skip(why)
    script = (
        "from virtshim.model.hardware import HardwareOptions\n"
        "def runs(digit):\n"
        "    other = ContainerId(digit * 64)\n"
        "    spec = dataclasses.replace(SPEC, name='virtshim-' + digit, container_id=other, hardware=HardwareOptions(tpm=True))\n"
        "    hypervisor.define(spec); hypervisor.start(spec.uuid); hypervisor.destroy(spec.uuid, other)\n"
        "    return other\n"
        "def remembered():\n"
        "    return (PLACE / 'l/lib/swtpm' / str(SPEC.uuid)).exists()\n"
    )
    said = place.run(
        script + "import libvirt\n"
        "whole = libvirt.virDomain.undefineFlags\n"
        "def half(domain, flags):\n"
        "    whole(domain, flags | libvirt.VIR_DOMAIN_UNDEFINE_KEEP_TPM)\n"
        "    os.kill(os.getpid(), 9)\n"
        "libvirt.virDomain.undefineFlags = half\n"
        "other = runs('c'); say(remembered()); hypervisor.undefine(SPEC.uuid, other)\n",
        expect=KILLED,
    )
    assert said == [True]
    said = place.run(
        script + "hypervisor.undefine(SPEC.uuid, ContainerId('c' * 64)); say(remembered())\n"
        "other = runs('d'); hypervisor.undefine(SPEC.uuid, other); say(remembered())\n"
    )
    assert said == [False, False]


def test_a_persistent_tpm_survives_its_definition(place):
    if why := missing(Firmware.BIOS, tpm=True):
        pytest.skip(why)
    said = place.run(
        "from virtshim.model.hardware import HardwareOptions\n"
        "hypervisor.define(dataclasses.replace(SPEC, hardware=HardwareOptions(tpm=True), keeps_tpm=True))\n"
        "hypervisor.start(SPEC.uuid); hypervisor.destroy(SPEC.uuid, SPEC.container_id)\n"
        "hypervisor.undefine(SPEC.uuid, SPEC.container_id)\n"
        "say((PLACE / 'l/lib/swtpm' / str(SPEC.uuid)).exists())\n"
    )
    assert said == [True]


def missing(firmware, *, tpm):
    try:
        refuse_missing_programs(HardwareOptions(firmware, tpm=tpm))
    except Unimplemented as exc:
        return f"AREA guest NOT TESTED: {exc}"
    return ""


def test_a_reset_does_not_end_the_vm(place):
    said = place.run("boot(); type_into_console(b'r'); wait_for_log(b'guest is up', 2); say(state())")
    assert said == [["running", "unknown"]]


def test_a_panic_is_known_to_the_next_process(place):
    place.run("boot(); type_into_console(b'p'); wait_off(); os.kill(os.getpid(), 9)", expect=KILLED)
    said = place.run("say(state()); hypervisor.destroy(SPEC.uuid, SPEC.container_id); say(state()[0])")
    assert said == [["crashed", "unknown"], "off"]


def test_a_killed_qemu_is_a_crash(place):
    said = place.run("boot(); os.kill(qemu_pid(), 9); wait_off(); say(state())")
    assert said == [["off", "crashed"]]


def test_a_vm_survives_its_killed_process_and_is_found_again(place):
    place.run("boot(); os.kill(os.getpid(), 9)", expect=KILLED)
    said = place.run(
        "say(state()); say([d.name for d in hypervisor.owned()])\n"
        "type_into_console(b'y'); type_into_console(b'q'); wait_off(); say(state())"
    )
    # libvirt does not know why it ended if the end came while it was still looking for the VM.
    assert said[:2] == [["running", "unknown"], ["virtshim-integration"]]
    assert said[2][0] == "off"
    assert b"guest is up\ny" in _words(place.log)


def test_a_guests_shutdown_is_known_to_the_next_process(place):
    """libvirt reports a crash, or knows nothing of it, because it is killed, too."""
    place.run("boot(); type_into_console(b'q'); wait_off(); os.kill(os.getpid(), 9)", expect=KILLED)
    assert place.run("wait_off(); say(state())") == [["off", "shutdown"]]
    place.run(
        "hypervisor.start(SPEC.uuid); wait_for_log(b'guest is up', 2)\n"
        "os.kill(qemu_pid(), 9); wait_off(); os.kill(os.getpid(), 9)",
        expect=KILLED,
    )
    said = place.run("wait_off(); say(state()); hypervisor.undefine(SPEC.uuid, SPEC.container_id)")
    assert said[0][0] == "off"
    assert said[0][1] != "shutdown", "that was the run before"
    assert list((place.root / "run/qemu/guest-ends").iterdir()) == []


def test_a_vm_that_ended_unobserved_is_off(place):
    place.run("boot(); os.kill(os.getpid(), 9)", expect=KILLED)
    pid = int((place.root / "run/qemu/virtshim-integration.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    said = place.run("wait_off(); say(state()[0]); hypervisor.start(SPEC.uuid); say(state())")
    assert said == ["off", ["running", "unknown"]]


def test_qemu_is_unprivileged_confined_and_owns_only_its_disk(place):
    said = place.run(
        "boot(); pid = (PLACE / 'l/run/qemu' / (SPEC.name + '.pid')).read_text().strip()\n"
        "say(Path(f'/proc/{pid}/status').read_text())\n"
        "say(Path('/proc/self/cgroup').read_text() == Path(f'/proc/{pid}/cgroup').read_text())"
    )
    user = embed.qemu_user()
    status = dict(line.split(":", 1) for line in said[0].splitlines())
    assert status["Uid"].split() == [str(user.uid)] * 4
    assert status["Gid"].split() == [str(user.gid)] * 4
    assert status["Seccomp"].strip() == "2"
    assert status["CapEff"].strip() == "0" * 16
    assert said[1] is True, "QEMU is not in the cgroups of the process that started it"
    assert (place.vm / "root.qcow2").stat().st_uid == user.uid
    base, seed = (place.vm / "base.raw").stat(), (place.vm / "seed.iso").stat()
    assert (base.st_uid, base.st_gid, stat.S_IMODE(base.st_mode)) == (0, 0, 0o444)
    assert (seed.st_uid, seed.st_gid, stat.S_IMODE(seed.st_mode)) == (0, user.gid, 0o640)


def test_a_failed_start_reports_qemus_error(place):
    said = place.run(
        "from virtshim.model.errors import InternalError\n"
        "hypervisor.define(SPEC)\n"
        "with open(SPEC.disks[0].path, 'r+b') as disk: os.pwrite(disk.fileno(), bytes([1] * 8), 40)\n"
        "try: hypervisor.start(SPEC.uuid)\n"
        "except InternalError as error: say(str(error))\n"
        "say(state())"
    )
    assert "L1 table" in said[0]
    assert said[1][0] == "off"


def test_a_failed_start_reports_qemus_output_in_its_pipe(place):
    said = place.run(
        "from virtshim.model.errors import InternalError\n"
        "hypervisor.define(SPEC)\n"
        "with open(SPEC.disks[0].path, 'r+b') as disk: os.pwrite(disk.fileno(), bytes([1] * 8), 40)\n"
        "try: hypervisor.start(SPEC.uuid)\n"
        "except InternalError as error: say(str(error))\n"
        "say(state())",
        "vmwrapper",
    )
    assert "L1 table" in said[0]
    assert said[1][0] == "off"
    assert b"L1 table" in (place.root / "log/qemu/virtshim-integration.log").read_bytes()
    assert list((place.root / "output").iterdir()) == []


def test_the_last_output_of_a_qemu_started_by_another_process_is_logged(place):
    place.run("boot(); os.kill(os.getpid(), 9)", "vmwrapper", expect=KILLED)
    log = place.root / "log/qemu/virtshim-integration.log"
    assert b"terminating" not in log.read_bytes()
    place.run(
        "import threading\n"
        "def wait_for(holds):\n"
        "    until = time.monotonic() + 60\n"
        "    while not holds():\n"
        "        assert time.monotonic() < until\n"
        "        time.sleep(0.02)\n"
        "wait_for(lambda: any(thread.name == 'qemu-output' for thread in threading.enumerate()))\n"
        "os.kill(qemu_pid(), 15); wait_off()\n"
        f"wait_for(lambda: b'terminating on signal 15' in Path({str(log)!r}).read_bytes())",
        "vmwrapper",
    )


def test_a_second_process_gets_an_error_that_the_directory_is_in_use(place):
    said = place.run(
        "import subprocess; code = ('import sys; from virtshim.vm.connection import Connection\\n'\n"
        '\'from virtshim.system.logsetup import set_up_logging; set_up_logging("error", "text")\\n\'\n'
        "'c = Connection(sys.argv[1]); c.start(); print(c.wait_open(1), c.trouble())')\n"
        "command = [sys.executable, '-c', code, f'qemu:///embed?root={PLACE}/l']\n"
        "done = subprocess.run(command, capture_output=True, text=True)\n"
        "say(done.stdout)"
    )
    *_, answer = said[0].splitlines()  # its log comes first
    assert answer.startswith("False libvirt at qemu:///embed")
    assert "cannot be reached" in answer


def _questions(log: Path) -> list[str]:
    """libvirt's queries to the monitor of the QEMU that it started last, in order. libvirt may have started one before, to
    find out what it can do."""
    sent = [line for line in log.read_text(errors="replace").splitlines() if "QEMU_MONITOR_IO_WRITE" in line]
    asked = re.findall(r'"execute":"([a-z_-]+)"', "\n".join(sent))
    return asked[max(number for number, one in enumerate(asked) if one == "qmp_capabilities") :]


def test_a_start_sends_few_queries_to_qemu(place, monkeypatch, tmp_path):
    """There are some 400 if libvirt queries each property of the CPU."""
    log = tmp_path / "monitor.log"
    monkeypatch.setenv("LIBVIRT_LOG_FILTERS", "1:qemu.qemu_monitor")
    monkeypatch.setenv("LIBVIRT_LOG_OUTPUTS", f"1:file:{log}")
    place.run("boot(); say(state())")
    asked = _questions(log)
    assert "cont" in asked
    assert len(asked) < 40, asked


def test_a_named_cpu_model_is_queried_in_full(place, monkeypatch, tmp_path):
    """Its live definition names features that the short query omits."""
    log = tmp_path / "monitor.log"
    monkeypatch.setenv("LIBVIRT_LOG_FILTERS", "1:qemu.qemu_monitor")
    monkeypatch.setenv("LIBVIRT_LOG_OUTPUTS", f"1:file:{log}")
    place.run("from virtshim.model.vm import CpuModel\nboot(dataclasses.replace(SPEC, cpu_model=CpuModel.HOST_MODEL))")
    assert _questions(log).count("qom-get") > 100 or "qom-list-get" in _questions(log)


def test_a_capability_that_libvirt_does_not_know_is_refused_before_any_start(place):
    said = place.run(
        "from virtshim.vm import cpu_query\n"
        "with connection.using('ask') as conn:\n"
        "    say(cpu_query.refusal(conn, QEMU, 'qemu'))\n"
        "    cpu_query.CAPABILITY = 'no-such-capability'\n"
        "    say(cpu_query.refusal(conn, QEMU, 'qemu'))\n"
    )
    assert said[0] == ""
    assert "no-such-capability" in said[1]
