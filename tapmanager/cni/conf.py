"""CNI network configurations, and what a plugin is given: standard input and environment. Pure.

Follows the CNI specification 1.1.0, sections 1 (configuration) and 3 (execution); 0.3.0 to 1.1.0 are spoken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tapmanager.cni import versions
from tapmanager.fields import BadField, Json, as_object, objects, text
from tapmanager.pod import Bandwidth, Pod

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
# A bare file name: it is looked up in the plugin directories, nowhere else.
_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_LEAST_BURST = 64 * 1024 * 8
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
    """A chain of plugins; `plugins` are their configurations as they stand in the file. `without_gc`: the network's author wants
    none."""

    name: str
    version: str
    plugins: tuple[Json, ...]
    without_gc: bool = False

    @property
    def has_status(self) -> bool:
        """And GC: its plugins are of CNI 1.1."""
        return versions.has_status(self.version)

    def can(self, capability: str) -> bool:
        """Whether a plugin of it wants to know that of pods."""
        told = (plugin.get("capabilities") for plugin in self.plugins)
        return any(isinstance(one, dict) and one.get(capability) is True for one in told)

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
    version = versions.chosen(raw)
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
    return NetworkConf(name, version, tuple(plugins), raw.get("disableGC") is True)


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


def environment_of_all(command: str, bin_dirs: Sequence[str]) -> dict[str, str]:
    """For what concerns no single attachment: STATUS and GC."""
    return {"PATH": _PATH, "CNI_COMMAND": command, "CNI_PATH": ":".join(bin_dirs)}


def stdin_of_all(conf: NetworkConf, plugin: Json, sandboxes: Sequence[str] | None = None) -> bytes:
    """For STATUS; with `sandboxes`, whose attachments are all that there are, for GC."""
    derived: dict[str, object] = {**plugin, "cniVersion": conf.version, "name": conf.name}
    if sandboxes is not None:
        derived["cni.dev/valid-attachments"] = [{"containerID": one, "ifname": IFNAME} for one in sandboxes]
    return json.dumps(derived).encode()


def stdin(conf: NetworkConf, plugin: Json, pod: Pod, previous: Json | None) -> bytes:
    """The plugin's configuration as the specification derives it from the list's."""
    derived: dict[str, object] = {**plugin, "cniVersion": conf.version, "name": conf.name}
    derived.pop("prevResult", None)
    if previous is not None:
        derived["prevResult"] = versions.converted(previous, conf.version)
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
    wanted = {"portMappings": mappings, "bandwidth": _bandwidth(pod.bandwidth)}
    return {name: value for name, value in wanted.items() if value and capabilities.get(name) is True}


def _bandwidth(asked: Bandwidth) -> dict[str, int]:
    """Bits a second, and bits that may come at once: a tenth of a second's, but never less than one large segment."""
    found: dict[str, int] = {}
    for direction, rate in (("ingress", asked.ingress), ("egress", asked.egress)):
        if rate:
            found |= {f"{direction}Rate": rate, f"{direction}Burst": max(rate // 10, _LEAST_BURST)}
    return found


def result_for_del(conf: NetworkConf, result: Json | None) -> Json | None:
    """What DEL is told of ADD, None for nothing."""
    return result if versions.has_result_at_del(conf.version) else None


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
