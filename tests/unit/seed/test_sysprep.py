"""A volume with Windows' answer file becomes a CD-ROM with its files."""

import pytest

from virtshim.annotations.parse import parse_vm_options
from virtshim.model.container import Mount
from virtshim.model.errors import InvalidRequest
from virtshim.volumes.copies import CopiedVolume, Entry, EntryKind
from virtshim.volumes.pod_mounts import mount_path
from virtshim.volumes.sysprep import (
    SYSPREP_ANNOTATION,
    sysprep_files,
    sysprep_not_mounted,
    sysprep_volume,
)

SECRET = "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~secret/answers"
MOUNTS = (Mount("/sysprep/", SECRET), Mount("/data", "/srv/data"))


def entries(*names: str) -> list[Entry]:
    """As kubelet writes them."""
    found = [Entry("", EntryKind.DIRECTORY, 0o755, 0, 0), Entry("..1", EntryKind.DIRECTORY, 0o755, 0, 0)]
    found.append(Entry("..data", EntryKind.LINK, 0o777, 0, 0, target="..1"))
    for name in names:
        found.append(Entry(f"..1/{name}", EntryKind.FILE, 0o644, 0, 0, content=name.encode(errors="replace")))
        found.append(Entry(name, EntryKind.LINK, 0o777, 0, 0, target=f"..data/{name}"))
    return found


@pytest.mark.parametrize("name", ["autounattend.xml", "unattend.xml", "Autounattend.xml", "UNATTEND.XML"])
def test_all_files_of_a_volume_with_an_answer_file_are_on_the_cdrom(name: str) -> None:
    assert sysprep_files(entries(name, "more.ps1")) == {name: name.encode(), "more.ps1": b"more.ps1"}


@pytest.mark.parametrize("names", [(), ("answers.xml",), ("unattend.xml.txt", "other")])
def test_a_volume_without_an_answer_file_is_refused_and_its_files_listed(names: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest, match=r"has no autounattend\.xml and no unattend\.xml, but ") as error:
        sysprep_files(entries(*names))
    assert (", ".join(sorted(names)) or "nothing") in str(error.value)


def test_the_volume_mounted_at_the_path_is_found() -> None:
    assert sysprep_volume(MOUNTS, {}, "uid", "/sysprep") == CopiedVolume("/sysprep", SECRET)
    assert sysprep_volume(MOUNTS, {}, "uid", "/other") is None
    with pytest.raises(InvalidRequest, match="is not a Secret or ConfigMap"):
        sysprep_volume(MOUNTS, {}, "uid", "/data")
    with pytest.raises(InvalidRequest, match="is not a Secret or ConfigMap"):
        sysprep_volume(MOUNTS, {}, "another-pods-uid", "/sysprep")


def test_the_error_for_a_path_without_a_mount_lists_the_mounts() -> None:
    token = Mount("/var/run/secrets/kubernetes.io/serviceaccount", SECRET.replace("secret/answers", "projected/token"))
    assert sysprep_not_mounted((*MOUNTS, token), {}, "uid", "/answers") == (
        "annotation virtshim.io/sysprep: no container of the pod mounts anything at /answers; this one has Secrets "
        "and ConfigMaps at /sysprep; write one of these mountPaths, or mount the volume with the answer file "
        "there, or remove the annotation"
    )
    assert "mounts no Secret and no ConfigMap; let it mount the volume" in sysprep_not_mounted(
        (token,), {}, "uid", "/answers"
    )


def test_the_annotation_is_a_mount_path() -> None:
    assert [mount_path(text) for text in ("", "/a", "//a//b/", " /a\n")] == ["", "/a", "/a/b", "/a"]
    for text in ("sysprep", "/", "/a/../b", "/a\0"):
        with pytest.raises(InvalidRequest, match=f"annotation {SYSPREP_ANNOTATION}: .* is not a mountPath"):
            parse_vm_options({SYSPREP_ANNOTATION: text})


@pytest.mark.parametrize("name", ["x" * 64, "größe +~%&.txt", "日本", "a.b.c", "...x"])
def test_a_name_that_joliet_allows_is_on_the_cdrom(name: str) -> None:
    assert set(sysprep_files(entries("unattend.xml", name))) == {"unattend.xml", name}


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("x" * 65, "its name has 65 characters, but Joliet allows 64; shorten it"),
        ("a:b*c", r"Joliet does not allow \* : in a name; leave it out"),
        ("a\\b", "Joliet does not allow "),
        ("a;1", "Joliet does not allow ; "),
        ("what?", r"Joliet does not allow \? "),
        ("a\nb", r"Joliet does not allow \\n "),
        ("\N{GRINNING FACE}", "Joliet does not allow "),
        ("\udcff", r"Joliet does not allow \\udcff "),
    ],
)
def test_a_name_that_joliet_forbids_is_refused_with_the_rule(name: str, rule: str) -> None:
    with pytest.raises(
        InvalidRequest, match=f"annotation {SYSPREP_ANNOTATION}: the file .* cannot be on a CD-ROM: {rule}"
    ):
        sysprep_files(entries("unattend.xml", name))


def test_names_that_differ_only_in_case_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"the files 'Setup\.ps1' and 'setup\.ps1' have the same name; rename one"):
        sysprep_files(entries("unattend.xml", "setup.ps1", "Setup.ps1"))
