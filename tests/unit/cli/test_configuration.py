"""`virtshim config` shows the settings in force, their origin, and their faults."""

import json
import tomllib
from pathlib import Path

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from virtshim.cli.main import app
from virtshim.config.reference import page
from virtshim.config.settings import BadConfiguration, Settings
from virtshim.config.texts import Section, setting
from virtshim.model.errors import InvalidRequest

pytestmark = pytest.mark.operator


@pytest.fixture
def file(tmp_path: Path) -> Path:
    drop_in = tmp_path / "config.toml.d/10.toml"
    drop_in.parent.mkdir()
    drop_in.write_text('[images]\ninsecure_registries = ["a:5000"]\n')
    (tmp_path / "config.toml").write_text("[vm]\nmax_vcpus = 3\n")
    return tmp_path / "config.toml"


def ran(*arguments: object, **environment: str) -> str:
    result = CliRunner().invoke(app, ["config", *map(str, arguments)], env=environment, catch_exceptions=True)
    if result.exception:
        raise result.exception
    return result.output


def test_each_setting_is_shown_with_its_value_and_where_it_comes_from(file: Path) -> None:
    shown = json.loads(ran("show", "--json", "--config", file, VIRTSHIM_LOG__LEVEL="debug"))
    assert shown["vm.max_vcpus"] == {"value": 3, "source": "file", "place": f"{file}:2"}
    assert shown["images.insecure_registries"] == {
        "value": ["a:5000"], "source": "drop-in", "place": f"{file}.d/10.toml:2",
    }  # fmt: skip
    assert shown["log.level"] == {"value": "debug", "source": "environment", "place": "VIRTSHIM_LOG__LEVEL"}
    assert shown["log.format"] == {"value": "auto", "source": "default", "place": ""}


def test_the_shown_configuration_is_a_file_with_the_same_settings(file: Path) -> None:
    text = ran("show", "--config", file)
    assert Settings.model_validate(tomllib.loads(text)).vm.max_vcpus == 3
    assert f"vm.max_vcpus = 3{' ' * 46}# {file}:2\n" in text


def test_show_can_be_limited_to_changed_settings(file: Path) -> None:
    text = ran("show", "--changed", "--config", file)
    assert [line.split(" = ")[0] for line in text.splitlines() if line] == [
        "images.insecure_registries",
        "vm.max_vcpus",
    ]


def test_secrets_are_hidden_by_their_type() -> None:
    class WithSecret(Section):
        token: SecretStr = setting(SecretStr("hush"), "a token", why="")

    assert "hush" not in json.dumps(WithSecret().model_dump(mode="json"))


@pytest.mark.parametrize("form", ["--changed", "--json"])
def test_passwords_in_addresses_are_hidden(file: Path, form: str) -> None:
    file.write_text('[tracing]\nendpoint = "http://me:hush@collector:4317"\n')
    text = ran("show", form, "--config", file)
    assert "hush" not in text
    assert "http://me:***@collector:4317" in text


@pytest.mark.parametrize("form", ["--changed", "--json"])
def test_annotation_values_of_profiles_are_hidden_except_numbers_and_keywords(file: Path, form: str) -> None:
    file.write_text(
        '[[vm.profiles]]\nname = "big"\n[vm.profiles.annotations]\nVirtletVCPUCount = "4"\n"virtshim.io/firmware" = "uefi"\n'
        'VirtletCloudInitUserData = "password: planted"\nVirtletCloudInitMetaData = "hint: planted"\n'
    )
    text = ran("show", form, "--config", file)
    assert "planted" not in text
    [big] = json.loads(text)["vm.profiles"]["value"] if form == "--json" else tomllib.loads(text)["vm"]["profiles"]
    assert big["annotations"] == {
        "VirtletVCPUCount": "4",
        "virtshim.io/firmware": "uefi",
        "VirtletCloudInitUserData": "(hidden, 17 characters)",
        "VirtletCloudInitMetaData": "(hidden, 13 characters)",
    }


def test_annotation_values_of_profiles_are_in_no_fault(file: Path) -> None:
    """Faults are logged, too, when a daemon is told to reload."""
    file.write_text(
        '[[vm.profiles]]\nname = "a"\nannotations = { VirtletCloudInitUserData = ["planted"] }\n'
        '[[vm.profiles]]\nname = "b"\nannotations = "planted"\n'
        '[[vm.profiles]]\nname = "c"\nannotations = { VirtletCloudInitUserData = "password: [planted" }\n'
    )
    with pytest.raises(BadConfiguration) as refused:
        ran("check", "--config", file)
    assert len(refused.value.faults) == 3
    assert "planted" not in str(refused.value)


def test_a_good_configuration_is_reported_as_good(file: Path) -> None:
    assert ran("check", "--config", file) == (
        f"no faults found: 2 settings from {file}, {file}.d/10.toml; `virtshim config show` lists all settings\n"
    )


def test_all_faults_of_a_bad_configuration_are_reported(file: Path) -> None:
    file.write_text('[vm]\nmax_vcpus = 0\nfoo = 1\n[proxy]\nannotation = ""\n')
    with pytest.raises(BadConfiguration) as refused:
        ran("check", "--config", file)
    assert [fault.partition(": ")[0] for fault in refused.value.faults] == [f"{file}:{line}" for line in (2, 3, 5)]


def test_two_proxy_runtimes_with_one_socket_are_a_fault(file: Path) -> None:
    file.write_text('[proxy.primary]\nsocket = "/run/virtshim/virtshim.sock"\n')
    with pytest.raises(InvalidRequest, match="must all be different"):
        ran("check", "--config", file)


def test_the_reference_is_the_page() -> None:
    assert ran("reference") == page(Settings)
