"""`virtshim device-plugin`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import structlog

from virtshim.app.reload import Reload
from virtshim.config.settings import OfferedResource, load_settings
from virtshim.devices.function_health import AerCounts, FunctionHealth
from virtshim.devices.host_files import HostFiles
from virtshim.devices.pci import PciBus
from virtshim.devices.pools import HostFunction, Pool
from virtshim.devices.values import PciAddress
from virtshim.kubelet.device_plugin import (
    DevicePlugin,
    KubeletPlugins,
    ResourcePlugin,
    ResourceServer,
    cdi_file_qualified_name,
    write_cdi_file,
)
from virtshim.model.errors import InvalidRequest
from virtshim.store.read_only import read_conditions
from virtshim.system.daemon import notify_systemd, reload_requests, stop_event
from virtshim.system.grpc_socket import SocketLock
from virtshim.system.logsetup import set_up_logging

log = structlog.get_logger(__name__)


def device_plugin_command(file: str | None) -> None:
    """Offers devices until SIGTERM or SIGINT. Raises WrongState while another device plugin runs: they would take over each
    other's sockets."""
    settings = load_settings(file)
    wanted = settings.device_plugin
    if not wanted.resources:
        raise InvalidRequest(
            "device_plugin.resources is empty, so there is no device to offer; see Device plugin in docs/devices.md"
        )
    set_up_logging(settings.log.level, settings.log.format)
    stopping = stop_event()
    pools = tuple(pool_of(resource) for resource in wanted.resources)
    excluded = frozenset(map(PciAddress.parse, settings.devices.keep))
    directory = KubeletPlugins(wanted.directory)
    with_cdi = wanted.deliver == "cdi"

    def name_of(pool: Pool) -> partial[str] | None:
        return partial(cdi_file_qualified_name, pool) if with_cdi else None

    plugins = {pool.resource: ResourcePlugin(pool, directory, ResourceServer(pool, name_of(pool))) for pool in pools}
    # Without CDI there is nothing to publish: containers get device nodes through kubelet's Allocate call.
    publish = partial(write_cdi_file, wanted.cdi_dir) if with_cdi else lambda *_: None
    # Not in kubelet's directory: kubelet empties that when it starts.
    lock = SocketLock(f"{settings.paths.run_dir}/device-plugin")
    try:
        # A reload changes only the log level, which `Reload` itself sets.
        Reload(file, settings, lambda _: None, ("paths", "device_plugin", "devices", "log")).start(reload_requests())
        notify_systemd("READY=1")
        log.info("plugin.started", resources=[pool.resource for pool in pools])
        files = HostFiles()
        health = FunctionHealth(AerCounts(files), partial(read_conditions, settings.layout().database))
        plugin = DevicePlugin(plugins, pools, lambda: candidates(files, health, excluded), publish)
        plugin.run(stopping, wanted.interval, alive=partial(notify_systemd, "WATCHDOG=1"))
    finally:
        lock.release()
    log.info("plugin.stopped")


def pool_of(resource: OfferedResource) -> Pool:
    """Converts the settings of one resource."""
    return Pool(
        resource=resource.name,
        vendor=resource.vendor,
        devices=frozenset(resource.devices),
        drivers=frozenset(resource.drivers),
        pfs=frozenset(map(PciAddress.parse, resource.pfs)),
        addresses=frozenset(map(PciAddress.parse, resource.addresses)),
        functions=resource.functions,
    )


def candidates(
    files: HostFiles, health: FunctionHealth, excluded: Collection[PciAddress] = ()
) -> Sequence[HostFunction]:
    """All PCI functions of the node except bridges. `excluded`: functions that no VM may get."""
    functions = [facts for facts in PciBus(files).functions() if not facts.is_bridge]
    trouble = health.look(functions)
    return [
        HostFunction(
            address=facts.address,
            vendor=f"{facts.vendor:04x}",
            device=f"{facts.device:04x}",
            driver=facts.driver,
            is_vfio=facts.is_vfio,
            is_reserved=facts.address in excluded,
            is_busy=not facts.is_vfio and not facts.is_idle,
            group=facts.group,
            numa=facts.node,
            physfn=facts.physical,
            has_vfio_node=facts.group is not None and files.exists(f"/dev/vfio/{facts.group}"),
            trouble=trouble.get(facts.address, ""),
        )
        for facts in functions
    ]
