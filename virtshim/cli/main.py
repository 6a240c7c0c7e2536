"""The `virtshim` command. Each subcommand is one module; this one parses arguments and turns errors into exit codes."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from virtshim.cli.help import Group, Program
from virtshim.cli.operating import ConfigFile, Vm, cri_socket, operating_app
from virtshim.cli.terminal import open_closed_streams, write_out
from virtshim.model.errors import InvalidRequest, Kind, ShimError

# The meaning of exit codes, taken from sysexits(3) where it has a fitting code. docs/commands.md has the same table.

EXIT_CODES: Final[Mapping[Kind, int]] = {
    Kind.NOT_FOUND: 66,
    Kind.UNAVAILABLE: 69,
    Kind.REGISTRY: 69,
    Kind.INTERNAL: 70,
    Kind.UNIMPLEMENTED: 70,
    Kind.EXHAUSTED: 71,
    Kind.ALREADY_EXISTS: 73,
    Kind.FAILED_PRECONDITION: 75,
    Kind.DEADLINE: 75,
    Kind.ABORTED: 75,
    Kind.PERMISSION: 77,
    Kind.SIGNATURE: 77,
    Kind.INVALID: 78,
}

EXIT_UNREAD: Final = 1
EXIT_INTERRUPTED: Final = 130

EXIT_MEANINGS: Final[Mapping[int, str]] = {
    0: "done",
    1: "done, but something needs attention: `check` found an error, `setup` kept a file, or nobody read the output",
    2: "the command line is wrong",
    66: "the pod, container or image does not exist",
    69: "virtshim, libvirt, tapmanager or a registry cannot be reached",
    70: "something failed, and repeating the command will not help; or this version does not support it",
    71: "disk space, memory, addresses or slots have run out",
    73: "something else already has the name",
    75: "not now: the state is wrong, another call is in the way, or time ran out; fix what the message names and try again",
    77: "not allowed: you are not root, credentials were refused, or an image lacks a required signature",
    78: "a setting, an argument or a file is wrong",
    EXIT_INTERRUPTED: "Ctrl-C",
}

EXIT_EPILOG: Final = (
    "Exit codes: "
    + "; ".join(f"{code} {meaning.partition(':')[0].partition(';')[0]}" for code, meaning in EXIT_MEANINGS.items())
    + ". `exec`, `ssh` and `run` exit with the code of their command."
)

app = typer.Typer(
    cls=Program,
    help="A Kubernetes CRI runtime: each pod is a virtual machine.",
    epilog=EXIT_EPILOG,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Socket = Annotated[
    str | None,
    typer.Option("--socket", envvar="CONTAINER_RUNTIME_ENDPOINT", help="CRI socket; default: the one in the settings"),
]
_Dir = Annotated[
    str, typer.Option("--dir", help="directory for all files of this node; the QEMU user must be able to reach it")
]


class _CommandInGuest(TyperCommand):
    """The words after NAME are those of another command, with its options. After `--` they always are; without `--` our own
    options go before NAME."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_interspersed_args = "--" in args
        return super().parse_args(ctx, args)


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    pass


@app.command()
def serve(config: ConfigFile = None) -> None:
    """Serve CRI on a Unix socket (the installed way; tapmanager runs beside it)."""
    from virtshim.cli.serve import serve_command

    serve_command(config)


@app.command()
def up(
    directory: _Dir,
    config: Annotated[
        str | None, typer.Option("--config", help="TOML file whose settings override the defaults")
    ] = None,
    cni_conf_dir: Annotated[
        str | None, typer.Option(help="CNI configuration directory to use instead of a generated bridge")
    ] = None,
    cni_bin_dir: Annotated[str | None, typer.Option(help="directory of the CNI plugins")] = None,
    domain_type: Annotated[str | None, typer.Option(help="auto, kvm or qemu (TCG)")] = None,
    pod_cidr: Annotated[str, typer.Option(help="address range of the generated bridge network")] = "10.88.0.0/16",
    with_containerd: Annotated[
        bool,
        typer.Option(
            "--with-containerd", help="also run a containerd for this node, with `virtshim proxy` in front of both"
        ),
    ] = False,
) -> None:
    """Run a whole node in the foreground under DIR. Ctrl-C stops the daemons and leaves the VMs running."""
    from virtshim.cli.up import NodeOptions, up_command

    options = NodeOptions(directory, config, cni_conf_dir, cni_bin_dir, domain_type, pod_cidr, with_containerd)
    raise typer.Exit(up_command(options))


@app.command()
def down(
    directory: Annotated[str, typer.Option("--dir", help="the directory of `up --dir DIR`")],
    everything: Annotated[bool, typer.Option("--all", help="also remove DIR itself, including its images")] = False,
) -> None:
    """Stop the daemons of `up --dir DIR`, then remove every pod, VM, netns, tap and bridge that they made."""
    from virtshim.cli.down import down_command

    down_command(directory, everything=everything)


@app.command()
def check(
    config: ConfigFile = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
    devices: Annotated[
        bool, typer.Option("--devices", help="list the node's PCI devices instead, and say which ones a VM can use")
    ] = False,
    kubeconfig: Annotated[
        str, typer.Option("--kubeconfig", help="also check the cluster's RuntimeClasses, using this kubeconfig")
    ] = "",
) -> None:
    """Check whether this machine can run VMs. Prints each finding with its remedy. The exit code is 1 if it cannot."""
    from virtshim.cli.check import check as check_command
    from virtshim.cli.check import check_devices

    if devices:
        raise typer.Exit(check_devices(config, as_json=json))
    raise typer.Exit(check_command(config, as_json=json, kubeconfig=kubeconfig))


@app.command()
def setup(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show the changes as a diff, and change nothing")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="revert what an earlier setup wrote and enabled")] = False,
    json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
    vms_only: Annotated[
        bool | None,
        typer.Option(
            "--vms-only/--no-vms-only",
            help="run VMs only, even if containerd or CRI-O is installed; later runs remember the choice",
            show_default=False,
        ),
    ] = None,
    root: Annotated[
        str,
        typer.Option("--root", help="set up the file tree at this path, e.g. a machine image, instead of this machine"),
    ] = "/",
) -> None:
    """Inspect this node, configure virtshim, its proxy, kubelet, crictl and libvirt for it, and start the services."""
    from virtshim.cli.setup import SetupOptions, setup_command

    raise typer.Exit(setup_command(SetupOptions(root, dry_run, undo, json, vms_only)))


@app.command()
def diag(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="directory to write the archive to")],
    config: ConfigFile = None,
    node: Annotated[
        str | None, typer.Option("--dir", help="examine the node that `up --dir` runs in this directory")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print a summary as JSON, for programs")] = False,
) -> None:
    """Collect diagnostic data of this node, without secrets, into DIR/virtshim-diag-HOST-TIME.tar.gz."""
    from virtshim.cli.diag.command import diag_command

    raise typer.Exit(diag_command(directory, config, node, as_json=json))


@app.command("device-plugin")
def device_plugin(config: ConfigFile = None) -> None:
    """Offer this node's PCI functions to kubelet, as configured in device_plugin.resources."""
    from virtshim.cli.device_plugin import device_plugin_command

    device_plugin_command(config)


@app.command()
def proxy(
    config: ConfigFile = None,
    directory: Annotated[
        str | None, typer.Option("--dir", help="serve the node that `up --dir` runs in this directory")
    ] = None,
) -> None:
    """Serve one CRI socket to kubelet: containers go to containerd or CRI-O, VMs to virtshim."""
    from virtshim.cli.proxy import proxy_command

    proxy_command(config, directory)


@app.command()
def controller(
    kubeconfig: Annotated[
        str, typer.Option("--kubeconfig", help="credentials for the API server; default: the pod's service account")
    ] = "",
    namespace: Annotated[
        str, typer.Option("--namespace", help="where the controller's Service and the agents' Leases are")
    ] = "virtshim-cluster",
    listen: Annotated[
        str, typer.Option("--listen", help="address and port of the webhook for evictions; empty for none")
    ] = "0.0.0.0:9443",
    moves: Annotated[int, typer.Option("--moves", help="the most VMs that move at once in the cluster")] = 5,
    moves_from_node: Annotated[
        int, typer.Option("--moves-from-node", help="the most VMs that move at once from one node")
    ] = 2,
    sign_certificates: Annotated[
        bool, typer.Option("--sign-certificates", help="sign the certificates by which nodes know each other")
    ] = False,
) -> None:
    """Run VirtualMachine objects: make their pods, move VMs, answer evictions. One for a cluster; see docs/cluster.md."""
    from virtshim.cli.cluster import controller_command

    controller_command(kubeconfig, namespace, listen, moves, moves_from_node, signs=sign_certificates)


@app.command()
def agent(
    node: Annotated[
        str,
        typer.Option(
            "--node",
            envvar="NODE_NAME",
            help="this node's name in the cluster; default: the token's",
            show_default=False,
        ),
    ] = "",
    kubeconfig: Annotated[
        str, typer.Option("--kubeconfig", help="credentials for the API server; default: the pod's service account")
    ] = "",
    namespace: Annotated[str, typer.Option("--namespace", help="where the agent's Lease is")] = "virtshim-cluster",
    certificates: Annotated[
        str,
        typer.Option(
            "--certificates",
            help="directory where this node's certificate for other nodes is kept, signed by the controller; default: none",
            show_default=False,
        ),
    ] = "",
    socket: _Socket = None,
    config: ConfigFile = None,
) -> None:
    """Tell the API server about this node's VMs, and do what VirtualMachine objects ask for. See docs/cluster.md."""
    from virtshim.cli.cluster import agent_command

    agent_command(kubeconfig, namespace, node, socket, config, certificates)


@app.command()
def dashboard(
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="TCP port on 127.0.0.1 and ::1; 0 picks a free one")
    ] = 8734,
    socket: _Socket = None,
    config: ConfigFile = None,
) -> None:
    """Show this node in a browser: VMs, graphs, consoles, screens. Prints a URL that works once. Ctrl-C ends it."""
    from virtshim.dashboard.command import dashboard as show_dashboard

    show_dashboard(cri_socket(socket, config), port)


@app.command("exec", cls=_CommandInGuest)
def exec_(
    name: Vm,
    command: Annotated[list[str], typer.Argument(help="program and arguments", show_default=False)],
    stdin: Annotated[bool, typer.Option("-i", "--stdin", help="pass input to the command")] = False,
    tty: Annotated[bool, typer.Option("-t", "--tty", help="give the command a terminal")] = False,
    socket: _Socket = None,
    config: ConfigFile = None,
) -> None:
    """Run a command in a VM, e.g. `virtshim exec -it NAME -- sh`. Exits with the command's exit code."""
    from virtshim.cli.sessions import exec_command

    if command[0].startswith("-"):
        raise InvalidRequest(
            f"{command[0][:80]!r} is not a program; write options before NAME, and the command after it"
        )
    raise typer.Exit(exec_command(cri_socket(socket, config), name, command, stdin=stdin, tty=tty))


@app.command()
def console(name: Vm, socket: _Socket = None, config: ConfigFile = None) -> None:
    """Attach this terminal to a VM's serial console. Ctrl-] detaches."""
    from virtshim.cli.sessions import console as attach

    raise typer.Exit(attach(cri_socket(socket, config), name))


@app.command()
def ssh(
    name: Vm,
    command: Annotated[
        list[str] | None,
        typer.Argument(help="command to run in the guest, after --; default: a shell", show_default=False),
    ] = None,
    user: Annotated[str, typer.Option("-l", "--user", help="user to log in as")] = "root",
    identity: Annotated[str, typer.Option("-i", "--identity", help="private key file, passed to ssh")] = "",
    inject: Annotated[
        str, typer.Option("--inject", help="file of public keys to add to the guest before logging in")
    ] = "",
    socket: _Socket = None,
    config: ConfigFile = None,
) -> None:
    """Log in to a VM with ssh. `--inject ~/.ssh/id_ed25519.pub` first adds your key through the guest agent."""
    from virtshim.cli.sessions import SshOptions
    from virtshim.cli.sessions import ssh as run_ssh

    options = SshOptions(user, identity, inject, tuple(command or ()))
    raise typer.Exit(run_ssh(cri_socket(socket, config), name, options))


config_app = typer.Typer(cls=Group, help="Show and check the settings.", no_args_is_help=True)


@config_app.command("show")
def config_show(
    config: ConfigFile = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
    changed: Annotated[bool, typer.Option("--changed", help="only settings that differ from their defaults")] = False,
) -> None:
    """Print the settings in force as TOML, with the source of each. Secrets and annotations of profiles are hidden."""
    from virtshim.cli.config import show_command

    show_command(config, as_json=json, changed=changed)


@config_app.command("check")
def config_check(config: ConfigFile = None) -> None:
    """Check the settings. Prints every fault with its file and line; the exit code is then 78."""
    from virtshim.cli.config import check_command

    check_command(config)


@config_app.command("schema")
def config_schema() -> None:
    """Print all settings with their defaults and meanings, as JSON Schema."""
    import json

    from virtshim.config.settings import Settings

    print(json.dumps(Settings.model_json_schema(), indent=2))


@config_app.command("reference")
def config_reference() -> None:
    """Print all settings with their defaults, limits, units, meanings and reasons, as Markdown."""
    from virtshim.config.reference import page
    from virtshim.config.settings import Settings

    print(page(Settings), end="")


app.add_typer(config_app, name="config")
app.add_typer(operating_app)


@app.command()
def version() -> None:
    """Print the version of this installation."""
    from importlib.metadata import version as installed

    print(installed("virtshim"))


def main(words: Sequence[str] | None = None, command: Callable[[Sequence[str]], object] = app) -> None:
    """Entry point. `words` replaces the process's own arguments. A ShimError becomes one line on standard error, never a
    traceback; so does output that cannot be written."""
    # The embedded libvirt driver forks to start QEMU, and gRPC's fork handlers would abort the child. grpc reads this
    # variable when it is first imported, which happens later.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    open_closed_streams()
    words = sys.argv[1:] if words is None else words
    try:
        _refuse_other_bytes(words)
        try:
            command(words)
        finally:
            write_out()
    except ShimError as exc:
        print(f"virtshim: {exc}", file=sys.stderr)
        sys.exit(EXIT_CODES[exc.kind])
    except OSError as exc:
        if exc.errno == errno.EPIPE:
            sys.exit(EXIT_UNREAD)
        if exc.errno != errno.ENOSPC:
            raise
        print(
            f"virtshim: {exc.filename or 'the output'} could not be written: {exc.strerror}; free some space",
            file=sys.stderr,
        )
        sys.exit(EXIT_CODES[Kind.EXHAUSTED])


def _refuse_other_bytes(words: Sequence[str]) -> None:
    """CRI strings and settings files are UTF-8, so arguments must be UTF-8 too."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as exc:
            raise InvalidRequest(f"the argument {word!r} is not UTF-8; write it in UTF-8") from exc
