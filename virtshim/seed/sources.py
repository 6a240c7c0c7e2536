"""What pods give their guests: data of Secrets and ConfigMaps, Ignition configurations, merged documents. Pure."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from virtshim.model.errors import InvalidRequest, ShimError
from virtshim.model.text import escaped
from virtshim.model.yaml_text import MAX_TEXT_BYTES, parse_value

# The key for a `VirtletSSHKeySource` that names none.
AUTHORIZED_KEYS: Final = "authorized_keys"

# The limit for the files of one source, so that they fit into the seed's documents.
MAX_FILES_BYTES: Final = 512 * 1024
_LONGEST_PATH: Final = 4095
_LONGEST_NAME: Final = 255
# These belong to the guest's kernel and devices, or are emptied at each boot before anybody could read a file.
_NO_FILES_BELOW: Final = ("/proc/", "/sys/", "/dev/", "/run/")

_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
_KEY: Final = re.compile(r"[-._a-zA-Z0-9]{1,253}")

Data = Mapping[str, bytes]
Encoding = Literal["plain", "base64"]


@dataclass(frozen=True, slots=True)
class DataSource:
    """`key`: one entry of the Secret or ConfigMap; "" for all entries."""

    kind: Literal["secret", "configmap"]
    name: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"

    def field_name(self, annotation: str, namespace: str) -> str:
        """Names the annotation and the source, for error texts."""
        return f"annotation {annotation}: {self.kind} {escaped(namespace, 80)}/{self.name}"


def parse_data_source(text: str, *, with_key: bool) -> DataSource:
    """`secret/NAME` or `configmap/NAME`; `with_key`: `/KEY` may follow. Raises InvalidRequest."""
    kind, _, rest = text.partition("/")
    name, slash, key = rest.partition("/")
    if (
        kind not in ("secret", "configmap")
        or not _NAME.fullmatch(name)
        or (slash and not (with_key and _is_data_key(key)))
    ):
        form = "secret/NAME[/KEY] or configmap/NAME[/KEY]" if with_key else "secret/NAME or configmap/NAME"
        raise InvalidRequest(f"{text[:80]!r} is malformed; the form is {form}")
    return DataSource("secret" if kind == "secret" else "configmap", name, key)


def parse_data_key(text: str) -> str:
    """Raises InvalidRequest."""
    if not _is_data_key(text):
        raise InvalidRequest(
            f"{text[:80]!r} is malformed; write a key of the Secret or ConfigMap (letters, digits, '-', '_', '.')"
        )
    return text


def parse_data_encoding(text: str) -> Encoding:
    """Raises InvalidRequest."""
    if text not in ("", "plain", "base64"):
        raise InvalidRequest(f"{text[:80]!r} is malformed; write plain or base64")
    return "base64" if text == "base64" else "plain"


def text_of(data: Data, key: str, encoding: Encoding = "plain") -> str:
    """Raises InvalidRequest; the error never shows the data."""
    if key not in data:
        known = ", ".join(sorted(data))
        raise InvalidRequest(f"has no key {key!r}; it has {escaped(known, 200) or 'none'}")
    return _text(key, data[key], encoding)


def mapping_of(data: Data) -> dict[str, Any]:
    """Key -> the entry, read as YAML. Raises InvalidRequest."""
    found = {}
    for key in sorted(data):
        try:
            found[key] = parse_value(_text(key, data[key], "plain"))
        except ShimError as exc:
            raise InvalidRequest(f"key {key!r}: {exc}") from None
    return found


def files_of(data: Data) -> dict[str, bytes]:
    """Path in the guest -> content. Virtlet's rule: the entry KEY_path has the path for the entry KEY, and KEY_encoding is
    `base64` (the default) or `plain`. Raises InvalidRequest; the error never shows the data."""
    entries = [key for key in sorted(data) if f"{key}_path" in data]
    others = {f"{key}{ending}" for key in entries for ending in ("_path", "_encoding")}
    for key in sorted(data):
        if key not in others and key not in entries:
            raise InvalidRequest(
                f"key {key!r}: there is no key {f'{key}_path'[:80]!r} with its path in the guest; add it, or remove {key!r}"
            )
    files: dict[str, bytes] = {}
    for key in entries:
        path = _file_path(data, f"{key}_path")
        if path in files:
            raise InvalidRequest(f"key {f'{key}_path'!r}: another file already has this path; give each file its own")
        files[path] = _content(key, data[key], _file_encoding(data, f"{key}_encoding"))
    if (size := sum(map(len, files.values()))) > MAX_FILES_BYTES:
        raise InvalidRequest(
            f"its files have {size} bytes; at most {MAX_FILES_BYTES} are allowed; mount it as a volume"
        )
    return files


def _file_path(data: Data, key: str) -> str:
    # `kubectl create secret --from-file` keeps a text's last line break.
    path = _text(key, data[key], "plain").strip()
    if not path.startswith("/") or path.endswith("/") or {"", ".", ".."} & set(path[1:].split("/")):
        raise InvalidRequest(f"key {key!r}: write the absolute path of a file, without '.', '..' and empty parts")
    is_long = len(path.encode()) > _LONGEST_PATH or any(len(name.encode()) > _LONGEST_NAME for name in path.split("/"))
    if is_long or not path.isprintable() or path.startswith(_NO_FILES_BELOW):
        raise InvalidRequest(f"key {key!r}: no file can be put there; write a path such as /etc/app.conf")
    return path


def _file_encoding(data: Data, key: str) -> Encoding:
    text = _text(key, data[key], "plain").strip() if key in data else "base64"
    if text not in ("plain", "base64"):
        raise InvalidRequest(f"key {key!r}: write plain or base64, or remove the key for base64")
    return "plain" if text == "plain" else "base64"


def _text(key: str, content: bytes, encoding: Encoding) -> str:
    try:
        return _content(key, content, encoding).decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"key {key!r} is not text in UTF-8; correct it") from None


def _content(key: str, content: bytes, encoding: Encoding) -> bytes:
    if len(content) > MAX_TEXT_BYTES:
        raise InvalidRequest(f"key {key!r}: {len(content)} bytes are too many; write at most {MAX_TEXT_BYTES}")
    try:
        return base64.b64decode(b"".join(content.split()), validate=True) if encoding == "base64" else content
    except binascii.Error:
        raise InvalidRequest(f"key {key!r} is not base64; correct it, or declare it plain") from None


def _is_data_key(text: str) -> bool:
    return _KEY.fullmatch(text) is not None


# Ignition sets up Fedora CoreOS, RHEL CoreOS and Flatcar at their first boot. The firmware provides its configuration under these
# names: the first for Fedora CoreOS and RHEL CoreOS, the second for Flatcar.
IGNITION_FIRMWARE_NAMES: Final = ("opt/com.coreos/config", "opt/org.flatcar-linux/config")
# The key of a Secret or ConfigMap, if the annotation names none.
DEFAULT_KEY: Final = "config.ign"

_VERSION: Final = re.compile(r"[23]\.[0-9]{1,3}\.[0-9]{1,3}(?:-[a-z0-9.-]{1,40})?")


def checked(text: str) -> str:
    """Returns `text` unchanged. Raises InvalidRequest, which never shows the content, if no Ignition could read it."""
    try:
        document = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        place = f" at line {exc.lineno}, column {exc.colno}" if isinstance(exc, json.JSONDecodeError) else ""
        raise InvalidRequest(
            f"not valid JSON{place}; Ignition does not read YAML: translate a Butane configuration with butane"
        ) from None
    if not isinstance(document, dict) or not isinstance(document.get("ignition"), dict):
        raise InvalidRequest('no Ignition configuration; one begins with {"ignition": {"version": "3.3.0"}}')
    version: Any = document["ignition"].get("version")
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise InvalidRequest(
            "ignition.version is missing, or neither 2.x.x nor 3.x.x; write the specification's version"
        )
    return text


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def merged(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Merges `upper` into a copy of `lower`, at every depth. Mappings are merged and lists concatenated (lower first); otherwise,
    and if the types differ, `upper` wins. Neither argument is changed."""
    result = dict(lower)
    for key, value in upper.items():
        result[key] = _merged_value(result[key], value) if key in result else value
    return result


def _merged_value(lower: Any, upper: Any) -> Any:
    if isinstance(lower, Mapping) and isinstance(upper, Mapping):
        return merged(lower, upper)
    if isinstance(lower, list) and isinstance(upper, list):
        return [*lower, *upper]
    return upper
