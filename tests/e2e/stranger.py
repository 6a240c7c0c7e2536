"""Attempts of an unprivileged local user against a running node. The system's Python runs this as that user:

    python3 -IS -c SOURCE ATTEMPT < FACTS.json

The name of each attempt completes a sentence that begins with "a stranger". An attempt returns the text that it got, or
raises OSError; "" means nothing.
"""

from __future__ import annotations

import ctypes
import fcntl
import glob
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

Facts = dict[str, Any]

_PTRACE_SEIZE = 0x4206
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _first_of(paths: list[str], use: Callable[[str], str]) -> str:
    """The result of the first usable one, or the last one's error."""
    assert paths
    problem = OSError()
    for path in paths:
        try:
            return use(path) or path
        except OSError as exc:
            problem = exc
    raise problem


def _read(path: str) -> str:
    with open(path, "rb") as file:
        return repr(file.read(200))


def _listed(path: str) -> str:
    return " ".join(os.listdir(path))


def _connected(path: str) -> str:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as tried:
            tried.settimeout(5)
            try:
                tried.connect(path)
            except OSError as exc:
                if exc.errno == 91:  # EPROTOTYPE: it is there, of another kind
                    continue
                raise
            return f"connected to {path}"
    return ""


def _made(path: str) -> str:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    return f"made {path}"


# --- reading ---------------------------------------------------------------------------------------------------------


def reads_the_records_of_all_pods(facts: Facts) -> str:
    return _first_of([f"{facts['state']}/state.db", f"{facts['state']}/state.db-wal"], _read)


def reads_the_copy_of_a_pods_records(facts: Facts) -> str:
    return _read(f"{facts['container_dir']}/record.json")


def lists_what_containers_there_are(facts: Facts) -> str:
    return _first_of([f"{facts['state']}/containers", facts["container_dir"], facts["directory"]], _listed)


def reads_the_root_disk_of_a_vm(facts: Facts) -> str:
    return _read(f"{facts['container_dir']}/root.qcow2")


def reads_the_seed_of_a_vm_with_its_passwords(facts: Facts) -> str:
    return _read(f"{facts['container_dir']}/seed.iso")


def reads_the_console_of_a_vm(facts: Facts) -> str:
    return _read(f"{facts['container_dir']}/console.log")


def reads_the_log_of_a_container(facts: Facts) -> str:
    return _read(facts["log"])


def lists_the_images(facts: Facts) -> str:
    return _first_of([f"{facts['state']}/images", f"{facts['state']}/images/sha256"], _listed)


def reads_an_image_whose_digest_it_knows(facts: Facts) -> str:
    return _read(facts["image"])


def reads_the_keys_in_tapmanagers_ledger(facts: Facts) -> str:
    return _first_of(facts["ledger"], _read)


def reads_the_definition_of_a_vm(facts: Facts) -> str:
    return _first_of(facts["definitions"], _read)


def reads_the_master_key_that_libvirt_shares_with_a_vm(facts: Facts) -> str:
    return _first_of(facts["master_keys"], _read)


def reads_the_log_that_libvirt_keeps_of_a_vm(facts: Facts) -> str:
    return _first_of(facts["libvirt_logs"], _read)


# --- talking ---------------------------------------------------------------------------------------------------------


def talks_to_the_cri_and_admin_socket(facts: Facts) -> str:
    return _connected(f"{facts['run']}/virtshim.sock")


def talks_to_tapmanager(facts: Facts) -> str:
    return _connected(f"{facts['run']}/tapmanager.sock")


def types_on_the_console_of_a_vm(facts: Facts) -> str:
    return _connected(f"{facts['sockets']}/console.sock")


def talks_to_the_guest_agent(facts: Facts) -> str:
    return _connected(f"{facts['sockets']}/agent.sock")


def joins_a_command_in_a_guest(facts: Facts) -> str:
    return _first_of([f"{facts['sockets']}/exec-{n}.sock" for n in range(4)], _connected)


def looks_at_the_screen_of_a_vm(facts: Facts) -> str:
    return _connected(facts["screen"])


def talks_to_qemus_monitor(facts: Facts) -> str:
    return _first_of(facts["monitors"], _connected)


def connects_to_any_socket_of_the_node(facts: Facts) -> str:
    return _first_of(facts["all_sockets"], _connected)


def talks_to_the_machines_libvirt(facts: Facts) -> str:
    """Fails if the machine has no libvirt."""
    places = glob.glob("/run/libvirt/*-sock") + glob.glob("/var/run/libvirt/virt*/*-sock")
    return _first_of([*places, "/run/libvirt/libvirt-sock"], _connected)


def _asked(facts: Facts, path: str) -> str:
    with socket.create_connection(("127.0.0.1", facts["stream_port"]), 10) as connected:
        upgrade = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\n"
        connected.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\n{upgrade}\r\n".encode())
        connected.settimeout(15)
        said = connected.recv(4096).decode(errors="replace")
    return said if said.startswith(("HTTP/1.1 1", "HTTP/1.1 2")) else ""


def streams_without_a_token(facts: Facts) -> str:
    return _asked(facts, "/") or _asked(facts, "/exec/") or _asked(facts, "/portforward") or _asked(facts, "/attach//")


def streams_with_a_token_that_it_guessed(facts: Facts) -> str:
    token = facts["token"]
    guesses = [token[:-1] + ("a" if token[-1] != "a" else "b"), token[::-1], token.upper(), "A" * len(token), token[:8]]
    return "".join(_asked(facts, f"/{kind}/{guess}") for kind in ("exec", "attach") for guess in guesses)


def streams_with_a_token_for_something_else(facts: Facts) -> str:
    return _asked(facts, f"/exec/{facts['token']}")


def streams_with_a_token_that_was_used(facts: Facts) -> str:
    return _asked(facts, f"/portforward/{facts['used_token']}")


def listens_in_the_streaming_servers_place(facts: Facts) -> str:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", facts["stream_port"]))
        listener.listen()
    return "listens"


def listens_to_the_machines_packets(facts: Facts) -> str:
    del facts
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)).close()
    return "listens"


# --- changing --------------------------------------------------------------------------------------------------------


def makes_files_in_the_nodes_directories(facts: Facts) -> str:
    return _first_of([f"{place}/stranger" for place in facts["directories"]], _made)


def prepares_a_link_where_settings_will_be_written(facts: Facts) -> str:
    for name in ("config.toml.new", "config.toml.d", "up.lock", "state/state.db-journal", "run/kvm-probe.json.new"):
        try:
            os.symlink("/etc/passwd", f"{facts['directory']}/{name}")
        except FileExistsError:
            continue
        return f"made {name}"
    return ""


def changes_the_settings_of_the_node(facts: Facts) -> str:
    with open(f"{facts['directory']}/config.toml", "ab"):
        return "opened it for writing"


def changes_what_libvirt_runs_as_emulator(facts: Facts) -> str:
    with open(f"{facts['directory']}/bin/vmwrapper", "ab"):
        return "opened it for writing"


def changes_the_networks_configuration(facts: Facts) -> str:
    return _first_of(facts["conflists"], lambda path: open(path, "ab").close() or path)  # type: ignore[func-returns-value]


def takes_the_nodes_sockets_away(facts: Facts) -> str:
    def away(path: str) -> str:
        os.rename(path, f"{path}.gone")
        return path

    return _first_of([f"{facts['run']}/virtshim.sock", f"{facts['run']}/tapmanager.sock", *facts["all_sockets"]], away)


def takes_a_lock_that_a_daemon_wants_next_time(facts: Facts) -> str:
    def lock(path: str) -> str:
        descriptor = os.open(path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return path

    return _first_of(facts["locks"], lock)


def writes_another_process_into_a_lock(facts: Facts) -> str:
    return _first_of(facts["locks"], lambda path: open(path, "w").write("1\n") and path)


def changes_the_limits_of_a_vms_cgroup(facts: Facts) -> str:
    def join(path: str) -> str:
        with open(path, "w", encoding="ascii") as file:
            file.write(str(os.getpid()))
        return path

    return _first_of(facts["cgroups"], join)


# --- processes -------------------------------------------------------------------------------------------------------


def _of_processes(facts: Facts, name: str) -> str:
    return _first_of([f"/proc/{pid}/{name}" for pid in facts["pids"]], _read)


def reads_the_environment_of_a_daemon_or_qemu(facts: Facts) -> str:
    return _of_processes(facts, "environ")


def reads_the_memory_of_a_daemon_or_qemu(facts: Facts) -> str:
    return _first_of(
        [f"/proc/{pid}/mem" for pid in facts["pids"]], lambda path: os.close(os.open(path, os.O_RDONLY)) or path
    )  # type: ignore[func-returns-value]


def sees_the_open_files_of_a_daemon_or_qemu(facts: Facts) -> str:
    return _first_of([f"/proc/{pid}/fd" for pid in facts["pids"]], _listed)


def goes_by_a_daemons_root_and_working_directory(facts: Facts) -> str:
    places = [f"/proc/{pid}/{name}" for pid in facts["pids"] for name in ("root", "cwd", "exe")]
    return _first_of(places, os.readlink)


def traces_a_daemon_or_qemu(facts: Facts) -> str:
    def seize(pid: str) -> str:
        _checked(_libc.ptrace(_PTRACE_SEIZE, int(pid), None, None))
        return pid

    return _first_of([str(pid) for pid in facts["pids"]], seize)


def ends_a_daemon_or_qemu(facts: Facts) -> str:
    def end(pid: str) -> str:
        os.kill(int(pid), signal.SIGTERM)
        return pid

    return _first_of([str(pid) for pid in facts["pids"]], end)


def stops_a_daemon_by_its_processor_time(facts: Facts) -> str:
    def slow(pid: str) -> str:
        os.setpriority(os.PRIO_PROCESS, int(pid), 19)
        os.sched_setaffinity(int(pid), {0})
        return pid

    return _first_of([str(pid) for pid in facts["pids"]], slow)


def finds_a_secret_on_a_command_line(facts: Facts) -> str:
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    words = file.read()
            except OSError:
                continue
            for secret in facts["secrets"]:
                if secret.encode() in words:
                    return f"process {pid}"
    return ""


# --- the network -----------------------------------------------------------------------------------------------------


def enters_the_network_of_a_pod(facts: Facts) -> str:
    def enter(path: str) -> str:
        descriptor = os.open(path, os.O_RDONLY)
        _checked(_libc.setns(descriptor, _CLONE_NEWNET))
        return path

    return _first_of([facts["netns"], *(f"/proc/{pid}/ns/net" for pid in facts["pids"])], enter)


def takes_the_tap_of_a_vm(facts: Facts) -> str:
    del facts
    with open("/dev/net/tun", "r+b", buffering=0) as tun:
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", b"tap0", 0x1002))
    return "has it"


# --- disturbing ------------------------------------------------------------------------------------------------------


def holds_all_connections_to_the_streaming_server(facts: Facts) -> str:
    """The server closes the oldest connections, so a client with a token gets through."""
    held = [socket.create_connection(("127.0.0.1", facts["stream_port"]), 10) for _ in range(300)]
    _announce_and_wait(facts)
    for one in held:
        one.close()
    return ""


def asks_tapmanager_without_end(facts: Facts) -> str:
    held = []
    for _ in range(300):
        one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one.setblocking(False)
        held.append(one)
        try:
            one.connect(f"{facts['run']}/tapmanager.sock")
        except OSError:
            continue
        one.send(b'{"v": 1, "id": 1, "verb": "list", "timeout": 5, "args": {}}')
        time.sleep(0.01)
        try:
            said = json.loads(one.recv(65536))
        except OSError:
            continue
        if "ok" in said:
            return str(said)
    _announce_and_wait(facts)
    return ""


def _announce_and_wait(facts: Facts) -> None:
    del facts
    print("READY", flush=True)
    sys.stdin.readline()


def main() -> None:
    facts = json.loads(sys.stdin.readline())
    attempt = globals()[sys.argv[1]]
    try:
        got = attempt(facts)
    except OSError as exc:
        print(json.dumps({"refused": str(exc)}), flush=True)
    else:
        print(json.dumps({"got": got}), flush=True)


if __name__ == "__main__":
    main()
