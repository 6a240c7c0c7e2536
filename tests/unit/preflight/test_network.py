import json

import pytest

from virtshim.preflight import network
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
