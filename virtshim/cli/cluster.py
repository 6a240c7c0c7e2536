"""`virtshim controller` and `virtshim agent`, for clusters with VirtualMachine objects."""

from __future__ import annotations

from tapmanager.heap import share_one_heap
from virtshim.cli.operating import admin_socket
from virtshim.config.agent import agent_settings
from virtshim.system.daemon import do_without_extras, stop_event


def controller_command(
    kubeconfig: str, namespace: str, listen: str, moves: int, moves_from_node: int, *, signs: bool
) -> None:
    stopping = stop_event()
    share_one_heap()
    do_without_extras()
    from virtshim.cluster.moving import MoveLimits
    from virtshim.cluster.serving import ControllerOptions, serve_controller
    from virtshim.system.logsetup import set_up_logging

    set_up_logging("info", "auto")
    options = ControllerOptions(kubeconfig, namespace, listen, MoveLimits(moves, moves_from_node), signs=signs)
    serve_controller(options, stopping)


def agent_command(
    kubeconfig: str, namespace: str, node: str, socket: str | None, file: str | None, certificates: str
) -> None:
    """`socket`, `file`: virtshim's CRI socket and settings, None for the usual ones."""
    stopping = stop_event()
    share_one_heap()
    do_without_extras()
    from virtshim.cluster.serving import AgentOptions, serve_agent
    from virtshim.system.logsetup import set_up_logging

    set_up_logging("info", "auto")
    settings = agent_settings(file)
    admin = admin_socket(socket, None) if socket else f"{settings.run_dir}/admin.sock"
    serve_agent(AgentOptions(kubeconfig, namespace, node, admin, settings.translations_dir, certificates), stopping)
