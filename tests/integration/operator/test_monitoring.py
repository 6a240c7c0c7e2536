"""Prometheus can read the alert rules and the dashboard, and their metrics exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes.described_metrics import OF_BOTH, OF_PROCESS, OF_PROXY, RECORDED

from virtshim.metrics.node import (
    CNI_SECONDS,
    OF_NODE,
    OF_SCRAPE,
    OF_VMS,
    POD_FAMILIES,
    POD_LABELS,
    VM_FAMILIES,
    VM_LABELS,
)

pytestmark = [
    pytest.mark.operator,
    pytest.mark.skipif(not shutil.which("promtool"), reason="promtool (Debian: prometheus) is not installed"),
]

VM = 'instance="n", namespace="default", pod="web", id="1", container="vm"'
DELAY = f'virtshim_vmi_vcpu_delay_seconds_total{{{{{VM}, vcpu="{{}}"}}}}'
USED = f'virtshim_vmi_filesystem_used_bytes{{{VM}, mount_point="/"}}'
SIZE = f'virtshim_vmi_filesystem_capacity_bytes{{{VM}, mount_point="/"}}'
CALLS = 'virtshim_rpc_duration_seconds_{what}{{instance="n", method="{method}", {more}}}'


def calls(what: str, method: str, more: str) -> str:
    return CALLS.format(what=what, method=method, more=more)


def buckets(name: str, labels: str, low: str, high: str, fast: bool) -> dict[str, str]:
    """A histogram with ten samples a minute, all of them below `low`, or all between `low` and `high`."""
    labels = f"{labels}, " if labels else ""
    return {
        f'{name}_bucket{{{labels}le="{low}"}}': "0+10x60" if fast else "0x60",
        f'{name}_bucket{{{labels}le="{high}"}}': "0+10x60",
        f'{name}_bucket{{{labels}le="+Inf"}}': "0+10x60",
    }


# For each rule: series (a sample a minute) with which it fires within the hour, and series with which it never fires.
CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "VirtshimDown": ({'up{job="virtshim", instance="n"}': "0x60"}, {'up{job="virtshim", instance="n"}': "1x30 0x3 1x26"}),
    "VirtshimPartDown": (
        {'virtshim_up{instance="n", part="libvirt"}': "0x60"},
        {'virtshim_up{instance="n", part="libvirt"}': "1x20 0x3 1x36"},
    ),
    "VirtshimThreadDied": (
        {'virtshim_thread_up{instance="n", thread="reconcile"}': "1x20 0x40"},
        {'virtshim_thread_up{instance="n", thread="reconcile"}': "1x60"},
    ),
    "VirtshimNumbersLate": (
        {'virtshim_scrape_late{instance="n"}': "1x60"},
        {'virtshim_scrape_late{instance="n"}': "0x20 1x5 0x34"},
    ),
    "VirtshimCallsFail": (
        {calls("count", "StartContainer", 'code="OK"'): "0+1x60", calls("count", "StartContainer", 'code="INTERNAL"'): "0+1x60"},
        # A caller's mistake is not our failure.
        {calls("count", "StartContainer", 'code="OK"'): "0+1x60", calls("count", "StartContainer", 'code="NOT_FOUND"'): "0+1x60"},
    ),
    "VirtshimListsSlow": (
        buckets("virtshim_rpc_duration_seconds", 'instance="n", method="ListPodSandbox", code="OK"', "1.0", "2.5", fast=False),
        # A stop may take minutes.
        buckets("virtshim_rpc_duration_seconds", 'instance="n", method="StopContainer", code="OK"', "1.0", "240.0", fast=False),
    ),
    "VirtshimStartsSlow": (
        buckets("virtshim_start_phase_duration_seconds", 'instance="n", phase="disk", result="ok"', "30.0", "60.0", fast=False),
        buckets("virtshim_start_phase_duration_seconds", 'instance="n", phase="agent", result="ok"', "30.0", "60.0", fast=False),
    ),
    "VirtshimCniFails": (
        {'virtshim_cni_errors_total{instance="n", command="ADD", plugin="bridge"}': "0+1x60"},
        {'virtshim_cni_errors_total{instance="n", command="ADD", plugin="bridge"}': "0x30 1x30"},
    ),
    "VirtshimPullsFail": (
        {'virtshim_image_pull_duration_seconds_count{instance="n", result="unavailable"}': "0+1x60"},
        {'virtshim_image_pull_duration_seconds_count{instance="n", result="ok"}': "0+1x60"},
    ),
    "VirtshimLeaks": (
        {'virtshim_leaks_found_total{instance="n", kind="stray_network"}': "0+1x60"},
        {'virtshim_leaks_found_total{instance="n", kind="stray_network"}': "0x30 1x30"},
    ),
    "VirtshimRepairsUnfinished": (
        {'virtshim_repairs_unfinished{instance="n"}': "1x60"},
        {'virtshim_repairs_unfinished{instance="n"}': "0x20 2x20 0x20"},
    ),
    "VirtshimReconcileFails": (
        {'virtshim_reconcile_duration_seconds_count{instance="n", result="unavailable"}': "0+1x60"},
        {'virtshim_reconcile_duration_seconds_count{instance="n", result="ok"}': "0+1x60"},
    ),
    "VirtshimVmTrouble": ({f"virtshim_vmi_trouble{{{VM}}}": "1x60"}, {f"virtshim_vmi_trouble{{{VM}}}": "0x20 1x3 0x36"}),
    "VirtshimVmOutOfMemory": (
        {'virtshim_vmi_exits_total{instance="n", reason="OOMKilled"}': "0x20 1x40"},
        {'virtshim_vmi_exits_total{instance="n", reason="Completed"}': "0+1x60"},
    ),
    "VirtshimVmStarved": (
        {DELAY.format(0): "0+30x60"},
        {DELAY.format(0): "0+30x60", DELAY.format(1): "0x60"},
    ),
    "VirtshimGuestFilesystemFull": (
        {USED: "97x60", SIZE: "100x60"},
        {USED: "90x60", SIZE: "100x60"},
    ),
    "VirtshimDeviceBroken": (
        {'virtshim_device_broken{instance="n", device="0000:01:00.0"}': "1x60"},
        {'virtshim_device_broken{instance="n", device="0000:01:00.0"}': "0x60"},
    ),
    "VirtshimDescriptors": (
        {'process_open_fds{job="virtshim", instance="n"}': "90x60", 'process_max_fds{job="virtshim", instance="n"}': "100x60"},
        {'process_open_fds{job="others", instance="n"}': "90x60", 'process_max_fds{job="others", instance="n"}': "100x60"},
    ),
    "VirtshimProxyRuntimeDown": (
        {'virtshim_proxy_runtime_up{instance="n", runtime="containerd"}': "0x60"},
        {'virtshim_proxy_runtime_up{instance="n", runtime="containerd"}': "1x20 0x3 1x36"},
    ),
    "VirtshimProxySlow": (
        buckets("virtshim_proxy_added_seconds", 'instance="n"', "0.1", "1.0", fast=False),
        buckets("virtshim_proxy_added_seconds", 'instance="n"', "0.1", "1.0", fast=True),
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def monitoring(pytestconfig: pytest.Config) -> Path:
    return pytestconfig.rootpath / "deploy/monitoring"


@pytest.fixture(scope="session")
def overlay(pytestconfig: pytest.Config) -> Path:
    return pytestconfig.rootpath / "deploy/kustomize/overlays/monitoring"


@pytest.fixture(scope="session")
def rule_file(overlay: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The PrometheusRule's rules, as Prometheus itself reads them."""
    file = tmp_path_factory.mktemp("rules") / "alerts.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load((overlay / "alerts.yaml").read_text())["spec"]))
    return file


@pytest.fixture(scope="session")
def rules(rule_file: Path) -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(rule_file.read_text())["groups"]
    return list(group["rules"])


@pytest.fixture(scope="session")
def dashboard(monitoring: Path) -> dict[str, Any]:
    return dict(json.loads((monitoring / "grafana-dashboard.json").read_text()))


def metrics() -> dict[str, frozenset[str]]:
    """All series names with their labels."""
    groups = (
        RECORDED,
        OF_NODE,
        OF_SCRAPE,
        (CNI_SECONDS,),
        OF_PROXY,
        OF_PROCESS,
        OF_BOTH,
    )
    described = [(one.name, one.kind, one.labels) for group in groups for one in group]
    described += [(one.name, one.kind, (*POD_LABELS, *one.labels)) for one in POD_FAMILIES]
    described += [(one.name, one.kind, (*VM_LABELS, *one.labels)) for one in (*VM_FAMILIES, *OF_VMS)]
    found = {"up": frozenset[str]()}
    for name, kind, labels in described:
        for end in ("_bucket", "_count", "_sum") if kind == "histogram" else ("",):
            found[name + end] = frozenset({*labels, *(["le"] if end == "_bucket" else [])})
    return found


def check(rule_file: Path, *words: str) -> None:
    done = subprocess.run(["promtool", *words, str(rule_file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def wrong_words(expression: str) -> list[str]:
    """Unknown metrics, and unknown labels of known ones."""
    known, wrong = metrics(), []
    for name, chosen in re.findall(r"\b((?:virtshim|process)_\w+|up\b)(?:\{(.*?)\})?", expression):
        if name not in known:
            wrong.append(name)
            continue
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", chosen))
        wrong += [f"{name}{{{label}}}" for label in labels - known[name] - {"instance", "job"}]
    return wrong


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def test_prometheus_accepts_the_alert_rules(monitoring: Path, rule_file: Path) -> None:
    check(rule_file, "check", "rules")
    check(monitoring / "prometheus.yaml", "check", "config", "--syntax-only")


def test_rules_use_existing_metrics_and_have_a_remedy(rules: list[dict[str, Any]]) -> None:
    assert {rule["alert"]: wrong_words(rule["expr"]) for rule in rules if wrong_words(rule["expr"])} == {}
    for rule in rules:
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}


def test_each_rule_fires_exactly_when_it_should(rule_file: Path, rules: list[dict[str, Any]], tmp_path: Path) -> None:
    assert [rule["alert"] for rule in rules] == list(CASES)
    tests = []
    for alert, (bad, good) in CASES.items():
        for series, fires in ((bad, True), (good, False)):
            ever = f'count(max_over_time(ALERTS{{alertname="{alert}", alertstate="firing"}}[1h]))'
            told = [{"labels": "{}", "value": 1}] if fires else []
            tests.append(
                {
                    "name": f"{alert} {'fires' if fires else 'is quiet'}",
                    "interval": "1m",
                    "input_series": [{"series": name, "values": values} for name, values in series.items()],
                    "promql_expr_test": [{"expr": ever, "eval_time": "59m", "exp_samples": told}],
                }
            )
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(rule_file)], "tests": tests}))
    check(file, "test", "rules")


def test_every_panel_uses_existing_metrics(dashboard: dict[str, Any], tmp_path: Path) -> None:
    asked = expressions(dashboard)
    assert len(asked) > 30
    queries = [one["definition"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    assert {one: wrong_words(one) for one in (*asked, *queries) if wrong_words(one)} == {}
    names = {match for one in asked for match in re.findall(r"\$(?:\{)?(\w+)", one)}
    assert names - {"__rate_interval"} <= {one["name"] for one in dashboard["templating"]["list"]}


def test_prometheus_understands_every_panel(dashboard: dict[str, Any], tmp_path: Path) -> None:
    written = [
        {"record": f"panel:{at}", "expr": one.replace("$__rate_interval", "5m")}
        for at, one in enumerate(expressions(dashboard))
    ]
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": written}]}))
    check(file, "check", "rules")


def test_the_kubernetes_examples_refer_to_each_other_correctly(overlay: Path) -> None:
    objects = list(yaml.safe_load_all((overlay / "servicemonitor.yaml").read_text()))
    by_kind = {one["kind"]: one for one in objects}
    (endpoint,) = by_kind["ServiceMonitor"]["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in by_kind["Service"]["spec"]["ports"]}
    labels = by_kind["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    assert by_kind["Service"]["spec"]["selector"] == labels
    assert by_kind["ServiceMonitor"]["spec"]["selector"]["matchLabels"] == by_kind["Service"]["metadata"]["labels"]


def test_the_metrics_proxy_runs_on_nodes_for_vms_alone_and_has_a_place_there(monitoring: Path, overlay: Path) -> None:
    objects = list(yaml.safe_load_all((overlay / "servicemonitor.yaml").read_text()))
    (spec,) = (one["spec"]["template"]["spec"] for one in objects if one["kind"] == "DaemonSet")
    kubelet = yaml.safe_load((monitoring.parent / "kubelet" / "90-virtshim.conf").read_text())
    tolerated = {one["key"] for one in spec["tolerations"] if one["operator"] == "Exists"}
    assert {taint["key"] for taint in kubelet["registerWithTaints"]} <= tolerated
    assert spec["priorityClassName"].startswith("system-")
    assert all({"cpu", "memory"} <= one["resources"]["requests"].keys() for one in spec["containers"])
