"""Arguments and help of the commands that show the node's VMs and act on them. Each imports its work from another module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from virtshim.cli.help import Group
from virtshim.guest.operation import Action
from virtshim.model.errors import InvalidRequest, ShimError


def pod_names(incomplete: str) -> Iterable[str]:
    """For shell completion: this node's pod names that begin with `incomplete`, with the namespace where a name is not
    unique. Empty if the node does not answer."""
    import os

    from virtshim.config.settings import load_settings
    from virtshim.cri.client import connected

    try:
        socket = os.environ.get("CONTAINER_RUNTIME_ENDPOINT", "") or load_settings(None).cri_socket
        with connected(socket.removeprefix("unix://")) as node:
            pods = node.pods()
    except (ShimError, OSError):
        return []
    names = [pod.name for pod in pods]
    full = {f"{pod.namespace}/{pod.name}" for pod in pods}
    shown = {name for name in names if names.count(name) == 1} | full
    return sorted(name for name in shown if name.startswith(incomplete))


operating_app = typer.Typer()

ConfigFile = Annotated[str | None, typer.Option("--config", help="TOML file; default /etc/virtshim/config.toml")]
_Socket = Annotated[
    str | None,
    typer.Option(
        "--socket",
        envvar="CONTAINER_RUNTIME_ENDPOINT",
        help="CRI socket, also the proxy's; default: the one in the settings. The admin socket must be in its directory",
    ),
]
_NAME = typer.Argument(
    metavar="NAME",
    help="a pod's name, namespace/name, or the first characters of a container's or pod's id",
    autocompletion=pod_names,
)
Vm = Annotated[str, _NAME]
_Json = Annotated[bool, typer.Option("--json", help="print JSON, for programs; its keys are in docs/commands.md")]


def _format(example: str) -> Any:
    return typer.Option(
        "--format", help=f"print a line for each row, such as '{example}'; names are those of the table's head"
    )


def cri_socket(socket: str | None, config: str | None) -> str:
    from virtshim.config.settings import load_settings

    return socket.removeprefix("unix://") if socket else load_settings(config).cri_socket


def admin_socket(socket: str | None, config: str | None) -> str:
    """The path of the admin socket: from the settings, or beside `socket` if that names another node's CRI socket."""
    import os

    if socket:  # without the settings, whose code takes 11 MiB
        return os.path.join(os.path.dirname(socket.removeprefix("unix://")), "admin.sock")

    from virtshim.config.settings import load_settings
    from virtshim.model.layout import admin_socket as of_layout

    return of_layout(load_settings(config).layout())


@operating_app.command()
def ps(
    wanted: Annotated[
        str,
        typer.Option("--filter", help="only pods with this in name, id, address, or name, id, state or image of a VM"),
    ] = "",
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="print ids of VMs only")] = False,
    template: Annotated[str, _format("{pod}\\t{ip}")] = "",
    as_json: _Json = False,
    socket: _Socket = None,
    config: ConfigFile = None,
) -> None:
    """List pods and their VMs, with addresses, states and ages."""
    from virtshim.cli.tables import ps as list_vms

    list_vms(cri_socket(socket, config), wanted, template, as_json=as_json, quiet=quiet)


@operating_app.command()
def top(
    sort: Annotated[str, typer.Option("--sort", help="cpu, memory, disk, network or name")] = "cpu",
    interval: Annotated[float, typer.Option("--interval", help="seconds between two measurements")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="print one table and exit; the default without a terminal")
    ] = False,
    as_json: _Json = False,
    socket: _Socket = None,
    config: ConfigFile = None,
) -> None:
    """Show the processors, memory, disk and network that VMs use, refreshed until Ctrl-C."""
    from virtshim.cli.top import top as show_usage

    show_usage(cri_socket(socket, config), sort=sort, interval=interval, once=once, as_json=as_json)


@operating_app.command()
def events(as_json: _Json = False, socket: _Socket = None, config: ConfigFile = None) -> None:
    """Follow the events of pods and VMs, and what operators do to them, until Ctrl-C. --json prints one line per event."""
    from virtshim.cli.events import events as follow

    follow(cri_socket(socket, config), admin_socket(socket, config), as_json=as_json)


@operating_app.command()
def images(
    wanted: Annotated[str, typer.Option("--filter", help="only images with this in their name, digest or id")] = "",
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="print ids only")] = False,
    template: Annotated[str, _format("{image}\\t{size}")] = "",
    as_json: _Json = False,
    socket: _Socket = None,
    config: ConfigFile = None,
) -> None:
    """List the images on this node, sorted by name."""
    from virtshim.cli.pulling import images as list_images

    list_images(cri_socket(socket, config), wanted, template, as_json=as_json, quiet=quiet)


@operating_app.command()
def rmi(
    images: Annotated[list[str], typer.Argument(metavar="IMAGE", help="names or ids of images")],
    socket: _Socket = None,
    config: ConfigFile = None,
) -> None:
    """Remove images from this node. An image that a pod uses stays."""
    from virtshim.cli.pulling import remove_images

    remove_images(cri_socket(socket, config), images)


image_app = typer.Typer(
    cls=Group,
    help="Clean up images. `virtshim images` lists them, and `virtshim rmi` removes one.",
    no_args_is_help=True,
)


@image_app.command("prune")
def prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would be removed, and remove nothing")] = False,
    socket: _Socket = None,
    config: ConfigFile = None,
) -> None:
    """Remove all images that no pod uses and that are not pinned. Prints what that frees."""
    from virtshim.cli.pulling import prune as remove_unused

    remove_unused(cri_socket(socket, config), dry_run=dry_run)


operating_app.add_typer(image_app, name="image")


def _print_image(name: str, image_id: str, *, as_json: bool) -> None:
    from virtshim.cli.tables import print_json

    if as_json:
        print_json({"image": name, "id": image_id})
    else:
        print(image_id)


@operating_app.command()
def pull(
    image: Annotated[
        str,
        typer.Argument(
            help="image name as in a pod: a disk on a web server, or a containerDisk; or a file here (./disk.qcow2)"
        ),
    ],
    creds: Annotated[
        str, typer.Option("--creds", envvar="VIRTSHIM_CREDS", help="USER:PASSWORD for the image's registry or server")
    ] = "",
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="print only the image's id")] = False,
    as_json: _Json = False,
    socket: _Socket = None,
    config: ConfigFile = None,
) -> None:
    """Pull an image and print its id. Shows a progress bar on a terminal, and lines elsewhere."""
    from virtshim.cli.pulling import image_name
    from virtshim.cli.pulling import pull as bring

    image = image_name(image)
    found = bring(cri_socket(socket, config), admin_socket(socket, config), image, login=creds, quiet=quiet or as_json)
    _print_image(image, found, as_json=as_json)


@operating_app.command()
def load(
    file: Annotated[
        str, typer.Argument(help="a disk, qcow2 or raw, plain or packed by gzip, xz or zstd; -: standard input")
    ],
    name: Annotated[str, typer.Argument(help="name of the image, for pods and for `virtshim run`")],
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="show no progress")] = False,
    as_json: _Json = False,
    socket: _Socket = None,
    config: ConfigFile = None,
) -> None:
    """Store a disk file as an image and print its id. Pods use it with imagePullPolicy IfNotPresent or Never."""
    from virtshim.cli.pulling import load as store

    found = store(cri_socket(socket, config), admin_socket(socket, config), file, name, quiet=quiet or as_json)
    _print_image(name, found, as_json=as_json)


@operating_app.command()
def logs(
    name: Vm,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="keep printing until the VM ends")] = False,
    since: Annotated[
        str, typer.Option("--since", help="how long ago (90s, 10m, 2h, 1d), or 2026-01-31T12:00:00Z")
    ] = "",
    tail: Annotated[int, typer.Option("-n", "--tail", help="number of last lines to print; -1: all")] = -1,
    timestamps: Annotated[bool, typer.Option("-t", "--timestamps", help="print the time of each line")] = False,
    socket: _Socket = None,
    config: ConfigFile = None,
) -> None:
    """Print a VM's log: its serial console, or the output of its command. Works only on the node itself."""
    from virtshim.cli.logs import LogOptions
    from virtshim.cli.logs import logs as print_log

    print_log(cri_socket(socket, config), name, LogOptions(follow, since, tail, timestamps))


@operating_app.command()
def inspect(name: Vm, as_json: _Json = False, socket: _Socket = None, config: ConfigFile = None) -> None:
    """Show everything about a pod and its VM: records, libvirt's state, addresses, devices, disks, phases of its start."""
    from virtshim.cli.acting import inspect as look

    look(cri_socket(socket, config), admin_socket(socket, config), name, as_json=as_json)


@operating_app.command()
def run(
    image: Annotated[
        str,
        typer.Argument(
            help="image name as in a pod, pulled if the node does not have it; or a file here (./disk.qcow2)"
        ),
    ],
    command: Annotated[
        list[str] | None,
        typer.Argument(help="command for the guest agent to run, after --; default: the console", show_default=False),
    ] = None,
    *,
    name: Annotated[str, typer.Option("--name", help="name of the pod and the guest; default: run- and digits")] = "",
    memory: Annotated[str, typer.Option("--memory", help="such as 512Mi or 2Gi; default: vm.default_memory")] = "",
    cpu: Annotated[float, typer.Option("--cpu", help="number of processors; 0: the node's default")] = 0.0,
    annotation: Annotated[
        list[str] | None, typer.Option("--annotation", help="pod annotation NAME=VALUE; may be repeated")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", "-e", help="environment variable NAME=VALUE for the command; may be repeated"),
    ] = None,
    handler: Annotated[
        str,
        typer.Option("--runtime", help="runtime handler of the VMs, needed where a proxy also serves other runtimes"),
    ] = "",
    detach: Annotated[
        bool, typer.Option("-d", "--detach", help="start a VM that stays until `virtshim rm`, and print its id")
    ] = False,
    always_pull: Annotated[bool, typer.Option("--pull", help="pull the image even if the node has it")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="print no messages of virtshim's own")] = False,
    socket: _Socket = None,
    config: ConfigFile = None,
) -> None:
    """Run a VM with its console in this terminal, as `docker run --rm -it` runs a container: `virtshim run IMAGE`.

    Ctrl-] leaves. The VM is removed when you leave it, when it ends, and on Ctrl-C, SIGTERM and SIGHUP. The exit code is
    the guest's. With -d the VM stays: `virtshim stop`, `start`, `restart` and `rm` then take its name. kubelet removes such
    VMs, because it knows no pod of theirs: use -d on nodes without kubelet.
    """
    import dataclasses
    import sys

    from virtshim.cli.pulling import image_name
    from virtshim.cli.run import run as run_vm
    from virtshim.cli.run import wanted_vm

    wanted = wanted_vm(image_name(image), name, memory, cpu, annotation or (), env or ())
    wanted = dataclasses.replace(wanted, command=tuple(command or ()), handler=handler)
    sockets = cri_socket(socket, config), admin_socket(socket, config)
    if detach:
        from virtshim.cli.staying import run_detached

        print(run_detached(*sockets, wanted, always_pull=always_pull, quiet=quiet))
        return
    wanted = dataclasses.replace(wanted, tty=sys.stdin.isatty())
    raise typer.Exit(run_vm(*sockets, wanted, always_pull=always_pull, quiet=quiet))


_Stays = Annotated[
    str, typer.Argument(metavar="NAME", help="the name of a VM of `virtshim run -d`", autocompletion=pod_names)
]
_Grace = Annotated[int, typer.Option("--seconds", help="the time that the guest has to shut down; 0 ends it at once")]


@operating_app.command()
def start(name: _Stays, socket: _Socket = None, config: ConfigFile = None) -> None:
    """Start a stopped VM of `virtshim run -d`, and print its id. Its disk is unchanged."""
    from virtshim.cli.staying import start as start_vm

    print(start_vm(cri_socket(socket, config), name))


@operating_app.command()
def stop(name: _Stays, seconds: _Grace = 30, socket: _Socket = None, config: ConfigFile = None) -> None:
    """Shut down a VM of `virtshim run -d`. Its disk stays."""
    from virtshim.cli.staying import stop as stop_vm

    stop_vm(cri_socket(socket, config), name, seconds)


@operating_app.command()
def restart(name: _Stays, seconds: _Grace = 30, socket: _Socket = None, config: ConfigFile = None) -> None:
    """Shut down a VM of `virtshim run -d`, start it again, and print its new id."""
    from virtshim.cli.staying import start as start_vm
    from virtshim.cli.staying import stop as stop_vm

    stop_vm(cri_socket(socket, config), name, seconds)
    print(start_vm(cri_socket(socket, config), name))


@operating_app.command()
def rm(
    name: _Stays,
    force: Annotated[
        bool, typer.Option("-f", "--force", help="remove the VM even if it runs; its guest loses what is not on disk")
    ] = False,
    socket: _Socket = None,
    config: ConfigFile = None,
) -> None:
    """Remove a VM of `virtshim run -d`, with its disk."""
    from virtshim.cli.staying import remove

    remove(cri_socket(socket, config), admin_socket(socket, config), name, force=force)


def _act(action: Action, name: str, socket: str | None, config: str | None, *, as_json: bool, seconds: int = 0) -> None:
    from virtshim.cli.acting import act

    act(cri_socket(socket, config), admin_socket(socket, config), action, name, seconds=seconds, as_json=as_json)


def _acts(action: Action, text: str) -> None:
    """Declares the command of an action that needs only the VM's name."""

    @operating_app.command(action.value, help=text)
    def command(name: Vm, as_json: _Json = False, socket: _Socket = None, config: ConfigFile = None) -> None:
        _act(action, name, socket, config, as_json=as_json)


_acts(Action.PAUSE, "Pause a VM until it is resumed or stopped. kubelet still sees a running container.")
_acts(Action.RESUME, "Resume a paused VM. If the guest has an agent, virtshim sets the guest's clock.")
_acts(Action.RESET, "Press a VM's reset button. The guest restarts and loses all data that it had not written to disk.")
_acts(Action.REBOOT, "Ask a guest to restart itself, through its guest agent.")


@operating_app.command()
def freeze(
    name: Vm,
    seconds: Annotated[
        int, typer.Option("--seconds", help="seconds until the guest is thawed automatically, 600 at most")
    ] = 60,
    as_json: _Json = False,
    socket: _Socket = None,
    config: ConfigFile = None,
) -> None:
    """Flush and freeze a guest's file systems through its guest agent, e.g. to take a snapshot of its disks."""
    _act(Action.FREEZE, name, socket, config, as_json=as_json, seconds=seconds)


_acts(Action.THAW, "Thaw a guest's frozen file systems.")


@operating_app.command()
def save(
    name: Annotated[str | None, _NAME] = None,
    every: Annotated[
        bool, typer.Option("--all", help="all VMs of pods with virtshim.io/on-stop: save, at the same time")
    ] = False,
    seconds: Annotated[
        int, typer.Option("--seconds", help="with --all: the time for each VM; after that, its guest runs on")
    ] = 600,
    as_json: _Json = False,
    socket: _Socket = None,
    config: ConfigFile = None,
) -> None:
    """Save a VM that outlives its pods to disk, as a stop does. Its next container continues from there.

    The pod needs the annotation virtshim.io/vm. The container ends with exit code 143 and reason Saved. kubelet then follows
    the pod's restartPolicy: with Always or OnFailure it starts the container again, and the guest continues there. With Never
    the VM stays saved until another pod names it.
    """
    if every == (name is not None):
        raise InvalidRequest("name one VM, or give --all")
    if name is not None:
        _act(Action.SAVE, name, socket, config, as_json=as_json)
        return
    from virtshim.cli.acting import save_all

    save_all(admin_socket(socket, config), seconds, as_json=as_json)


_acts(
    Action.RENEW,
    """Give a VM that outlives its pods a new QEMU, for example after an upgrade of QEMU. The guest does not reboot.

    The pod needs the annotation virtshim.io/vm. The guest is paused while its memory is written and read. The container
    continues, and so do the guest's connections. Exec sessions and port-forwards end.
    """,
)


vms_app = typer.Typer(cls=Group)
operating_app.add_typer(vms_app, name="vms")


@vms_app.callback(invoke_without_command=True)
def vms(
    context: typer.Context,
    template: Annotated[str, _format("{vm}\\t{disk}")] = "",
    as_json: _Json = False,
    socket: _Socket = None,
    config: ConfigFile = None,
) -> None:
    """List the VMs that outlive their pods (virtshim.io/vm), with their disks, pods and saved memory."""
    if context.invoked_subcommand is None:
        from virtshim.cli.vms import vms as list_vms

        list_vms(cri_socket(socket, config), admin_socket(socket, config), template, as_json=as_json)
    elif any(getattr(context.get_parameter_source(one), "name", "") == "COMMANDLINE" for one in context.params):
        raise InvalidRequest(f"options for `vms {context.invoked_subcommand}` go after it")


_LastingVm = Annotated[
    str, typer.Argument(metavar="NAME", help="a VM's name, namespace/name, or namespace/name/container")
]


@vms_app.command("rm")
def remove_vm(name: _LastingVm, as_json: _Json = False, socket: _Socket = None, config: ConfigFile = None) -> None:
    """Remove a VM that outlives its pods, with its disk, firmware variables, TPM state and saved memory. No pod may use it."""
    from virtshim.cli.vms import remove

    remove(cri_socket(socket, config), admin_socket(socket, config), name, as_json=as_json)


@vms_app.command("take")
def take_vm(name: _LastingVm, as_json: _Json = False, socket: _Socket = None, config: ConfigFile = None) -> None:
    """Let a VM run here that has arrived from a node which no longer answers. First make sure that the other node is off for
    good: it may run the VM, too."""
    from virtshim.cli.vms import take

    take(cri_socket(socket, config), admin_socket(socket, config), name, as_json=as_json)


@operating_app.command()
def screenshot(
    name: Vm,
    file: Annotated[
        str,
        typer.Option("-o", "--output", help="PNG file, or - for standard output; default: NAME.png in this directory"),
    ] = "",
    socket: _Socket = None,
    config: ConfigFile = None,
) -> None:
    """Save a picture of a VM's screen. The pod needs the annotation virtshim.io/vnc."""
    from virtshim.cli.acting import screenshot as take

    take(cri_socket(socket, config), admin_socket(socket, config), name, file)


@operating_app.command()
def dumpxml(name: Vm, socket: _Socket = None, config: ConfigFile = None) -> None:
    """Print libvirt's definition of a VM, without the key that opens its pod's network."""
    from virtshim.cli.acting import dumpxml as show_definition

    show_definition(cri_socket(socket, config), admin_socket(socket, config), name)


@operating_app.command()
def vnc(
    name: Vm,
    listen: Annotated[
        str,
        typer.Option(
            help="loopback address and port, such as 127.0.0.1:5900, for VNC clients of root and of the sudo user"
        ),
    ] = "",
    unix: Annotated[
        str,
        typer.Option(
            "--unix",
            help="path of the Unix socket for VNC clients, mode 0600; default: one in a new private directory",
        ),
    ] = "",
    socket: _Socket = None,
    config: ConfigFile = None,
) -> None:
    """Show a VM's screen to your VNC clients on this machine. The pod needs the annotation virtshim.io/vnc."""
    from virtshim.cli.vnc import parse_listen_address
    from virtshim.cli.vnc import vnc as show

    place = parse_listen_address(listen, unix)
    show(cri_socket(socket, config), admin_socket(socket, config), name, place)


@operating_app.command("port-forward")
def port_forward(
    name: Vm,
    ports: Annotated[
        list[str],
        typer.Argument(metavar="PORT", help="PORT, LOCAL:PORT, or :PORT for a free local port; several may follow"),
    ],
    address: Annotated[str, typer.Option("--address", help="address of this machine to listen on")] = "127.0.0.1",
    socket: _Socket = None,
    config: ConfigFile = None,
) -> None:
    """Forward ports of this machine to ports of a VM until Ctrl-C: `virtshim port-forward NAME 8080:80`."""
    from virtshim.cli.port_forward import parse_forwards
    from virtshim.cli.port_forward import port_forward as forward

    host, forwards = parse_forwards(ports, address)
    forward(cri_socket(socket, config), name, host, forwards)


@operating_app.command()
def cp(
    source: Annotated[str, typer.Argument(help="file or directory: VM:PATH, or a path here")],
    target: Annotated[
        str, typer.Argument(help="target of the copy: VM:PATH, or a path here; an existing directory, or a new name")
    ],
    socket: _Socket = None,
    config: ConfigFile = None,
) -> None:
    """Copy files and directories into a VM or out of it: `virtshim cp ./site web:/srv`. The guest needs tar."""
    from virtshim.cli.copying import copy

    raise typer.Exit(copy(cri_socket(socket, config), source, target))
