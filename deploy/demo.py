"""`make demo`: starts a node, serves an image by HTTP, runs a VM pod through the CRI socket, tries console and IP, removes
everything."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from imageserver import serve_directory
from podclient import PodClient, container_config, log_lines, pod_config, wait_for_log, wait_until
from rich.console import Console

console = Console(highlight=False)
GUEST = Path(__file__).resolve().parent.parent / "build" / "guest.qcow2"
VIRTSHIM = [sys.executable, "-m", "virtshim"]


@contextmanager
def step(text: str) -> Iterator[None]:
    started = time.monotonic()
    console.print(f"[bold]*[/] {text} ...")
    yield
    console.print(f"    done in {time.monotonic() - started:.2f} s")


@contextmanager
def node(directory: str) -> Iterator[str]:
    """Runs a node and yields its CRI socket. Afterwards removes everything, also after a failure."""
    log = Path(directory, "node.log")
    settings = Path(directory, "demo.toml")
    settings.write_text('[images]\ndownload_protocol = "http"\n', encoding="utf-8")  # the image is served on loopback
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*VIRTSHIM, "up", "--dir", f"{directory}/n", "--config", str(settings)],
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    socket = f"{directory}/n/run/virtshim.sock"
    try:
        wait_until(lambda: "up: ready" in log.read_text() or process.poll() is not None, 60, "the node is ready")
        if process.poll() is not None:
            sys.exit(f"the node did not start:\n{log.read_text()}\n`virtshim check` may say why")
        yield socket
    except BaseException:
        console.print(f"the node's log:\n{log.read_text()[-4000:]}")
        raise
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(60)
        subprocess.run([*VIRTSHIM, "down", "--dir", f"{directory}/n", "--all"], check=True)


def ssh_key(directory: str) -> str:
    """Makes a key and returns the path of its private part."""
    path = f"{directory}/key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "demo", "-f", path], check=True)
    return path


def run_command(client: PodClient, container: str) -> None:
    with step("ExecSync: a command in the guest, through its QEMU guest agent"):
        answer = client.exec_sync(container, "sh", "-c", "uname -sr; hostname; exit 3")
        console.print(f"    {answer.stdout.decode().strip()!r}, exit code {answer.exit_code}", markup=False)
        if answer.exit_code != 3 or not answer.stdout.startswith(b"Linux"):
            sys.exit(f"the command did not run: {answer}")


def demo(directory: str) -> None:
    begun = time.monotonic()
    with serve_directory(GUEST.parent) as url, node(directory) as socket, PodClient(socket) as client:
        image = f"{url.removeprefix('http://')}/{GUEST.name}"
        key = ssh_key(directory)
        pod = pod_config("demo", f"{directory}/logs", {"VirtletSSHKeys": Path(f"{key}.pub").read_text()})
        with step("RunPodSandbox: network namespace, CNI, tap, DHCP"):
            sandbox = client.run_pod(pod)
            address = client.pod_ip(sandbox)
            console.print(f"    sandbox {sandbox[:12]}, pod IP {address}")
        with step(f"PullImage {image}"):
            digest = client.pull(image)
            console.print(f"    {digest}")
        with step("CreateContainer: root disk, cloud-init seed, libvirt domain"):
            container = client.create(sandbox, container_config(digest), pod)
        with step("StartContainer: QEMU boots the VM"):
            client.start(container)
        with step("the guest boots"):
            log = client.status(container).log_path
            wait_for_log(log, "virtshim-guest: ready", 120)
        console.print(f"    first lines of {log}:")
        for line in log_lines(log)[:12]:
            console.print(f"    | {line}", markup=False)
        console.print(f"    | ...\n    | {log_lines(log)[-1]}", markup=False)
        with step(f"ping {address}"):
            result = subprocess.run(
                ["ping", "-c", "3", "-i", "0.2", "-W", "5", address], capture_output=True, check=False
            )
            console.print("    " + result.stdout.decode().strip().replace("\n", "\n    "), markup=False)
            if result.returncode:
                sys.exit("the guest does not answer on its pod IP")
        with step(f"ssh root@{address} uname -a, with the key that cloud-init brought"):
            options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
            command = ["ssh", "-i", key, *options, f"root@{address}", "uname -a"]
            result = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=60, check=False)
            console.print("    " + (result.stdout + result.stderr).decode().strip(), markup=False)
            if result.returncode:
                sys.exit("the guest does not let the key in")
        run_command(client, container)
        with step("StopContainer: ACPI shutdown"):
            client.stop(container, 30)
            status = client.status(container)
            console.print(f"    exit code {status.exit_code}, reason {status.reason}")
        with step("RemoveContainer, StopPodSandbox, RemovePodSandbox"):
            client.remove(container)
            client.stop_pod(sandbox)
            client.remove_pod(sandbox)
    console.print(f"[bold green]All of it works, and nothing is left behind[/] ({time.monotonic() - begun:.1f} s)")


def main() -> None:
    if os.geteuid() != 0:
        sys.exit("the demo needs root: sudo make demo")
    directory = tempfile.mkdtemp(prefix="virtshim-demo-", dir="/var/tmp")
    os.chmod(directory, 0o711)  # noqa: S103
    try:
        demo(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
