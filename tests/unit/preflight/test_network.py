"""`virtshim check` reports CNI configurations and node certificates that cannot work."""

import json
from pathlib import Path

import pytest
from fakes.node_certificates import ClusterCa

from virtshim.config.settings import Settings
from virtshim.preflight import checks, network
from virtshim.preflight.finding import Level

BRIDGE = {"type": "bridge", "ipam": {"type": "host-local"}}


def test_a_list_gives_each_plugin_and_ipam_plugin_once() -> None:
    text = json.dumps({"name": "n", "plugins": [BRIDGE, {"type": "portmap"}, BRIDGE]})
    assert network.parsed(text) == network.Network("n", ("bridge", "host-local", "portmap"))


def test_a_single_plugin_is_a_network_too() -> None:
    assert network.parsed(json.dumps({"name": "n", **BRIDGE})).programs == ("bridge", "host-local")


def test_built_in_ipam_is_no_separate_program() -> None:
    azure = {"name": "azure", "plugins": [{"type": "azure-vnet", "ipam": {"type": "azure-cns"}}, {"type": "portmap"}]}
    assert network.parsed(json.dumps(azure)).programs == ("azure-vnet", "portmap")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"name": "n"}',
        '{"name": "n", "plugins": []}',
        '{"name": "n", "plugins": ["bridge"]}',
        '{"name": "n", "type": "/bin/sh"}',
    ],
)
def test_malformed_configurations_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        network.parsed(text)


def test_only_the_first_configuration_file_by_name_is_used() -> None:
    assert network.first_configuration(["20-a.conf", ".05-x.conf", "10-b.conflist", "01-note.txt"]) == "10-b.conflist"
    assert network.first_configuration(["note.txt"]) == ""


def test_missing_plugins_are_an_error_that_names_them() -> None:
    found = network.plugins("/c", network.Network("n", ("bridge", "nope")), ["nope"], ["/opt/cni/bin"])
    assert found.level is Level.ERROR
    assert found.text.endswith("/opt/cni/bin: nope")
    assert network.plugins("/c", network.Network("n", ("bridge",)), [], ["/opt/cni/bin"]).level is Level.OK


def test_a_missing_or_bad_configuration_is_an_error_and_a_failing_tapmanager_a_warning() -> None:
    assert network.no_configuration("/etc/cni/net.d").level is Level.ERROR
    assert network.bad_configuration("/c", "it has no name").level is Level.ERROR
    assert network.tapmanager("/s", "Connection refused", "").level is Level.WARNING
    assert network.tapmanager("/s", "", "no CNI config").level is Level.WARNING
    assert network.tapmanager("/s", "", "").level is Level.OK


def test_whether_a_vms_next_pod_keeps_its_addresses_depends_on_the_networks_capabilities() -> None:
    able = network.parsed('{"name": "n", "plugins": [{"type": "bridge", "capabilities": {"ips": true, "mac": false}}]}')
    assert able.capabilities == {"ips"}
    assert "the same addresses" in network.kept_addresses(able).text
    assert "no plugin of network n has the capability ips" in network.kept_addresses(network.Network("n", ())).text


DAY = 86400.0
HOUR = 3600.0


@pytest.mark.parametrize(
    ("node", "expires_in", "lasts", "level", "text", "remedy"),
    [
        ("one", 80 * DAY, 90 * DAY, Level.OK, "are served on 0.0.0.0:10017; the certificate names node one and", ""),
        ("one", 6 * DAY, 90 * DAY, Level.WARNING, "is valid for 6 more days", "renew it"),
        ("one", 8 * HOUR, DAY, Level.OK, "is valid for 8 more hours", ""),
        ("one", 5 * HOUR, DAY, Level.WARNING, "is valid for 5 more hours", "renew it"),
        ("two", 80 * DAY, 90 * DAY, Level.WARNING, "names node two", "this node's name in Kubernetes"),
    ],
)
def test_a_certificate_that_soon_expires_for_its_kind_or_names_another_machine_is_reported(
    node: str, expires_in: float, lasts: float, level: Level, text: str, remedy: str
) -> None:
    told = network.peers(node, expires_in, lasts, "one", "0.0.0.0:10017")
    assert (told.level, text in told.text, remedy in told.remedy) == (level, True, True)


def test_each_trouble_with_the_certificate_for_other_nodes_is_one_finding(tmp_path: Path) -> None:
    ca = ClusterCa(tmp_path)

    def told(**table: str) -> tuple[Level, str, bool]:
        (found,) = checks.peers(Settings.model_validate({"peers": table}))
        return found.level, found.text, bool(found.remedy)

    def files(lasts: float) -> dict[str, str]:
        one = ca.node("one", lasts=lasts)
        return {"certificate": one.certificate, "key": one.key, "ca": one.ca}

    assert told() == (Level.OK, "no VM moves to another node or from one: peers.certificate is not set", False)
    level, text, has_remedy = told(**files(-1))
    assert (level, "certificate has expired" in text, has_remedy) == (Level.WARNING, True, True)
    level, text, has_remedy = told(**{**files(90 * DAY), "key": "/none"})
    assert (level, text, has_remedy) == (
        Level.WARNING,
        "peers.key: /none cannot be read: No such file or directory",
        True,
    )
    level, text, _ = told(**files(3 * DAY))
    assert (level, "is valid for 3 more days" in text) == (Level.WARNING, True)
