"""`virtshim proxy` serves one CRI socket: containers go to another runtime, VMs to virtshim."""

from __future__ import annotations

from tapmanager.heap import keep_large_blocks, share_one_heap
from virtshim.config.settings import Settings, load_settings
from virtshim.model.errors import InvalidRequest
from virtshim.model.layout import admin_socket
from virtshim.proxy.routes import Routes, Runtime
from virtshim.system.daemon import do_without_extras


def proxy_command(file: str | None, directory: str | None) -> None:
    if directory is not None and file is not None:
        raise InvalidRequest("--dir and --config exclude each other; --dir reads the settings from DIR/config.toml")
    share_one_heap()
    keep_large_blocks()
    do_without_extras()
    from virtshim.app.reload import Reload
    from virtshim.proxy.serving import Plan, serve
    from virtshim.system.logsetup import set_up_logging

    file = file if directory is None else f"{directory}/config.toml"
    settings = load_settings(file)
    set_up_logging(settings.log.level, settings.log.format)
    proxy = settings.proxy
    # A reload changes only the log level, which `Reload` itself sets.
    reload = Reload(
        file, settings, lambda _: None, ("paths", "cri.socket", "proxy", "log", "metrics.proxy_address", "tracing")
    ).serve
    serve(
        Plan(
            socket=settings.proxy_socket,
            directory=f"{settings.paths.state_dir}/proxy",
            routes=routes(settings),
            patience=proxy.answer_timeout,
            max_calls=proxy.max_calls,
            admin_socket=admin_socket(settings.layout()),
            metrics_address=settings.metrics.proxy_address,
            traces=settings.tracing.endpoint,
            sampling=settings.tracing.sampling,
        ),
        reload,
    )


def routes(settings: Settings) -> Routes:
    """The proxy's routes. Raises InvalidRequest if two sockets are the same, e.g. a runtime's and the proxy's own."""
    proxy = settings.proxy
    found = Routes(
        primary=Runtime(proxy.primary.name, proxy.primary.socket, proxy.primary.handlers),
        others=tuple(
            Runtime(
                one.name,
                one.socket or settings.cri_socket,
                one.handlers,
                one.handlers_of_pods,
                one.image_prefixes,
                one.when_down == "degraded",
            )
            for one in proxy.others
        ),
        annotation=proxy.annotation,
        annotation_alone=proxy.annotation_alone == "route",
    )
    sockets = [runtime.socket for runtime in found.runtimes]
    if settings.proxy_socket in sockets or len(set(sockets)) < len(sockets):
        raise InvalidRequest(
            f"configuration: proxy: the runtimes' sockets {', '.join(sockets)} and the proxy's own, {settings.proxy_socket}, "
            "must all be different"
        )
    return found
