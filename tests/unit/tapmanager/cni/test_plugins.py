"""tapmanager runs CNI plugins that work, fail, hang, or are missing. The plugins are shell scripts in a private
directory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from leaks import runs
from podclient import wait_until

from tapmanager.cni import conf as cni_conf
from tapmanager.cni.conf import CniAttachment, NetworkConf, parse_conf
from tapmanager.cni.plugins import CniPlugins
from tapmanager.cni.result import parse_result
from tapmanager.errors import TapmanagerError
from tapmanager.fields import BadField
from tapmanager.pod import Bandwidth, Pod, PortMapping

SANDBOX = "ab" * 32
POD = Pod(SANDBOX, "default", "web-0", "1f-2e", port_mappings=(PortMapping("tcp", 80, 8080), PortMapping("udp", 53, 0)))

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


# -- pure ----------------------------------------------------------------------------------------------------------------


def test_a_single_plugin_file_is_a_chain_of_one() -> None:
    conf = parse_conf('{"cniVersion": "0.4.0", "name": "n", "type": "bridge", "ipam": {"type": "host-local"}}')
    assert (conf.name, conf.version, conf.types(), conf.ipam_types()) == ("n", "0.4.0", ("bridge",), ("host-local",))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Expecting"),
        ("[]", "an object"),
        ('{"type": "bridge"}', "network.name"),
        ('{"name": "../x", "type": "bridge"}', "network.name"),
        ('{"name": "n", "type": "../bridge"}', "bare file name"),
        ('{"name": "n", "type": "a/b"}', "bare file name"),
        ('{"name": "n", "plugins": []}', "at least one"),
        ('{"name": "n", "plugins": [{}]}', r"plugins\[0\].type"),
        ('{"cniVersion": "9.0.0", "name": "n", "type": "x"}', "cniVersion"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_broken_configuration_says_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_conf(text)


@given(raw=st.dictionaries(st.sampled_from(["name", "type", "plugins", "cniVersion"]), _JSON))
def test_any_json_is_a_configuration_or_a_value_error(raw: dict[str, object]) -> None:
    with contextlib.suppress(ValueError):
        parse_conf(json.dumps(raw))


@given(raw=st.dictionaries(st.sampled_from(["interfaces", "ips", "routes", "dns", "ip4"]), _JSON))
def test_any_json_is_a_result_or_a_bad_field(raw: dict[str, object]) -> None:
    with contextlib.suppress(BadField):
        parse_result(raw)


def test_an_address_of_an_interface_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadField, match=r"ips\[0\].interface"):
        parse_result({"ips": [{"address": "10.0.0.1/8", "interface": 3}]})


def test_a_plugin_gets_the_specified_variables_and_nothing_of_our_environment() -> None:
    env = cni_conf.environment("ADD", CniAttachment(POD, "/run/netns/x", ("/opt/cni/bin", "/usr/lib/cni")))
    assert env["CNI_ARGS"] == (
        "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web-0;"
        f"K8S_POD_INFRA_CONTAINER_ID={SANDBOX};K8S_POD_UID=1f-2e"
    )
    assert env["CNI_PATH"] == "/opt/cni/bin:/usr/lib/cni"
    assert set(env) == {
        "PATH", "CNI_COMMAND", "CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS", "CNI_PATH",
    }  # fmt: skip


def test_every_plugin_is_asked_for_the_mac_of_the_guest() -> None:
    pod = dataclasses.replace(POD, macs={"eth0": "0a:58:00:00:00:02"})
    env = cni_conf.environment("ADD", CniAttachment(pod, "/run/netns/x", ("/opt/cni/bin",)))
    assert env["CNI_ARGS"].endswith(";MAC=0a:58:00:00:00:02")


def test_port_mappings_go_only_to_a_plugin_that_declares_them() -> None:
    able = {"type": "portmap", "capabilities": {"portMappings": True}}
    conf = NetworkConf("n", "1.0.0", (able,))
    given_to = json.loads(cni_conf.stdin(conf, able, POD, None))
    assert given_to["runtimeConfig"] == {
        "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": ""}]
    }
    assert "runtimeConfig" not in json.loads(cni_conf.stdin(conf, {"type": "x"}, POD, None))


def test_bandwidth_goes_only_to_a_plugin_that_declares_it_with_room_for_a_large_segment() -> None:
    able = {"type": "bandwidth", "capabilities": {"bandwidth": True}}
    conf = NetworkConf("n", "1.0.0", ({"type": "x"}, able))
    pod = dataclasses.replace(POD, bandwidth=Bandwidth(1_000_000, 100_000_000))
    wanted = {"ingressRate": 1_000_000, "ingressBurst": 524_288, "egressRate": 100_000_000, "egressBurst": 10_000_000}
    assert json.loads(cni_conf.stdin(conf, able, pod, None))["runtimeConfig"] == {"bandwidth": wanted}
    assert "runtimeConfig" not in json.loads(cni_conf.stdin(conf, {"type": "x"}, pod, None))
    assert "runtimeConfig" not in json.loads(cni_conf.stdin(conf, able, POD, None))
    assert conf.can("bandwidth")
    assert not conf.can("portMappings")


def test_the_mac_of_a_guest_goes_to_a_plugin_that_declares_the_capability() -> None:
    able = {"type": "bridge", "capabilities": {"mac": True}}
    conf = NetworkConf("n", "1.0.0", (able,))
    pod = dataclasses.replace(POD, macs={"eth0": "0a:58:00:00:00:02"})
    assert json.loads(cni_conf.stdin(conf, able, pod, None))["runtimeConfig"] == {"mac": "0a:58:00:00:00:02"}
    assert "runtimeConfig" not in json.loads(cni_conf.stdin(conf, able, POD, None))
    assert "runtimeConfig" not in json.loads(cni_conf.stdin(conf, {"type": "bridge"}, pod, None))


@pytest.mark.parametrize("macs", [{"eth0": "01:00:5e:00:00:01"}, {"eth0": "x"}, {"eth0": 7}])
def test_macs_that_no_guest_can_have_are_refused(macs: dict[str, object]) -> None:
    pod = {"namespace": "n", "name": "p", "uid": "u"}
    with pytest.raises(BadField, match="macs"):
        Pod.from_json({"sandbox": SANDBOX, "pod": pod, "macs": macs}, "args")


def test_wanted_addresses_go_to_a_plugin_that_declares_the_capability() -> None:
    able = {"type": "bridge", "capabilities": {"ips": True}}
    conf = NetworkConf("n", "1.0.0", (able,))
    pod = dataclasses.replace(POD, addresses={"eth0": ("10.88.0.7/16", "fd00::7/64"), "net1": ("10.9.0.7/16",)})
    assert json.loads(cni_conf.stdin(conf, able, pod, None))["runtimeConfig"] == {"ips": ["10.88.0.7/16", "fd00::7/64"]}
    assert "runtimeConfig" not in json.loads(cni_conf.stdin(conf, {"type": "bridge"}, pod, None))


@pytest.mark.parametrize("addresses", [{"eth0": ["10.88.0.7/99"]}, {"eth0": ["x"]}, {"eth0": "10.88.0.7/16"}])
def test_addresses_that_no_interface_can_have_are_refused(addresses: dict[str, object]) -> None:
    pod = {"namespace": "n", "name": "p", "uid": "u"}
    with pytest.raises(BadField, match="addresses"):
        Pod.from_json({"sandbox": SANDBOX, "pod": pod, "addresses": addresses}, "args")


def test_the_macs_and_addresses_of_a_pod_survive_in_its_record() -> None:
    pod = dataclasses.replace(POD, macs={"eth0": "0a:58:00:00:00:02"}, addresses={"eth0": ("10.88.0.7/16",)})
    assert Pod.from_json(json.loads(json.dumps(pod.to_json())), "pod") == pod


@pytest.mark.parametrize(("version", "kept"), [("0.3.1", False), ("0.4.0", True), ("1.1.0", True)])
def test_del_is_given_the_result_from_version_0_4_0_on(version: str, kept: bool) -> None:
    found = cni_conf.result_for_del(NetworkConf("n", version, ({"type": "x"},)), {"a": 1})
    assert (found is not None) is kept


@pytest.mark.parametrize("field", ["namespace", "name", "uid"])
@pytest.mark.parametrize("value", ["a;K8S_POD_NAME=b", "a=b", "", "-a", "a\nb", "a b", "a/b", "x" * 254])
def test_pod_names_that_could_change_cni_args_are_refused(field: str, value: str) -> None:
    pod = {"namespace": "n", "name": "p", "uid": "u", field: value}
    with pytest.raises(BadField, match=field):
        Pod.from_json({"sandbox": SANDBOX, "pod": pod}, "args")


# -- running -------------------------------------------------------------------------------------------------------------


class Place:
    """A private config and plugin folder; every plugin call is noted in `log`."""

    def __init__(self, folder: Path) -> None:
        self.conf, self.bin, self.log = folder / "conf", folder / "bin", folder / "log"
        self.conf.mkdir()
        self.bin.mkdir()
        self.cni = CniPlugins(str(self.conf), [str(self.bin)], 5.0)
        self.at = CniAttachment(POD, "/run/netns/none", (str(self.bin),))

    def plugin(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f'#!/bin/sh\necho "{name} $CNI_COMMAND" >> {self.log}\n{script}\n')
        path.chmod(0o755)

    def chain(self, *names: str, version: str = "1.0.0") -> NetworkConf:
        plugins = [{"type": name} for name in names]
        (self.conf / "10.conflist").write_text(json.dumps({"cniVersion": version, "name": "n", "plugins": plugins}))
        return self.cni.load()

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def test_the_first_configuration_by_name_is_used_and_reread(place: Place) -> None:
    (place.conf / "20.conf").write_text('{"name": "second", "type": "x"}')
    (place.conf / "00-not-a-config.txt").write_text("")
    assert place.cni.load().name == "second"
    (place.conf / "10.json").write_text('{"name": "first", "type": "x"}')
    assert place.cni.load().name == "first"


@pytest.mark.parametrize("text", [None, "{"])
def test_no_usable_configuration_is_unavailable_with_a_remedy(place: Place, text: str | None) -> None:
    if text is not None:
        (place.conf / "10.conf").write_text(text)
    with pytest.raises(TapmanagerError, match=r"install a network add-on|correct the file") as caught:
        place.cni.load()
    assert caught.value.kind == "unavailable"
    assert place.cni.trouble() == str(caught.value)


def test_a_chain_hands_each_plugin_the_result_of_the_one_before(place: Place) -> None:
    place.plugin("one", 'cat >/dev/null; echo \'{"cniVersion": "1.0.0", "ips": []}\'')
    place.plugin("two", f"cat > {place.bin}/seen; cat {place.bin}/seen")
    result = place.cni.add(place.chain("one", "two"), place.at, soon())
    assert json.loads((place.bin / "seen").read_text())["prevResult"] == {"cniVersion": "1.0.0", "ips": []}
    assert result["name"] == "n"
    assert place.calls() == ["one ADD", "two ADD"]


def test_a_result_of_another_version_is_converted_to_the_chains_version(place: Place) -> None:
    """A meta plugin prints what its delegate said; the next one reads only its own version."""
    printed = {"cniVersion": "0.3.1", "ips": [{"version": "4", "address": "10.0.0.5/8"}]}
    place.plugin("one", f"cat >/dev/null; echo '{json.dumps(printed)}'")
    place.plugin("two", f"cat > {place.bin}/seen.$CNI_COMMAND; cat {place.bin}/seen.ADD")
    chain = place.chain("one", "two")
    place.cni.add(chain, place.at, soon())
    place.cni.delete(chain, place.at, printed, soon())
    for command in ("ADD", "DEL"):
        given_to = json.loads((place.bin / f"seen.{command}").read_text())
        assert given_to["prevResult"] == {"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.5/8"}]}


@pytest.mark.parametrize("printed", ['{"ips": 5}', '{"ips": [5]}', '{"ip4": 5}', '{"routes": {}, "interfaces": 1}'])
def test_a_malformed_earlier_result_does_not_hinder_del(place: Place, printed: str) -> None:
    place.plugin("one", f"cat >/dev/null; echo '{printed}'")
    chain = place.chain("one", "one")
    result = place.cni.add(chain, place.at, soon())
    place.cni.delete(chain, place.at, result, soon())
    assert place.calls() == ["one ADD", "one ADD", "one DEL", "one DEL"]


def test_del_runs_the_chain_backwards_and_continues_after_a_failure(place: Place) -> None:
    place.plugin("one", "")
    place.plugin("two", 'echo \'{"code": 7, "msg": "no", "details": "way"}\'; exit 1')
    with pytest.raises(
        TapmanagerError, match=r'plugin "two" of network "n" failed at DEL: no: way \(CNI error 7\)'
    ) as caught:
        place.cni.delete(place.chain("one", "two"), place.at, None, soon())
    assert caught.value.kind == "internal"
    assert place.calls() == ["two DEL", "one DEL"]


def test_try_again_later_becomes_unavailable(place: Place) -> None:
    place.plugin("one", 'echo \'{"code": 11, "msg": "later"}\'; exit 1')
    with pytest.raises(TapmanagerError, match="later") as caught:
        place.cni.add(place.chain("one"), place.at, soon())
    assert caught.value.kind == "unavailable"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo boom >&2; exit 3", "failed at ADD: boom"),
        ("exit 3", "exit status 3"),
        ("kill -9 $$", "killed by signal 9"),
        ("echo '[1]'", "did not return a JSON object"),
        ("true", "did not return JSON"),
        ("head -c 100000 /dev/zero; exit 1", "failed at ADD"),
    ],
)
def test_a_plugins_failure_is_reported_in_its_own_words(place: Place, script: str, words: str) -> None:
    place.plugin("one", script)
    with pytest.raises(TapmanagerError, match=words) as caught:
        place.cni.add(place.chain("one"), place.at, soon())
    assert caught.value.kind == "internal"


def test_a_missing_plugin_is_unavailable_and_nothing_was_run(place: Place) -> None:
    place.plugin("one", "")
    conf = place.chain("one", "two")
    with pytest.raises(TapmanagerError, match='"two" is not in') as caught:
        place.cni.require_plugins(conf, place.at.bin_dirs)
    assert caught.value.kind == "unavailable"
    assert '"two" is not in' in place.cni.trouble()
    assert place.calls() == []


def test_a_hanging_plugin_is_killed_with_its_children_at_the_limit(place: Place) -> None:
    place.plugin("one", f"sleep 600 & echo $! > {place.bin}/child; echo $$ > {place.bin}/self; wait")
    with pytest.raises(TapmanagerError, match="was killed") as caught:
        place.cni.add(place.chain("one"), place.at, soon(0.5))
    assert caught.value.kind == "deadline"
    for name in ("self", "child"):
        wait_until(lambda name=name: not runs(int((place.bin / name).read_text())), 5, f"{name} is gone")


def test_a_plugin_that_leaves_a_child_with_our_pipes_is_cut_at_the_limit(place: Place) -> None:
    place.plugin("one", f"sleep 600 & echo $! > {place.bin}/child; exit 0")
    with pytest.raises(TapmanagerError, match="was killed"):
        place.cni.add(place.chain("one"), place.at, soon(0.5))
    wait_until(lambda: not runs(int((place.bin / "child").read_text())), 5, "the child is gone")


def test_no_plugin_runs_after_the_time_limit(place: Place) -> None:
    place.plugin("one", "")
    with pytest.raises(TapmanagerError, match="time limit expired before"):
        place.cni.add(place.chain("one"), place.at, time.monotonic())
    assert place.calls() == []


def test_built_in_ipam_needs_no_separate_program(place: Place) -> None:
    place.plugin("one", "")
    conf = NetworkConf("n", "1.0.0", ({"type": "one", "ipam": {"type": "azure-cns"}},))
    place.cni.require_plugins(conf, place.at.bin_dirs)


def test_a_missing_ipam_plugin_is_found_before_anything_is_made(place: Place) -> None:
    place.plugin("one", "")
    conf = NetworkConf("n", "1.0.0", ({"type": "one", "ipam": {"type": "no-ipam"}},))
    with pytest.raises(TapmanagerError, match='"no-ipam" is not in'):
        place.cni.require_plugins(conf, place.at.bin_dirs)


def test_endless_output_of_a_plugin_takes_no_memory_and_ends_at_the_time_limit(place: Place) -> None:
    place.plugin("one", f"echo $$ > {place.bin}/self; exec yes")
    tracemalloc.start()
    try:
        with pytest.raises(TapmanagerError, match="was killed"):
            place.cni.add(place.chain("one"), place.at, soon(0.5))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20, "0.5 s of it are hundreds of MiB"
    wait_until(lambda: not runs(int((place.bin / "self").read_text())), 5, "it is gone")


def test_a_plugin_that_does_not_read_its_input_blocks_nothing(place: Place) -> None:
    place.plugin("one", "exec < /dev/null; echo '{\"ips\": []}'")
    conf = NetworkConf("n", "1.0.0", ({"type": "one", "filler": "x" * (1 << 20)},))
    assert place.cni.add(conf, place.at, soon()) == {"ips": []}
