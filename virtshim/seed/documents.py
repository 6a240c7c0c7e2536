"""A seed's documents (meta-data, user-data, network-config, vendor-data) in NoCloud's or the config drive's form. No I/O.

meta-data and network-config are JSON, which is also valid YAML: cloud-init reads it, and a small guest needs no YAML parser.
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
from virtshim.devices.guest_view import guest_links_command, guest_links_udev_names, normal_path
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

# OpenStack's config drive is for guests that look for one: cloudbase-init on Windows, and guests made for Virtlet. OpenStack's
# network document cannot express a gateway outside the NIC's subnet, so such a gateway is written with cloud-init's own keys,
# which cloud-init's `convert_net_json` passes through.
# https://docs.openstack.org/nova/latest/user/metadata.html

_CONFIG_DRIVE_LABEL: Final = "config-2"
# The directory of its files in the ISO.
_CONFIG_DRIVE_DIRECTORY: Final = "openstack/latest"
_ANY: Final = "0.0.0.0"  # noqa: S104  nothing is bound
# Keys that cloud-init passes through.
_PASSED_THROUGH: Final = ("pointopoint", "dns_nameservers", "dns_search")


def _config_drive_meta_data(generated: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`generated`: a NoCloud seed's meta-data. `own`: the pod's meta-data, which takes precedence."""
    keys = generated.get("public-keys", [])
    document = {
        "uuid": generated["instance-id"],
        "hostname": generated["local-hostname"],
        "name": generated["local-hostname"],
        **({"public_keys": {f"key-{number}": key for number, key in enumerate(keys)}} if keys else {}),
    }
    return {**document, **own}


def config_drive_network_data(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config`: a NoCloud seed's `network_config`."""
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
        # cloud-init turns "ipv6" into a type that not all of its renderers know.
        network = {"type": "static", "ip_address": str(address)}
    network |= {key: subnet[key] for key in _PASSED_THROUGH if key in subnet}
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
# DNS' limit for a name without dots, and the kernel's limit for a name with dots.
_MAX_LABEL: Final = 63
_MAX_HOSTNAME: Final = 64

# Virtlet's users put this token on a line of their script where the volumes are to be mounted, or use it as the whole script.
_MOUNT_TOKEN: Final = "@virtlet-mount-script@"  # noqa: S105 (a placeholder in a text)
_NOTHING_TO_MOUNT: Final = "# virtshim: no volumes to mount"
# Virtlet's path for the mount script, for the pods' scripts that call it.
_MOUNT_FILE: Final = "/etc/cloud/mount-volumes.sh"

# Virtlet's path for the container's environment variables.
_ENVIRONMENT: Final = "/etc/cloud/environment"

# By default cloud-init sets the network up once for each instance, but a kept disk gets new addresses with each sandbox. This is
# not in user-data, because that may be a script.
_NETWORK_AT_EACH_BOOT: Final[Mapping[str, Any]] = {"updates": {"network": {"when": ["boot"]}}}

_RESOLVER: Final = "/etc/resolv.conf"
# Keys of user-data that determine its content.
_RESOLVER_KEYS: Final = ("manage_resolv_conf", "resolv_conf")

# `echo` is built into the shell, so the kernel's limit on a program's arguments does not apply to the content.
_FILE_SCRIPT: Final = "(umask 022; mkdir -p {directory}; echo {content} | base64 -d > {path}; chmod {mode} {path})"

# Keys of user-data that determine the hostname.
_HOSTNAME_KEYS: Final = ("hostname", "fqdn", "prefer_fqdn_over_hostname", "preserve_hostname")

# libyaml's dumper is about ten times as fast, but PyYAML may have been built without it.
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


_NOCLOUD_LABEL: Final = "cidata"


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    mode: str = "0644"


@dataclass(frozen=True, slots=True)
class SeedDocuments:
    """`files`: path in the ISO -> text. Without a network document the guest uses DHCP."""

    label: str
    files: Mapping[str, str]


def seed_documents(request: SeedRequest, hosts: bytes = b"") -> SeedDocuments:
    """`hosts`: the content for /etc/hosts; b"" keeps the guest's own. Raises InvalidRequest if a document is too large."""
    network = None if request.options.force_dhcp else network_config(request.interfaces, request.dns)
    meta, user, vendor = _meta_data(request), _user_data(request, hosts), _vendor_data(request)
    if request.options.config_drive:
        documents = _config_drive(meta, request.options.meta_data, user, network, vendor)
    else:
        documents = _nocloud({**meta, **request.options.meta_data}, user, network, vendor)
    for name, text in documents.files.items():
        if len(text.encode()) > _MAX_BYTES:
            raise InvalidRequest(
                f"cloud-init {posixpath.basename(name)} is larger than {_MAX_BYTES} bytes; shorten the annotations, env, or "
                "the files of VirtletFilesFromDataSource"
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
    files = {"meta_data.json": _json(_config_drive_meta_data(meta, own)), "user_data": user}
    if network is not None:
        files["network_data.json"] = _json(config_drive_network_data(network))
    if vendor:
        files["vendor_data.json"] = _json({"cloud-init": vendor})
    return SeedDocuments(
        _CONFIG_DRIVE_LABEL, {f"{_CONFIG_DRIVE_DIRECTORY}/{name}": text for name, text in files.items()}
    )


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _meta_data(request: SeedRequest) -> dict[str, Any]:
    """cloud-init runs its once-per-instance modules whenever `instance-id` is new. So the id identifies the disk: a new
    disk needs those modules, but a kept disk already has its host keys and has run its first commands."""
    generated: dict[str, Any] = {
        "instance-id": f"i-{request.kept_disk or request.container.short}",
        "local-hostname": _hostname(request),
    }
    if request.options.ssh_keys:
        generated["public-keys"] = list(request.options.ssh_keys)
    return generated


def _hostname(request: SeedRequest) -> str:
    """Shortened if necessary: a pod's name may be longer than Linux allows for a hostname."""
    name = request.hostname or request.pod.name
    return name[: _MAX_HOSTNAME if "." in name[:_MAX_LABEL] else _MAX_LABEL].rstrip("-.")


def _hostname_settings(request: SeedRequest) -> dict[str, Any]:
    """Makes the whole of a name with dots the hostname, as in a container. By default cloud-init takes only the part before the
    first dot. `prefer_fqdn_over_hostname` alone is not enough: cloud-init sets that part before it reads user-data, and sets
    the name again only if hostname or fqdn changed."""
    name = _hostname(request)
    pods_keys = {*request.options.user_data, *request.options.meta_data}
    if "." not in name or pods_keys & {*_HOSTNAME_KEYS, "local-hostname"}:
        return {}
    return {"hostname": name, "fqdn": name, "prefer_fqdn_over_hostname": True}


def _user_data(request: SeedRequest, hosts: bytes) -> str:
    """A pod's script replaces the generated user-data."""
    options = request.options
    if options.user_data_script:
        return options.user_data_script.replace(_MOUNT_TOKEN, _mount_script(request))
    document = merged(_with_known_disks(options.user_data, request.blocks), _generated_user_data(request, hosts))
    if scripts := list(_scripts(request, hosts)):
        document["bootcmd"] = [*scripts, *_listed(document.get("bootcmd"))]
    return _cloud_config(document)


def _cloud_config(document: Mapping[str, Any]) -> str:
    # ASCII only, because PyYAML does not read back every character that it writes unescaped (U+0085).
    return "#cloud-config\n" + yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=120)


def _vendor_data(request: SeedRequest) -> str:
    """ "" if there is nothing to say. If user-data is the pod's script, hostname and files go here."""
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
    """The commands for each boot, not only the first."""
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
    """Whether the guest's DHCP client or the pod's user-data writes /etc/resolv.conf."""
    asked = options.user_data
    return options.force_dhcp or any(key in asked for key in _RESOLVER_KEYS) or _RESOLVER in written_paths(asked)


def _volume_commands(request: SeedRequest) -> Iterator[tuple[str, ...]]:
    """The commands that put the pod's volumes in their places."""
    if mount := empty_disks.command(request.empty_disks):
        yield mount
    if request.blocks:
        yield guest_links_command(request.blocks)
    if _has_volumes(request):
        yield _mount_command(request)


def _mount_script(request: SeedRequest) -> str:
    lines = [shlex.join(words) for words in _volume_commands(request)]
    return "\n".join(["#!/bin/sh", *(lines or [_NOTHING_TO_MOUNT])])


def _with_known_disks(user_data: Mapping[str, Any], blocks: Sequence[BlockDevice]) -> Mapping[str, Any]:
    """Replaces block volumes' devicePaths in `mounts` by names that udev knows. cloud-init writes `mounts` to /etc/fstab, and
    systemd would wait for ever for a devicePath, because udev does not know that link."""
    if not blocks or not isinstance(user_data.get("mounts"), list):
        return user_data
    known = guest_links_udev_names(blocks)
    return {**user_data, "mounts": [_with_known_disk(entry, known) for entry in user_data["mounts"]]}


def _with_known_disk(entry: Any, known: Mapping[str, str]) -> Any:
    if not (isinstance(entry, list) and entry and isinstance(entry[0], str)):
        return entry
    return [known.get(normal_path(entry[0]), entry[0]), *entry[1:]]


def _has_volumes(request: SeedRequest) -> bool:
    return bool(request.volumes or request.memory_volumes) or any(not volume.written for volume in request.copies)


def _mount_command(request: SeedRequest) -> tuple[str, ...]:
    """Contains nothing of the copied volumes' content, because cloud-init keeps user-data on the guest's disk."""
    return command(request.volumes, request.copies, Copies.SEED, request.memory_volumes)


def _listed(found: Any) -> list[Any]:
    """[] if `found` is no list: cloud-init would reject such a document too."""
    return found if isinstance(found, list) else []


def _generated_user_data(request: SeedRequest, hosts: bytes) -> dict[str, Any]:
    """The settings that come from the pod but not from its user-data annotations."""
    asked = request.options.user_data
    generated = {**_resolver_settings(request.dns, asked), **_hostname_settings(request)}
    files = _files(request, hosts)
    if HOSTS in files:
        generated["manage_etc_hosts"] = False  # otherwise some images' cloud-init would overwrite the file
    if files and not request.kept_disk:
        generated["write_files"] = [_entry(path, file) for path, file in files.items()]
    return generated


def _files(request: SeedRequest, hosts: bytes) -> dict[str, _File]:
    """The files to write, by path; without those that the pod's own user-data writes. On a kept disk they must be written at each
    boot, because `write_files` runs once for each instance and would leave the files of an earlier container."""
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
    """An entry of `write_files`. Base64, because variables and kubelet's hosts file may not be valid text."""
    content = base64.b64encode(file.content).decode()
    return {"path": path, "permissions": file.mode, "encoding": "b64", "content": content}


def _resolver_settings(dns: Dns, user_data: Mapping[str, Any]) -> dict[str, Any]:
    """The resolver's options (`ndots:5`), which neither network-config nor DHCP can express. {} without options, or if the pod's
    user-data configures the resolver.

    cloud-init's module resolv_conf writes them in distributions that leave /etc/resolv.conf to it: Red Hat's and SUSE's
    families, Alpine, Photon, Azure Linux. Elsewhere the module logs that it does not support the distribution and does nothing.
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
    """cloud-init writes `NAME` for True and `NAME:VALUE` for any other value."""
    name, colon, value = text.partition(":")
    if not colon:
        return name, True
    return name, int(value) if value.isascii() and value.isdecimal() else value
