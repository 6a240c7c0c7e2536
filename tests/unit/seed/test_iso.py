"""The seed ISO can be read by another reader, where there is one."""

import dataclasses
import io
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pycdlib
import pytest

from virtshim.annotations.options import VmOptions
from virtshim.model.errors import InternalError
from virtshim.model.ids import ContainerId
from virtshim.model.image import DiskFormat
from virtshim.model.layout import Layout
from virtshim.model.network import Dns, Interface
from virtshim.model.sandbox import PodKey
from virtshim.model.vm import Disk
from virtshim.seed.documents import seed_documents
from virtshim.seed.iso import SeedStore
from virtshim.seed.ports import SeedRequest
from virtshim.volumes.copies import CopiedVolume

CONTAINER = ContainerId("c" * 64)
REQUEST = SeedRequest(
    container=CONTAINER,
    pod=PodKey("ns", "pod", "uid", 0),
    hostname="pod",
    options=VmOptions(user_data={"greeting": "grüezi"}),
    interfaces=(Interface("eth0", "0a:58:00:00:00:01", 1500, ("10.0.0.2/24",)),),
    dns=Dns(),
)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(str(tmp_path / "state"), str(tmp_path / "run"))


def read_back(path: str, facade: str) -> dict[str, str]:
    iso = pycdlib.PyCdlib()
    iso.open(path)
    try:
        names = iso.get_joliet_facade() if facade == "joliet" else iso.get_rock_ridge_facade()
        found = {}
        for child in names.list_children("/"):
            if child is None or child.is_dir():
                continue
            raw = (
                child.file_identifier().decode("utf-16-be") if facade == "joliet" else child.rock_ridge.name().decode()
            )
            content = io.BytesIO()
            names.get_file_from_iso_fp(content, f"/{raw}")
            found[raw] = content.getvalue().decode()
        return found
    finally:
        iso.close()


@pytest.mark.parametrize("facade", ["joliet", "rock ridge"])
def test_both_name_tables_hold_the_documents(layout: Layout, facade: str) -> None:
    disk = SeedStore(layout).create(REQUEST)
    documents = seed_documents(REQUEST)
    assert read_back(disk.path, facade) == {
        "user-data": documents.files["user-data"],
        "meta-data": documents.files["meta-data"],
        "network-config": documents.files.get("network-config"),
    }


def test_copies_are_a_file_beside_the_documents_and_not_in_them(layout: Layout) -> None:
    """cloud-init keeps the documents on the guest's disk."""
    copies = (CopiedVolume("/s", "/srv/s"),)
    disk = SeedStore(layout).create(dataclasses.replace(REQUEST, copies=copies, copied=b"a secret"))
    found = read_back(disk.path, "rock ridge")
    assert found.pop("volumes.tar") == "a secret"
    assert found["user-data"].count("virtshim-copies") > 0
    assert "a secret" not in str(found)


def test_without_network_there_is_no_network_config(layout: Layout) -> None:
    disk = SeedStore(layout).create(dataclasses.replace(REQUEST, options=VmOptions(force_dhcp=True)))
    assert set(read_back(disk.path, "joliet")) == {"user-data", "meta-data"}


def test_the_disk_is_a_read_only_cdrom_in_the_containers_directory(layout: Layout) -> None:
    assert SeedStore(layout).create(REQUEST) == Disk(
        layout.seed_iso(CONTAINER), DiskFormat.RAW, serial="seed", readonly=True, cdrom=True
    )


def test_file_and_directory_modes_do_not_depend_on_the_umask(layout: Layout) -> None:
    before = os.umask(0o177)
    try:
        disk = SeedStore(layout).create(REQUEST)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(disk.path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(layout.container_dir(CONTAINER)).st_mode) == 0o711


@pytest.mark.skipif(not shutil.which("blkid", path=f"{os.environ['PATH']}:/usr/sbin:/sbin"), reason="needs blkid")
def test_blkid_finds_the_label_that_cloud_init_looks_for(layout: Layout) -> None:
    disk = SeedStore(layout).create(REQUEST)
    blkid = shutil.which("blkid", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    done = subprocess.run([str(blkid), "-o", "export", "-p", disk.path], capture_output=True, text=True, check=True)
    assert "LABEL=cidata\n" in done.stdout
    assert "TYPE=iso9660\n" in done.stdout


@pytest.mark.skipif(not shutil.which("isoinfo"), reason="needs isoinfo")
def test_isoinfo_lists_the_names(layout: Layout) -> None:
    disk = SeedStore(layout).create(REQUEST)
    for names in ("-J", "-R"):
        done = subprocess.run(["isoinfo", "-f", names, "-i", disk.path], capture_output=True, text=True, check=True)
        assert sorted(done.stdout.split()) == ["/meta-data", "/network-config", "/user-data"]


def test_a_second_seed_replaces_the_first_and_leftovers_of_a_kill(layout: Layout) -> None:
    seeds = SeedStore(layout)
    disk = seeds.create(REQUEST)
    Path(f"{disk.path}.new").write_text("half")
    with open(disk.path, "rb") as open_before:
        seeds.create(dataclasses.replace(REQUEST, options=VmOptions(user_data={"second": True})))
        assert b"greeting" in open_before.read()
    assert "second" in read_back(disk.path, "joliet")["user-data"]
    assert os.listdir(os.path.dirname(disk.path)) == ["seed.iso"]


def test_a_link_at_the_seeds_path_is_not_followed(layout: Layout, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    os.makedirs(layout.container_dir(CONTAINER))
    for name in (layout.seed_iso(CONTAINER), f"{layout.seed_iso(CONTAINER)}.new"):
        os.symlink(victim, name)
    SeedStore(layout).create(REQUEST)
    assert victim.read_text() == "precious"
    assert not os.path.islink(layout.seed_iso(CONTAINER))


def test_a_failure_is_a_shim_error(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where a directory should be")
    with pytest.raises(InternalError, match="seed"):
        SeedStore(Layout(str(tmp_path / "state"), "")).create(REQUEST)


def test_large_user_data_survives(layout: Layout) -> None:
    script = "#!/bin/sh\n" + "# filler\n" * 25_000
    disk = SeedStore(layout).create(dataclasses.replace(REQUEST, options=VmOptions(user_data_script=script)))
    assert read_back(disk.path, "joliet")["user-data"] == script


def test_a_config_drive_has_its_label_and_its_directories(layout: Layout) -> None:
    request = dataclasses.replace(REQUEST, options=VmOptions(config_drive=True), copied=b"a secret")
    disk = SeedStore(layout).create(request)
    iso = pycdlib.PyCdlib()
    iso.open(disk.path)
    try:
        assert iso.pvd.volume_identifier.strip() == b"config-2"
        assert iso.joliet_vd.volume_identifier.decode("utf-16-be").strip(" \0") == "config-2"
        for facade in (iso.get_joliet_facade(), iso.get_rock_ridge_facade()):
            read = {}
            for path in (*seed_documents(request).files, "volumes.tar"):
                content = io.BytesIO()
                facade.get_file_from_iso_fp(content, f"/{path}")
                read[path] = content.getvalue().decode()
            assert read == {**seed_documents(request).files, "volumes.tar": "a secret"}
    finally:
        iso.close()


def test_ignitions_file_is_for_root_only_and_written_atomically(layout: Layout) -> None:
    store = SeedStore(layout)
    store.create(REQUEST)
    for text in ("{}", '{"ü": 1}'):
        path = store.write_ignition(CONTAINER, text)
        assert Path(path).read_text() == text
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert sorted(os.listdir(layout.container_dir(CONTAINER))) == ["ignition.json", "seed.iso"]


def test_the_cdrom_for_windows_has_files_by_name_and_is_for_root_only(layout: Layout) -> None:
    """Windows reads Joliet."""
    store = SeedStore(layout)
    store.create(REQUEST)
    path = store.write_sysprep(CONTAINER, {"Autounattend.xml": b"<unattend/>", "set-up.ps1": b"x"})
    for facade in ("joliet", "rock ridge"):
        assert read_back(path, facade) == {"Autounattend.xml": "<unattend/>", "set-up.ps1": "x"}
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


@pytest.mark.parametrize("facade", ["joliet", "rock ridge"])
def test_names_that_only_iso_9660_cannot_distinguish_are_all_on_the_cdrom(layout: Layout, facade: str) -> None:
    store = SeedStore(layout)
    store.create(REQUEST)
    files = {"unattend.xml": "u", "a.b": "1", "a_b": "2", "a-b": "3", "A b+": "4", "größe.txt": "5"}
    files |= {f"{'x' * 59}{number:05}": f"long {number}" for number in range(40)}
    path = store.write_sysprep(CONTAINER, {name: text.encode() for name, text in files.items()})
    assert read_back(path, facade) == files


def test_iso_9660s_own_names_are_short_and_distinct(layout: Layout) -> None:
    store = SeedStore(layout)
    store.create(REQUEST)
    path = store.write_sysprep(CONTAINER, {"unattend.xml": b"", "A.B": b"", "A_B": b"", "x" * 64: b""})
    iso = pycdlib.PyCdlib()
    iso.open(path)
    try:
        names = [child.file_identifier().decode() for child in iso.list_children(iso_path="/") if not child.is_dir()]
    finally:
        iso.close()
    assert sorted(names) == ["A_B.;1", "A_B_2.;1", "UNATTEND_XML.;1", f"{'X' * 30}.;1"]
