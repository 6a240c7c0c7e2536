"""The documents of a seed: meta-data, user-data, network-config, vendor-data; as NoCloud has them, or as a config drive. No I/O.

meta-data and network-config are JSON, which is also YAML: cloud-init reads both, and a small guest needs no YAML parser.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import posixpath
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

from virtshim.annotations.options import VmOptions
from virtshim.devices.guest_view import guest_links_command, guest_links_normal, guest_links_udev_names
from virtshim.devices.values import BlockDevice
from virtshim.guest.set_up_scripts import sysctls_command
from virtshim.model.errors import InvalidRequest
from virtshim.model.network import Dns
from virtshim.seed.network_config import network_config, resolver_command
from virtshim.seed.ports import SeedRequest
from virtshim.seed.sources import merged
from virtshim.volumes import empty_disks
from virtshim.volumes.mount_script import Copies, command
from virtshim.volumes.pod_mounts import HOSTS, says_hosts, written_paths

# The documents of a seed as OpenStack's config drive has them. Pure.
#
# For guests that look for one: cloudbase-init on Windows, and what was made for Virtlet. cloud-init reads the
# network's document by a way of its own (`convert_net_json`), which hands the keys of its network configuration
# through; so what OpenStack has no word for, a gateway outside of the NIC's subnet, is told by cloud-init's.
# https://docs.openstack.org/nova/latest/user/metadata.html

CONFIG_DRIVE_LABEL: Final = "config-2"
# Where its files are in the ISO.
CONFIG_DRIVE_DIRECTORY: Final = "openstack/latest"

_ANY: Final = "0.0.0.0"  # noqa: S104  nothing is bound
# Keys that cloud-init hands through.
_THROUGH: Final = ("pointopoint", "dns_nameservers", "dns_search")


def config_drive_meta_data(generated: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`generated`: as of a NoCloud seed; `own`: what the pod says, which is laid over."""
    keys = generated.get("public-keys", [])
    document = {
        "uuid": generated["instance-id"],
        "hostname": generated["local-hostname"],
        "name": generated["local-hostname"],
        **({"public_keys": {f"key-{number}": key for number, key in enumerate(keys)}} if keys else {}),
    }
    return {**document, **own}


def config_drive_vendor_data(text: str) -> dict[str, Any]:
    """It is JSON here; cloud-init takes its part."""
    return {"cloud-init": text}


def config_drive_network_data(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config`: as of a NoCloud seed (`network_config`)."""
    links: list[dict[str, Any]] = []
    networks: list[dict[str, Any]] = []
    servers: list[str] = []
    for entry in config["config"]:
        if entry["type"] == "nameserver":
            servers += entry.get("address", [])
            continue
        links.append(_link(entry))
        for subnet in entry.get("subnets", []):
            networks.append({"id": f"network{len(networks)}", "link": entry["name"], **_network(subnet)})
            servers += subnet.get("dns_nameservers", [])
    services = [{"type": "dns", "address": server} for server in servers]
    return {"links": links, "networks": networks, "services": services}


def _link(entry: Mapping[str, Any]) -> dict[str, Any]:
    link = {"id": entry["name"], "name": entry["name"], "type": "phy", "ethernet_mac_address": entry["mac_address"]}
    return {**link, **({"mtu": entry["mtu"]} if "mtu" in entry else {})}


def _network(subnet: Mapping[str, Any]) -> dict[str, Any]:
    address = ipaddress.ip_interface(subnet["address"])
    network: dict[str, Any]
    if isinstance(address, ipaddress.IPv4Interface):
        network = {"type": "ipv4", "ip_address": str(address.ip), "netmask": str(address.netmask)}
    else:
        # "ipv6" means to cloud-init what not each of its renderers knows.
        network = {"type": "static", "ip_address": str(address)}
    network |= {key: subnet[key] for key in _THROUGH if key in subnet}
    routes = list(_routes(subnet))
    gateway = subnet.get("gateway")
    if gateway is not None:
        if address.version == 4 and ipaddress.ip_address(gateway) in address.network:
            routes.append({"network": _ANY, "netmask": _ANY, "gateway": gateway})
        else:
            network["gateway"] = gateway
    return {**network, "routes": routes} if routes else network


def _routes(subnet: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for route in subnet.get("routes", []):
        destination = ipaddress.ip_network(route["network"])
        if destination.version == 4:
            yield {
                "network": str(destination.network_address),
                "netmask": str(destination.netmask),
                "gateway": route["gateway"],
            }
        else:
            yield dict(route)


_MAX_BYTES: Final = 1024 * 1024
# DNS' limit for a name without dots, the kernel's for one with them.
_MAX_LABEL: Final = 63
_MAX_HOSTNAME: Final = 64

# Virtlet's users put it on a line of its own, where the script wants its volumes mounted, or in place of a whole script.
_MOUNT_TOKEN: Final = "@virtlet-mount-script@"  # noqa: S105 (a placeholder in a text)
_NOTHING_TO_MOUNT: Final = "# virtshim: no volumes to mount"
# Virtlet's place for the same, for scripts of the pod's that call it.
_MOUNT_FILE: Final = "/etc/cloud/mount-volumes.sh"

# Virtlet's place for the container's variables.
_ENVIRONMENT: Final = "/etc/cloud/environment"

# An instance's network is set up once, and a kept disk gets other addresses with each sandbox. Not in user-data, which may be a
# script of the pod's.
_NETWORK_AT_EACH_BOOT: Final[Mapping[str, Any]] = {"updates": {"network": {"when": ["boot"]}}}

_RESOLVER: Final = "/etc/resolv.conf"
# In user-data: what that is to be.
_RESOLVER_KEYS: Final = ("manage_resolv_conf", "resolv_conf")

# Shells have a limit for what they hand to programs, and none for their own echo.
_FILE_SCRIPT: Final = "(umask 022; mkdir -p {directory}; echo {content} | base64 -d > {path}; chmod {mode} {path})"

# In user-data: what the guest is to be called.
_HOSTNAME_KEYS: Final = ("hostname", "fqdn", "prefer_fqdn_over_hostname", "preserve_hostname")

# libyaml's is some ten times as fast; PyYAML may have been built without.
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


_NOCLOUD_LABEL: Final = "cidata"


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    mode: str = "0644"


@dataclass(frozen=True, slots=True)
class SeedDocuments:
    """`files`: path in the ISO -> text. Without a network document the guest asks by DHCP."""

    label: str
    files: Mapping[str, str]


def seed_documents(request: SeedRequest, hosts: bytes = b"") -> SeedDocuments:
    """`hosts`: what /etc/hosts is to be, nothing for the guest's own. InvalidRequest if a document would be too large."""
    network = None if request.options.force_dhcp else network_config(request.interfaces, request.dns)
    meta, user, vendor = _meta_data(request), _user_data(request, hosts), _vendor_data(request)
    if request.options.config_drive:
        documents = _config_drive(meta, request.options.meta_data, user, network, vendor)
    else:
        documents = _nocloud({**meta, **request.options.meta_data}, user, network, vendor)
    for name, text in documents.files.items():
        if len(text.encode()) > _MAX_BYTES:
            raise InvalidRequest(
                f"cloud-init {posixpath.basename(name)} is larger than {_MAX_BYTES} bytes; shorten the annotations, or env, "
                "or what VirtletFilesFromDataSource names"
            )
    return documents


def _nocloud(meta: Mapping[str, Any], user: str, network: Mapping[str, Any] | None, vendor: str) -> SeedDocuments:
    files = {"meta-data": _json(meta), "user-data": user}
    if network is not None:
        files["network-config"] = _json(network)
    if vendor:
        files["vendor-data"] = vendor
    return SeedDocuments(_NOCLOUD_LABEL, files)


def _config_drive(
    meta: Mapping[str, Any], own: Mapping[str, Any], user: str, network: Mapping[str, Any] | None, vendor: str
) -> SeedDocuments:
    files = {"meta_data.json": _json(config_drive_meta_data(meta, own)), "user_data": user}
    if network is not None:
        files["network_data.json"] = _json(config_drive_network_data(network))
    if vendor:
        files["vendor_data.json"] = _json(config_drive_vendor_data(vendor))
    return SeedDocuments(CONFIG_DRIVE_LABEL, {f"{CONFIG_DRIVE_DIRECTORY}/{name}": text for name, text in files.items()})


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _meta_data(request: SeedRequest) -> dict[str, Any]:
    """cloud-init runs its once-per-instance part whenever `instance-id` is a new one. So the instance is the disk: a re-created
    container has a new one, where everything must run again, unless it goes on with the disk of an earlier one, whose host keys
    and first commands are there."""
    generated: dict[str, Any] = {
        "instance-id": f"i-{request.kept_disk or request.container.short}",
        "local-hostname": _hostname(request),
    }
    if request.options.ssh_keys:
        generated["public-keys"] = list(request.options.ssh_keys)
    return generated


def _hostname(request: SeedRequest) -> str:
    """A pod's name may be longer than Linux allows a hostname to be."""
    name = request.hostname or request.pod.name
    return name[: _MAX_HOSTNAME if "." in name[:_MAX_LABEL] else _MAX_LABEL].rstrip("-.")


def _hostname_settings(request: SeedRequest) -> dict[str, Any]:
    """Of a name with dots (`setHostnameAsFQDN`, or a pod's name that has them) cloud-init takes the first part for the hostname;
    in a container all of it is. `prefer_fqdn_over_hostname` alone changes nothing: cloud-init has set the first part before it
    reads user-data, and sets a name again only if hostname or fqdn are others."""
    name = _hostname(request)
    said = {*request.options.user_data, *request.options.meta_data}
    if "." not in name or said & {*_HOSTNAME_KEYS, "local-hostname"}:
        return {}
    return {"hostname": name, "fqdn": name, "prefer_fqdn_over_hostname": True}


def _user_data(request: SeedRequest, hosts: bytes) -> str:
    """A script replaces everything that is generated."""
    options = request.options
    if options.user_data_script:
        return options.user_data_script.replace(_MOUNT_TOKEN, _mount_script(request))
    document = merged(_with_known_disks(options.user_data, request.blocks), _generated_user_data(request, hosts))
    if scripts := list(_scripts(request, hosts)):
        document["bootcmd"] = [*scripts, *_listed(document.get("bootcmd"))]
    return _cloud_config(document)


def _cloud_config(document: Mapping[str, Any]) -> str:
    # ASCII only: PyYAML does not read back every character that it writes plainly (U+0085).
    return "#cloud-config\n" + yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=120)


def _vendor_data(request: SeedRequest) -> str:
    """What is told besides user-data; "" for nothing. Where that is a script of the pod's, what it does not replace is here."""
    document: dict[str, Any] = dict(_NETWORK_AT_EACH_BOOT) if request.kept_disk else {}
    if request.options.user_data_script:
        document |= _hostname_settings(request)
        files = {path: _File(content) for path, content in request.options.files.items()}
        if files and request.kept_disk:
            document["bootcmd"] = list(_file_scripts(files))
        elif files:
            document["write_files"] = [_entry(path, file) for path, file in files.items()]
    return _cloud_config(document) if document else ""


def _scripts(request: SeedRequest, hosts: bytes) -> Iterator[list[str] | str]:
    """What is run at each boot, not only at the first."""
    if request.kept_disk:
        yield from _file_scripts(_files(request, hosts))
    if request.sysctls:
        yield list(sysctls_command(request.sysctls))
    yield from (list(words) for words in _volume_commands(request))
    if request.interfaces and request.dns.servers and not _writes_resolver(request.options):
        yield list(resolver_command(request.dns))


def _file_scripts(files: Mapping[str, _File]) -> Iterator[str]:
    for path, file in files.items():
        yield _FILE_SCRIPT.format(
            directory=shlex.quote(posixpath.dirname(path)),
            path=shlex.quote(path),
            content=base64.b64encode(file.content).decode(),
            mode=file.mode,
        )


def _writes_resolver(options: VmOptions) -> bool:
    """Whether the guest's DHCP client does, or the pod's own user-data says what /etc/resolv.conf is to be."""
    asked = options.user_data
    return options.force_dhcp or any(key in asked for key in _RESOLVER_KEYS) or _RESOLVER in written_paths(asked)


def _volume_commands(request: SeedRequest) -> Iterator[tuple[str, ...]]:
    """What puts the pod's volumes where it expects them."""
    if mount := empty_disks.command(request.empty_disks):
        yield mount
    if request.blocks:
        yield guest_links_command(request.blocks)
    if _has_volumes(request):
        yield _mounting(request)


def _mount_script(request: SeedRequest) -> str:
    lines = [shlex.join(words) for words in _volume_commands(request)]
    return "\n".join(["#!/bin/sh", *(lines or [_NOTHING_TO_MOUNT])])


def _with_known_disks(user_data: Mapping[str, Any], blocks: Sequence[BlockDevice]) -> Mapping[str, Any]:
    """cloud-init writes `mounts` into /etc/fstab, and systemd waits in vain for a device that udev does not know, as the link at
    a block volume's devicePath is."""
    if not blocks or not isinstance(user_data.get("mounts"), list):
        return user_data
    known = guest_links_udev_names(blocks)
    return {**user_data, "mounts": [_with_known_disk(entry, known) for entry in user_data["mounts"]]}


def _with_known_disk(entry: Any, known: Mapping[str, str]) -> Any:
    if not (isinstance(entry, list) and entry and isinstance(entry[0], str)):
        return entry
    return [known.get(guest_links_normal(entry[0]), entry[0]), *entry[1:]]


def _has_volumes(request: SeedRequest) -> bool:
    return bool(request.volumes or request.memory_volumes) or any(not volume.written for volume in request.copies)


def _mounting(request: SeedRequest) -> tuple[str, ...]:
    """Without a word of what the copied ones hold: cloud-init keeps user-data on the guest's disk."""
    return command(request.volumes, request.copies, Copies.SEED, request.memory_volumes)


def _listed(found: Any) -> list[Any]:
    """Of a document that cloud-init would not take either, nothing."""
    return found if isinstance(found, list) else []


def _generated_user_data(request: SeedRequest, hosts: bytes) -> dict[str, Any]:
    """What the pod asks of the guest besides its annotations."""
    asked = request.options.user_data
    generated = {**_resolver_settings(request.dns, asked), **_hostname_settings(request)}
    files = _files(request, hosts)
    if HOSTS in files:
        generated["manage_etc_hosts"] = False  # images that have it on would write theirs over it
    if files and not request.kept_disk:
        generated["write_files"] = [_entry(path, file) for path, file in files.items()]
    return generated


def _files(request: SeedRequest, hosts: bytes) -> dict[str, _File]:
    """By path. They are this container's and its sandbox's, also where the instance is an earlier one's: there `write_files`,
    which is for once, would leave it the earlier one's. What the pod's own user-data writes is left to it."""
    files = {path: _File(content) for path, content in request.options.files.items()}
    if any(_volume_commands(request)):
        files[_MOUNT_FILE] = _File(f"{_mount_script(request)}\n".encode(), "0755")
    own = written_paths(request.options.user_data)
    files = {path: file for path, file in files.items() if path not in own}
    if request.envs:
        files[_ENVIRONMENT] = _File(b"".join(name.encode() + b"=" + value + b"\n" for name, value in request.envs))
    if hosts and not says_hosts(request.options):
        files[HOSTS] = _File(hosts)
    return files


def _entry(path: str, file: _File) -> dict[str, str]:
    """Of write_files. Base64, for neither the lines of variables nor what kubelet writes need be text."""
    content = base64.b64encode(file.content).decode()
    return {"path": path, "permissions": file.mode, "encoding": "b64", "content": content}


def _resolver_settings(dns: Dns, user_data: Mapping[str, Any]) -> dict[str, Any]:
    """The resolver's options (`ndots:5`), which neither network-config nor DHCP has a word for. Nothing without options, or if
    the pod's own user-data says what /etc/resolv.conf is to be.

    cloud-init writes them itself, with its module resolv_conf, where the distribution leaves /etc/resolv.conf to it: Red Hat's
    and SUSE's families, Alpine, Photon, Azure Linux. Elsewhere it says that the module is not for this distribution and does
    nothing.
    """
    if not dns.options or any(key in user_data for key in _RESOLVER_KEYS):
        return {}
    wanted: dict[str, Any] = {}
    if dns.servers:
        wanted["nameservers"] = list(dns.servers)
    if dns.searches:
        wanted["searchdomains"] = list(dns.searches)
    wanted["options"] = dict(_resolver_option(text) for text in dns.options)
    return {"manage_resolv_conf": True, "resolv_conf": wanted}


def _resolver_option(text: str) -> tuple[str, bool | int | str]:
    """cloud-init writes a flag for True, `NAME:VALUE` for all else."""
    name, colon, value = text.partition(":")
    if not colon:
        return name, True
    return name, int(value) if value.isascii() and value.isdecimal() else value
