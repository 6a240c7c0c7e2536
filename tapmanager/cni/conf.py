"""CNI network configurations, and what a plugin is given: standard input and environment. Pure.

Follows the CNI specification 1.1.0, sections 1 (configuration) and 3 (execution); 0.3.0 to 1.1.0 are spoken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tapmanager.fields import BadField, Json, as_object, objects, text
from tapmanager.pod import Pod

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
# A bare file name: it is looked up in the plugin directories, nowhere else.
_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_VERSIONS = frozenset({"0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"})
# Only from 0.4.0 on is DEL given the result of ADD.
_NO_RESULT_AT_DEL = frozenset({"0.1.0", "0.2.0", "0.3.0", "0.3.1"})
# Until 1.0.0 each address says its family.
_FAMILY_IN_RESULT = frozenset({"0.4.0"})
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

IFNAME = "eth0"


# IPAM that is a part of its plugin (azure-vnet), and no program of that name.
_BUILT_IN_IPAM = frozenset({"azure-cns"})


def ipam_program(plugin: Json) -> str:
    """What a plugin with that configuration runs for addresses, "" for nothing."""
    ipam = plugin.get("ipam")
    kind = ipam.get("type") if isinstance(ipam, dict) else None
    return kind if isinstance(kind, str) and kind not in _BUILT_IN_IPAM else ""


@dataclass(frozen=True, slots=True)
class NetworkConf:
    """A chain of plugins; `plugins` are their configurations as they stand in the file."""

    name: str
    version: str
    plugins: tuple[Json, ...]

    def types(self) -> tuple[str, ...]:
        return tuple(str(plugin["type"]) for plugin in self.plugins)

    def ipam_types(self) -> tuple[str, ...]:
        """The IPAM programs that the chain's plugins will run themselves."""
        return tuple(found for plugin in self.plugins if (found := ipam_program(plugin)))

    def to_json(self) -> Json:
        return {"cniVersion": self.version, "name": self.name, "plugins": list(self.plugins)}


def parse_conf(data: bytes | str) -> NetworkConf:
    """A .conf (one plugin) or .conflist (a chain). Raises ValueError (BadField is one) saying what is wrong."""
    try:
        raw = as_object(json.loads(data), "the file")
    except RecursionError as exc:
        raise BadField("the file: nested too deeply") from exc
    return conf_from_json(raw)


def conf_from_json(raw: Json) -> NetworkConf:
    """Raises BadField."""
    version = text(raw, "cniVersion", "network", "0.2.0") or "0.2.0"
    if version not in _VERSIONS:
        raise BadField(f"network.cniVersion: {version[:20]!r} is not among {', '.join(sorted(_VERSIONS))}")
    name = text(raw, "name", "network")
    if not _NAME.fullmatch(name):
        raise BadField(f"network.name: {name[:60]!r}: must be letters, digits, _ . -, beginning with a letter or digit")
    plugins = objects(raw, "plugins", "network") if "plugins" in raw else [raw]
    if not plugins:
        raise BadField("network.plugins: at least one plugin is required")
    for at, plugin in enumerate(plugins):
        kind = text(plugin, "type", f"network.plugins[{at}]")
        if not _TYPE.fullmatch(kind):
            raise BadField(f"network.plugins[{at}].type: {kind[:60]!r} is not a bare file name")
    return NetworkConf(name, version, tuple(plugins))


@dataclass(frozen=True, slots=True)
class CniAttachment:
    """What stays the same over all calls for one pod."""

    pod: Pod
    netns: str
    bin_dirs: tuple[str, ...]


def environment(command: str, attachment: CniAttachment) -> dict[str, str]:
    """All of a plugin's environment: nothing is inherited, so that no setting of ours changes a plugin."""
    pod = attachment.pod
    args = {
        "IgnoreUnknown": "1",
        "K8S_POD_NAMESPACE": pod.namespace,
        "K8S_POD_NAME": pod.name,
        "K8S_POD_INFRA_CONTAINER_ID": pod.sandbox,
        "K8S_POD_UID": pod.uid,
    }
    return {
        "PATH": _PATH,
        "CNI_COMMAND": command,
        "CNI_CONTAINERID": pod.sandbox,
        "CNI_NETNS": attachment.netns,
        "CNI_IFNAME": IFNAME,
        "CNI_ARGS": ";".join(f"{key}={value}" for key, value in args.items()),
        "CNI_PATH": ":".join(attachment.bin_dirs),
    }


def stdin(conf: NetworkConf, plugin: Json, pod: Pod, previous: Json | None) -> bytes:
    """The plugin's configuration as the specification derives it from the list's."""
    derived: dict[str, object] = {**plugin, "cniVersion": conf.version, "name": conf.name}
    derived.pop("prevResult", None)
    if previous is not None:
        derived["prevResult"] = previous
    runtime = _runtime_config(plugin, pod)
    if runtime:
        derived["runtimeConfig"] = runtime
    return json.dumps(derived).encode()


def _runtime_config(plugin: Json, pod: Pod) -> dict[str, object]:
    """Only what the plugin says it can do, and only what the pod asks for."""
    capabilities = plugin.get("capabilities")
    if not isinstance(capabilities, dict):
        return {}
    mappings = [
        {
            "hostPort": mapping.host_port,
            "containerPort": mapping.container_port,
            "protocol": mapping.protocol,
            "hostIP": mapping.host_ip,
        }
        for mapping in pod.port_mappings
        if mapping.host_port
    ]
    return {"portMappings": mappings} if mappings and capabilities.get("portMappings") is True else {}


def result_for_del(conf: NetworkConf, result: Json | None) -> Json | None:
    """In the configuration's version, which is the only one that the plugin then reads: a meta plugin prints its delegate's."""
    if conf.version in _NO_RESULT_AT_DEL or result is None:
        return None
    if "ip4" in result or "ip6" in result:  # of the oldest form
        return result
    ips = [{key: value for key, value in ip.items() if key != "version"} for ip in objects(result, "ips", "result")]
    if conf.version in _FAMILY_IN_RESULT:
        ips = [{**ip, "version": "6" if ":" in str(ip.get("address")) else "4"} for ip in ips]
    return {**result, "cniVersion": conf.version, **({"ips": ips} if ips else {})}


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A plugin's own error message; `code` is 0 if it gave none."""

    code: int
    text: str


def failure(stdout: bytes, stderr: bytes, status: int) -> PluginFailure:
    """The error of a plugin that ended with `status` (negative: a signal), whatever it wrote."""
    fallback = stderr.decode(errors="replace").strip()[-2000:] or stdout.decode(errors="replace").strip()[-2000:]
    ended = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    try:
        raw = json.loads(stdout)
    except (ValueError, RecursionError):
        raw = None
    if not isinstance(raw, Mapping):
        return PluginFailure(0, fallback or f"{ended}, without any output")
    parts: Sequence[object] = [raw.get("msg"), raw.get("details")]
    words = ": ".join(str(part).strip() for part in parts if part)
    code = raw.get("code")
    return PluginFailure(code if isinstance(code, int) else 0, words[:2000] or fallback or ended)
