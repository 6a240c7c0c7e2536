"""Set-up writes on nodes of all kinds what the examples in deploy/ say."""

import configparser
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from virtshim.config.settings import Settings
from virtshim.neighbours.kubelet import EXTRA_FLAGS, KUBEADM_FLAGS, Given, KubeletSetup
from virtshim.neighbours.runtimes import RuntimeSetup
from virtshim.setup import texts
from virtshim.setup.facts import AS_BYTES, UNITS, NodeFacts, kubelet_version
from virtshim.setup.next_steps import after_undo
from virtshim.setup.plan import LIBVIRTD, QEMU, OwnSettings, Plan, plan

pytestmark = pytest.mark.operator

FILE = "/var/lib/kubelet/config.yaml"
CONTAINERD = RuntimeSetup(
    "containerd", "/run/containerd/containerd.sock", "/etc/containerd/config.toml", cgroup_driver="systemd"
)
# kubelet's defaults on Linux.
HARD = {
    "memory.available": "100Mi",
    "nodefs.available": "10%",
    "nodefs.inodesFree": "5%",
    "imagefs.available": "15%",
    "imagefs.inodesFree": "5%",
}
ALL = frozenset({*UNITS, "libvirt-guests.service", "containerd.service", "libvirtd-ro.socket"})


def kubelet(**changed: Any) -> KubeletSetup:
    facts: dict[str, Any] = {"fields": {"cgroupDriver": Given("systemd", FILE)}, "has_unit": True, **changed}
    return KubeletSetup(**{"takes_extra_flags": True, **facts})


def node(**changed: Any) -> NodeFacts:
    whole: dict[str, Any] = {
        "emulator": "/usr/bin/qemu-system-x86_64",
        "vmwrapper": "/usr/libexec/virtshim/vmwrapper",
        "libvirt": "libvirtd",
        "units": ALL,
        "kubelet": kubelet(),
        "cni_configuration": "10-calico.conflist",
        **changed,
    }
    return NodeFacts(**whole)


def planned(facts: NodeFacts, own: OwnSettings | None = None, **options: Any) -> Plan:
    return plan(facts, own or OwnSettings(Settings()), **options)


def text(found: Plan, ending: str) -> str:
    (file,) = [file for file in found.files if file.path.endswith(ending)]
    return file.content.decode()


def paths(found: Plan) -> list[str]:
    return [file.path for file in found.files]


def deployed(pytestconfig: pytest.Config, name: str) -> str:
    return (pytestconfig.rootpath / "deploy" / name).read_text()


def test_the_drop_in_of_a_vms_only_node_is_the_example(pytestconfig: pytest.Config) -> None:
    written = yaml.safe_load(text(planned(node()), "kubelet.conf.d/90-virtshim.conf"))
    assert written == yaml.safe_load(deployed(pytestconfig, "kubelet/90-virtshim.conf"))


def test_the_files_of_a_node_with_containers_are_the_examples(pytestconfig: pytest.Config) -> None:
    found = planned(node(runtimes=(CONTAINERD,)))
    for written, example in (
        ("91-virtshim-proxy.conf", "kubelet/91-virtshim-proxy.conf"),
        ("crictl.yaml", "crictl-proxy.yaml"),
    ):
        assert yaml.safe_load(text(found, written)) == yaml.safe_load(deployed(pytestconfig, example))
    assert Settings(**tomllib.loads(text(found, "proxy.toml"))) == Settings()


@pytest.mark.parametrize(
    ("written", "example"),
    [
        (texts.LOGIND, "kubelet/virtshim-logind.conf"),
        (f"[x]\n{texts.libvirt_guests()}", "libvirt-guests.conf"),
        (texts.kubelet_order("virtshim.service"), "kubelet/virtshim-systemd.conf"),
        (texts.kubelet_order("virtshim-proxy.service"), "kubelet/virtshim-proxy-systemd.conf"),
    ],
)
def test_configuration_of_other_programs_is_the_example(
    pytestconfig: pytest.Config, written: str, example: str
) -> None:
    wanted = deployed(pytestconfig, example)
    assert read_ini(written) == read_ini(wanted if "\n[" in wanted else f"[x]\n{wanted}")


def read_ini(text: str) -> dict[str, dict[str, str]]:
    found = configparser.ConfigParser(interpolation=None)
    found.read_string(text)
    return {name: dict(found[name]) for name in found.sections()}


def test_runtime_class_and_network_are_the_examples(pytestconfig: pytest.Config) -> None:
    example = deployed(pytestconfig, "kustomize/base/runtimeclass.yaml")
    assert list(yaml.safe_load_all(texts.RUNTIME_CLASS)) == list(yaml.safe_load_all(example))
    assert json.loads(texts.CNI) == json.loads(deployed(pytestconfig, "cni/10-virtshim.conflist"))


@pytest.mark.parametrize("runtimes", [(), (CONTAINERD,)], ids=["VMs alone", "behind the proxy"])
def test_a_usual_node_refuses_pods_without_overhead_and_has_no_other_setting_that_differs(
    runtimes: tuple[RuntimeSetup, ...],
) -> None:
    found = planned(node(runtimes=runtimes))
    assert found.problems == ()
    assert tomllib.loads(text(found, "/config.toml")) == {"vm": {"require_overhead": True}}


def test_an_operator_who_allows_pods_without_overhead_is_not_overruled() -> None:
    own = OwnSettings(Settings(vm={"require_overhead": False}), frozenset({"vm.require_overhead"}))
    assert tomllib.loads(text(planned(node(), own), "/config.toml")) == {}


def test_a_usual_node_has_its_units_enabled_and_the_open_socket_masked() -> None:
    found = planned(node(runtimes=(CONTAINERD,)))
    assert found.enable == (
        *UNITS[:3],
        "virtshim-guests.service",
        "virtshim-proxy.service",
        "containerd.service",
        "libvirt-guests.service",
    )
    assert found.mask == ("libvirtd-ro.socket",)


def test_each_setting_that_differs_has_its_reason_and_is_a_setting() -> None:
    crio = RuntimeSetup(
        "cri-o", "/run/crio/crio.sock", "/etc/crio/crio.conf", cgroup_driver="cgroupfs", cni_conf_dir="/etc/own.d/",
        cni_bin_dirs=("/opt/own",), registry_hosts_dir="/etc/certs.d",
    )  # fmt: skip
    flags = {"root-dir": Given("/data/kubelet", KUBEADM_FLAGS)}
    facts = node(
        runtimes=(crio,),
        kubelet=kubelet(fields={}, flags=flags),
        emulator="/usr/libexec/qemu-kvm",
        vmwrapper="/x/vmwrapper",
    )
    found = planned(facts)
    written = text(found, "/config.toml")
    settings = Settings(**tomllib.loads(written))
    assert (settings.cri.cgroup_driver, settings.libvirt.emulator) == ("cgroupfs", "/usr/libexec/qemu-kvm")
    assert (settings.libvirt.vmwrapper, settings.images.registry_hosts_dir) == ("/x/vmwrapper", "/etc/certs.d")
    assert settings.tapmanager.cni_conf_dir == "/etc/own.d"
    assert settings.tapmanager.cni_bin_dir == ("/opt/own", "/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni")
    assert settings.devices.pod_resources_socket == "/data/kubelet/pod-resources/kubelet.sock"
    assert settings.device_plugin.directory == "/data/kubelet/device-plugins"
    for choice in found.choices:
        assert f"# {choice.why}\n{choice.key.partition('.')[2]} = " in written
    assert Settings(**tomllib.loads(text(found, "proxy.toml"))).proxy.primary.name == "cri-o"
    assert "It cannot make\n# pods of RuntimeClass virtshim-pod" in text(found, "proxy.toml")
    assert not any("/crio/" in path for path in paths(found))
    assert "cgroupDriver: cgroupfs" in text(found, "91-virtshim-proxy.conf")


def test_kubelets_cgroup_driver_wins_over_the_machines_default() -> None:
    found = planned(node(kubelet=kubelet(fields={"cgroupDriver": Given("cgroupfs", FILE)}), texts={QEMU: '# "none"\n'}))
    assert [choice.key for choice in found.choices] == ["vm.require_overhead", "cri.cgroup_driver"]
    assert "cgroup_controllers = [ ]\n" in text(found, "qemu.conf")
    assert found.seen["cgroup driver"] == f"cgroupfs: as kubelet's configuration says in {FILE}"


def test_a_kubelet_without_drop_ins_gets_a_directory_and_winning_flags_are_replaced() -> None:
    flags = {
        "container-runtime-endpoint": Given("unix:///run/containerd/containerd.sock", KUBEADM_FLAGS),
        "node-labels": Given("a=b", KUBEADM_FLAGS),
    }
    found = planned(node(kubelet=kubelet(flags=flags), runtimes=(CONTAINERD,)))
    line = text(found, "zz-virtshim-flags.conf").splitlines()[-1]
    assert line == (
        'Environment="KUBELET_EXTRA_ARGS=--config-dir=/etc/kubernetes/kubelet.conf.d '
        '--container-runtime-endpoint=unix:///run/virtshim/proxy.sock --node-labels=a=b,virtshim.io/vms=true"'
    )


def test_extra_flags_in_a_file_are_changed_without_losing_its_other_content() -> None:
    place = "/etc/default/kubelet"
    variables = {EXTRA_FLAGS: Given("--v=4", place)}
    facts = node(kubelet=kubelet(variables=variables), texts={place: "# mine\nOTHER=1\nKUBELET_EXTRA_ARGS=--v=4\n"})
    written = text(planned(facts), place)
    assert "# mine\nOTHER=1\n" in written
    assert 'KUBELET_EXTRA_ARGS="--v=4 --config-dir=/etc/kubernetes/kubelet.conf.d ' in written


def test_a_kubelet_with_a_drop_in_directory_gets_our_drop_in_and_no_flags() -> None:
    found = planned(node(kubelet=kubelet(flags={"config-dir": Given("/etc/k.d/", FILE)})))
    assert "/etc/k.d/90-virtshim.conf" in paths(found)
    assert not [path for path in paths(found) if "flags" in path]


def test_a_kubelet_whose_unit_takes_no_extra_flags_is_a_problem_with_the_flags_to_give() -> None:
    (told,) = planned(node(kubelet=kubelet(takes_extra_flags=False))).problems
    assert "--config-dir=/etc/kubernetes/kubelet.conf.d" in told


def test_a_kubelet_too_old_for_drop_ins_gets_flags_and_a_note_about_the_rest() -> None:
    found = planned(node(kubelet=kubelet(fields={}), runtimes=(CONTAINERD,), kubelet_version=(1, 29)))
    assert not [path for path in paths(found) if "kubelet.conf.d" in path]
    line = text(found, "zz-virtshim-flags.conf")
    assert "--container-runtime-endpoint=unix:///run/virtshim/proxy.sock --cgroup-driver=systemd" in line
    assert "--config-dir" not in line
    assert any(
        "kubelet 1.29 does not read drop-ins; write shutdownGracePeriod" in problem for problem in found.problems
    )
    graces = {name: Given("1m", FILE) for name in ("shutdownGracePeriod", "shutdownGracePeriodCriticalPods")}
    written = node(kubelet=kubelet(fields=graces), runtimes=(CONTAINERD,), kubelet_version=(1, 29))
    assert planned(written).problems == ()
    (told,) = planned(node(kubelet=kubelet(fields=graces), kubelet_version=(1, 29))).problems
    assert "write the taint virtshim.io/vms=true:NoSchedule" in told


@pytest.mark.parametrize("runtimes", [(), (CONTAINERD,)])
def test_kubelet_pulls_several_images_at_once_and_gives_evicted_guests_time(runtimes: tuple[RuntimeSetup, ...]) -> None:
    name = "91-virtshim-proxy.conf" if runtimes else "90-virtshim.conf"
    found = yaml.safe_load(text(planned(node(runtimes=runtimes)), name))
    assert (found["serializeImagePulls"], found["maxParallelImagePulls"]) == (False, 3)
    # kubelet does not start with a soft threshold that has no grace period.
    assert found["evictionSoft"].keys() == found["evictionSoftGracePeriod"].keys() == HARD.keys()
    for signal, hard in HARD.items():
        assert quantity(found["evictionSoft"][signal]) > quantity(hard)
    # What the garbage collection of images frees by default, or disks would be short all the time.
    assert quantity(found["evictionSoft"]["imagefs.available"]) < 20
    assert found["evictionMaxPodGracePeriod"] >= 30
    assert "evictionHard" not in found  # any of it would turn kubelet's own others off


def quantity(said: str) -> int:
    assert said[-2:] == "Mi" or said[-1] == "%"
    return int(said.removesuffix("Mi").removesuffix("%"))


@pytest.mark.parametrize(
    ("mine", "kept"),
    [
        ({"fields": {"evictionSoft": Given({"memory.available": "1Gi"}, FILE)}}, "serializeImagePulls"),
        ({"fields": {"evictionMaxPodGracePeriod": Given(120, "/etc/k.d/10-own.conf")}}, "serializeImagePulls"),
        ({"fields": {"serializeImagePulls": Given(True, FILE)}}, "evictionSoft"),
        ({"flags": {"serialize-image-pulls": Given("true", KUBEADM_FLAGS)}}, "evictionSoft"),
    ],
)
def test_the_operators_settings_of_pulls_and_evictions_are_left_alone(mine: dict[str, Any], kept: str) -> None:
    written = yaml.safe_load(text(planned(node(kubelet=kubelet(**mine))), "90-virtshim.conf"))
    assert {"serializeImagePulls", "evictionSoft"} & written.keys() == {kept}
    assert ("maxParallelImagePulls" in written) == (kept == "serializeImagePulls")
    assert ("evictionMaxPodGracePeriod" in written) == (kept == "evictionSoft")


def test_a_repeated_set_up_keeps_its_settings_of_pulls_and_evictions() -> None:
    first = text(planned(node()), "90-virtshim.conf")
    fields = {name: Given(value, "/etc/k.d/90-virtshim.conf") for name, value in yaml.safe_load(first).items()}
    again = planned(node(kubelet=kubelet(fields=fields)))
    assert yaml.safe_load(text(again, "90-virtshim.conf")) == yaml.safe_load(first)


@pytest.mark.parametrize(("said", "version"), [("Kubernetes v1.29.4", (1, 29)), ("", None), ("no such file", None)])
def test_kubelets_version_is_read_from_its_output(said: str, version: tuple[int, int] | None) -> None:
    assert kubelet_version(said) == version


def test_a_node_without_kubelet_and_network_gets_its_own_bridge() -> None:
    found = planned(node(kubelet=KubeletSetup(), cni_configuration="", cni_conf_dir="/etc/own.d"))
    assert "/etc/own.d/10-virtshim.conflist" in paths(found)
    assert not [path for path in paths(found) if "kubelet" in path]
    assert "when kubelet is installed" in found.steps[-1]


def test_a_node_in_a_cluster_without_a_network_gets_none_from_set_up() -> None:
    found = planned(node(cni_configuration=""))
    assert not [path for path in paths(found) if "cni" in path]
    assert any("network add-on" in step for step in found.steps)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"emulator": ""}, "apt-get install qemu-system-x86"),
        ({"libvirt": ""}, "apt-get install libvirt-daemon-system"),
        ({"vmwrapper": ""}, "vmwrapper is missing"),
        ({"units": frozenset()}, "units are missing: tapmanager.service"),
        ({"kubelet": kubelet(unreadable=("/x: not YAML",))}, "/x: not YAML"),
        ({"runtimes": (RuntimeSetup("containerd", "/s", "/f", serves_cri=False),)}, "does not serve CRI"),
        ({"runtimes": (RuntimeSetup("containerd", "/s", "/f", "/f: bad"),)}, "/f: bad"),
    ],
)  # fmt: skip
def test_obstacles_are_reported(changed: dict[str, Any], said: str) -> None:
    assert any(said in problem for problem in planned(node(**changed)).problems)


@pytest.mark.parametrize(
    ("runtime", "has", "remedy"),
    [
        (RuntimeSetup("containerd", "/s", "/f", driver_table="[t]"), "cgroupfs, its default", "= true below [t] in /f"),
        (RuntimeSetup("containerd", "/s", "/f", cgroup_driver="cgroupfs"), "cgroupfs", "and restart containerd"),
        (RuntimeSetup("cri-o", "/s", "/g", cgroup_driver="cgroupfs"), "cgroupfs", 'cgroup_manager = "systemd"'),
    ],
)  # fmt: skip
def test_a_runtime_with_another_cgroup_driver_than_kubelets_is_refused_with_the_remedy(
    runtime: RuntimeSetup, has: str, remedy: str
) -> None:
    found = planned(node(runtimes=(runtime,)))
    assert found.refusal == found.problems[0]
    assert (
        f"{runtime.name} has cgroup driver {has}, but this node uses systemd (as kubelet's configuration says in {FILE})"
        in found.refusal
    )
    assert remedy in found.refusal
    assert found.steps == ()
    assert found.seen["containers"] == f"{runtime.name}, /s, cgroup driver {has}"


def test_without_a_kubelet_another_cgroup_driver_of_the_runtimes_is_a_problem_and_no_refusal() -> None:
    found = planned(node(kubelet=KubeletSetup(), runtimes=(RuntimeSetup("containerd", "/s", "/f"),)))
    assert "SystemdCgroup = true" in found.problems[0]
    assert found.refusal == ""
    agreed = {"kubelet": kubelet(fields={"cgroupDriver": Given("cgroupfs", FILE)})}
    assert planned(node(runtimes=(RuntimeSetup("containerd", "/s", "/f"),), **agreed)).problems == ()


def test_a_docker_beside_the_runtime_that_serves_cri_is_no_problem() -> None:
    docker = RuntimeSetup("containerd", "/run/containerd/containerd.sock", "/f", serves_cri=False, is_running=True)
    crio = RuntimeSetup("cri-o", "/run/crio/crio.sock", "/g", is_running=True, cgroup_driver="systemd")
    found = planned(node(runtimes=(docker, crio)))
    assert found.problems == ()
    assert found.seen["containers"] == "cri-o, /run/crio/crio.sock, cgroup driver systemd"


def test_vms_only_leaves_an_installed_containerd_alone() -> None:
    found = planned(node(vms_only=True))
    assert found.seen["containers"] == "not looked for: --vms-only"
    assert "unix:///run/virtshim/virtshim.sock" in text(found, "crictl.yaml")
    assert "virtshim-proxy.service" not in found.enable
    assert "containerd.service" not in found.enable


def test_an_operators_own_file_is_kept_and_its_missing_settings_are_reported() -> None:
    settings = Settings(libvirt={"vmwrapper": "/mine"}, paths={"run_dir": "/run/own"})
    own = OwnSettings(settings, frozenset({"libvirt.vmwrapper", "paths.run_dir"}), has_file=True)
    found = planned(node(vmwrapper="/x/vmwrapper", emulator="/usr/libexec/qemu-kvm"), own)
    assert [choice.key for choice in found.choices] == ["vm.require_overhead", "libvirt.emulator"]
    assert any("add vm.require_overhead = true" in problem for problem in found.problems)
    assert any("add libvirt.emulator" in problem for problem in found.problems)
    assert "unix:///run/own/virtshim.sock" in text(found, "crictl.yaml")


def test_a_correct_line_is_kept_and_a_line_with_another_value_replaced() -> None:
    said = node(texts={LIBVIRTD: 'unix_sock_ro_perms="0700"  # closed\n'})
    assert LIBVIRTD not in paths(planned(said))
    other = text(planned(node(texts={LIBVIRTD: 'unix_sock_ro_perms = "0777"\nlog_level = 3\n'})), "libvirtd.conf")
    assert [line for line in other.splitlines() if not line.startswith("#")] == [
        "log_level = 3",
        'unix_sock_ro_perms = "0700"',
    ]


GUESTS = "/etc/default/libvirt-guests"


def test_the_file_of_libvirt_guests_keeps_its_lines_and_gets_only_settings_that_it_lacks() -> None:
    before = "# mine\n#ON_BOOT=start\nSTART_DELAY=5\nSHUTDOWN_TIMEOUT=300  # our VMs are slow"
    found = planned(node(texts={GUESTS: before}))
    kept, written = text(found, GUESTS).split(texts.MARK)
    assert kept == f"{before}\n"
    assert [line for line in written.splitlines() if not line.startswith("#")] == [
        "URIS=qemu:///system", "ON_BOOT=ignore", "ON_SHUTDOWN=shutdown", "PARALLEL_SHUTDOWN=500",
    ]  # fmt: skip
    assert found.problems == ()


def test_a_file_of_libvirt_guests_that_has_all_settings_is_not_changed() -> None:
    whole = text(planned(node()), GUESTS)
    assert text(planned(node(texts={GUESTS: whole.rstrip()})), GUESTS) == whole


@pytest.mark.parametrize(
    "said", ["ON_BOOT=start", "ON_SHUTDOWN='suspend'", "export ON_BOOT=start # ours", "URIS=xen:///"]
)
def test_an_operators_settings_of_libvirt_guests_that_harm_vms_are_kept_and_reported(said: str) -> None:
    found = planned(node(texts={GUESTS: said}))
    assert text(found, GUESTS).startswith(f"{said}\n")
    (told,) = found.problems
    key, _, value = said.removeprefix("export ").partition(" #")[0].replace("'", "").partition("=")
    assert told.startswith(f"{GUESTS} has {key}={value}, which setup keeps; virtshim's VMs need {key}=")


@pytest.mark.parametrize("said", ["URIS=default", "URIS='default qemu+tcp://other/system'", "ON_BOOT=ignore", 'X="'])
def test_settings_of_libvirt_guests_that_suit_vms_are_no_problem(said: str) -> None:
    assert planned(node(texts={GUESTS: said})).problems == ()


@pytest.mark.parametrize("in_cluster", [False, True])
def test_without_systemd_nothing_names_systemctl(in_cluster: bool) -> None:
    facts = node(
        systemd_runs=False,
        kubelet=kubelet(is_in_cluster=in_cluster, has_unit=False),
        runtimes=(RuntimeSetup("containerd", "/s", "/f", cgroup_driver="cgroupfs"),),
    )
    refused = planned(facts)
    agreed = planned(replace(facts, runtimes=(CONTAINERD,)))
    undone = after_undo(facts, "one", paths(agreed), ["/etc/kubernetes/kubelet.conf.d/91-virtshim-proxy.conf"], ())
    said = [*refused.problems, *agreed.problems, *agreed.steps, *undone, *agreed.seen.values()]
    assert "restart kubelet" in agreed.steps
    assert "and restart containerd" in refused.refusal
    assert [one for one in said if "systemctl" in one] == []


def test_libvirts_apparmor_profiles_get_missing_rules_below_the_nodes_own() -> None:
    daemon, guests = "/etc/apparmor.d/usr.sbin.libvirtd", "/etc/apparmor.d/abstractions/libvirt-qemu"
    local = "/etc/apparmor.d/local/abstractions/libvirt-qemu"
    found = planned(node(texts={daemon: "profile", guests: "rules", local: "/mine r,"}))
    assert "/usr/libexec/virtshim/vmwrapper PUx,\n" in text(found, "local/usr.sbin.libvirtd")
    assert text(found, local).startswith("/mine r,\n# Written by")
    again = {daemon: "profile /usr/libexec/virtshim/vmwrapper PUx,", guests: text(found, local)}
    assert not [path for path in paths(planned(node(texts=again))) if "apparmor" in path]
    assert not [path for path in paths(planned(node())) if "apparmor" in path]


def test_facts_that_matter_for_vms_are_shown() -> None:
    seen = planned(node(huge_pages={2048: 512, 1048576: 4}, iommu_groups=17, has_kvm=True)).seen
    assert seen["huge pages"] == "512 of 2 MiB, 4 of 1024 MiB"
    assert (seen["IOMMU"], seen["KVM"]) == ("17 groups", "/dev/kvm")


def test_a_node_is_labelled_by_the_name_that_kubelet_gives_it() -> None:
    flags = {"hostname-override": Given("node-7.example", KUBEADM_FLAGS)}
    assert "kubectl label node node-7.example virtshim.io/vms=true" in planned(node(kubelet=kubelet(flags=flags))).steps
    assert "kubectl label node one virtshim.io/vms=true" in planned(node(), name="one").steps


def test_a_vms_only_node_already_in_the_cluster_is_drained_and_tainted_by_hand() -> None:
    """kubelet gives its taints and labels only to a node that is new."""
    assert [
        step.partition("   #")[0] for step in planned(node(kubelet=kubelet(is_in_cluster=True)), name="one").steps
    ] == [
        "virtshim check",
        "kubectl drain one --ignore-daemonsets --delete-emptydir-data",
        "kubectl taint nodes one virtshim.io/vms=true:NoSchedule --overwrite",
        "systemctl daemon-reload && systemctl restart kubelet",
        "kubectl label node one virtshim.io/vms=true",
        "kubectl uncordon one",
        "kubectl apply -f /etc/virtshim/runtimeclass.yaml",
    ]


def test_a_node_that_is_new_to_the_cluster_is_tainted_by_its_kubelet_unless_a_flag_has_other_taints() -> None:
    assert not [step for step in planned(node()).steps if "taint" in step or "drain" in step]
    assert "if the node joins the cluster with kubeadm join, use --cri-socket unix:///run/virtshim/virtshim.sock" in (
        planned(node()).steps
    )
    flags = {"register-with-taints": Given("a=b:NoSchedule", KUBEADM_FLAGS)}
    assert [step for step in planned(node(kubelet=kubelet(flags=flags))).steps if "kubectl taint" in step]


def test_a_node_that_gets_containers_too_loses_its_taint_by_hand() -> None:
    facts = node(runtimes=(CONTAINERD,), kubelet=kubelet(is_in_cluster=True))
    assert not [step for step in planned(facts).steps if "taint" in step]
    (told,) = [step for step in planned(facts, name="one", had_taint=True).steps if "taint" in step]
    assert told.startswith("kubectl taint nodes one virtshim.io/vms-   # ")


def test_every_step_that_names_a_file_names_one_that_is_written() -> None:
    found = planned(node())
    (apply,) = [step for step in found.steps if "kubectl apply" in step]
    assert apply.split()[3] in paths(found)
    assert Path(apply.split()[3]).name == "runtimeclass.yaml"


def test_a_changed_foreign_file_keeps_its_other_bytes() -> None:
    """Its comments may be in another encoding."""
    theirs = b"# Gr\xf6\xdfe\nlog_level = 3"
    found = planned(node(texts={LIBVIRTD: theirs.decode(errors=AS_BYTES)}))
    (file,) = [file for file in found.files if file.path == LIBVIRTD]
    assert file.content.startswith(theirs + b"\n# virtshim setup: ")


def test_extra_flags_over_several_lines_are_replaced_completely() -> None:
    place = "/etc/default/kubelet"
    variables = {EXTRA_FLAGS: Given('--v=4 --x="y z"', place)}
    facts = node(kubelet=kubelet(variables=variables), texts={place: 'KUBELET_EXTRA_ARGS="--v=4 \\\n --x=y"\nOTHER=1'})
    written = text(planned(facts), place)
    assert [line.partition("=")[0] for line in written.splitlines() if line[0] != "#"] == ["OTHER", EXTRA_FLAGS]
    assert 'KUBELET_EXTRA_ARGS="--v=4 --x=\\"y z\\" --config-dir' in written
