"""Settings: file, drop-ins, environment; every fault told at once."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from virtshim import config
from virtshim.cli.node_dir import to_toml
from virtshim.domain.errors import InvalidRequest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("VIRTSHIM_"):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def test_without_a_file_the_defaults_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "DEFAULT_FILE", str(tmp_path / "absent.toml"))
    settings = config.load()
    assert settings.paths.state_dir == "/var/lib/virtshim"
    assert settings.cri_socket == "/run/virtshim/virtshim.sock"
    assert settings.vm.default_memory == 1 << 30


def test_the_default_file_is_read_if_it_is_there(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    file.write_text("[vm]\nmax_vcpus = 3\n")
    monkeypatch.setattr(config, "DEFAULT_FILE", str(file))
    assert config.load().vm.max_vcpus == 3


def test_a_file_that_was_named_must_be_there(file: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"config\.toml cannot be read: No such file"):
        config.load(str(file))


def test_drop_ins_win_over_the_file_in_the_order_of_their_names(file: Path) -> None:
    file.write_text('[vm]\nmax_vcpus = 1\ndefault_memory = "2GiB"\n[log]\nlevel = "debug"\n')
    drop_ins = Path(f"{file}.d")
    drop_ins.mkdir()
    (drop_ins / "20-later.toml").write_text("[vm]\nmax_vcpus = 20\n")
    (drop_ins / "10-first.toml").write_text('[vm]\nmax_vcpus = 10\nmin_memory = "64MiB"\n')
    (drop_ins / "30-ignored.conf").write_text("not toml at all")
    settings = config.load(str(file))
    assert (settings.vm.max_vcpus, settings.vm.default_memory, settings.vm.min_memory) == (20, 2 << 30, 64 << 20)
    assert settings.log.level == "debug"


def test_the_environment_wins_over_the_file_setting_by_setting(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('[vm]\nmax_vcpus = 1\ndefault_memory = "2GiB"\n')
    monkeypatch.setenv("VIRTSHIM_VM__MAX_VCPUS", "7")
    monkeypatch.setenv("VIRTSHIM_LIBVIRT__URI", "test:///default")
    settings = config.load(str(file))
    assert (settings.vm.max_vcpus, settings.vm.default_memory) == (7, 2 << 30)
    assert settings.libvirt.uri == "test:///default"


def test_overrides_win_over_the_file(file: Path) -> None:
    file.write_text("[vm]\nmax_vcpus = 1\n")
    assert config.load(str(file), {"vm": {"max_vcpus": 5}}).vm.max_vcpus == 5


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[vmm]\nx = 1\n", ["vmm"]),
        ("[vm]\nmax_vcpu = 1\n", ["vm.max_vcpu"]),
        ('[vm]\nmax_vcpus = "many"\n', ["vm.max_vcpus"]),
        ("[vm]\nmax_vcpus = 0\n", ["vm.max_vcpus"]),
        ('[paths]\nstate_dir = "relative"\n', ["paths.state_dir"]),
        ('[libvirt]\ndomain_type = "xen"\n', ["libvirt.domain_type"]),
        ('[paths]\nrun_dir = "/' + "r" * 60 + '"\n', ["run_dir is 61 bytes long"]),
        ("vm = 3\n", ["vm"]),
        (
            '[vm]\nmax_vcpus = 0\n[log]\nlevel = "loud"\n[cri]\nstop_timeout = -1\nsokcet = "/x"\n',
            ["vm.max_vcpus", "log.level", "cri.stop_timeout", "cri.sokcet"],
        ),
    ],
)
def test_every_bad_key_is_named_at_once_with_the_file(file: Path, text: str, names: list[str]) -> None:
    file.write_text(text)
    with pytest.raises(InvalidRequest) as faults:
        config.load(str(file))
    for name in (*names, str(file), "virtshim config schema"):
        assert name in str(faults.value)


def test_a_bad_value_of_the_environment_is_an_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("")
    monkeypatch.setenv("VIRTSHIM_VM__MAX_VCPUS", "many")
    with pytest.raises(InvalidRequest, match=r"vm\.max_vcpus"):
        config.load(str(file))


@pytest.mark.parametrize("content", [b"[vm\n", b"\xff\xfe", b"[vm]\nmax_vcpus = 1\n[vm]\n"])
def test_a_file_that_is_not_toml_is_named(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"config\.toml is not TOML"):
        config.load(str(file))


def test_settings_are_frozen() -> None:
    settings = config.Settings()
    with pytest.raises(ValidationError):
        settings.vm = config.Vm()
    with pytest.raises(ValidationError):
        settings.vm.max_vcpus = 3


def test_the_longest_run_dir_that_is_allowed_has_room_for_every_socket() -> None:
    settings = config.Settings(paths=config.Paths(run_dir="/" + "r" * 59))
    assert len(settings.cri_socket) <= 107


def test_settings_as_shown_are_a_file_that_gives_them_again(file: Path) -> None:
    shown = json.loads(config.Settings().model_dump_json())
    file.write_text(to_toml(shown))
    assert config.load(str(file)) == config.Settings()


def test_every_setting_has_a_meaning_in_the_schema() -> None:
    schema = config.Settings.model_json_schema()
    silent = [
        f"{name}.{key}"
        for name, section in schema["$defs"].items()
        for key, value in section.get("properties", {}).items()
        if not value.get("description")
    ]
    assert silent == ["Log.level", "Tapmanager.log_level"]  # the level speaks for itself


def test_laying_one_table_over_another_keeps_both() -> None:
    low: dict[str, Any] = {"a": {"x": 1, "y": 2}, "b": [1]}
    high: dict[str, Any] = {"a": {"y": 3}, "b": [2], "c": 4}
    assert config.merged(low, high) == {"a": {"x": 1, "y": 3}, "b": [2], "c": 4}
    assert low == {"a": {"x": 1, "y": 2}, "b": [1]}


def test_the_layout_follows_the_paths() -> None:
    layout = config.Settings(paths=config.Paths(state_dir="/s", run_dir="/r")).layout()
    assert (layout.database, layout.sockets) == ("/s/state.db", "/r/vm")
