"""The how-to pages for hardware and guests that nobody has here are right as far as it can be checked: their units,
manifests and commands."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from virtshim.annotations import profiles
from virtshim.annotations.parse import parse_vm_options

pytestmark = pytest.mark.operator

PAGES = Path(__file__).resolve().parents[3] / "docs/how-to"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)


def manifests(page: str, kind: str) -> Iterator[Any]:
    for block in blocks(page, "yaml"):
        yield from (one for one in yaml.safe_load_all(block) if one["kind"] == kind)


def test_a_page_that_was_not_tried_says_so_once_at_its_top() -> None:
    texts = {page.name: page.read_text() for page in PAGES.glob("*.md")}
    untried = {name: text for name, text in texts.items() if "not tried" in text.lower()}
    assert {"windows.md", "sr-iov.md", "own-images.md"} <= untried.keys()
    for name, text in untried.items():
        assert text.lower().count("not tried") == 1, name
        assert text.split("\n\n")[1].startswith("**Not tried"), name


def test_systemd_accepts_the_unit_that_makes_virtual_functions(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("NOT TESTED: systemd-analyze is not installed")
    (text,) = blocks("sr-iov.md", "ini")
    (path,) = re.findall(r"`/etc/systemd/system/([\w@-]+)\.service`", (PAGES / "sr-iov.md").read_text())
    (enabled,) = re.findall(rf"systemctl enable --now {path}(\w+)", "".join(blocks("sr-iov.md", "sh")))
    unit = tmp_path / f"{path}{enabled}.service"
    unit.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_plugin_network_and_pod_name_the_same_virtual_functions() -> None:
    (config,) = manifests("sr-iov.md", "ConfigMap")
    (offered,) = json.loads(config["data"]["config.json"])["resourceList"]
    resource = f"{offered['resourcePrefix']}/{offered['resourceName']}"
    (network,) = manifests("sr-iov.md", "NetworkAttachmentDefinition")
    assert network["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/resourceName": resource}
    plugin = json.loads(network["spec"]["config"])
    assert (plugin["name"], plugin["type"]) == (network["metadata"]["name"], "sriov")
    (pod,) = manifests("sr-iov.md", "Pod")
    assert pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == network["metadata"]["name"]
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"][resource] == "1"
    shown = "".join(blocks("sr-iov.md", "sh"))
    assert resource.replace(".", "\\.") in shown
    (selected,) = offered["selectors"]
    assert f"virtual-functions@{selected['pfNames'][0]}" in shown


def test_windows_pods_have_the_recommended_profile_and_valid_annotations() -> None:
    pods = list(manifests("windows.md", "Pod"))
    assert len(pods) == 2
    for pod in pods:
        own = pod["metadata"]["annotations"]
        assert own[profiles.PROFILE_ANNOTATION] == "windows"
        parse_vm_options({**profiles.of_pod((), own, ""), **own})
        mounts = [one["mountPath"] for one in pod["spec"]["containers"][0].get("volumeMounts", ())]
        assert mounts == [own[name] for name in own if name == "virtshim.io/sysprep"]


def test_qemu_accepts_the_commands_that_make_a_windows_image(tmp_path: Path) -> None:
    """With an empty medium, and stopped before the first instruction."""
    text = (PAGES / "windows.md").read_text().replace("\\\n", " ")
    commands = [shlex.split(line) for line in re.findall(r"^ +(qemu-\S+ .*)$", text, re.MULTILINE)]
    assert [one[0] for one in commands] == ["qemu-img", "qemu-system-x86_64", "qemu-img"]
    (tmp_path / "windows.iso").write_bytes(bytes(1 << 20))
    for command in commands:
        if command[0] == "qemu-system-x86_64":
            for option, value in {"-accel": "tcg", "-cpu": "max", "-vnc": "none"}.items():
                command[command.index(option) + 1] = value
            command += ["-S", "-monitor", "stdio"]
        done = subprocess.run(
            command, cwd=tmp_path, input="info block\nquit\n", capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "windows-server.qcow2").exists()
