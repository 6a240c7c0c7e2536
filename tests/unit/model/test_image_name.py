"""Image references are parsed and found again, and every failure is a ShimError."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtshim.model.errors import InvalidRequest, ShimError
from virtshim.model.ids import ImageDigest, ImageId
from virtshim.model.image import DiskFormat, Image
from virtshim.model.image_name import ImageName, familiar, find_image, looks_like_id

D = "sha256:" + "a" * 64


def image(hex_digit: str, *tags: str, digests: tuple[str, ...] = (), pulled_at: int = 0) -> Image:
    digest = ImageDigest(f"sha256:{(hex_digit * 64)[:64]}")
    return Image(ImageId(digest.value), digest, tags, digests, 1, 512, DiskFormat.RAW, pulled_at)


@pytest.mark.parametrize(
    ("text", "name", "tag", "digest"),
    [
        ("cirros", "cirros", "latest", None),
        ("cirros:0.6", "cirros", "0.6", None),
        ("host:5000/cirros", "host:5000/cirros", "latest", None),
        ("host:5000/a/b:1.0", "host:5000/a/b", "1.0", None),
        ("[::1]:5000/a:1", "[::1]:5000/a", "1", None),
        (f"host/a@{D}", "host/a", "latest", D),
        (f"host:5000/a:1@{D}", "host:5000/a", "1", D),
        ("virtlet.cloud/cirros", "virtlet.cloud/cirros", "latest", None),
        ("virtlet.cloud/host.example/a/x.qcow2:latest", "virtlet.cloud/host.example/a/x.qcow2", "latest", None),
        ("https://host:8080/x.img", "https://host:8080/x.img", "latest", None),
        ("https://host:8080/x.img:latest", "https://host:8080/x.img", "latest", None),
        (f"http://host/x.img@{D}", "http://host/x.img", "latest", D),
        ("https://host/x?sig=a:b/c", "https://host/x?sig=a:b/c", "latest", None),
        ("https://host/a@b.img", "https://host/a@b.img", "latest", None),
    ],
)
def test_a_reference_is_taken_apart(text: str, name: str, tag: str, digest: str | None) -> None:
    assert ImageName.parse(text) == ImageName(name, tag, digest)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("a b", "a space"),
        ("a\x00b", "control"),
        ("é", "ASCII"),
        ("x" * 3000, "at most"),
        (D, "image id"),
        ("b" * 64, "image id"),
        ("a:", "tag"),
        ("a:-x", "tag"),
        ("a@b", "after|follows the @"),
        ("a@sha512:" + "a" * 128, "sha256"),
        ("a@" + D.upper(), "sha256"),
        ("a//b", "expected "),
        ("/a", "expected "),
        ("a/", "expected "),
        ("a/../b", r"\. or \.\."),
        ("ftp://host/x", "only http"),
        ("file://etc/passwd", "expected "),
        ("file:///etc/../x", "expected "),
        ("https://", "expected "),
        ("https://host", "expected "),
        ("https:///x", "expected "),
        ("https://host:65536/x", "no port 65536"),
        ("https://host/x#y", "fragment"),
        ("https://host/a/../x", "expected "),
        ("https://user:hunter2@host/x", "user name or password"),
    ],
)
def test_a_malformed_reference_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        ImageName.parse(text)
    assert "hunter2" not in str(caught.value)


def test_a_tagged_name_parses_to_itself() -> None:
    for text in ("a", "host:5000/a:1", "https://host/x.img"):
        name = ImageName.parse(text)
        assert ImageName.parse(name.tagged) == name


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("docker.io/library/fedora:39", "fedora:39"),
        ("index.docker.io/library/fedora:39", "fedora:39"),
        ("library/fedora:39", "fedora:39"),
        ("docker.io/kubevirt/fedora:39", "kubevirt/fedora:39"),
        ("docker.io/library/a/b:1", "library/a/b:1"),
        ("other.io/library/fedora:39", "other.io/library/fedora:39"),
    ],
)
def test_the_default_registry_need_not_be_written(text: str, short: str) -> None:
    assert familiar(text) == short


@pytest.mark.parametrize(
    ("text", "is_id"),
    [(D, True), ("a" * 64, True), ("sha256:abcd", True), ("abcd", False), ("a" * 63, False), ("sha256:", False)],
)
def test_text_that_can_only_be_an_id_is_recognised_as_an_id(text: str, is_id: bool) -> None:
    assert looks_like_id(text) is is_id


def test_an_image_is_found_by_each_of_its_names() -> None:
    wanted = image("12", "host/a:latest", "docker.io/library/b:1", digests=(f"host/a@{D}",))
    others = [image("34", "host/a:2", "cafe:latest"), image("56", digests=(f"host/b@{D}",))]
    images = [*others, wanted]
    hexes = "12" * 32
    for reference in (
        f"sha256:{hexes}",
        hexes,
        hexes[:12],
        f"sha256:{hexes[:12]}",
        "host/a",
        "host/a:latest",
        "b:1",
        "library/b:1",
        "docker.io/b:1",
        f"host/a@{D}",
        f"host/a:other@{D}",
    ):
        assert find_image(images, reference) is wanted, reference


@pytest.mark.parametrize("reference", ["host/c", "host/a:9", f"host/c@{D}", "f" * 64, "sha256:ffff", "ffff", "host/b"])
def test_an_absent_image_is_none(reference: str) -> None:
    assert find_image([image("12", "host/a:latest")], reference) is None


def test_an_ambiguous_prefix_is_refused() -> None:
    images = [image("ab" * 3 + "1"), image("ab" * 3 + "2")]
    with pytest.raises(InvalidRequest, match="fits 2 images"):
        find_image(images, "ababab")


def test_a_name_wins_over_an_id_prefix() -> None:
    named = image("12", "abab:latest")
    assert find_image([image("ab"), named], "abab") is named


def test_an_exact_spelling_wins_and_then_the_later_pull() -> None:
    old, new = image("1", "docker.io/library/x:latest", pulled_at=1), image("2", "docker.io/x:latest", pulled_at=2)
    assert find_image([new, old], "docker.io/library/x") is old
    assert find_image([old, new], "x") is new


_PIECES = st.sampled_from(
    ["sha256:", "@", ":", "/", "a", "abcd", "docker.io/", "library/", "https://", "..", "[::1]", "?", D]
)


@pytest.mark.parametrize("url", ["http://h/?", "https://h/i.qcow2?a=b:c", "https://h/i.qcow2?x"])
def test_a_url_with_a_query_is_listed_as_it_was_written(url: str) -> None:
    assert ImageName.parse(url).tagged == url
    assert ImageName.parse(ImageName.parse(url).tagged) == ImageName.parse(url)


@given(st.one_of(st.text(), st.lists(_PIECES).map("".join), st.text("0123456789abcdef", max_size=70)))
def test_any_text_finds_an_image_or_none_or_is_refused(text: str) -> None:
    images = [image("a", "a:latest", digests=(f"a@{D}",)), image("ab", "host/a:1"), image("c", "not a name")]
    with contextlib.suppress(ShimError):
        assert find_image(images, text) in [*images, None]
    with contextlib.suppress(ShimError):
        name = ImageName.parse(text)
        assert ImageName.parse(str(name)).name == name.name
