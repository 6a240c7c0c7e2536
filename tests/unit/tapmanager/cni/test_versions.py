"""tapmanager uses the newest common version of CNI, and reads results of each version."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapmanager.cni.conf import conf_from_json, converted
from tapmanager.cni.result import parse_result
from tapmanager.fields import BadField

PLUGIN = {"name": "n", "plugins": [{"type": "x"}]}

BY_FAMILY = {
    "cniVersion": "0.2.0",
    "ip4": {"ip": "10.1.0.5/16", "gateway": "10.1.0.1", "routes": [{"dst": "0.0.0.0/0"}]},
    "ip6": {"ip": "fd00::5/64", "routes": [{"dst": "::/0", "gw": "fd00::1"}]},
    "dns": {"nameservers": ["10.1.0.1"]},
}
WITH_FAMILY = {
    "cniVersion": "0.4.0",
    "interfaces": [{"name": "eth0", "sandbox": "/run/netns/x"}],
    "ips": [
        {"version": "4", "address": "10.1.0.5/16", "gateway": "10.1.0.1", "interface": 0},
        {"version": "6", "address": "fd00::5/64", "interface": 0},
    ],
    "routes": [{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}, {"dst": "::/0", "gw": "fd00::1"}],
    "dns": {"nameservers": ["10.1.0.1"]},
}
PLAIN = {
    **WITH_FAMILY,
    "cniVersion": "1.1.0",
    "ips": [
        {"address": "10.1.0.5/16", "gateway": "10.1.0.1", "interface": 0},
        {"address": "fd00::5/64", "interface": 0},
    ],
}


@pytest.mark.parametrize(
    ("said", "spoken"),
    [
        ({}, "0.2.0"),
        ({"cniVersion": ""}, "0.2.0"),
        ({"cniVersion": "0.4.0"}, "0.4.0"),
        ({"cniVersions": ["0.3.1", "1.1.0", "0.4.0"]}, "1.1.0"),
        ({"cniVersion": "1.0.0", "cniVersions": ["0.3.1", "0.4.0"]}, "1.0.0"),
        ({"cniVersion": "0.3.1", "cniVersions": ["1.0.0", "2.7.0"]}, "1.0.0"),
        ({"cniVersion": "9.0.0", "cniVersions": ["1.0.0"]}, "1.0.0"),
    ],
)
def test_the_newest_common_version_is_used(said: dict[str, object], spoken: str) -> None:
    assert conf_from_json({**PLUGIN, **said}).version == spoken


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"cniVersion": "9.0.0"}, r"network\.cniVersion: '9\.0\.0' is not among 0\.1\.0, .*, 1\.1\.0"),
        ({"cniVersions": ["2.0.0", "3.0.0"]}, r"network\.cniVersions: '2\.0\.0', '3\.0\.0' is not among"),
        ({"cniVersions": "1.0.0"}, r"network\.cniVersions: must be a list"),
        ({"cniVersions": [1]}, r"network\.cniVersions\[0\]"),
    ],
)
def test_unsupported_versions_are_refused_by_name(said: dict[str, object], words: str) -> None:
    with pytest.raises(BadField, match=words):
        conf_from_json({**PLUGIN, **said})


@pytest.mark.parametrize("result", [WITH_FAMILY, PLAIN], ids=["with-family", "plain"])
@pytest.mark.parametrize("version", ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"])
def test_a_list_of_addresses_has_families_if_the_version_has_them(result: dict[str, object], version: str) -> None:
    wanted = PLAIN if version in ("1.0.0", "1.1.0") else WITH_FAMILY
    assert converted(result, version) == {**wanted, "cniVersion": version}


def test_a_result_of_the_oldest_version_becomes_a_list() -> None:
    found = converted(BY_FAMILY, "1.0.0")
    without_interface = [{key: ip[key] for key in ip if key != "interface"} for ip in PLAIN["ips"]]
    wanted = {**PLAIN, "cniVersion": "1.0.0", "ips": without_interface}
    del wanted["interfaces"]
    assert {**found, "routes": [dict(sorted(route.items())) for route in found["routes"]]} == wanted


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0"])
def test_converting_to_the_oldest_version_keeps_one_address_per_family(version: str) -> None:
    more = {**PLAIN, "ips": [*PLAIN["ips"], {"address": "10.1.0.6/16"}]}
    found = converted(more, version)
    through = [{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}]
    assert found == {**BY_FAMILY, "cniVersion": version, "ip4": {**BY_FAMILY["ip4"], "routes": through}}
    assert converted(BY_FAMILY, version) == {**BY_FAMILY, "cniVersion": version}


_JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["ip", "gateway", "dst"]), inner),
    max_leaves=6,
)


@given(
    raw=st.dictionaries(st.sampled_from(["ips", "routes", "ip4", "ip6", "interfaces"]), _JSON),
    version=st.sampled_from(["0.2.0", "0.4.0", "1.1.0"]),
)
def test_malformed_results_are_converted_without_an_error(raw: dict[str, object], version: str) -> None:
    assert converted(raw, version)["cniVersion"] == version


@pytest.mark.parametrize("version", ["0.2.0", "0.3.1", "1.0.0"])
def test_a_converted_result_has_the_same_meaning(version: str) -> None:
    kept = parse_result(converted(WITH_FAMILY, version))
    told = parse_result(WITH_FAMILY)
    assert ([ip.address for ip in kept.ips], kept.routes, kept.dns) == (
        [ip.address for ip in told.ips],
        told.routes,
        told.dns,
    )
