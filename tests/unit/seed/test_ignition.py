"""virtshim accepts what Ignition's own validator accepts, and refuses other configurations with a remedy."""

import json
import shutil
import subprocess
from typing import Any

import pytest

from virtshim.annotations.from_cluster import with_data
from virtshim.annotations.parse import parse_vm_options
from virtshim.model.errors import InvalidRequest, ShimError
from virtshim.seed.sources import DataSource, checked

OWN = "virtshim.io/ignition"
SOURCE = "virtshim.io/ignition-source"
FILES = {"files": [{"path": "/etc/motd", "mode": 420, "contents": {"source": "data:,hunter2"}}]}
GOOD: list[dict[str, Any]] = [
    {"ignition": {"version": "3.0.0"}},
    {"ignition": {"version": "3.3.0"}, "storage": FILES},
    {
        "ignition": {"version": "3.1.0"},
        "passwd": {"users": [{"name": "core", "sshAuthorizedKeys": ["ssh-ed25519 AAAA x"]}]},
    },
    {"ignition": {"version": "3.4.0-experimental"}, "systemd": {"units": [{"name": "a.service", "enabled": True}]}},
]
# The version of old releases of Container Linux and Flatcar. Debian's Ignition is newer.
OLD = {"ignition": {"version": "2.3.0"}}
BAD = {
    "variant: fcos\nversion: 1.5.0\n": "translate a Butane configuration with butane",
    "#cloud-config\n": "not valid JSON",
    '{"ignition": {"version": "3.3.0"}': "at line 1",
    '{"ignition": {"version": NaN}}': "not valid JSON",
    "[" * 100_000: "not valid JSON",
    "[]": "no Ignition configuration",
    "{}": "no Ignition configuration",
    '{"ignition": []}': "no Ignition configuration",
    '{"ignition": {}}': "ignition.version is missing",
    '{"ignition": {"version": 3}}': "ignition.version",
    '{"ignition": {"version": "4.0.0"}}': "ignition.version",
    '{"ignition": {"version": "3.3"}}': "ignition.version",
}


@pytest.mark.parametrize("config", GOOD)
def test_a_configuration_that_ignitions_validator_accepts_is_passed_on_unchanged(config: dict[str, Any]) -> None:
    text = json.dumps(config, indent=1)
    validator = shutil.which("ignition-validate")
    assert validator, "needs Debian's package ignition; run make setup"
    done = subprocess.run([validator, "-"], input=text, text=True, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert parse_vm_options({OWN: text}).ignition == text


def test_older_ignition_versions_are_accepted() -> None:
    assert checked(json.dumps(OLD))


@pytest.mark.parametrize("text", BAD)
def test_other_configurations_are_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_vm_options({OWN: text})
    assert str(error.value).startswith(f"annotation {OWN}: ")
    assert BAD[text] in str(error.value)


def test_a_configuration_from_a_secret_is_checked_and_shown_in_no_error() -> None:
    text = json.dumps(GOOD[1])
    data = {"config.ign": text.encode(), "other": b'{"hunter2', "none": b'{"hunter2": 1}'}

    def ignition(source: str) -> str:
        def read(found: DataSource) -> dict[str, bytes]:
            assert str(found) == "secret/first-boot"
            return data

        return with_data(parse_vm_options({SOURCE: source}), "team", read).ignition

    assert ignition("secret/first-boot") == text
    for key in ("other", "none", "missing"):
        with pytest.raises(ShimError) as error:
            ignition(f"secret/first-boot/{key}")
        assert str(error.value).startswith(f"annotation {SOURCE}: secret team/first-boot: ")
        assert "hunter2" not in str(error.value)


def test_a_guest_has_one_ignition_configuration() -> None:
    with pytest.raises(InvalidRequest, match=r"virtshim.io/ignition is set too"):
        parse_vm_options({OWN: json.dumps(GOOD[0]), SOURCE: "secret/x"})
    assert parse_vm_options({OWN: "", SOURCE: ""}).ignition == ""


def test_the_configuration_is_hidden_when_options_are_printed() -> None:
    assert "hunter2" not in repr(parse_vm_options({OWN: json.dumps(GOOD[1])}))
