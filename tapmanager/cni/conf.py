"""CNI network configurations, and the standard input and environment of plugins. Pure.

Follows the CNI specification 1.1.0, sections 1 (configuration) and 3 (execution). Supports versions 0.3.0 to 1.1.0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tapmanager.fields import BadField, Json, as_object, objects, text, texts
from tapmanager.pod import Bandwidth, Pod

# CNI versions: the version that a configuration uses, and the conversion of results between versions.
#
# A chain uses one version, and its plugins read no other. But a plugin may print a result of another version: a meta plugin
# prints the result of its delegate. Until 0.2.0 a result has one address of each family (`ip4`, `ip6`). Later ones have a list
# (`ips`), whose items have a `version`, 4 or 6, until 0.4.0.

_IN_ORDER = ("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
_FAMILY_BY_NAME = frozenset({"0.1.0", "0.2.0"})
_FAMILY_IN_ADDRESS = frozenset({"0.3.0", "0.3.1", "0.4.0"})
# The version of a file that names none.
_UNSAID = "0.2.0"

_FAMILIES = (("ip4", "4"), ("ip6", "6"))


def _chosen_version(raw: Json) -> str:
    """The newest version that both the network (`cniVersion`, and `cniVersions` of CNI 1.1) and tapmanager support. Raises
    BadField."""
    several = texts(raw, "cniVersions", "network")
    said = (*several, text(raw, "cniVersion", "network", "") or (None if several else _UNSAID))
    spoken = [version for version in _IN_ORDER if version in said]
    if not spoken:
        where = "cniVersions" if several else "cniVersion"
        listed = ", ".join(repr(version[:20]) for version in said[:9] if version)
        raise BadField(f"network.{where}: {listed} is not among {', '.join(_IN_ORDER)}")
    return spoken[-1]


def converted(result: Json, version: str) -> Json:
    """The result in the form of that version. An invalid result stays unchanged, so that its reader reports the fault."""
    if version in _FAMILY_BY_NAME:
        found = result if _is_by_family(result) else _by_family(result)
    else:
        found = _as_list(result) if _is_by_family(result) else result
        ips = found.get("ips")
        if isinstance(ips, list) and all(isinstance(ip, dict) for ip in ips):
            found = {**found, "ips": [_address(ip, version) for ip in ips]}
    return {**found, "cniVersion": version}


def _is_by_family(result: Json) -> bool:
    return "ip4" in result or "ip6" in result


def _address(ip: Mapping[str, object], version: str) -> Json:
    plain = {key: value for key, value in ip.items() if key != "version"}
    return {**plain, "version": _family(ip)} if version in _FAMILY_IN_ADDRESS else plain


def _family(item: Mapping[str, object], key: str = "address") -> str:
    return "6" if ":" in str(item.get(key)) else "4"


def _as_list(result: Json) -> Json:
    """Converts to a list. A route without a gateway used the gateway of its family's address."""
    ips: list[Json] = []
    routes: list[Json] = []
    for name, _ in _FAMILIES:
        item = result.get(name)
        if isinstance(item, dict):
            through = {"gateway": item["gateway"]} if item.get("gateway") else {}
            implied = {"gw": item["gateway"]} if through else {}
            ips.append({"address": item.get("ip"), **through})
            routes += [{**implied, **route} for route in _objects(item.get("routes"))]
    rest = {key: value for key, value in result.items() if key not in ("ip4", "ip6")}
    return {**rest, "ips": ips, "routes": routes}


def _by_family(result: Json) -> Json:
    """Converts to the first address of each family, and the routes."""
    found = {key: value for key, value in result.items() if key not in ("ips", "routes", "interfaces")}
    for name, family in _FAMILIES:
        first = next((ip for ip in _objects(result.get("ips")) if _family(ip) == family), None)
        if first is not None:
            through = {"gateway": first["gateway"]} if first.get("gateway") else {}
            routes = [route for route in _objects(result.get("routes")) if _family(route, "dst") == family]
            found[name] = {"ip": first.get("address"), **through, **({"routes": routes} if routes else {})}
    return found


def _objects(value: object) -> Sequence[Json]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
# A bare file name, because plugins are searched for only in the plugin directories.
_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_LEAST_BURST = 64 * 1024 * 8
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

IFNAME = "eth0"


# IPAM types that are part of their plugin (azure-vnet), not separate programs.
_BUILT_IN_IPAM = frozenset({"azure-cns"})


def ipam_program(plugin: Json) -> str:
    """The IPAM program that a plugin with this configuration runs; "" for none."""
    ipam = plugin.get("ipam")
    kind = ipam.get("type") if isinstance(ipam, dict) else None
    return kind if isinstance(kind, str) and kind not in _BUILT_IN_IPAM else ""


@dataclass(frozen=True, slots=True)
class NetworkConf:
    """A chain of plugins. `plugins`: their configurations, unchanged from the file. `without_gc`: the network's author disabled
    GC."""

    name: str
    version: str
    plugins: tuple[Json, ...]
    without_gc: bool = False

    @property
    def has_status(self) -> bool:
        """Whether the plugins support STATUS and GC, which CNI 1.1 added."""
        return self.version == _IN_ORDER[-1]

    def can(self, capability: str) -> bool:
        """Whether a plugin of the chain has this capability."""
        declared = (plugin.get("capabilities") for plugin in self.plugins)
        return any(isinstance(one, dict) and one.get(capability) is True for one in declared)

    def types(self) -> tuple[str, ...]:
        return tuple(str(plugin["type"]) for plugin in self.plugins)

    def ipam_types(self) -> tuple[str, ...]:
        """The IPAM programs that the chain's plugins run."""
        return tuple(found for plugin in self.plugins if (found := ipam_program(plugin)))

    def to_json(self) -> Json:
        return {"cniVersion": self.version, "name": self.name, "plugins": list(self.plugins)}


# Of a pod whose network another runtime made.
NO_CNI = NetworkConf("", "", ())


def parse_conf(data: bytes | str) -> NetworkConf:
    """Parses a .conf (one plugin) or a .conflist (a chain). Raises ValueError, of which BadField is one, with the fault."""
    try:
        raw = as_object(json.loads(data), "the file")
    except RecursionError as exc:
        raise BadField("the file: nested too deeply") from exc
    return conf_from_json(raw)


def conf_from_json(raw: Json) -> NetworkConf:
    """Raises BadField."""
    version = _chosen_version(raw)
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
    """The values that are the same in all calls for one pod."""

    pod: Pod
    netns: str
    bin_dirs: tuple[str, ...]


def environment(command: str, attachment: CniAttachment) -> dict[str, str]:
    """The complete environment of a plugin. Nothing is inherited, so tapmanager's environment cannot affect plugins."""
    pod = attachment.pod
    args = {
        "IgnoreUnknown": "1",
        "K8S_POD_NAMESPACE": pod.namespace,
        "K8S_POD_NAME": pod.name,
        "K8S_POD_INFRA_CONTAINER_ID": pod.sandbox,
        "K8S_POD_UID": pod.uid,
    }
    if mac := pod.macs.get(IFNAME):
        # For plugins that pin the link's MAC without the capability: bridge with macspoofchk. Others ignore it.
        args["MAC"] = mac
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
    """The environment of STATUS and GC, which concern no single attachment."""
    return {"PATH": _PATH, "CNI_COMMAND": command, "CNI_PATH": ":".join(bin_dirs)}


def stdin_of_all(conf: NetworkConf, plugin: Json, sandboxes: Sequence[str] | None = None) -> bytes:
    """Standard input of STATUS; with `sandboxes`, which are all valid attachments, that of GC."""
    derived: dict[str, object] = {**plugin, "cniVersion": conf.version, "name": conf.name}
    if sandboxes is not None:
        derived["cni.dev/valid-attachments"] = [{"containerID": one, "ifname": IFNAME} for one in sandboxes]
    return json.dumps(derived).encode()


def stdin(conf: NetworkConf, plugin: Json, pod: Pod, previous: Json | None) -> bytes:
    """The plugin's configuration, derived from the list's as in the specification."""
    derived: dict[str, object] = {**plugin, "cniVersion": conf.version, "name": conf.name}
    derived.pop("prevResult", None)
    if previous is not None:
        derived["prevResult"] = converted(previous, conf.version)
    runtime = _runtime_config(plugin, pod)
    if runtime:
        derived["runtimeConfig"] = runtime
    return json.dumps(derived).encode()


def _runtime_config(plugin: Json, pod: Pod) -> dict[str, object]:
    """Only values that the plugin has capabilities for, and that the pod asks for."""
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
    # A plugin that pins MACs then pins the guest's.
    wanted = {
        "portMappings": mappings,
        "bandwidth": _bandwidth(pod.bandwidth),
        "mac": pod.macs.get(IFNAME, ""),
        "ips": list(pod.addresses.get(IFNAME, ())),
    }
    return {name: value for name, value in wanted.items() if value and capabilities.get(name) is True}


def _bandwidth(asked: Bandwidth) -> dict[str, int]:
    """Rates in bits per second, and bursts in bits: a tenth of a second's amount, but at least one large segment."""
    found: dict[str, int] = {}
    for direction, rate in (("ingress", asked.ingress), ("egress", asked.egress)):
        if rate:
            found |= {f"{direction}Rate": rate, f"{direction}Burst": max(rate // 10, _LEAST_BURST)}
    return found


def result_for_del(conf: NetworkConf, result: Json | None) -> Json | None:
    """The result of ADD for DEL, which gets it from CNI 0.4.0 on; else None."""
    return result if _IN_ORDER.index(conf.version) >= _IN_ORDER.index("0.4.0") else None


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A plugin's error message. `code` is 0 if the plugin gave none."""

    code: int
    text: str


def failure(stdout: bytes, stderr: bytes, status: int) -> PluginFailure:
    """The error of a plugin that ended with `status` (negative: a signal), from any output."""
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
