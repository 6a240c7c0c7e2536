"""A node whose QEMUs are taken over, with two VMs, and the results of one VM's attempts against the other and the node.

Both libvirts are tested: the embedded one, and the system's, with private mounts for each QEMU and its virtlogd.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from attempts import attempts
from imageserver import serve_directory
from node import Node, free_cidr
from own_libvirtd import OwnLibvirtd, missing
from podclient import PodClient, container_config, pod_config, wait_until

HERE = Path(__file__).parent
QEMU = "/usr/bin/qemu-system-x86_64"
LIMIT = 120.0


@dataclass(frozen=True)
class Vm:
    sandbox: str
    container: str
    pid: int

    @property
    def short(self) -> str:
        return self.container[:20]


@dataclass(frozen=True)
class Libvirt:
    """`places`: its files, as it and its QEMUs see them. `root`: where the tests see them. `enter`: a command that
    starts programs with the same view."""

    root: str
    uri: str
    places: tuple[str, ...]
    run: str
    log: str
    enter: tuple[str, ...] = ()

    def seen(self, path: str) -> Path:
        return Path(self.root + path)

    def paths(self) -> list[str]:
        return [str(one).removeprefix(self.root) for place in self.places for one in self.seen(place).rglob("*")]


class Said:
    """All output of a VM's QEMU: in its output pipe if it has one, in its log after it has ended, and in rotated logs of
    virtlogd."""

    def __init__(self, libvirt: Libvirt, vm: Vm) -> None:
        self._place = libvirt.seen(libvirt.log)
        self._container = vm.container[:12]
        self._read = b""
        self._pipe = -1
        if "/embed" in libvirt.uri:
            self._pipe = os.open(f"/proc/{vm.pid}/fd/2", os.O_RDONLY | os.O_NONBLOCK)

    def logs(self) -> list[Path]:
        """The logs, newest last."""
        return sorted(self._place.glob(f"*{self._container}*.log*"), key=lambda path: path.suffix, reverse=True)

    def text(self) -> str:
        with contextlib.suppress(BlockingIOError):
            while self._pipe >= 0 and (more := os.read(self._pipe, 1 << 16)):
                self._read += more
        return (self._read + self._logged()).decode(errors="replace")

    def _logged(self) -> bytes:
        while True:
            with contextlib.suppress(FileNotFoundError):  # virtlogd has renamed one just now
                return b"".join(log.read_bytes() for log in self.logs())

    def close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


@dataclass
class Field:
    """`tried`: attempt -> "got", "refused EPERM", or a number."""

    node: Node
    attacker: Vm
    victim: Vm
    said: Said
    tried: Mapping[str, str] = field(default_factory=dict)

    def got(self, *kinds: str) -> dict[str, str]:
        """The attempts of these kinds that were not refused."""
        of_kind = {what: how for what, how in self.tried.items() if what.split()[0] in kinds}
        assert of_kind, f"nothing of {kinds} was tried"
        return {what: how for what, how in of_kind.items() if not how.startswith("refused")}


@pytest.fixture(scope="package")
def weapons() -> Iterator[Path]:
    """The malicious library, and the emulator that loads it, where QEMU's user can read them."""
    directory = Path(tempfile.mkdtemp(prefix="virtshim-hostile-", dir="/var/tmp"))
    directory.chmod(0o755)
    library = directory / "taken_over.so"
    build = ("gcc", "-O1", "-Wall", "-Wextra", "-Werror")
    subprocess.run([*build, "-shared", "-fPIC", "-o", str(library), str(HERE / "taken_over.c"), "-pthread"], check=True)
    named = (f'-DLIBRARY="{library}"', f'-DQEMU="{QEMU}"')
    subprocess.run([*build, *named, "-o", str(directory / "qemu"), str(HERE / "launch.c")], check=True)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="package")
def root() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="virtshim-test-", dir="/var/tmp"))
    root.chmod(0o711)
    yield root
    shutil.rmtree(root)


@pytest.fixture(scope="package", params=["embedded", pytest.param("system", marks=pytest.mark.full)])
def libvirt(request: pytest.FixtureRequest, root: Path) -> Iterator[Libvirt]:
    if request.param == "embedded":
        own = f"{root}/n/libvirt"
        yield Libvirt("", f"qemu:///embed?root={own}", (own,), f"{own}/run/qemu", f"{own}/log/qemu")
        return
    if why := missing():
        pytest.skip(why)
    libvirtd = OwnLibvirtd()
    try:
        libvirtd.start()
        yield Libvirt(
            libvirtd.root,
            "qemu:///system",
            ("/etc/libvirt", "/run/libvirt", "/var/lib/libvirt", "/var/log/libvirt"),
            "/run/libvirt/qemu",
            "/var/log/libvirt/qemu",
            libvirtd.enter,
        )
    finally:
        libvirtd.end()


@pytest.fixture(scope="package")
def node(libvirt: Libvirt, root: Path, weapons: Path) -> Iterator[Node]:
    config = f'[libvirt]\nuri = "{libvirt.uri}"\nemulator = "{weapons}/qemu"\nparts = ["{weapons}", "{QEMU}"]\n'
    node = Node(f"{root}/n", pod_cidr=free_cidr(), config=config, enter=libvirt.enter)
    try:
        node.up()
        yield node
    finally:
        node.down()


@pytest.fixture(scope="package")
def battlefield(node: Node, libvirt: Libvirt, weapons: Path, root: Path, null_image: Path) -> Iterator[Field]:
    with (
        PodClient(node.socket) as cri,
        serve_directory(null_image.parent) as url,
        listeners(root) as (port, path, name),
    ):
        image = cri.pull(f"{url.removeprefix('http://')}/{null_image.name}")
        volume = root / "volume"
        volume.mkdir(exist_ok=True)
        volume.chmod(0o777)
        (volume / "file").write_text("of the pods")
        (volume / "file").chmod(0o666)
        try:
            victim, attacker = (started(cri, node, libvirt, image, each, volume) for each in ("victim", "attacker"))
            field = Field(node, attacker, victim, Said(libvirt, attacker))
            tried = attempts(node, libvirt, attacker, victim, port, path, name)
            lines = [f"{attacker.container[:12]} {line}" for line in tried]
            (weapons / "list.new").write_text("\n".join(lines) + "\n")
            os.rename(weapons / "list.new", weapons / "list")
            try:
                wait_until(lambda: _has_ended(field), LIMIT, "the taken-over QEMU has tried it all")
                # virtshim may hold a part of the output that it has not written to the log yet.
                wait_until(lambda: "TRIED end" in field.said.text(), LIMIT, "its output is in the log")
            except TimeoutError as exc:
                exc.add_note(field.said.text()[-2000:])
                raise
            field.tried = dict(re.findall(r"^TRIED (.*): (.*)$", field.said.text(), re.MULTILINE))
            field.said.close()
            assert "end " in field.tried, field.tried
            yield field
        finally:
            (weapons / "list").unlink(missing_ok=True)
            for pod in cri.pods():
                cri.remove_pod(pod.id)


def _has_ended(field: Field) -> bool:
    """Whether it has made all attempts, or was killed for one of the last."""
    return "TRIED exec" in field.said.text() or not os.path.exists(f"/proc/{field.attacker.pid}")


def started(cri: PodClient, node: Node, libvirt: Libvirt, image: str, name: str, volume: Path) -> Vm:
    """A started VM with everything that other programs serve: volumes by virtiofsd, a TPM by swtpm."""
    annotations = {"virtshim.io/vnc": "true", "virtshim.io/tpm": "true"}
    config = pod_config(name, f"{node.directory}/logs/{name}", annotations=annotations)
    pod = cri.run_pod(config)
    wanted = container_config(image, 64 << 20)
    wanted.mounts.add(container_path="/data", host_path=str(volume))
    container = cri.create(pod, wanted, config)
    cri.start(container)
    return Vm(pod, container, int(next(libvirt.seen(libvirt.run).glob(f"*{container[:12]}*.pid")).read_text()))


class listeners:  # noqa: N801
    """Listeners of the host that would answer: a TCP port on loopback, a socket open to any user, and an abstract
    socket."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "open.sock"

    def __enter__(self) -> tuple[int, Path, str]:
        self._tcp = socket.create_server(("127.0.0.1", 0))
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(self._tcp.getsockname())
        self._abstract = socket.socket(socket.AF_UNIX)
        name = f"virtshim-hostile-{os.getpid()}-{threading.get_ident()}"
        self._abstract.bind(f"\0{name}")
        self._abstract.listen()
        self._open = socket.socket(socket.AF_UNIX)
        self._open.bind(str(self._path))
        self._path.chmod(0o666)
        self._open.listen()
        return self._tcp.getsockname()[1], self._path, name

    def __exit__(self, *_: object) -> None:
        for one in (self._tcp, self._udp, self._abstract, self._open):
            one.close()
        self._path.unlink()
