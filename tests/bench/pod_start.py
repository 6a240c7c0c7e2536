"""Measures a pod's start up to its first console byte, compared with the same domain under bare libvirt."""

from __future__ import annotations

import os
import re
import subprocess
import time

from bare import BareLibvirt
from figures import Figures, timed
from node import Node
from podclient import PodClient, container_config, pod_config


def one_round(cri: PodClient, node: Node, bare: BareLibvirt, image: str, figures: Figures, number: int) -> None:
    config = pod_config(f"bench-{number}", f"{node.directory}/logs/{number}")
    made: dict[str, str] = {}
    sandbox = timed(lambda: made.update(pod=cri.run_pod(config)))
    figures.add("phase_sandbox_ms", sandbox, "ms")
    figures.add("phase_pull_ms", timed(lambda: made.update(image=cri.pull(image))), "ms")
    wanted = container_config(made["image"], 64 << 20)
    create = timed(lambda: made.update(vm=cri.create(made["pod"], wanted, config)))
    figures.add("create_ms", create, "ms")
    bare.define_like(made["vm"])
    started = time.monotonic()
    # Which one goes first changes from round to round.
    if number % 2:
        plain = timed(bare.start)
        started = time.monotonic()
        ours = timed(lambda: cri.start(made["vm"]))
        first = first_byte_ms(node, made["vm"], started)
    else:
        ours = timed(lambda: cri.start(made["vm"]))
        first = first_byte_ms(node, made["vm"], started)
        plain = timed(bare.start)
    qemu = bare.start_qemu()
    bare.remove()
    figures.add("phase_start_ms", ours, "ms")
    figures.add("phase_first_byte_ms", first, "ms")
    figures.add("bare_libvirt_start_ms", plain, "ms")
    figures.add("bare_qemu_start_ms", qemu, "ms")
    figures.add("start_vs_bare_libvirt", ours / plain, "ratio")
    figures.add("start_vs_qemu", ours / qemu, "ratio")
    others = cni_ms(node, made["pod"]) + libvirt_ms(node, made["vm"])
    figures.add("own_time_ms", sandbox + create + ours - others, "ms")
    figures.add("phase_stop_ms", timed(lambda: cri.stop(made["vm"], 0)), "ms")
    figures.add("phase_remove_ms", timed(lambda: cri.remove_pod(made["pod"])), "ms")
    figures.add("status_ms", timed(cri.pods), "ms")


def cni_ms(node: Node, pod: str) -> float:
    """The time of the CNI plugins' ADD, from tapmanager's log."""
    return sum(float(ms) for ms in re.findall(rf"cni\.ran sandbox={pod} command=ADD .* ms=([0-9.]+)", node.log()))


def libvirt_ms(node: Node, container: str) -> float:
    """libvirt's time to define and start the VM, including QEMU and vmwrapper, from virtshim's log."""
    lines = [line for line in node.log().splitlines() if f"virtshim-{container[:12]}-" in line]
    found = [re.search(r"libvirt\.domain\.(?:defined|started)\b.*\bms=([0-9.]+)", line) for line in lines]
    return sum(float(one[1]) for one in found if one)


def first_byte_ms(node: Node, container: str, started: float) -> float:
    """From the start request to the guest's first byte on the serial console."""
    log = f"{node.directory}/state/containers/{container}/console.log"
    while not os.path.exists(log) or not os.path.getsize(log):
        if time.monotonic() - started > 60:
            raise TimeoutError("the null guest wrote nothing")
        time.sleep(0.001)
    return (time.monotonic() - started) * 1000


def vmwrapper_round(node: Node, figures: Figures) -> None:
    """From exec of vmwrapper to exec of the emulator, when libvirt only queries capabilities."""
    environment = {"VIRTSHIM_EMULATOR": "/bin/true", "PATH": os.defpath}
    argv = [f"{node.directory}/bin/vmwrapper", "-version"]
    wrapped = timed(lambda: subprocess.run(argv, env=environment, check=True))
    plain = timed(lambda: subprocess.run(["/bin/true"], env=environment, check=True))
    figures.add("vmwrapper_ms", wrapped - plain, "ms")
    # Started as for a VM, but without taps; nine times, because the time is short and the machine's speed drifts.
    confined = {**environment, "VIRTSHIM_CONFINE": "landlock,seccomp,core-scheduling"}
    disk = '{"driver":"file","filename":"/bin/true"}'
    argv = [argv[0], "-blockdev", disk, "-device", "virtio-blk-pci"]
    for _ in range(9):
        with_it = timed(lambda: subprocess.run(argv, env=confined, check=True))
        without = timed(lambda: subprocess.run(argv, env=environment, check=True))
        figures.add("jail_ms", with_it - without, "ms")
