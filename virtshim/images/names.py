"""Decides whether an image comes from a web server, an OCI registry or a file. Pure.

http://..., https://...            that URL
file:///...                        that file of the node
virtlet.cloud/NAME                 Virtlet's rules: NAME by a translation rule, else NAME is a URL without scheme
a name in a translation rule       the rule's URL
host/path.{qcow2,qcow,img,raw}     a URL without scheme; may also end in .gz, .xz or .zst
everything else                    an OCI registry
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from virtshim.images.translations import TranslationFile, Transport, translate
from virtshim.model.errors import InvalidRequest
from virtshim.model.image_name import FILE_SCHEME, URL_SCHEMES, ImageName

VIRTLET_PREFIX = "virtlet.cloud/"

_DISK_SUFFIXES = (".qcow2", ".qcow", ".img", ".raw")
_PACKED_SUFFIXES = (".gz", ".xz", ".zst")
# A repository in the OCI distribution grammar: components in lower case.
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_MAX_REPOSITORY = 255
# The registry of names without one, the host that serves its API, and all its names.
DEFAULT_REGISTRY = "docker.io"
_DEFAULT_REGISTRY_API = f"registry-1.{DEFAULT_REGISTRY}"
DEFAULT_REGISTRY_HOSTS = frozenset({DEFAULT_REGISTRY, f"index.{DEFAULT_REGISTRY}", _DEFAULT_REGISTRY_API})


@dataclass(frozen=True, slots=True)
class HttpLocation:
    """One file on a web server. `name`: as the caller wrote it. Its tag means nothing; its digest must match the file."""

    name: ImageName
    url: str
    transport: Transport = Transport()

    @property
    def is_packed(self) -> bool:
        """Whether the file must be unpacked, which its name decides."""
        return urlsplit(self.url).path.endswith(_PACKED_SUFFIXES)


@dataclass(frozen=True, slots=True)
class FileLocation:
    """One file of the node. `path`: absolute, without empty components, . and .. components. A digest in the name must match the
    file."""

    name: ImageName
    path: str

    @property
    def is_packed(self) -> bool:
        return self.path.endswith(_PACKED_SUFFIXES)


@dataclass(frozen=True, slots=True)
class RegistryLocation:
    """One image in a registry. `registry`: the name that people use. `api`: the host[:port] of its API."""

    name: ImageName
    registry: str
    api: str
    repository: str

    @property
    def reference(self) -> str:
        """Digest or tag, for the manifest's URL."""
        return self.name.digest or self.name.tag


Location = HttpLocation | FileLocation | RegistryLocation


def resolve(name: ImageName, files: Sequence[TranslationFile], default_scheme: str) -> Location:
    """`default_scheme`: "https" or "http", for URLs without scheme. Raises InvalidRequest."""
    if name.is_file:
        return FileLocation(name, name.name.removeprefix(FILE_SCHEME))
    if name.is_url:
        return HttpLocation(name, name.name)
    bare = name.name.removeprefix(VIRTLET_PREFIX)
    found = translate(bare, files)
    if found is not None:
        url = found.url if "://" in found.url else f"{default_scheme}://{found.url}"
        if url.startswith(FILE_SCHEME):
            path = ImageName.parse(url).name.removeprefix(FILE_SCHEME)
            return FileLocation(name, path)
        if not _usable(url):
            raise InvalidRequest(
                f"image {bare!r}: its rule in {found.file} gives {found.url[:200]!r}, which is not an http(s) URL; "
                "correct the rule"
            )
        return HttpLocation(name, url, found.transport)
    if bare != name.name:
        if "/" not in bare:
            raise InvalidRequest(
                f"image {bare!r} is in no image translation file and is not host/path; add a rule for it or write the host"
            )
        return HttpLocation(name, f"{default_scheme}://{bare}")
    host, slash, path = bare.partition("/")
    if slash and _unpacked_name(path).endswith(_DISK_SUFFIXES) and _is_host(host):
        return HttpLocation(name, f"{default_scheme}://{bare}")
    return _registry(name)


def _unpacked_name(path: str) -> str:
    return next((path.removesuffix(suffix) for suffix in _PACKED_SUFFIXES if path.endswith(suffix)), path)


def _registry(name: ImageName) -> RegistryLocation:
    host, slash, path = name.name.partition("/")
    if not slash or not _is_host(host):
        host, path = DEFAULT_REGISTRY, name.name
    if host in (DEFAULT_REGISTRY, f"index.{DEFAULT_REGISTRY}"):
        repository = path if "/" in path else f"library/{path}"
        host, api = DEFAULT_REGISTRY, _DEFAULT_REGISTRY_API
    else:
        repository, api = path, host
    if len(repository) > _MAX_REPOSITORY or not _REPOSITORY.fullmatch(repository):
        raise InvalidRequest(
            f"{name.name[:300]!r} is neither an image file's URL nor a registry's repository (lower-case letters, digits "
            f"and single separators, at most {_MAX_REPOSITORY} characters)"
        )
    return RegistryLocation(name, host, api, repository)


def is_loopback(host: str) -> bool:
    """Whether `host` is localhost or a loopback address. It may have a port and brackets."""
    bare = host_of(host)
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def host_of(authority: str) -> str:
    """`host[:port]` or `[v6][:port]` without port and brackets, in lower case."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    return authority.partition(":")[0].lower()


def _is_host(component: str) -> bool:
    """Whether a name's first component is a host, by the OCI reference grammar."""
    return "." in component or ":" in component or component == "localhost"


def _usable(url: str) -> bool:
    if not url.startswith(URL_SCHEMES):
        return False
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.username is None and parts.port != 0
    except ValueError:
        return False
