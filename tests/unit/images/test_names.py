"""A reference means one source, by Virtlet's translation rules, too."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtshim.images.names import HttpLocation, RegistryLocation, is_loopback, resolve
from virtshim.images.translations import TranslationFile, Transport, parse_translations, read_translations, translate
from virtshim.model.errors import InvalidRequest, ShimError
from virtshim.model.image_name import ImageName

PROD = """
prefix: prod
translations:
- name: image1
  url: https://images.example/image1.qcow2
- regexp: '^linux/(\\d+\\.\\d+)'
  url: http://images.example/linux-$1.qcow2
  transport: slow
- regex: 'both/(?P<what>\\w+)/(x)?'
  url: images.example/${what}-$2-$3-$$1-${1}.img
transports:
  "":
    maxRedirects: 0
  slow:
    timeout: 30000
    proxy: http://proxy.example:3128
"""
PLAIN = """
apiVersion: virtlet.k8s/v1
kind: VirtletImageMapping
metadata: {name: plain, namespace: kube-system}
spec:
  translations:
  - regex: 'image\\d'
    url: https://images.example/any.qcow2
  - name: cirros
    url: images.example/cirros.img
"""


@pytest.fixture(scope="module")
def rules():
    return [parse_translations(PROD, "a.yaml"), parse_translations(PLAIN, "b.yaml")]


@pytest.mark.parametrize(
    ("reference", "url"),
    [
        ("https://host/x", "https://host/x"),
        ("http://host/x.qcow2:latest", "http://host/x.qcow2"),
        ("virtlet.cloud/host.example/x/y", "https://host.example/x/y"),
        ("virtlet.cloud/nas/images/x", "https://nas/images/x"),
        ("virtlet.cloud/host:8080/x.img:tag", "https://host:8080/x.img"),
        ("virtlet.cloud/cirros", "https://images.example/cirros.img"),
        ("cirros:anything", "https://images.example/cirros.img"),
        ("prod/image1", "https://images.example/image1.qcow2"),
        ("virtlet.cloud/prod/linux/6.1:latest", "http://images.example/linux-6.1.qcow2"),
        ("prod/both/this/x", "https://images.example/this-x--$1-this.img"),
        # An unanchored regex of a file without prefix sees the whole name.
        ("other/image7", "https://images.example/any.qcow2"),
        ("host.example/a/disk.qcow2", "https://host.example/a/disk.qcow2"),
        ("host.example:8080/disk.raw:latest", "https://host.example:8080/disk.raw"),
        ("localhost/disk.img", "https://localhost/disk.img"),
    ],
)
def test_a_web_servers_image_is_resolved_to_its_url(rules, reference: str, url: str) -> None:
    location = resolve(ImageName.parse(reference), rules, "https")
    assert isinstance(location, HttpLocation)
    assert location.url == url


@pytest.mark.parametrize(
    ("reference", "api", "repository", "tag"),
    [
        ("fedora", "registry-1.docker.io", "library/fedora", "latest"),
        ("docker.io/fedora:39", "registry-1.docker.io", "library/fedora", "39"),
        ("index.docker.io/kubevirt/x", "registry-1.docker.io", "kubevirt/x", "latest"),
        ("kubevirt/x", "registry-1.docker.io", "kubevirt/x", "latest"),
        ("kubevirt/disk.img", "registry-1.docker.io", "kubevirt/disk.img", "latest"),
        ("quay.example/a/b/c:1", "quay.example", "a/b/c", "1"),
        ("host:5000/a", "host:5000", "a", "latest"),
        ("localhost/a", "localhost", "a", "latest"),
        (f"host:5000/a@sha256:{'a' * 64}", "host:5000", "a", f"sha256:{'a' * 64}"),
    ],
)
def test_every_other_name_is_a_registrys(rules, reference: str, api: str, repository: str, tag: str) -> None:
    location = resolve(ImageName.parse(reference), rules, "https")
    assert isinstance(location, RegistryLocation)
    assert (location.api, location.repository, location.reference) == (api, repository, tag)


def test_the_default_scheme_is_a_setting_and_does_not_touch_written_schemes(rules) -> None:
    def url(reference: str) -> str:
        location = resolve(ImageName.parse(reference), rules, "http")
        assert isinstance(location, HttpLocation)
        return location.url

    assert url("host.example/x.img") == "http://host.example/x.img"
    assert url("https://host.example/x.img") == "https://host.example/x.img"
    assert url("prod/image1") == "https://images.example/image1.qcow2"


@pytest.mark.parametrize("reference", ["Host/Upper", "a--/b", "a/.b", "x" * 300, "a_._b"])
def test_a_name_that_no_registry_can_have_is_refused(reference: str) -> None:
    with pytest.raises(InvalidRequest, match="neither an image file's URL nor"):
        resolve(ImageName.parse(reference), [], "https")


def test_the_error_for_a_virtlet_name_without_rule_and_host_says_what_to_do() -> None:
    with pytest.raises(InvalidRequest, match="add a rule"):
        resolve(ImageName.parse("virtlet.cloud/cirros"), [], "https")


@pytest.mark.parametrize("url", ["ftp://host/x", "https://", "https://user:pw@host/x", "http://h:x/"])
def test_a_rule_that_makes_no_url_is_refused_by_its_files_name(url: str) -> None:
    rules = [parse_translations(f"translations: [{{name: x, url: '{url}'}}]", "the-file.yaml")]
    with pytest.raises(InvalidRequest, match=r"the-file\.yaml"):
        resolve(ImageName.parse("x"), rules, "https")


def test_exact_names_of_all_files_win_over_regexes() -> None:
    files = [
        parse_translations("translations: [{regex: i, url: https://h/regex}]", "a"),
        parse_translations("translations: [{name: image, url: https://h/name}]", "b"),
    ]
    found = translate("image", files)
    assert found is not None
    assert (found.url, found.file) == ("https://h/name", "b")


def test_a_rule_carries_its_transport(rules) -> None:
    slow, default = translate("prod/linux/6.1", rules), translate("prod/image1", rules)
    assert slow is not None
    assert slow.transport == Transport(timeout=30.0, proxy="http://proxy.example:3128")
    assert default is not None
    assert default.transport.max_redirects == 0


@pytest.mark.parametrize("name", ["", "other", "prod", "production/image1"])
def test_a_name_without_a_matching_rule_is_not_translated(name: str) -> None:
    assert translate(name, [parse_translations(PROD, "a.yaml")]) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[", "line 1: not YAML"),
        ("- a", "mapping"),
        ("1: 2", "mapping"),
        ("prefixx: a", "unknown key 'prefixx'"),
        ("prefix: 7", "not a string"),
        ("translations: x", "not a list"),
        ("translations: [x]", "entry 1 of translations must be a mapping"),
        ("translations: [{url: x}]", "either a name or a regex"),
        ("translations: [{name: a, regex: a, url: x}]", "either a name or a regexp"),
        ("translations: [{name: a, regexp: a, url: x}]", "either a name or a regexp"),
        ("translations: [{regex: a, regexp: a, url: x}]", "either a name or a regexp"),
        ("translations: [{name: a}]", "no url"),
        ("translations: [{regex: '(', url: x}]", "bad regex"),
        ("translations: [{name: a, url: x, transport: t}]", "transport 't'"),
        ("transports: {t: {timeout: -1}}", "whole number"),
        ("transports: {t: {timeout: true}}", "whole number"),
        ("transports: {t: {retries: 1}}", "unknown key 'retries'"),
        ("transports: {t: {proxy: 'socks5://x'}}", "not supported"),
        ("transports: {t: {tls: {insecure: maybe}}}", "neither true nor false"),
        ("transports: {t: {tls: {certificates: [{key: x}]}}}", "no cert"),
        ("transports: {t: {tls: {certificates: [{cert: a, key: b}, {cert: a, key: b}]}}}", "more than one"),
        ("transports: {t: []}", "mapping"),
        ("!!python/object/apply:os.system [x]", "not YAML"),
    ],
)
def test_a_bad_translation_file_is_named_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        parse_translations(text, "bad.yaml")
    assert "bad.yaml" in str(caught.value)


def one_rule(regex: str, url: str = "https://h/x") -> TranslationFile:
    return parse_translations(json.dumps({"translations": [{"regex": regex, "url": url}]}), "the-file.yaml")


@pytest.mark.parametrize(
    ("regex", "name", "url"),
    [
        ("^(?P<os>[a-z]+)/(?<version>[0-9.]+)$", "linux/6.1", "https://h/linux-6.1"),
        ("(?i)^LINUX/(\\d+)$", "linux/7", "https://h/-"),
        (r"^\pL+/\pN$", "linux/7", "https://h/-"),
        (r"^\Qa.b\E\z", "a.b", "https://h/-"),
        ("[[:alpha:]]/[[:digit:]]", "linux/7", "https://h/-"),
        (r"^\w+/(?U)(?P<os>.+)(?P<version>\d*)$", "linux/a7", "https://h/a-7"),
        ("(?P<os>x)?linux", "linux", "https://h/-"),
    ],
)
def test_a_regex_has_gos_meaning(regex: str, name: str, url: str) -> None:
    found = translate(name, [one_rule(regex, "https://h/${os}-$version")])
    assert found is not None
    assert found.url == url


def test_a_regex_is_tried_on_names_of_any_length() -> None:
    found = translate("a" * 2000 + "/6.1", [one_rule("/([0-9.]+)$", "https://h/$1")])
    assert found is not None
    assert found.url == "https://h/6.1"


BAD = {
    "looks ahead": ("(?=a)b", "no lookaround"),
    "looks behind": ("(?<!a)b", "no lookaround"),
    "backreference": (r"(a)\1", "no backreferences"),
    "Python's end of the text": (r"a\Z", r"invalid escape sequence: \\Z"),
    "repetition": ("a{1001}", "invalid repetition size"),
    "repetition of a repetition": ("(?:a{1000}){1000}", "invalid repetition size"),
    "depth": ("(" * 1500, r"missing \)"),
    "large classes": (r"[\pL\pN]{1,1000}", "pattern too large"),
    "length": ("a" * 900_000, "pattern too large"),
    "a name twice": ("(?P<os>a)|(?P<os>b)", "two groups have the name 'os'"),
    "half of a character": ("a\ud800", "surrogate"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_regex_that_is_invalid_in_go_or_too_big_is_refused_with_its_file_and_rule(
    case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    regex, why = BAD[case]
    with pytest.raises(InvalidRequest, match=why) as caught:
        one_rule(regex)
    said = str(caught.value)
    assert said.startswith("image translation file the-file.yaml: entry 1 of translations has a bad regex (")
    assert said.endswith("correct or remove the file")
    assert capfd.readouterr() == ("", "")


HEAVY = {
    "optional characters": "(?:a?){1000}a{1000}",
    "many places at once": "^(?:.*a.{200}){4}(b)",
    "many groups": "|".join(f"(.*)a{n}(.*)" for n in range(200)),
}


@pytest.mark.parametrize("case", HEAVY)
def test_a_search_that_needs_more_memory_than_a_regex_may_take_ends_without_output(
    case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """RE2 forgets what it has seen, and goes on more slowly."""
    file = one_rule(HEAVY[case])
    for name in ("a" * 2047 + "!", "ab" * 1000, "aab" * 600):
        translate(name, [file])
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("reference", ["$2", "$" + "9" * 5000, "$" + "9" * 20, "${none}"])
def test_a_reference_to_a_missing_group_is_empty(reference: str) -> None:
    found = translate("a", [one_rule("(a)", f"https://h/{reference}.img")])
    assert found is not None
    assert found.url == "https://h/.img"


def test_the_regex_library_is_loaded_only_if_a_rule_has_a_regex() -> None:
    """It would take more than a megabyte on every node."""
    code = (
        "import sys; from virtshim.images.translations import *;"
        "translate('a', [parse_translations('translations: [{name: a, url: b}]', 'f')]); sys.exit('re2' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(st.text())
def test_any_text_is_a_regex_or_refused(text: str) -> None:
    with contextlib.suppress(ShimError):
        translate("linux/6.1", [one_rule(text)])


@given(st.text())
def test_any_text_is_a_translation_file_or_refused(text: str) -> None:
    with contextlib.suppress(ShimError):
        parse_translations(text, "f")


def test_files_are_reread_in_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b.yml").write_text("translations: [{name: x, url: https://h/b}]")
    (tmp_path / "notes.txt").write_text("no YAML: [")
    (tmp_path / ".hidden.yaml").write_text("[")
    assert [Path(file.file).name for file in read_translations(str(tmp_path))] == ["b.yml"]
    (tmp_path / "a.yaml").write_text("")
    assert [Path(file.file).name for file in read_translations(str(tmp_path))] == ["a.yaml", "b.yml"]
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="UTF-8"):
        read_translations(str(tmp_path))
    (tmp_path / "a.yaml").unlink()
    (tmp_path / "a.yaml").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InvalidRequest, match="No such file"):
        read_translations(str(tmp_path))


def test_no_directory_means_no_rules(tmp_path: Path) -> None:
    assert read_translations(str(tmp_path / "none")) == []


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost:5000", True),
        ("127.0.0.1", True),
        ("127.9.9.9:1", True),
        ("[::1]:5000", True),
        ("10.0.0.1", False),
        ("localhost.example", False),
        ("127.0.0.1.example:80", False),
        ("[::2]", False),
    ],
)
def test_loopback_is_distinguished_from_names_that_look_like_it(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
