"""Pod annotations have Virtlet's meaning; all errors are reported at once, and no annotation is ignored."""

import datetime as dt
import json
import re
import uuid

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from virtshim.annotations.options import VmOptions
from virtshim.annotations.parse import parse_vm_options
from virtshim.model.errors import InvalidRequest
from virtshim.model.vm import CpuDetails, CpuModel, DiskBus
from virtshim.model.yaml_text import MAX_TEXT_BYTES, parse_mapping

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHUH1zzlzhSHrPmrF9JCvKRBPMUKQF3OaUXcSPxUFvRz me@host"

KNOWN = [
    "kubernetes.io/target-runtime",
    "VirtletVCPUCount",
    "VirtletDiskDriver",
    "VirtletCloudInitImageType",
    "VirtletCloudInitMetaData",
    "VirtletCloudInitUserData",
    "VirtletCloudInitUserDataOverwrite",
    "VirtletCloudInitUserDataScript",
    "VirtletCloudInitUserDataSource",
    "VirtletCloudInitUserDataSourceKey",
    "VirtletCloudInitUserDataSourceEncoding",
    "VirtletSSHKeys",
    "VirtletSSHKeySource",
    "VirtletCPUModel",
    "VirtletLibvirtCPUSetting",
    "VirtletRootVolumeSize",
    "VirtletChown9pfsMounts",
    "VirtletFilesFromDataSource",
    "VirtletSystemUUID",
    "VirtletForceDHCPNetworkConfig",
]


def refusal(**annotations: str) -> str:
    with pytest.raises(InvalidRequest) as error:
        parse_vm_options(annotations)
    return str(error.value)


def outcome(annotations: dict[str, str]) -> str:
    """The options, or why there are none; any other exception is a failure."""
    try:
        return repr(parse_vm_options(annotations))
    except InvalidRequest as error:
        return str(error)


def test_queues_are_one_to_eight() -> None:
    assert VmOptions().nic_queues == 0
    assert [parse_vm_options({"virtshim.io/nic-queues": text}).nic_queues for text in ("1", "8")] == [1, 8]


@pytest.mark.parametrize("text", ["0", "9", "-1", "two", "", "1.5", "1000", "\u0661"])
def test_any_other_number_of_queues_is_refused_and_the_error_lists_the_range(text: str) -> None:
    assert "not a number of queues; write 1 to 8" in refusal(**{"virtshim.io/nic-queues": text})


def test_command_and_image_config_annotations_take_two_values_each() -> None:
    assert VmOptions().run_command is None
    assert parse_vm_options({"virtshim.io/command": "run"}).run_command is True
    assert parse_vm_options({"virtshim.io/command": "ignore"}).run_command is False
    assert "write one of them" in refusal(**{"virtshim.io/command": "yes"})
    assert parse_vm_options({"virtshim.io/image-config": "ignore"}).use_image_config is False
    assert parse_vm_options({"virtshim.io/image-config": "use"}).use_image_config is True
    assert "neither use nor ignore" in refusal(**{"virtshim.io/image-config": "true"})


def test_kubelets_own_volumes_are_copied_unless_the_pod_wants_them_shared() -> None:
    assert parse_vm_options({"virtshim.io/kubelet-volumes": "shared"}).share_kubelet_volumes is True
    assert parse_vm_options({"virtshim.io/kubelet-volumes": "copied"}).share_kubelet_volumes is False
    assert "neither copied nor shared" in refusal(**{"virtshim.io/kubelet-volumes": "virtiofs"})


def test_no_annotations_give_the_defaults() -> None:
    assert parse_vm_options({}) == VmOptions()
    assert VmOptions().vcpus is None
    assert VmOptions().disk_bus is None


def test_annotations_of_other_programs_are_ignored() -> None:
    others = {
        "kubernetes.io/config.source": "api",
        "virtlet.cloud/x": "1",
        "k8s.v1.cni.cncf.io/networks": "[]",
        "": "x",
    }
    assert parse_vm_options({**others, "kubernetes.io/target-runtime": "virtlet.cloud"}) == VmOptions()


def test_all_annotations_of_a_pod_are_read_together() -> None:
    options = parse_vm_options(
        {
            "VirtletVCPUCount": "4",
            "VirtletDiskDriver": "virtio",
            "VirtletCPUModel": "host-model",
            "VirtletRootVolumeSize": "4Gi",
            "VirtletSystemUUID": "53008994-44C0-4017-AD44-9C49758083DA",
            "VirtletCloudInitImageType": "NoCloud",
            "VirtletCloudInitMetaData": '{"instance-id": "foo"}',
            "VirtletCloudInitUserData": "users:\n- name: cloudy\n",
            "VirtletCloudInitUserDataOverwrite": "true",
            "VirtletCloudInitUserDataScript": "#!/bin/sh\n",
            "VirtletSSHKeys": f"{KEY}\n\n{KEY}2\r\n",
            "VirtletForceDHCPNetworkConfig": "true",
        }
    )
    assert options == VmOptions(
        vcpus=4,
        disk_bus=DiskBus.VIRTIO,
        cpu_model=CpuModel.HOST_MODEL,
        root_volume_bytes=4 * 2**30,
        system_uuid=uuid.UUID("53008994-44c0-4017-ad44-9c49758083da"),
        meta_data={"instance-id": "foo"},
        user_data={"users": [{"name": "cloudy"}]},
        user_data_overwrite=True,
        user_data_script="#!/bin/sh\n",
        ssh_keys=(KEY, f"{KEY}2"),
        force_dhcp=True,
    )


@pytest.mark.parametrize(
    ("text", "count"), [("1", 1), ("255", 255), ("0", 1), ("-3", 1), ("-0", 1), ("+2", 2), ("007", 7)]
)
def test_the_vcpu_count_is_at_least_one(text: str, count: int) -> None:
    assert parse_vm_options({"VirtletVCPUCount": text}).vcpus == count


@pytest.mark.parametrize("text", ["", "x", "1.5", "256", "9" * 5000, "٣", "1 ", "0x1"])
def test_any_other_vcpu_count_is_an_error(text: str) -> None:
    assert "VirtletVCPUCount" in refusal(VirtletVCPUCount=text)


@pytest.mark.parametrize(
    "key", ["VirtletCloudInitUserDataOverwrite", "VirtletForceDHCPNetworkConfig", "VirtletChown9pfsMounts"]
)
def test_only_true_and_false_are_booleans(key: str) -> None:
    for text in ("false", ""):
        assert parse_vm_options({key: text}) == VmOptions()
    for text in ("True", "yes", "1", " true", "flase"):
        assert "neither true nor false" in refusal(**{key: text})


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("VirtletDiskDriver", "ide"),
        ("VirtletDiskDriver", "SCSI"),
        ("VirtletCPUModel", "host-passthrough"),
        ("VirtletCloudInitImageType", "iso"),
        ("VirtletRootVolumeSize", "4GiB"),
        ("VirtletRootVolumeSize", ""),
        ("VirtletRootVolumeSize", "-1Gi"),
        ("VirtletRootVolumeSize", "2Ei"),
        ("VirtletSystemUUID", ""),
        ("VirtletSystemUUID", "5300899444c04017ad449c49758083da"),
        ("VirtletSystemUUID", "{53008994-44c0-4017-ad44-9c49758083da}"),
        ("VirtletSystemUUID", "00000000-0000-0000-0000-000000000000"),
        ("VirtletCloudInitMetaData", "a: 2020-01-01"),
        ("VirtletCloudInitMetaData", "a: .nan"),
        ("VirtletCloudInitMetaData", "a: !!binary AAAA"),
        ("VirtletCloudInitUserData", "- a"),
        ("VirtletCloudInitUserData", "just text"),
        ("VirtletCloudInitUserData", "a: [b"),
        ("VirtletCloudInitUserData", "1: a"),
        ("VirtletSSHKeys", "nothing like a key"),
        ("VirtletSSHKeys", "ssh-rsa"),
        ("VirtletSSHKeys", "ssh-rsa ???"),
        ("VirtletSSHKeys", f"{KEY}\x1b[0m"),
        ("VirtletSSHKeys", "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA"),
        ("VirtletCloudInitUserDataScript", "x" * (MAX_TEXT_BYTES + 1)),
        ("VirtletCloudInitUserDataScript", "\ud800"),
    ],
)
def test_a_wrong_value_names_its_annotation(key: str, text: str) -> None:
    assert refusal(**{key: text}).startswith(f"annotation {key}: ")


def test_an_unsupported_feature_is_refused_with_a_remedy() -> None:
    message = refusal(VirtletChown9pfsMounts="true")
    assert "annotation VirtletChown9pfsMounts: not supported yet: " in message
    assert "remove it" in message


@pytest.mark.parametrize(
    ("text", "model", "details"),
    [
        ("mode: host-passthrough", CpuModel.HOST_PASSTHROUGH, CpuDetails()),
        ("mode: host-model\n", CpuModel.HOST_MODEL, CpuDetails()),
        ("model: Nehalem", CpuModel.CUSTOM, CpuDetails("Nehalem")),
        (
            "Mode: custom\nModel: {Value: core2duo, Fallback: forbid}\nFeatures: [{Name: vmx}, {name: sse4.1, policy: disable}]",
            CpuModel.CUSTOM,
            CpuDetails("core2duo", fallback=False, features=(("vmx", "require"), ("sse4.1", "disable"))),
        ),
        ("{mode: maximum, features: null}", CpuModel.MAXIMUM, CpuDetails()),
    ],
)
def test_virtlets_cpu_setting_beats_its_cpu_model(text: str, model: CpuModel, details: CpuDetails) -> None:
    options = parse_vm_options({"VirtletLibvirtCPUSetting": text, "VirtletCPUModel": "host-model"})
    assert (options.cpu_model, options.cpu_details) == (model, details)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("- a", "mapping"),
        ("mode: x", "mode 'x' is not one of host-model, host-passthrough, maximum, custom"),
        ("{}", "mode '' is not one of"),
        ("mode: [a]", "mode"),
        ("mode: custom", "mode custom needs a model"),
        ("{mode: host-model, model: Nehalem}", "mode custom needs a model"),
        ("{mode: host-model, topology: {sockets: 2}}", "'topology' cannot be set; only mode, model, features can"),
        ("model: {value: '</cpu>'}", "model is malformed"),
        ("model: {value: Nehalem, vendorid: x}", "model is malformed"),
        ("model: {value: Nehalem, fallback: maybe}", "model is malformed"),
        ("{mode: host-model, features: vmx}", "features is not a list"),
        ("{mode: host-model, features: [vmx]}", "a feature is malformed"),
        ("{mode: host-model, features: [{name: vmx, policy: please}]}", "a feature is malformed"),
    ],
)
def test_a_cpu_setting_that_libvirt_cannot_express_is_refused(text: str, why: str) -> None:
    assert why in refusal(VirtletLibvirtCPUSetting=text)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("VirtletCloudInitUserDataSource", "vault/data"),
        ("VirtletCloudInitUserDataSource", "secret/a/b"),
        ("VirtletCloudInitUserDataSourceEncoding", "hex"),
        ("VirtletSSHKeySource", "secret/"),
    ],
)
def test_a_malformed_value_is_not_reported_as_an_unsupported_feature(key: str, text: str) -> None:
    assert "not supported" not in refusal(**{key: text})


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("VirtletVCPUcount", "VirtletVCPUCount"),
        ("virtletDiskDriver", "VirtletDiskDriver"),
        ("VirtletSSHKey", "VirtletSSHKeys"),
        ("VirtletCloudInitUserdata", "VirtletCloudInitUserData"),
    ],
)
def test_a_misspelt_name_suggests_the_right_one(key: str, near: str) -> None:
    assert f"did you mean {near}?" in refusal(**{key: "1"})


def test_an_unknown_name_of_ours_is_refused() -> None:
    assert "virtshim.io/cpu-modell: there is no such annotation" in refusal(**{"virtshim.io/cpu-modell": "x"})


def test_all_errors_are_reported_at_once() -> None:
    message = refusal(VirtletVCPUCount="x", VirtletDiskDriver="ide", VirtletRotVolumeSize="1", VirtletSSHKeys="\n")
    assert message.startswith("3 annotations are wrong: (1) ")
    for part in ("VirtletVCPUCount: 'x' is not a whole number", "VirtletDiskDriver", "mean VirtletRootVolumeSize?"):
        assert part in message


def test_a_report_stays_small() -> None:
    wrong = {f"Virtlet{number:04}{'x' * 200}": "y" * 1000 for number in range(500)}
    assert len(refusal(**wrong)) < 6000


def test_every_known_name_is_known() -> None:
    for key in KNOWN:
        assert "no such annotation" not in outcome({key: "\x00"})


def test_yaml_errors_give_the_position_but_not_the_content() -> None:
    message = refusal(VirtletCloudInitUserData="password: hunter2\nx: y: z\n")
    assert "line 2" in message
    assert "hunter2" not in message


def test_yaml_values_that_cloud_init_knows_survive() -> None:
    user_data = parse_vm_options(
        {"VirtletCloudInitUserData": "expiredate: 2030-01-01\ncontent: !!binary aGk=\nmode: 0644\nnone:\n"}
    ).user_data
    assert user_data == {"expiredate": dt.date(2030, 1, 1), "content": b"hi", "mode": 0o644, "none": None}


def test_yaml_aliases_are_expanded() -> None:
    mapping = parse_mapping("a: &x {k: [1]}\nb: *x\nc: {<<: *x, l: 2}\n")
    assert mapping == {"a": {"k": [1]}, "b": {"k": [1]}, "c": {"k": [1], "l": 2}}
    assert mapping["a"]["k"] is not mapping["b"]["k"]


LEVELS = "".join(f"c{n}: &c{n} [{','.join([f'*c{n - 1}'] * 9)}]\n" for n in range(1, 30))
MERGES = "".join(f"c{n}: &c{n} {{<<: [{','.join([f'*c{n - 1}'] * 9)}]}}\n" for n in range(1, 30))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        "c0: &c0 [x]\n" + LEVELS,
        "c0: &c0 {x: y}\n" + MERGES,
        "a: &x " + "y" * 100_000 + "\nb: [" + "*x," * 10_000 + "]",
        "a: " + "[" * 200_000,
        "a: " + "{b: " * 50_000,
        "a: &a [*a]",
        "a: &a {<<: *a}",
        "a: 0x" + "f" * 200_000,
        "a: 1" + ":1" * 100_000,
        "a: " + "9" * 200_000,
    ],
)
def test_yaml_bombs_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_mapping(text)


@pytest.mark.parametrize(
    "tag", ["int ''", "bool x", "timestamp x", "float _", "set {a}", "omap [a: 1]", "python/name:os x"]
)
def test_unknown_yaml_tags_are_refused(tag: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_mapping(f"a: !!{tag}")


@pytest.mark.parametrize("text", ["", "null", "{}", "# nothing", "---\n"])
def test_an_empty_document_is_an_empty_mapping(text: str) -> None:
    assert parse_mapping(text) == {}


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.dates() | st.binary()
trees = st.dictionaries(
    st.text(),
    st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)),
    max_size=5,
)


@given(trees)
def test_yaml_output_can_be_read_back(tree: dict[str, object]) -> None:
    assert parse_mapping(yaml.safe_dump(tree)) == tree


@given(st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text(), max_size=5))
def test_json_is_accepted_as_yaml(tree: dict[str, object]) -> None:
    assert parse_mapping(json.dumps(tree, ensure_ascii=True)) == tree


yamlish = st.text(alphabet="ab01:-{}[]&*!<,'\"|>#\n %@.?~\\x\t", max_size=40)
values = st.text() | yamlish | st.sampled_from(["true", "4Gi", "nocloud", "-1", KEY, "a: 1", "secret/x"])
keys = (
    st.sampled_from(KNOWN)
    | st.text()
    | st.builds("Virtlet{}".format, st.text())
    | st.builds("virtshim.io/{}".format, st.text())
)


@given(st.dictionaries(keys, values, max_size=6))
def test_any_annotation_gives_options_or_invalid_request(annotations: dict[str, str]) -> None:
    assert outcome(annotations)


def test_a_seed_is_a_config_drive_or_nocloud() -> None:
    assert parse_vm_options({"VirtletCloudInitImageType": "ConfigDrive"}).config_drive is True
    assert parse_vm_options({"VirtletCloudInitImageType": "nocloud"}).config_drive is False


def test_a_vm_that_outlives_its_pods_keeps_its_root_disk() -> None:
    options = parse_vm_options({"virtshim.io/vm": "db", "virtshim.io/on-stop": "save"})
    assert (options.vm, options.save_on_stop, options.keep_root_disk) == ("db", True, True)


@pytest.mark.parametrize(
    ("annotations", "why"),
    [
        ({"virtshim.io/vm": "Upper"}, "is not a VM's name"),
        ({"virtshim.io/vm": "-x"}, "is not a VM's name"),
        ({"virtshim.io/vm": "a" * 64}, "is not a VM's name"),
        ({"virtshim.io/vm": "../../etc"}, "is not a VM's name"),
        ({"virtshim.io/on-stop": "freeze"}, "neither shutdown nor save"),
        ({"virtshim.io/on-stop": "save"}, "virtshim.io/on-stop: save needs virtshim.io/vm"),
        ({"virtshim.io/root-disk": "vm"}, "virtshim.io/root-disk: vm needs virtshim.io/vm"),
        ({"virtshim.io/vm": "db", "virtshim.io/root-disk": "pod"}, "contradicts virtshim.io/vm"),
    ],
)
def test_a_wrong_name_or_use_of_a_lasting_vm_is_refused(annotations: dict[str, str], why: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(why)):
        parse_vm_options(annotations)
