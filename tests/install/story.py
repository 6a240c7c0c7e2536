"""Tells a node's life with the package: installed, set up, a VM, an upgrade while it runs, a reboot, purged."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from install.outer import Failed, Machine

UNITS = (
    "tapmanager",
    "virtshim-shares",
    "virtshim",
    "virtshim-proxy",
    "virtshim-device-plugin",
    "virtshim-agent",
    "virtshim-guests",
)
SERVED = UNITS[:3]
POD_SLICE = "kubepods-burstable-pod1234.slice"
_PYTHON = "cd /root/node && /usr/lib/virtshim/bin/python3 in_the_machine.py"
_RUNNING, _EXITED, _READY, _NOT_READY = 1, 2, 0, 1
# Seconds for all steps together, which are less than the limits of the single steps.
_WHOLE = 3000.0
_GUEST_BOOT = "virtshim exec kept -- cat /proc/sys/kernel/random/boot_id"


class Story:
    """`packages`: two versions, the older one first."""

    def __init__(self, machine: Machine, packages: list[Path], say: Callable[[str], None]) -> None:
        self._machine = machine
        self._packages = packages
        self._say = say
        self._boot = self._guest_boot = ""
        self._until = 0.0

    def tell(self) -> None:
        begun = time.monotonic()
        for step, seconds in (
            (self.boot, 600), (self.install, 600), (self.set_up, 600), (self.units, 300), (self.hands, 900), (self.run, 600),
            (self.confined, 200), (self.upgrade, 600), (self.come_and_go, 600), (self.keep, 600), (self.reboot, 900),
            (self.go_on, 600), (self.purge, 600),
        ):  # fmt: skip
            started = time.monotonic()
            self._until = min(started + seconds, begun + _WHOLE)
            self._say(f"* {(step.__doc__ or '').strip()}")
            step()
            self._say(f"  done in {time.monotonic() - started:.0f} s")

    def boot(self) -> None:
        """Debian boots, with systemd and AppArmor"""
        self._boot = self._machine.wait_for_boot(self._left())
        self._do("mkdir /root/node && mount -o ro /dev/vdb /media && cp /media/*.py /media/*.qcow2 /root/node/")
        self._is("cat /sys/module/apparmor/parameters/enabled", "Y")

    def install(self) -> None:
        """apt-get install ./virtshim.deb: nothing is started"""
        self._do(f"apt-get install -y /media/{self._packages[0].name}")
        for unit in UNITS:
            self._is(f"systemctl is-active {unit}", "inactive", code=None)
        self._do("zcat /usr/share/man/man8/virtshim-setup.8.gz | grep -q SYNOPSIS")

    def set_up(self) -> None:
        """virtshim setup, virtshim check"""
        # The image is served on loopback.
        settings = '[images]\\ndownload_protocol = "http"\\ninsecure_registries = ["127.0.0.1"]\\n'
        self._do(f"printf '{settings}' > /etc/virtshim/config.toml.d/test.toml")
        self._say(self._do("virtshim setup"))
        for unit in SERVED:
            self._is(f"systemctl is-active {unit}", "active")
        found = json.loads(self._do("virtshim check --json", code=None))
        findings = found if isinstance(found, list) else found["findings"]
        for one in findings:
            if one["level"] != "ok":
                self._say(f"  {one['level']}: {one['subject']}: {one['text']}")
        _expect([one for one in findings if one["level"] == "error"], [])

    def units(self) -> None:
        """systemd-analyze verify and security"""
        names = " ".join(f"{unit}.service" for unit in UNITS)
        _expect(self._do(f"systemd-analyze verify --man=no {names}"), "")
        for unit in UNITS:
            self._say("  " + self._do(f"systemd-analyze security --no-pager {unit} | tail -n 1"))

    def hands(self) -> None:
        """A new user's VM: load, run -d, cp, port-forward, exec, rm; nothing is left"""
        before = self._traces()
        self._do("virtshim load /root/node/guest.qcow2 small")
        self._do("virtshim run -d --name box --memory 256Mi small")
        # exec waits a minute for the guest's agent, and the guest boots longer in an emulated machine.
        self._do("until virtshim exec box -- true; do sleep 2; done")
        self._is("virtshim exec box -- uname -s", "Linux")
        self._do("echo hello > /root/page && virtshim cp /root/page box:/srv/www/page")
        # Job control, so that the job takes SIGINT as in a terminal.
        self._do("set -m; virtshim port-forward box 18080:80 > /root/forward 2>&1 & echo $! > /root/forward.pid")
        self._do(
            "until grep 'leads to port 80' /root/forward; do kill -0 $(cat /root/forward.pid) || exit 1; sleep 1; done"
        )
        fetch = "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:18080/page').read().decode())"
        self._is(f'python3 -c "{fetch}"', "hello")
        self._do("kill -INT $(cat /root/forward.pid); while kill -0 $(cat /root/forward.pid) 2>&1; do sleep 1; done")
        self._is("virtshim exec box -- cat /srv/www/page", "hello")
        self._do("virtshim rm --force box && virtshim rmi small && rm /root/page /root/forward*")
        _expect(self._traces(), before)

    def _traces(self) -> str:
        """What pods, VMs and images leave. The bridge of the CNI plugin stays."""
        return self._do(
            "virtshim ps -q; virtshim vms; virtshim images -q; virsh list --all --name; ls -A /run/netns /run/virtshim/shares;"
            "ip -brief link | cut -d ' ' -f 1 | grep -v virtshim0; find /var/lib/virtshim -type f -size +1M;"
            "pidof qemu-system-x86_64 virtiofsd",
            code=None,
        )

    def run(self) -> None:
        """A VM in the slice of a pod, through the CRI socket"""
        self._do(f"systemctl start {POD_SLICE}")
        self._do(f"{_PYTHON} run")
        self._say("  " + self._do("virtshim ps").replace("\n", "\n  "))

    def confined(self) -> None:
        """systemd has its QEMU in the pod's slice, AppArmor in a profile of its own, as a user of its own"""
        self._is("virsh list --name | grep -c virtshim", "1")
        group = self._do("cat /proc/$(pidof qemu-system-x86_64)/cgroup")
        _expect([f"/{POD_SLICE}/machine-qemu" in group, ".scope" in group], [True, True])
        label = self._do("cat /proc/$(pidof qemu-system-x86_64)/attr/current")
        _expect([label.startswith("libvirt-"), "(enforce)" in label], [True, True])
        uid = int(self._do("stat -c %u /proc/$(pidof qemu-system-x86_64)"))
        self._say(f"  {group}; {label}; user {uid}")
        _expect(uid >= 2130706432, True)
        _expect(self._do("journalctl -k -b | grep 'apparmor=\"DENIED\"'", code=None), "")

    def upgrade(self) -> None:
        """apt-get install of the next version: daemons are others, QEMU is the same"""
        qemu, daemons, before = self._qemu(), self._daemons(), self._show()
        self._do(f"apt-get install -y /media/{self._packages[1].name}")
        self._is("virtshim version", self._packages[1].name.split("_")[1].partition("~")[0])
        _expect(self._qemu(), qemu)
        _expect([old for old, new in zip(daemons, self._daemons(), strict=True) if old == new], [])
        self._same(before)
        self._is("virtshim exec vm -- echo still here", "still here")

    def come_and_go(self) -> None:
        """apt-get purge is refused while the VM runs; installed again, the VM is virtshim's as before"""
        qemu, before = self._qemu(), self._show()
        said = self._do("apt-get purge -y virtshim", code=100)
        _expect(["would lose their disks" in said, "virtshim setup --undo" in said], [True, True])
        _expect(self._qemu(), qemu)
        self._do(f"apt-get install -y /media/{self._packages[1].name}")
        self._do(f"systemctl start {' '.join(SERVED)}")
        self._same(before)

    def keep(self) -> None:
        """A VM that outlives its pods, and that a stop saves"""
        self._do(f"{_PYTHON} keep")
        self._guest_boot = self._do(_GUEST_BOOT)

    def reboot(self) -> None:
        """A reboot: one guest is saved, the other one is shut down, the pods' records say so"""
        self._machine.ask_to_reboot()
        self._boot = self._machine.wait_for_boot(self._left(), self._boot)
        for unit in SERVED:
            self._is(f"systemctl is-active {unit}", "active")
        _expect(self._do("systemctl --failed --no-legend --plain"), "")
        said = self._show()
        ends = {}
        for pod in said["pods"]:
            (container,) = [one for one in said["containers"] if one["pod"] == pod["id"]]
            self._say(f"  pod {pod['name']} {pod['state']}: {container['code']}, {container['message']!r}")
            _expect((pod["state"], container["state"]), (_NOT_READY, _EXITED))
            ends[pod["name"]] = (container["code"], container["reason"], "restarted" in container["message"])
        _expect(ends, {"vm": (255, "Unknown", True), "kept": (143, "Saved", False)})

    def go_on(self) -> None:
        """The saved guest continues in its next pod"""
        self._do(f"{_PYTHON} remove")
        self._do(f"systemctl start {POD_SLICE}")
        self._do(f"{_PYTHON} go_on")
        _expect(self._do(_GUEST_BOOT), self._guest_boot)

    def purge(self) -> None:
        """crictl rmp, virtshim setup --undo, apt-get purge: nothing is left"""
        self._do(f"{_PYTHON} remove")
        self._say(self._do("virtshim setup --undo"))
        self._do("apt-get purge -y virtshim")
        places = "/etc /lib/systemd /opt /run /root /usr /var"
        skipped = "-path /var/log/journal -o -path /var/cache/apt -o -path /root/node -o -path /usr/lib/virtualbox"
        _expect(self._do(f"find {places} \\( {skipped} \\) -prune -o -iname '*virtshim*' -print"), "")
        # The distribution's tools keep what their files were before: /etc/passwd-.
        _expect(self._do("grep -rl --exclude='*-' virtshim /etc /var/lib/dpkg/statoverride", code=None), "")
        _expect(self._do("getent passwd virtshim-parser", code=None), "")
        _expect(self._do("virsh list --all --name; ls -A /run/netns").split(), [])
        _expect(self._do("ip -brief link | grep -Ev '^(lo|virbr|virtshim0)'", code=None), "")
        _expect(self._do("systemctl list-units --all --no-legend 'virtshim*' 'tapmanager*'"), "")

    def _do(self, command: str, code: int | None = 0) -> str:
        """Runs a command in the time that is left for the step. `code`: the expected exit code, None for any."""
        done = self._machine.run(command, self._left())
        if code not in (None, done.code):
            raise Failed(f"{command}: exit code {done.code}\n{done.output}")
        return done.output.strip()

    def _left(self) -> float:
        return self._until - time.monotonic()

    def _is(self, command: str, wanted: str, code: int | None = 0) -> None:
        _expect(self._do(command, code), wanted)

    def _qemu(self) -> str:
        """The QEMU process and its start time."""
        return self._do("cut -d ' ' -f 1,22 /proc/$(pidof qemu-system-x86_64)/stat")

    def _daemons(self) -> list[str]:
        return [self._do(f"systemctl show -p MainPID --value {unit}") for unit in SERVED]

    def _show(self) -> Any:
        return json.loads(self._do(f"{_PYTHON} show"))

    def _same(self, before: Any) -> None:
        _expect([one["state"] for one in before["containers"]], [_RUNNING])
        _expect(self._show(), before)


def _expect(found: object, wanted: object) -> None:
    if found != wanted:
        raise Failed(f"expected {wanted!r}, found {found!r}")
