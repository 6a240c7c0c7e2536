"""Annotations that name a Secret or ConfigMap are read by Virtlet's rules."""

import base64
from collections.abc import Mapping

import pytest

from virtshim.annotations.from_cluster import with_data
from virtshim.annotations.options import VmOptions
from virtshim.annotations.parse import parse_vm_options
from virtshim.model.errors import InvalidRequest, ShimError, WrongState
from virtshim.model.yaml_text import MAX_TEXT_BYTES
from virtshim.seed.sources import Data, DataSource

ONE = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHUH1zzlzhSHrPmrF9JCvKRBPMUKQF3OaUXcSPxUFvRz one"
TWO = f"{ONE[:-3]}two"
SOURCE = "VirtletCloudInitUserDataSource"
KEY = f"{SOURCE}Key"
ENCODING = f"{SOURCE}Encoding"
OWN = "VirtletCloudInitUserData"


def filled(objects: Mapping[str, Data], **annotations: str) -> VmOptions:
    def read(source: DataSource) -> Data:
        if str(source) not in objects:
            raise WrongState("there is none")
        return objects[str(source)]

    return with_data(parse_vm_options(annotations), "team", read)


def refusal(objects: Mapping[str, Data], **annotations: str) -> str:
    with pytest.raises(ShimError) as error:
        filled(objects, **annotations)
    return str(error.value)


def test_each_key_of_a_source_is_a_key_of_user_data_read_as_yaml() -> None:
    data = {"users": b"- name: cloudy\n", "ssh_pwauth": b"true", "hostname": b"plain text", "empty": b""}
    expected = {"users": [{"name": "cloudy"}], "ssh_pwauth": True, "hostname": "plain text", "empty": None}
    assert filled({"secret/ud": data}, **{SOURCE: "secret/ud"}).user_data == expected
    assert filled({"configmap/ud": data}, **{SOURCE: "configmap/ud"}).user_data == expected


def test_the_annotation_is_merged_over_the_source() -> None:
    data = {"packages": b"[a]", "ssh_pwauth": b"true", "apt": b"{proxy: x, conf: y}"}
    own = "packages: [b]\nssh_pwauth: false\napt: {proxy: z}\nruncmd: [c]\n"
    assert filled({"secret/ud": data}, **{SOURCE: "secret/ud", OWN: own}).user_data == {
        "packages": ["a", "b"],
        "ssh_pwauth": False,
        "apt": {"proxy": "z", "conf": "y"},
        "runcmd": ["c"],
    }


def test_with_overwrite_the_annotations_replace_the_source() -> None:
    objects = {"secret/ud": {"packages": b"[a]"}, "secret/keys": {"authorized_keys": ONE.encode()}}
    asked = {SOURCE: "secret/ud", "VirtletSSHKeySource": "secret/keys", "VirtletCloudInitUserDataOverwrite": "true"}
    options = filled(objects, **asked, **{OWN: "packages: [b]", "VirtletSSHKeys": TWO})
    assert (options.user_data, options.ssh_keys) == ({"packages": ["b"]}, (TWO,))
    options = filled(objects, **asked)  # there are none
    assert (options.user_data, options.ssh_keys) == ({"packages": ["a"]}, (ONE,))


def test_with_a_key_the_text_of_that_key_is_the_whole_user_data() -> None:
    script = "#!/bin/sh\necho '@virtlet-mount-script@: é'\n"
    data = {"script": script.encode(), "packed": base64.encodebytes(script.encode()), "other": b"{"}
    plain = filled(
        {"secret/ud": data}, **{SOURCE: "secret/ud", KEY: "script", "VirtletCloudInitUserDataScript": "mine"}
    )
    assert plain.user_data_script == script
    packed = filled({"secret/ud": data}, **{SOURCE: "secret/ud", KEY: "packed", ENCODING: "base64"})
    assert packed.user_data_script == script


def test_keys_of_a_source_come_before_the_pods_own() -> None:
    objects = {"configmap/keys": {"authorized_keys": f"{ONE}\n\n".encode(), "mine": TWO.encode()}}
    assert filled(objects, VirtletSSHKeySource="configmap/keys", VirtletSSHKeys=TWO).ssh_keys == (ONE, TWO)
    assert filled(objects, VirtletSSHKeySource="configmap/keys/mine").ssh_keys == (TWO,)


def test_no_secret_or_configmap_is_read_unless_an_annotation_names_it() -> None:
    assert filled({}, VirtletSSHKeys=ONE) == parse_vm_options({"VirtletSSHKeys": ONE})
    assert filled({}, **{SOURCE: "", KEY: "", ENCODING: "", "VirtletSSHKeySource": ""}) == VmOptions()


@pytest.mark.parametrize(
    ("data", "asked", "said"),
    [
        ({}, {}, "secret team/other: there is none"),
        ({"a": b"{x: y"}, {SOURCE: "secret/ud"}, "key 'a': not valid YAML"),
        ({"a": b"\xff"}, {SOURCE: "secret/ud"}, "key 'a' is not text"),
        ({"a": b"x" * (MAX_TEXT_BYTES + 1)}, {SOURCE: "secret/ud"}, "too many"),
        ({"a": b"x"}, {SOURCE: "secret/ud", KEY: "b"}, "has no key 'b'; it has a"),
        ({}, {SOURCE: "secret/ud", KEY: "b"}, "has no key 'b'; it has none"),
        ({"a": b"?"}, {SOURCE: "secret/ud", KEY: "a", ENCODING: "base64"}, "is not base64"),
        ({"x": b"x"}, {"VirtletSSHKeySource": "secret/ud"}, "has no key 'authorized_keys'"),
        ({"a": b"x"}, {"VirtletSSHKeySource": "secret/ud/a"}, "key 'a': line 1 is not an SSH public key"),
    ],
)
def test_an_error_names_the_annotation_and_the_object(data: Data, asked: dict[str, str], said: str) -> None:
    told = refusal({"secret/ud": data}, **(asked or {SOURCE: "secret/other"}))
    assert said in told
    assert told.startswith("annotation Virtlet")
    assert "secret team/" in told


def test_no_error_shows_the_content_of_a_secret() -> None:
    for data in (
        b"{hunter2: ",
        b"hunter2",
        b"hunter2\xff",
        b"- hunter2\n  x: !hunter2 y\n &",
        b"!hunter2",
        b"a: !!hunter2 'b'",
        b"!<it's:hunter2> x",
        b"*hunter2",
        b"@hunter2",
    ):
        for asked in (
            {SOURCE: "secret/ud"},
            {SOURCE: "secret/ud", KEY: "other"},
            {"VirtletSSHKeySource": "secret/ud/a"},
            {"VirtletFilesFromDataSource": "secret/ud"},
        ):
            try:
                filled({"secret/ud": {"a": data}}, **asked)
            except ShimError as error:
                assert "hunter2" not in str(error)


@pytest.mark.parametrize(
    ("annotations", "said"),
    [
        ({SOURCE: "secret"}, "the form is secret/NAME or configmap/NAME"),
        ({SOURCE: "secret/a/b"}, "the form is"),
        ({SOURCE: "secret/../x"}, "the form is"),
        ({SOURCE: "pod/x"}, "the form is"),
        ({SOURCE: "Secret/x"}, "the form is"),
        ({"VirtletSSHKeySource": "secret/a/b/c"}, "secret/NAME[/KEY]"),
        ({"VirtletSSHKeySource": "secret/a/"}, "secret/NAME[/KEY]"),
        ({SOURCE: "secret/a", KEY: "a/b"}, "write a key"),
        ({SOURCE: "secret/a", ENCODING: "gzip"}, "write plain or base64"),
        ({KEY: "a"}, f"belongs to {SOURCE}, which is missing"),
        ({ENCODING: "base64"}, f"belongs to {SOURCE}, which is missing"),
        ({SOURCE: "secret/a", ENCODING: "base64"}, f"belongs to a {KEY}, which is missing"),
    ],
)
def test_malformed_sources_are_refused_when_the_pod_is_created(annotations: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_vm_options(annotations)
    assert said in str(error.value)


FILES = "VirtletFilesFromDataSource"
# The Secret of Virtlet's guide, made by `kubectl create secret --from-file`, which keeps line breaks.
GUIDE = {
    "locale": b'LANG="pl_PL.UTF-8"\n', "locale_path": b"/etc/locale.conf\n", "locale_encoding": b"plain\n",
    "host_conf": b"bXVsdGkgb2ZmCg==\n", "host_conf_path": b"/etc/host.conf",
}  # fmt: skip


@pytest.mark.parametrize("source", ["secret/files", "configmap/files"])
def test_an_entry_with_a_path_is_a_base64_file_unless_marked_plain(source: str) -> None:
    files = filled({source: GUIDE}, **{FILES: source}).files
    assert files == {"/etc/locale.conf": b'LANG="pl_PL.UTF-8"\n', "/etc/host.conf": b"multi off\n"}


def test_a_file_may_hold_any_bytes_and_an_entrys_name_may_look_like_a_path() -> None:
    data = {"search_path": b"\xff\x00", "search_path_path": b"/a", "search_path_encoding": b"plain"}
    assert filled({"secret/f": data}, **{FILES: "secret/f"}).files == {"/a": b"\xff\x00"}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"a": b"eA=="}, "key 'a': there is no key 'a_path'"),
        ({"a_path": b"/a"}, "key 'a_path': there is no key 'a_path_path'"),
        ({"a": b"no base64!", "a_path": b"/a"}, "key 'a' is not base64; correct it, or declare it plain"),
        ({"a": b"x", "a_path": b"/a", "a_encoding": b"gzip"}, "key 'a_encoding': write plain or base64"),
        ({"a": b"", "a_path": b"etc/a"}, "key 'a_path': write the absolute path of a file"),
        ({"a": b"", "a_path": b"/etc/../a"}, "key 'a_path': write the absolute path"),
        ({"a": b"", "a_path": b"/etc/"}, "key 'a_path': write the absolute path"),
        ({"a": b"", "a_path": b"/"}, "key 'a_path': write the absolute path"),
        ({"a": b"", "a_path": b"//a"}, "key 'a_path': write the absolute path"),
        ({"a": b"", "a_path": b"/proc/sys/a"}, "key 'a_path': no file can be put there"),
        ({"a": b"", "a_path": b"/a\nb"}, "key 'a_path': no file can be put there"),
        ({"a": b"", "a_path": b"/\xff"}, "key 'a_path' is not text in UTF-8"),
        ({"a": b"", "a_path": b"/" + b"a" * 256}, "key 'a_path': no file can be put there"),
        ({"a": b"", "a_path": b"/x", "b": b"", "b_path": b"/x"}, "key 'b_path': another file already has this path"),
        ({"a": b"x" * (MAX_TEXT_BYTES + 1), "a_path": b"/a", "a_encoding": b"plain"}, "bytes are too many"),
    ],
)  # fmt: skip
def test_an_impossible_file_is_refused_and_the_error_names_its_key(data: Data, says: str) -> None:
    told = refusal({"secret/f": data}, **{FILES: "secret/f"})
    assert told.startswith(f"annotation {FILES}: secret team/f: key")
    assert says in told


def test_files_whose_total_is_too_large_are_refused() -> None:
    data = dict.fromkeys("abc", b"x" * (200 * 1024))
    data |= {f"{key}_path": f"/{key}".encode() for key in "abc"} | {f"{key}_encoding": b"plain" for key in "abc"}
    assert "its files have 614400 bytes; at most 524288 are allowed" in refusal(
        {"secret/f": data}, **{FILES: "secret/f"}
    )
