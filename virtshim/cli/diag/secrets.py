"""Removes secrets from an archive, in three ways. Definitions and configurations lose fields whose names suggest a secret.
Records keep only fields that are listed as harmless. The removed values, and all text that looks like a secret, are then
removed from all other text, above all from logs."""

from __future__ import annotations

import base64
import binascii
import contextlib
import ipaddress
import itertools
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from xml.etree.ElementTree import Element

from virtshim.vm.xml_text import parsed, text_of

# Harmless fields of the records' dataclasses, and columns. A new field is removed until it is added here.
KEPT: Final = frozenset(
    (
        "added", "address", "addresses", "adopted", "attempt", "beside_pod", "blocks", "bus", "cdi", "cgroup_parent", "changed",
        "changed_overhead", "changed_resources", "checkpointing", "claim", "claims", "code", "command_begun", "config",
        "container_id", "container_path", "container_port", "copied", "copies", "cpu_period", "cpu_quota", "cpu_shares",
        "cpuset_cpus", "cpuset_mems", "created_at", "destination", "device", "devices", "digest", "disk_bus", "dns",
        "boot", "domain", "domain_uuid", "driver", "dropped", "empty_disks", "ending", "error", "exit", "family",
        "fatal", "finished_at",
        "follows", "format", "frozen", "function", "gateway", "gid", "granted", "group", "groups", "guest", "host",
        "host_ip", "host_path", "host_port", "hostname", "hugepage_limits", "id", "identity", "image", "image_config", "inode",
        "image_id", "image_ref", "image_sub_path", "interfaces", "ip", "ipc", "ips", "is_file", "is_volume", "key", "kind",
        "labels",
        "log_directory", "log_file", "log_path", "mac", "max_memory_bytes", "max_vcpus", "memory_bytes", "memory_volumes",
        "metric", "mode",
        "memory_limit_bytes", "memory_swap_limit_bytes", "mounts", "mounts_confirmed",
        "mtu", "name", "namespace", "namespaces", "netns", "not_given",
        "network", "network_released", "no_new_privs", "oom_score_adj", "options", "overhead", "own_groups",
        "page_bytes", "passthrough", "path", "paused",
        "permissions", "phase", "pid", "pinned", "place", "pod_disk", "port_mappings", "priority",
        "protocol", "pulled_at", "readonly", "readonly_root", "reason", "recursive_read_only", "renewed",
        "repo_digests", "reset_failed_at", "resizing", "resource", "resources", "root_disks", "routes", "rules",
        "runtime_handler",
        "sandbox_id", "searches", "servers", "size", "size_bytes", "slot", "source", "started_at", "stdin",
        "stdin_once", "stop_asked", "stop_signal", "supplementary", "sysctls", "table", "table_routes", "tags",
        "passt_uid", "taken", "target", "text", "tmpfs", "tree", "trouble", "troubles", "tty", "uid",
        "unified", "unmounted", "user", "user_image", "uuid", "value", "vcpus", "version_num", "virtual_size",
        "volumes", "working_dir", "written",
        "vm", "save_on_stop", "state_volume", "saving", "renewing", "known_as", "arriving", "moved_to", "restore_from",
        "warm_start", "warm_started",
    )
)  # fmt: skip
# Fields that are removed, because people may write secrets into them.
WITHHELD: Final = frozenset(
    (
        "annotations", "args", "cmd", "command", "entrypoint", "env", "envs", "fetch_key", "message", "profile",
    )
)  # fmt: skip
# Mappings whose keys are other people's names and whose values are shown.
MAPS: Final = frozenset(
    (
        "hugepage_limits", "labels", "root_disks", "sysctls", "unified",
    )
)  # fmt: skip
# Harmless annotations: each holds a number, a word, a size or a path.
PLAIN_ANNOTATIONS: Final = frozenset(
    (
        "VirtletCPUModel", "VirtletChown9pfsMounts", "VirtletCloudInitImageType", "VirtletCloudInitUserDataOverwrite",
        "VirtletDiskDriver", "VirtletForceDHCPNetworkConfig", "VirtletRootVolumeSize", "VirtletSystemUUID",
        "VirtletVCPUCount", "io.kubernetes.container.hash", "io.kubernetes.container.restartCount",
        "io.kubernetes.container.terminationMessagePath", "io.kubernetes.container.terminationMessagePolicy",
        "io.kubernetes.pod.terminationGracePeriod", "kubernetes.io/config.seen", "kubernetes.io/config.source",
        "kubernetes.io/target-runtime", "virtshim.io/command", "virtshim.io/disk-images", "virtshim.io/disks",
        "virtshim.io/exec-ports", "virtshim.io/forward", "virtshim.io/image-config", "virtshim.io/kubelet-volumes",
        "virtshim.io/max-memory", "virtshim.io/max-vcpus", "virtshim.io/network-filter", "virtshim.io/nic-queues",
        "virtshim.io/profile", "virtshim.io/root-disk", "virtshim.io/sysprep",
        "virtshim.io/clock", "virtshim.io/cpu-topology", "virtshim.io/disk-cache", "virtshim.io/disk-io",
        "virtshim.io/firmware", "virtshim.io/hyperv", "virtshim.io/initrd", "virtshim.io/kernel",
        "virtshim.io/nic-model", "virtshim.io/tablet", "virtshim.io/tpm",
        "virtshim.io/video", "virtshim.io/watchdog",
        "virtshim.io/root-disk-on-image-change", "virtshim.io/vnc",
    )
)  # fmt: skip


REMOVED: Final = "[removed]"

_WORD: Final = (
    r"passw|passphrase|secret|token|credential|\bcreds?\b|api[-_]?key|access[-_]?key|private[-_]?key|fetch[-_]?key"
    r"|authorization"
)
_NAME: Final = re.compile(rf"{_WORD}|\bauths?\b|headers|key[-_]?data|user[-_]?data", re.IGNORECASE)
_MANIFEST: Final = "kubectl.kubernetes.io/last-applied-configuration"
_ENVIRONMENT: Final = frozenset(("env", "envs", "environment"))

_I: Final = re.IGNORECASE
# NAME=value and name: value, also in JSON within a string.
_NAMED: Final = rf"(?=[pstcaf])(?:{_WORD})[\w.-]{{0,40}}(?:\\?[\"'])?\s*[:=]\s*"


def _without_key(lines: re.Match[str]) -> str:
    return REMOVED if lines[1] else lines[0]


# (pattern, replacement). Logs are long and their text comes from outside, so each pattern takes a bounded number of steps per
# character.
_SHAPES: Final[tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]] = tuple(
    (re.compile(pattern, flags), instead)
    for pattern, flags, instead in (
        (r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)", re.DOTALL, REMOVED),
        # A key whose beginning is cut off. Its lines match whatever follows, so that no line is scanned twice.
        (r"(?:^[\w+/=]{20,}+\n)++(-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----)?", re.MULTILINE, _without_key),
        (r"\b(?:ssh-\w{1,60}|ecdsa-sha2-[\w-]{1,60}|sk-[\w@.-]{1,60}) AAAA[\w+/=]+(?: [^\s\"'\\]+)?", 0, REMOVED),
        (r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*", 0, REMOVED),
        (r"(\b(?:Bearer|Basic|Digest) )[\w.~+/=-]{6,}", 0, rf"\1{REMOVED}"),
        (r"(://)[^/\s@\"']+@", 0, rf"\1{REMOVED}@"),
        # Tried once per word, up to its first colon, because a hostile line may be long.
        (r"(?<![^\s@/\"'])(?>[^\s@/\"']+?:)[^\s@/\"']+@(?=[\w.-]+(?::\d+)?/)", 0, f"{REMOVED}@"),
        (r"([?&](?:[\w-]*(?:signature|token|secret|password|credential)|sig|key)=)[^&\s\"']+", _I, rf"\1{REMOVED}"),
        (
            (
                rf"({_NAMED})(?:(\\?([\"']))(?:\\.|(?!\3)[^\\])+"
                r"|(?!null|true|false|none|\d{1,4}\b|\[removed)[^\s\"'\\,;(){}\[\]]+)"
            ),
            _I,
            rf"\1\2{REMOVED}",
        ),
        (rf"(\s--?[\w-]{{0,40}}(?:{_WORD})[\w-]{{0,40}} )(?!-)[^\s\"']+", _I, rf"\1{REMOVED}"),
    )
)

# Shorter and common values are not secrets; removing them would damage all other text.
_SHORTEST: Final = 8
# Limits on learnt secrets: of one record or file, of one tenant, and in total. Pods' authors choose the values, and must not
# use up the space of other tenants.
_MOST_OF_ONE: Final = 500
_MOST_OF_TENANT: Final = 5_000
_MOST: Final = 20_000
# kubelet sets this label itself and overwrites what a pod's author wrote.
_NAMESPACE_LABEL: Final = "io.kubernetes.pod.namespace"
_COMMON: Final = frozenset(("localhost", "#cloud-config", "/dev/termination-log", "default", "Default"))


_FULL: Final = (
    "a record or namespace held more secrets than can be searched for in other text; "
    "read the archive with care before you share it"
)


class Secrets:
    """Shared by all collectors, so that a value that one removes is removed from the files of all. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The values of each tenant, in the order of arrival.
        self._values: dict[str, dict[str, None]] = {}
        self._of_one = threading.local()
        self._records = itertools.count()
        self._was_full = False

    def learn(self, value: str) -> None:
        """Remembers a removed value: the whole, its lines, and its words if they look unique."""
        found = {part for part in (value, json.dumps(value)[1:-1], *value.splitlines()) if _is_telling(part.strip())}
        found |= {
            word for word in re.split(r"[\s\"',=]+", value) if _is_telling(word) and re.search(r"[^a-z:.-]", word)
        }
        with self._lock:
            known = self._values.setdefault(getattr(self._of_one, "tenant", ""), {})
            new = {stripped for part in found if (stripped := part.strip()) not in known}
            for part in sorted(new, key=len, reverse=True):
                if self._left() <= 0 or len(known) >= _MOST_OF_TENANT:
                    self._was_full = True
                    return
                self._of_one.left = self._left() - 1
                known[part] = None

    def _left(self) -> int:
        return int(getattr(self._of_one, "left", _MOST))

    @contextlib.contextmanager
    def one_record(self, document: object = None) -> Iterator[None]:
        """Values that this thread learns within the block belong to one pod, and count against the limit of one pod. If
        `document` names a namespace, they also count against that namespace's limit."""
        before = self._left(), getattr(self._of_one, "tenant", "")
        tenant = tenant_of(document)
        self._of_one.left = _MOST_OF_ONE
        self._of_one.tenant = f"namespace {tenant}" if tenant else f"record {next(self._records)}"
        try:
            yield
        finally:
            self._of_one.left, self._of_one.tenant = before

    @property
    def trouble(self) -> str:
        """The warning for the summary; "" if there is none."""
        with self._lock:
            is_cut = sum(map(len, self._values.values())) > _MOST
            return _FULL if self._was_full or is_cut else ""

    def _known(self) -> list[str]:
        """The values to search for: one of each tenant in turn, up to the limit. A tenant with few values gets all of them
        searched for."""
        turns = itertools.zip_longest(*self._values.values())
        in_turn = (value for turn in turns for value in turn if value is not None)
        return sorted(set(itertools.islice(in_turn, _MOST)), key=len, reverse=True)

    def cleaned(self, text: str) -> str:
        """The text without learnt values and without what looks like a secret. Call it when all collectors have ended."""
        with self._lock:
            known = self._known()
        for value in known:
            if value in text:
                text = text.replace(value, REMOVED)
        for shape, instead in _SHAPES:
            text = shape.sub(instead, text)
        return text

    def record(self, document: object) -> object:
        """A record of the state database as JSON, without the fields that are not known to be harmless."""
        match document:
            case dict():
                return {name: self._field(name, value) for name, value in document.items()}
            case list():
                return [self.record(item) for item in document]
            case _:
                return document

    def _field(self, name: str, value: object) -> object:
        if name in ("annotations", "profile") and isinstance(value, dict):
            return self.annotations(value)
        if name in MAPS:
            return value
        if name in _ENVIRONMENT:
            return self.environment(value)
        return self.record(value) if name in KEPT else self.withheld(value)

    def annotations(self, values: Mapping[str, Any]) -> dict[str, object]:
        return {name: self._annotation(name, value) for name, value in values.items()}

    def _annotation(self, name: str, value: object) -> object:
        if name in PLAIN_ANNOTATIONS:
            return value
        if name == _MANIFEST and isinstance(value, str):
            self.configuration(_json(value))  # most of its words are common, so only its secrets are learnt
            return f"{REMOVED} {len(value)} characters"
        return self.withheld(value)

    def withheld(self, value: object) -> object:
        """Replaces the value by its size, and learns its texts."""
        match value:
            case None | bool() | "" | []:
                return value
            case str():
                self._learn_encoded(value)
                return f"{REMOVED} {len(value)} characters"
            case list() | tuple():
                return [self.withheld(item) for item in value]
            case dict():
                return {str(name): self.withheld(item) for name, item in value.items()}
            case _:
                return REMOVED

    def environment(self, value: object) -> object:
        """Environment variables, in any notation, with their names and without their values."""
        match value:
            case list():
                return [self._variable(item) for item in value]
            case _:
                return self.withheld(value)

    def _variable(self, item: object) -> object:
        match item:
            case [str() as variable, text]:
                return [variable, self.withheld(text)]
            case str() if "=" in item:
                variable, _, text = item.partition("=")
                self._learn_encoded(text)
                return f"{variable}={REMOVED}"
            case dict():
                return {name: text if name in ("name", "key") else self.withheld(text) for name, text in item.items()}
            case _:
                return self.withheld(item)

    def _learn_encoded(self, value: str) -> None:
        """Also learns the decoded value of base64, in which records hold bytes."""
        self.learn(value)
        with contextlib.suppress(binascii.Error, ValueError, UnicodeDecodeError):
            self.learn(base64.b64decode(value, validate=True).decode())

    def configuration(self, value: object) -> object:
        """JSON from outside, without fields named like a secret, environments and annotations."""
        match value:
            case dict():
                return {name: self._entry(str(name), item) for name, item in value.items()}
            case list():
                return [self.configuration(item) for item in value]
            case str() if value[:1] in ("{", "[") and (inner := _json(value)) is not None:
                return json.dumps(self.configuration(inner))
            case _:
                return value

    def answer(self, value: Mapping[str, object]) -> dict[str, object]:
        """Like `configuration`, but each item of a list counts as one record."""
        found: dict[str, object] = {}
        for name, items in value.items():
            if isinstance(items, list):
                found[name] = [self._one(item) for item in items]
            else:
                found[name] = self._entry(name, items)
        return found

    def _one(self, item: object) -> object:
        with self.one_record(item):
            return self.configuration(item)

    def _entry(self, name: str, item: object) -> object:
        if name == "annotations" and isinstance(item, dict):
            return self.annotations(item)
        if name in _ENVIRONMENT:
            return self.environment(item)
        said = name in WITHHELD and not isinstance(item, str)  # a string under this name is a program's keyword
        return self.withheld(item) if said or _NAME.search(name) else self.configuration(item)

    def definition(self, xml: bytes) -> str:
        """XML of a domain, or of libvirt's status of one, without secrets. Raises ValueError for text that is not XML."""
        root = parsed(xml.decode())
        for element in root.iter():
            name = element.tag.rpartition("}")[2]
            if name == "env" and not _is_our_variable(str(element.get("name"))):
                self._remove_attribute(element, "value")
            elif name in ("record", "description") or (name == "entry" and element.get("name") != "uuid"):
                self._remove_text(element)
            for attribute in [attribute for attribute in element.attrib if _NAME.search(attribute)]:
                self._remove_attribute(element, attribute)
        return text_of(root)

    def _remove_attribute(self, element: Element, name: str) -> None:
        if value := element.get(name):
            self.learn(value)
            element.set(name, REMOVED)

    def _remove_text(self, element: Element) -> None:
        if element.text and element.text.strip():
            self.learn(element.text)
            element.text = REMOVED


def tenant_of(document: object) -> str:
    """The namespace of the pod that a record or an item of an answer belongs to; "" if it names none."""
    if isinstance(document, list):
        return next((name for item in document if (name := tenant_of(item))), "")
    for place in ((), ("key",), ("metadata",), ("config", "metadata"), ("labels",), ("config", "labels")):
        found: object = document
        for name in place:
            found = found.get(name) if isinstance(found, dict) else None
        if isinstance(found, dict):
            said = found.get(_NAMESPACE_LABEL if place[-1:] == ("labels",) else "namespace")
            if isinstance(said, str) and said:
                return said
    return ""


def _is_our_variable(name: str) -> bool:
    """Whether the variable is one of vmwrapper's own, except the key to the pod's network."""
    return name.startswith("VIRTSHIM_") and not _NAME.search(name)


def _json(text: str) -> object | None:
    try:
        found: object = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict | list) else None


def _is_telling(value: str) -> bool:
    """Whether the value is long enough, and not an address, a number, a path of this machine or a common word."""
    if len(value) < _SHORTEST or value in _COMMON or re.fullmatch(r"[\d.:,/ -]+|[a-z]+://[\d.:]+/?", value):
        return False
    with contextlib.suppress(ValueError):
        ipaddress.ip_interface(value)
        return False
    return not (value.startswith("/") and os.path.exists(value))
