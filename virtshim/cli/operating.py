"""Commands that look at the node's VMs and act on them: what each takes. What it does is in a module beside this one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from virtshim.guest.operation import Action
from virtshim.model.errors import ShimError

# Names of pods, for a shell that completes them.


def pod_names(incomplete: str) -> Iterable[str]:
    """Those of this node's pods that begin so, alone where that is enough; none if the node does not answer."""
    import os

    from virtshim.config.settings import config_load
    from virtshim.cri.client import connected

    try:
        socket = os.environ.get("CONTAINER_RUNTIME_ENDPOINT", "") or config_load(None).cri_socket
        with connected(socket.removeprefix("unix://")) as node:
            pods = node.pods()
    except (ShimError, OSError):
        return []
    names = [pod.name for pod in pods]
    full = {f"{pod.namespace}/{pod.name}" for pod in pods}
    shown = {name for name in names if names.count(name) == 1} | full
    return sorted(name for name in shown if name.startswith(incomplete))


operating_app = typer.Typer()

_ConfigFile = Annotated[str | None, typer.Option("--config", help="TOML file; default /etc/virtshim/config.toml")]
_Socket = Annotated[
    str | None,
    typer.Option(
        "--socket",
        envvar="CONTAINER_RUNTIME_ENDPOINT",
        help="CRI socket, the proxy's too; default: that of the settings. The admin socket is looked for beside it",
    ),
]
_Vm = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="pod, namespace/pod, or the beginning of a container's or pod's id",
        autocompletion=pod_names,
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="print JSON, for programs; its keys are in docs/commands.md")]


def cri_socket(socket: str | None, config: str | None) -> str:
    from virtshim.config.settings import config_load

    return socket.removeprefix("unix://") if socket else config_load(config).cri_socket


def admin_socket(socket: str | None, config: str | None) -> str:
    """That of the settings; of another node, beside its CRI socket."""
    import os

    from virtshim.config.settings import config_load
    from virtshim.model.layout import admin_socket as of_layout

    if socket:
        return os.path.join(os.path.dirname(socket.removeprefix("unix://")), "admin.sock")
    return of_layout(config_load(config).layout())


@operating_app.command()
def ps(as_json: _Json = False, socket: _Socket = None, config: _ConfigFile = None) -> None:
    """List pods and their VMs, with addresses, states and ages."""
    from virtshim.cli.tables import ps as list_vms

    list_vms(cri_socket(socket, config), as_json=as_json)


@operating_app.command()
def top(
    sort: Annotated[str, typer.Option("--sort", help="cpu, memory, disk, network or name")] = "cpu",
    interval: Annotated[float, typer.Option("--interval", help="seconds between two looks")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="print one table and end; so it is without a terminal")] = False,
    as_json: _Json = False,
    socket: _Socket = None,
    config: _ConfigFile = None,
) -> None:
    """Show what VMs use: processors, memory, disk, network; refreshed until ctrl-c."""
    from virtshim.cli.top import top as show_usage

    show_usage(cri_socket(socket, config), sort=sort, interval=interval, once=once, as_json=as_json)


@operating_app.command()
def events(as_json: _Json = False, socket: _Socket = None, config: _ConfigFile = None) -> None:
    """Follow what happens to pods and VMs, and what operators do to them, until ctrl-c. With --json a line each."""
    from virtshim.cli.events import events as follow

    follow(cri_socket(socket, config), admin_socket(socket, config), as_json=as_json)


@operating_app.command()
def images(as_json: _Json = False, socket: _Socket = None, config: _ConfigFile = None) -> None:
    """List the images on this node, by their names."""
    from virtshim.cli.pulling import images as list_images

    list_images(cri_socket(socket, config), as_json=as_json)


@operating_app.command()
def pull(
    image: Annotated[str, typer.Argument(help="as in a pod: a disk on a web server, or a containerDisk")],
    creds: Annotated[
        str, typer.Option("--creds", envvar="VIRTSHIM_CREDS", help="USER:PASSWORD for its registry or server")
    ] = "",
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="print the image's id and nothing else")] = False,
    as_json: _Json = False,
    socket: _Socket = None,
    config: _ConfigFile = None,
) -> None:
    """Pull an image, with a progress bar on a terminal and lines elsewhere. Prints its id."""
    from virtshim.cli.pulling import pull as bring
    from virtshim.cli.tables import tables_show_json

    found = bring(cri_socket(socket, config), admin_socket(socket, config), image, login=creds, quiet=quiet or as_json)
    if as_json:
        tables_show_json({"image": image, "id": found})
    else:
        print(found)


@operating_app.command()
def logs(
    name: _Vm,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="go on until the VM ends")] = False,
    since: Annotated[str, typer.Option("--since", help="a time ago (90s, 10m, 2h, 1d), or 2026-01-31T12:00:00Z")] = "",
    tail: Annotated[int, typer.Option("--tail", help="so many of the last lines; -1: all")] = -1,
    timestamps: Annotated[bool, typer.Option("-t", "--timestamps", help="each line with its time")] = False,
    socket: _Socket = None,
    config: _ConfigFile = None,
) -> None:
    """Print a VM's log: its serial console, or the output of its command. Run it on the node itself."""
    from virtshim.cli.logs import LogOptions
    from virtshim.cli.logs import logs as print_log

    print_log(cri_socket(socket, config), name, LogOptions(follow, since, tail, timestamps))


@operating_app.command()
def inspect(name: _Vm, as_json: _Json = False, socket: _Socket = None, config: _ConfigFile = None) -> None:
    """Show what is known of a pod and its VM: records, libvirt's state, addresses, devices, disks, phases of its start."""
    from virtshim.cli.acting import inspect as look

    look(cri_socket(socket, config), admin_socket(socket, config), name, as_json=as_json)


@operating_app.command()
def run(
    image: Annotated[str, typer.Argument(help="as in a pod; it is pulled if it is not there")],
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="what runs in the guest, after --, by its agent; without it the console", show_default=False
        ),
    ] = None,
    *,
    name: Annotated[str, typer.Option("--name", help="the pod's name, and the guest's; default: run- and digits")] = "",
    memory: Annotated[str, typer.Option("--memory", help="such as 512Mi or 2Gi; default: vm.default_memory")] = "",
    cpu: Annotated[float, typer.Option("--cpu", help="processors; 0: the node's default")] = 0.0,
    annotation: Annotated[
        list[str] | None, typer.Option("--annotation", help="NAME=VALUE of the pod; may be repeated")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE for the command; may be repeated")
    ] = None,
    handler: Annotated[
        str, typer.Option("--runtime", help="runtime handler; virtshim's own where a proxy has others too")
    ] = "",
    always_pull: Annotated[bool, typer.Option("--pull", help="pull the image also if it is there")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="say nothing of its own")] = False,
    socket: _Socket = None,
    config: _ConfigFile = None,
) -> None:
    """Run a VM by hand with its console here, as `docker run --rm -it` runs a container: `virtshim run IMAGE`.

    ctrl-] leaves. It is removed when it is left, when it ends, and on Ctrl-C, SIGTERM and SIGHUP. The exit code is the guest's.
    """
    import dataclasses
    import sys

    from virtshim.cli.run import run as run_vm
    from virtshim.cli.run import wanted_vm

    wanted = wanted_vm(image, name, memory, cpu, annotation or (), env or ())
    wanted = dataclasses.replace(wanted, command=tuple(command or ()), tty=sys.stdin.isatty(), handler=handler)
    sockets = cri_socket(socket, config), admin_socket(socket, config)
    raise typer.Exit(run_vm(*sockets, wanted, always_pull=always_pull, quiet=quiet))


def _act(action: Action, name: str, socket: str | None, config: str | None, *, as_json: bool, seconds: int = 0) -> None:
    from virtshim.cli.acting import act

    act(cri_socket(socket, config), admin_socket(socket, config), action, name, seconds=seconds, as_json=as_json)


@operating_app.command()
def pause(name: _Vm, as_json: _Json = False, socket: _Socket = None, config: _ConfigFile = None) -> None:
    """Make a VM stand still until it is resumed or stopped; kubelet sees a running container."""
    _act(Action.PAUSE, name, socket, config, as_json=as_json)


@operating_app.command()
def resume(name: _Vm, as_json: _Json = False, socket: _Socket = None, config: _ConfigFile = None) -> None:
    """Let a paused VM go on; its clock is set if it has a guest agent."""
    _act(Action.RESUME, name, socket, config, as_json=as_json)


@operating_app.command()
def reset(name: _Vm, as_json: _Json = False, socket: _Socket = None, config: _ConfigFile = None) -> None:
    """Press a VM's reset button: its guest begins anew, and loses what it had not written."""
    _act(Action.RESET, name, socket, config, as_json=as_json)


@operating_app.command()
def reboot(name: _Vm, as_json: _Json = False, socket: _Socket = None, config: _ConfigFile = None) -> None:
    """Ask a guest to restart itself, by its agent."""
    _act(Action.REBOOT, name, socket, config, as_json=as_json)


@operating_app.command()
def freeze(
    name: _Vm,
    seconds: Annotated[int, typer.Option("--seconds", help="until it is thawed in any case; 600 at most")] = 60,
    as_json: _Json = False,
    socket: _Socket = None,
    config: _ConfigFile = None,
) -> None:
    """Have a guest write its file systems out and hold them still, by its agent, as for a snapshot of its disks."""
    _act(Action.FREEZE, name, socket, config, as_json=as_json, seconds=seconds)


@operating_app.command()
def thaw(name: _Vm, as_json: _Json = False, socket: _Socket = None, config: _ConfigFile = None) -> None:
    """Let a frozen guest's file systems go on."""
    _act(Action.THAW, name, socket, config, as_json=as_json)


@operating_app.command()
def screenshot(
    name: _Vm,
    file: Annotated[
        str, typer.Option("-o", "--output", help="PNG file, - for standard output; default: NAME.png here")
    ] = "",
    socket: _Socket = None,
    config: _ConfigFile = None,
) -> None:
    """Write a picture of a VM's screen; its pod needs the annotation virtshim.io/vnc."""
    from virtshim.cli.acting import screenshot as take

    take(cri_socket(socket, config), admin_socket(socket, config), name, file)


@operating_app.command()
def dumpxml(name: _Vm, socket: _Socket = None, config: _ConfigFile = None) -> None:
    """Print libvirt's definition of a VM, without what opens its pod's network."""
    from virtshim.cli.acting import dumpxml as show_definition

    show_definition(cri_socket(socket, config), admin_socket(socket, config), name)


@operating_app.command()
def vnc(
    name: _Vm,
    listen: Annotated[
        str,
        typer.Option(
            help="loopback address and port for VNC clients of root and of who ran sudo, such as 127.0.0.1:5900"
        ),
    ] = "",
    unix: Annotated[
        str,
        typer.Option(
            "--unix", help="the Unix socket to make for VNC clients, 0600; by default one in a new directory of yours"
        ),
    ] = "",
    socket: _Socket = None,
    config: _ConfigFile = None,
) -> None:
    """Show a VM's screen to your own VNC clients on this machine; its pod needs the annotation virtshim.io/vnc."""
    from virtshim.cli.vnc import parse_listen_address
    from virtshim.cli.vnc import vnc as show

    place = parse_listen_address(listen, unix)
    show(cri_socket(socket, config), admin_socket(socket, config), name, place)
