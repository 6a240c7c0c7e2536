"""`virtshim ps` prints the table of pods and VMs."""

import pytest

from virtshim.cli.tables import age, columns, row_format, rows
from virtshim.cri.client import PodSummary, VmSummary
from virtshim.model.errors import InvalidRequest

NOW = 1_000_000.0


def test_each_vm_has_a_line_and_a_pod_without_one_too() -> None:
    full = PodSummary("a" * 64, "default", "web", True, NOW - 500)
    bare = PodSummary("b" * 64, "test", "db", False, NOW - 90_000)
    vms = [
        VmSummary(n * 64, full.id, "debian", 0, state, "img", NOW - 60)
        for n, state in (("1", "running"), ("2", "exited"))
    ]
    assert list(rows([full, bare], vms, {full.id: ["10.0.0.2", "fd00::2"], bare.id: []}, NOW)) == [
        ("default/web", "a" * 12, "ready", "10.0.0.2,fd00::2", "debian", "1" * 12, "running", "60s", "img"),
        ("default/web", "a" * 12, "ready", "10.0.0.2,fd00::2", "debian", "2" * 12, "exited", "60s", "img"),
        ("test/db", "b" * 12, "not ready", "-", "-", "-", "-", "25h", "-"),
    ]


def test_a_paused_vm_is_shown_as_paused_and_one_with_another_trouble_as_running() -> None:
    pod = PodSummary("a" * 64, "default", "web", True, NOW)
    troubles = ("paused by virtshim pause; virtshim resume continues it", "a volume is not mounted", "")
    vms = [VmSummary("1" * 64, pod.id, "vm", 0, "running", "img", NOW, trouble) for trouble in troubles]
    assert [row[6] for row in rows([pod], vms, {pod.id: []}, NOW)] == ["paused", "running", "running"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0s"),
        (0, "0s"),
        (119.9, "120s"),
        (120, "2m"),
        (7199, "119m"),
        (7200, "2h"),
        (172_799, "47h"),
        (864_000, "10d"),
    ],
)
def test_an_age_is_shown_in_one_unit(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_columns_fit_their_widest_cell_and_control_characters_are_removed() -> None:
    assert columns([("A", "B"), ("long", "\x1b[2Jx"), ("ü", "")]) == ["A     B", "long  ?[2Jx", "ü"]


def test_a_format_prints_the_columns_that_it_names() -> None:
    lines = [("default/web", "10.0.0.2"), ("\x1b[2Jx", "-")]
    assert list(row_format("{pod_id}\\t{ip} {{x}}", ("POD ID", "IP"), lines)) == [
        "default/web\t10.0.0.2 {x}",
        "?[2Jx\t- {x}",
    ]


@pytest.mark.parametrize("template", ["{name}", "{}", "{ip.__class__}", "{ip!r}", "{ip:>100}", "{0}", "{ip", "}"])
def test_a_format_that_names_no_column_is_refused(template: str) -> None:
    with pytest.raises(InvalidRequest, match="--format"):
        list(row_format(template, ("POD ID", "IP"), []))
