"""The program of virtshim's image: installs virtshim onto the node whose root is at /host, and uninstalls it if asked.

    on_node.py run          for the DaemonSet (deploy/kustomize/overlays/mixed): installs; as soon as a VM could start, restarts
                            kubelet for its new files and labels the node; then waits
    on_node.py install      installs once, without a label; exit code 1 if no VM could start
    on_node.py uninstall    undoes `install`; the records and disks in /var/lib/virtshim stay
    on_node.py virtshim ... runs a command of virtshim here, for the cluster's programs (deploy/kustomize/overlays/cluster)

It only needs the standard library. It runs the node's own programs (systemctl, virtshim itself) in the node's namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

LABEL = "virtshim.io/vms"
UNITS = (
    "tapmanager.service",
    "virtshim-shares.service",
    "virtshim.service",
    "virtshim-proxy.service",
    "virtshim-device-plugin.service",
    "virtshim-agent.service",
    "virtshim-guests.service",
)
# Operators enable it. systemd refuses to restart it while its service runs.
SOCKETS = ("tapmanager.socket",)
STATE = "var/lib/virtshim/image"
VIRTSHIM = "/usr/lib/virtshim/bin/virtshim"
_LIBVIRTS = "/var/lib/libvirt/qemu"
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# Set-up waits for services that check every pod before they are ready.
_LIMIT = 1800.0
_RECHECK = 60.0
# Findings of `virtshim check` that a restart of kubelet may fix.
_OF_KUBELET = ("kubelet_configuration", "kubelet_cgroups", "kubelet_runtime")
_TO_RESTART = "kubelet has not read its new configuration yet: systemctl restart kubelet (RESTART_KUBELET is false)"


class Trouble(Exception):
    """The message says what prevents the installation, and what to do."""


def say(text: str) -> None:
    print(f"virtshim-node: {text}", flush=True)


@dataclass(frozen=True, slots=True)
class Api:
    """The API server, with the pod's own account."""

    node: str
    host: str
    port: int
    account: Path = _ACCOUNT

    def label(self, value: str | None) -> None:
        """Sets the label; None removes it. Raises Trouble."""
        body = json.dumps({"metadata": {"labels": {LABEL: value}}})
        try:
            headers = {
                # Read each time, because it is renewed every hour.
                "Authorization": f"Bearer {(self.account / 'token').read_text().strip()}",
                "Content-Type": "application/merge-patch+json",
            }
            context = ssl.create_default_context(cafile=str(self.account / "ca.crt"))
            with contextlib.closing(HTTPSConnection(self.host, self.port, timeout=30, context=context)) as connection:
                connection.request("PATCH", f"/api/v1/nodes/{self.node}", body, headers)
                answer = connection.getresponse()
                status, said = answer.status, answer.read()[:300]
        except (OSError, HTTPException) as exc:
            raise Trouble(f"the label of node {self.node} is not set: {exc}") from exc
        if status != 200:
            raise Trouble(f"the label of node {self.node} is not set: {status} {said!r}")


@dataclass(frozen=True, slots=True)
class Node:
    """`root`: where the node's file system is mounted; `enter`: the command that runs a program in the node's namespaces;
    `payload`: the package's files, and `.version`, which identifies the payload."""

    root: Path = Path("/host")
    payload: Path = Path("/payload")
    enter: tuple[str, ...] = ("nsenter", "--target", "1", "--mount", "--uts", "--ipc", "--net", "--")
    restarts_kubelet: bool = True
    _state: Path = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_state", self.place(STATE))

    def place(self, path: str) -> Path:
        """The place of a node's path here. Follows symbolic links within the node, not into the image."""
        here, ahead, followed = self.root, list(Path(path.lstrip("/")).parts), 0
        while ahead:
            part = ahead.pop(0)
            if part == "..":
                here = here if here == self.root else here.parent
            elif (here / part).is_symlink() and followed < 40:
                followed += 1
                target = Path(os.readlink(here / part))
                here = self.root if target.is_absolute() else here
                ahead = [*target.parts[int(target.is_absolute()) :], *ahead]
            else:
                here /= part
        return here

    def run(self, *argv: str, codes: Sequence[int] = (0,)) -> str:
        """The program's standard output. Raises Trouble for other exit codes."""
        done = subprocess.run(
            [*self.enter, *argv], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT, check=False
        )
        if done.returncode not in codes:
            said = (done.stderr.strip() or done.stdout.strip())[-400:]
            raise Trouble(f"{' '.join(argv)} on the node ended with {done.returncode}: {said}")
        return done.stdout


def install(node: Node) -> None:
    """Copies the files; `set_up` follows. Safe to repeat: does not copy the same version again. Raises Trouble."""
    refuse_foreign(node)
    version = (node.payload / ".version").read_text().strip()
    before = listed(node)
    if before.get("version") == version:
        say(f"{version} is installed")
    else:
        copy(node, version, before.get("files", []))
    node.run("systemd-sysusers", "virtshim.conf")
    node.run("systemd-tmpfiles", "--create", "virtshim.conf")
    node.run("systemctl", "daemon-reload")
    if before and before.get("version") != version:
        # All together, because programs of different versions cannot talk to each other. VMs keep running.
        node.run("systemctl", "try-restart", *UNITS)
    # Only now, so that a killed run is repeated completely.
    remember(node, version=version)


def set_up(node: Node, *, is_first: bool = True) -> list[str]:
    """Returns what prevents VMs from starting, according to set-up and its check. If nothing does, restarts kubelet for its new
    files; otherwise kubelet would call a runtime that does not work. Safe to repeat. Raises Trouble."""
    open_libvirts_directory(node)
    outcome = with_kubelet_in_mind(node, "setup", "--json")
    report(outcome, is_first=is_first)
    wrong = [*outcome["problems"], *outcome["failed"]]
    found = [one for one in asked(node, "check", "--json") if one["level"] == "error"]
    if wrong or any(one.get("check") not in _OF_KUBELET for one in found):
        if kubelet_is_stale(node):
            say("kubelet is not restarted, and keeps using its earlier runtime, until the following is fixed")
    elif kubelet_is_stale(node) and not node.restarts_kubelet:
        wrong.append(_TO_RESTART)
    elif kubelet_is_stale(node):
        restart_kubelet(node)
        found = [one for one in asked(node, "check", "--json") if one["level"] == "error"]
    return [*wrong, *(f"{one['subject']}: {one['text']} -> {one['remedy']}" for one in found)]


def open_libvirts_directory(node: Node) -> None:
    """Does what the package does. Each VM's QEMU has its own user, which must be able to pass libvirt's directory. Debian's
    libvirt closes it at each upgrade unless dpkg has an override. libvirt may be installed later."""
    if not node.place("usr/bin/dpkg-statoverride").exists() or not node.place(_LIBVIRTS).exists():
        return
    if not node.run("dpkg-statoverride", "--list", _LIBVIRTS, codes=(0, 1)):
        remember(node, opened_libvirts=True)
        node.run("dpkg-statoverride", "--update", "--add", "libvirt-qemu", "libvirt-qemu", "0751", _LIBVIRTS)


def close_libvirts_directory(node: Node) -> None:
    """Closes it if it was opened here, and the override is unchanged."""
    if listed(node).get("opened_libvirts"):
        said = node.run("dpkg-statoverride", "--list", _LIBVIRTS, codes=(0, 1))
        if said.startswith("libvirt-qemu libvirt-qemu 751 "):
            node.run("dpkg-statoverride", "--remove", _LIBVIRTS)
            node.run("chmod", "0750", _LIBVIRTS)


def with_kubelet_in_mind(node: Node, *argv: str) -> Any:
    """Returns the answer of `virtshim setup`. Before kubelet's files change, records on disk which kubelet must restart."""
    was_stale = kubelet_is_stale(node)
    remember(node, stale_kubelet=kubelet_started(node))
    outcome = asked(node, *argv)
    changed = any("kubelet" in one["path"] for one in outcome["files"] if one["action"] not in ("same", "keep"))
    remember(node, stale_kubelet=kubelet_started(node) if was_stale or changed else None)
    return outcome


def kubelet_started(node: Node) -> str:
    """The time of kubelet's start; "" if it does not run."""
    return node.run(
        "systemctl", "show", "--property=ExecMainStartTimestamp", "--value", "kubelet", codes=(0, 1)
    ).strip()


def kubelet_is_stale(node: Node) -> bool:
    """Whether the running kubelet has not read its files yet. Somebody else may have restarted it, or the node."""
    stale = listed(node).get("stale_kubelet")
    return stale is not None and stale == kubelet_started(node)


def restart_kubelet(node: Node) -> None:
    say("restarting kubelet: its configuration has changed")
    node.run("systemctl", "daemon-reload")
    node.run("systemctl", "restart", "kubelet")
    remember(node, stale_kubelet=None)


def asked(node: Node, *argv: str) -> Any:
    """The JSON answer of virtshim on the node. Raises Trouble."""
    said = node.run(VIRTSHIM, *argv, codes=(0, 1))
    try:
        return json.loads(said)
    except ValueError as exc:
        raise Trouble(f"virtshim {' '.join(argv)} on the node did not answer JSON ({exc}): {said[:200]!r}") from exc


def refuse_foreign(node: Node) -> None:
    if node.place("var/lib/dpkg/info/virtshim.list").exists():
        raise Trouble("the node has virtshim's Debian package: upgrade it with apt, or purge it first")
    for unit in UNITS:
        with contextlib.suppress(OSError):
            if "=/usr/local/bin/" in node.place(f"etc/systemd/system/{unit}").read_text():
                raise Trouble(f"the node has virtshim from its sources: remove /etc/systemd/system/{unit} first")
    python = os.path.basename(os.readlink(node.payload / "usr/lib/virtshim/bin/python3"))
    if not node.place(f"usr/bin/{python}").exists():
        raise Trouble(
            f"the node has no /usr/bin/{python}: this image is for nodes of the distribution that it was built on "
            f"(make image), with its python3"
        )


def copy(node: Node, version: str, old: Sequence[str]) -> None:
    """Writes the list of files before the files, so that the next run can finish or remove those of a killed one."""
    files = sorted(str(path.relative_to(node.payload)) for path in files_of(node.payload))
    remember(node, version="", files=sorted({*files, *old}))
    for name in files:
        put(node.payload / name, node.place(os.path.dirname(name)) / os.path.basename(name))
    remove(node, sorted(set(old) - set(files)))
    os.sync()
    remember(node, files=files)
    say(f"{version}: {len(files)} files copied")


def files_of(payload: Path) -> Iterator[Path]:
    for directory, _, names in os.walk(payload):
        yield from (Path(directory, name) for name in names if name != ".version")
        yield from (path for path in Path(directory).iterdir() if path.is_symlink() and path.is_dir())


def put(source: Path, target: Path) -> None:
    """Replaces the file atomically, because it may be running."""
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f"{target.name}.virtshim-new")
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    shutil.copy2(source, new, follow_symlinks=False)
    if not source.is_symlink():
        new.chmod(stat.S_IMODE(source.stat().st_mode))
    new.replace(target)


def remove(node: Node, files: Sequence[str]) -> None:
    """Removes the files, and directories that become empty, except the distribution's."""
    for name in files:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (node.place(os.path.dirname(name)) / os.path.basename(name)).unlink()
    for name in sorted({os.path.dirname(name) for name in files if "virtshim" in os.path.dirname(name)}, reverse=True):
        directory = node.place(name)
        while "virtshim" in str(directory.relative_to(node.root)):
            try:
                if os.listdir(directory) == ["__pycache__"]:
                    shutil.rmtree(directory / "__pycache__")
                directory.rmdir()
            except OSError:
                break
            directory = directory.parent


def listed(node: Node) -> dict[str, Any]:
    try:
        found = json.loads((node.place(STATE) / "files.json").read_text())
    except FileNotFoundError:
        return {}
    except ValueError as exc:
        raise Trouble(f"/{STATE}/files.json is damaged ({exc}): remove it, and install again") from exc
    return found if isinstance(found, dict) else {}


def remember(node: Node, **changed: object) -> None:
    """`version`: "" until the `files` are in use; `stale_kubelet`: the start time of the kubelet that has not read its files yet;
    `opened_libvirts`: dpkg has the override for libvirt's directory."""
    kept = {**listed(node), **changed}
    directory = node.place(STATE)
    directory.mkdir(parents=True, exist_ok=True)
    new = directory / "files.json.new"
    with open(new, "w", encoding="utf-8") as file:
        json.dump(kept, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(directory / "files.json")


def report(outcome: Mapping[str, Any], *, is_first: bool = True) -> None:
    """Prints what set-up found and changed."""
    for subject, text in outcome["seen"].items() if is_first else ():
        say(f"{subject}: {text}")
    for one in outcome["files"]:
        if one["action"] not in (("same",) if is_first else ("same", "keep")):
            say(f"{one['action']} {one['path']} {one['note']}".rstrip())


def uninstall(node: Node) -> None:
    """Raises Trouble, without any change, while a VM runs."""
    vms = sorted(path.stem for path in node.place("run/libvirt/qemu").glob("virtshim-*.pid"))
    if vms:
        raise Trouble(f"not uninstalled: VMs run ({', '.join(vms)}); delete their pods, and uninstall again")
    files = listed(node).get("files", [])
    if node.place(VIRTSHIM).exists():
        outcome = with_kubelet_in_mind(node, "setup", "--undo", "--json")
        report(outcome)
        for text in outcome["failed"]:
            say(f"PROBLEM: {text}")
        # Even if something failed, because the runtime is removed.
        if kubelet_is_stale(node) and node.restarts_kubelet:
            restart_kubelet(node)
        elif kubelet_is_stale(node):
            say(_TO_RESTART)
    # Set-up has stopped its own units; others may have been enabled by hand.
    ours = [unit for unit in (*SOCKETS, *UNITS) if any(name.endswith(f"/{unit}") for name in files)]
    if ours:
        node.run("systemctl", "disable", "--now", *ours, codes=(0, 1))
    close_libvirts_directory(node)
    remove(node, files)
    node.run("systemctl", "daemon-reload")
    shutil.rmtree(node.place(STATE), ignore_errors=True)
    say("uninstalled; /var/lib/virtshim stays")


def stay(node: Node, api: Api, stopped: threading.Event, *, then_uninstall: bool, recheck: float = _RECHECK) -> None:
    """Sets the node up, and waits for the pod's end. The node gets pods as soon as a VM could start there."""
    labelled, is_first = False, True
    while not stopped.is_set():
        if not labelled:
            wrong = set_up(node, is_first=is_first)
            for text in wrong:
                say(f"NOT LABELLED: {text}")
            if not wrong:
                api.label("true")
                labelled = True
                say(f"node {api.node} is labelled {LABEL}=true")
            is_first = False
        stopped.wait(recheck)
    if then_uninstall:
        try:
            api.label(None)
        except Trouble as exc:  # the account may have been deleted
            say(str(exc))
        uninstall(node)


def api_of(environment: Mapping[str, str]) -> Api:
    """Raises Trouble."""
    port = environment.get("KUBERNETES_SERVICE_PORT_HTTPS", "443")
    try:
        return Api(environment["NODE_NAME"], environment["KUBERNETES_SERVICE_HOST"], int(port))
    except KeyError as exc:
        raise Trouble(f"the variable {exc} is not set: `run` is for a pod of the DaemonSet") from exc


def command_here(words: Sequence[str], payload: str = "/payload") -> list[str]:
    """The package's program by this image's Python, as the package's own environment names the Python of its node."""
    packages = sorted(str(one) for one in Path(payload, "usr/lib/virtshim/lib").glob("python3*/site-packages"))
    code = f"import sys; sys.path[:0] = {packages!r}; from virtshim.cli.main import main; sys.exit(main())"
    return [sys.executable, "-I", "-c", code, *words]


def main(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    node = Node(restarts_kubelet=environment.get("RESTART_KUBELET", "true") == "true")
    try:
        match list(argv):
            case ["install"]:
                install(node)
                wrong = set_up(node)
                for text in wrong:
                    say(f"PROBLEM: {text}")
                return int(bool(wrong))
            case ["virtshim", *words]:
                command = command_here(words)
                os.execv(command[0], command)  # noqa: S606
            case ["uninstall"]:
                uninstall(node)
            case ["run"]:
                api = api_of(environment)
                install(node)
                then_uninstall = environment.get("UNINSTALL_ON_TERMINATION", "false") == "true"
                stay(node, api, stopped, then_uninstall=then_uninstall)
            case _:
                print(__doc__, file=sys.stderr)
                return 64
    except (Trouble, OSError, subprocess.TimeoutExpired) as exc:
        say(str(exc))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
