"""Image references: what a caller wrote, taken apart; and which stored image they mean. No I/O.

A reference is an id (`sha256:<hex>`, bare hex, a prefix of it) or a name: `[host[:port]/]path[:tag][@sha256:<hex>]`, or an
http(s) or file URL with the same endings. Names are wider than the OCI grammar (they may be URLs without scheme); a registry's
own rules are applied where a registry is asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from virtshim.model.errors import InvalidRequest
from virtshim.model.image import Image

DEFAULT_TAG = "latest"
URL_SCHEMES = ("https://", "http://")
FILE_SCHEME = "file://"

_MAX_LENGTH = 2048
_MIN_ID_PREFIX = 4

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PREFIXED_ID = re.compile(rf"sha256:[0-9a-f]{{{_MIN_ID_PREFIX},64}}")
_BARE_ID = re.compile(r"[0-9a-f]{64}")
_BARE_ID_PREFIX = re.compile(rf"[0-9a-f]{{{_MIN_ID_PREFIX},63}}")
# The OCI distribution grammar for tags.
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?"
_COMPONENT = r"[A-Za-z0-9_~%+.-]+"
# A port may stand behind the second component, too: a prefix can come before the host.
_NAME = re.compile(rf"(?:{_HOST}/)?(?:{_COMPONENT}(?::[0-9]{{1,5}})?/)*{_COMPONENT}")
_URL = re.compile(rf"https?://{_HOST}/[!-~]*")
_PRINTABLE = re.compile(r"[!-~]+")
_DEFAULT_REGISTRY = re.compile(r"\A(?:index\.)?docker\.io/(?=.)")
_DEFAULT_NAMESPACE = re.compile(r"\Alibrary/(?=[^/]+\Z)")


@dataclass(frozen=True, slots=True)
class ImageName:
    """`name` is as written, without tag and digest; `tag` is never empty; `digest` is `sha256:<64 hex>` or None, and when
    there is one it decides and the tag means nothing."""

    name: str
    tag: str = DEFAULT_TAG
    digest: str | None = None

    @classmethod
    def parse(cls, text: str) -> ImageName:
        """Raises InvalidRequest naming what is wrong."""
        if not text:
            raise InvalidRequest("the image reference is empty; name an image")
        if len(text) > _MAX_LENGTH:
            raise InvalidRequest(f"the image reference has {len(text)} characters; at most {_MAX_LENGTH} are allowed")
        if not _PRINTABLE.fullmatch(text):
            raise _malformed(text, "it contains a space, a control character or a non-ASCII character")
        if looks_like_id(text):
            raise _malformed(text, "it is an image id, not a name")
        is_url = _is_url(text)
        rest, digest = _cut_digest(text, is_url=is_url)
        name, tag = _cut_tag(rest, text, is_url=is_url)
        if is_url:
            _check_url(name)
        else:
            _check_name(name, text)
        return cls(name, tag or DEFAULT_TAG, digest)

    @property
    def tagged(self) -> str:
        """`name:tag`, the form in which images are listed. A URL with a query has no tag: a colon in it is the query's."""
        return self.name if "?" in self.name else f"{self.name}:{self.tag}"

    @property
    def is_url(self) -> bool:
        return self.name.startswith(URL_SCHEMES)

    @property
    def is_file(self) -> bool:
        return self.name.startswith(FILE_SCHEME)

    def with_digest(self, digest: str) -> str:
        """`name@sha256:...`, the form of repo digests."""
        return f"{self.name}@{digest}"

    def __str__(self) -> str:
        return self.with_digest(self.digest) if self.digest else self.tagged


def looks_like_id(text: str) -> bool:
    """True for what can only be an image id: `sha256:` and hex digits, or 64 hex digits. A shorter bare hex word may be an
    id prefix or a name; `find_image` tries both."""
    return bool(_PREFIXED_ID.fullmatch(text) or _BARE_ID.fullmatch(text))


def familiar(text: str) -> str:
    """The shortest spelling of a name, tag or repo digest: without the registry and namespace that are understood when none
    is written. Two names are the same image if this is equal."""
    return _DEFAULT_NAMESPACE.sub("", _DEFAULT_REGISTRY.sub("", text, count=1), count=1)


def find_image(images: Sequence[Image], reference: str) -> Image | None:
    """The image that `reference` means: full id, tag (missing tag is `latest`), repo digest, or unique id prefix, in this
    order. If two images answer to one name, exact spelling wins, then the later pull. Raises InvalidRequest for a malformed
    reference and for a prefix that fits several ids."""
    if looks_like_id(reference):
        return _by_id(images, reference.removeprefix("sha256:"))
    found = find_named(images, reference)
    if found is None and _BARE_ID_PREFIX.fullmatch(reference):
        return _by_id(images, reference)
    return found


def find_named(images: Sequence[Image], reference: str) -> Image | None:
    """Like `find_image`, but compares only names, because a name of hex digits may by chance be the beginning of an
    id."""
    name = ImageName.parse(reference)
    if name.digest:
        return _by_name(images, str(name), lambda image: image.repo_digests)
    return _by_name(images, name.tagged, lambda image: image.tags)


def _by_id(images: Sequence[Image], prefix: str) -> Image | None:
    found = [image for image in images if image.id.hex.startswith(prefix)]
    if len(found) > 1:
        raise InvalidRequest(f"image id {prefix!r} fits {len(found)} images; give more digits")
    return found[0] if found else None


def _by_name(images: Sequence[Image], wanted: str, names: Callable[[Image], Iterable[str]]) -> Image | None:
    exact = [image for image in images if wanted in names(image)]
    same = exact or [image for image in images if familiar(wanted) in map(familiar, names(image))]
    return max(same, key=lambda image: image.pulled_at, default=None)


def _is_url(text: str) -> bool:
    scheme, separator, _ = text.partition("://")
    if separator and not text.startswith((*URL_SCHEMES, FILE_SCHEME)):
        raise _malformed(text, f"{scheme}:// is not supported; only http://, https:// and file:// are")
    return bool(separator)


def _cut_digest(text: str, *, is_url: bool) -> tuple[str, str | None]:
    """A URL may hold an @ of its own; in a name it can only begin a digest."""
    rest, at, digest = text.rpartition("@")
    if not at or (is_url and not digest.startswith("sha256:")):
        return text, None
    if not _DIGEST.fullmatch(digest):
        raise _malformed(text, "what follows the @ is not sha256: and 64 lower-case hex digits")
    return rest, digest


def _cut_tag(rest: str, text: str, *, is_url: bool) -> tuple[str, str]:
    """The tag follows a colon in the last path component. A URL's port is no tag, nor is anything in its query."""
    head, slash, last = rest.rpartition("/")
    if is_url and (rest.count("/") < 3 or "?" in rest):
        return rest, ""
    last, colon, tag = last.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise _malformed(text, "the tag must be 1 to 128 letters, digits, dots, dashes and underscores")
    return f"{head}{slash}{last}", tag


def _check_url(url: str) -> None:
    if url.startswith(FILE_SCHEME):
        path = url.removeprefix(FILE_SCHEME)
        if not path.startswith("/") or not {"", ".", ".."}.isdisjoint(path.split("/")[1:]):
            raise _malformed(url, "expected file:///path, without empty components, . and ..")
        return
    authority = url.split("/")[2]
    if "@" in authority:
        # Not shown: it may hold a password.
        raise InvalidRequest("image URLs with a user name or password are refused; give the pod an image pull secret")
    if "#" in url:
        raise _malformed(url, "an image URL has no fragment (#...)")
    if not _URL.fullmatch(url) or ".." in url.split("/"):
        raise _malformed(url, "expected http(s)://host[:port]/path")
    port = re.search(r":([0-9]+)\Z", authority)
    if port and int(port[1]) > 65535:
        raise _malformed(url, f"there is no port {port[1]}")


def _check_name(name: str, text: str) -> None:
    if not _NAME.fullmatch(name):
        raise _malformed(text, "expected [host[:port]/]path[:tag][@sha256:<64 hex digits>]")
    if any(component in (".", "..") for component in name.split("/")):
        raise _malformed(text, "a path component is . or ..")


def _malformed(text: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"malformed image reference {text[:200]!r}: {why}")
