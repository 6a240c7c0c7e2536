"""The CustomResourceDefinition accepts every field that a VirtualMachine may have. tests/contract/cluster tests the
refusals."""

from __future__ import annotations

import copy

import pytest
from fakes.crd import EXAMPLE, definition, faults


@pytest.mark.parametrize(
    ("annotations", "spec"),
    [
        ({"virtshim.io/state-volume": "/state"}, {"drain": "Save", "state": "Saved"}),
        ({"virtshim.io/on-stop": "save"}, {"drain": "Restart", "state": "Saved"}),
    ],
)
def test_what_needs_another_field_is_taken_with_it(annotations: dict[str, str], spec: dict[str, str]) -> None:
    made = copy.deepcopy(EXAMPLE)
    made["spec"] |= spec
    made["spec"]["template"]["metadata"]["annotations"] = annotations
    assert faults(made) == []


def test_every_condition_of_the_status_may_be_written() -> None:
    refusal = {"why": "exceeded quota", "generation": 2, "tries": 3, "at": 1.5}
    status = {
        "phase": "Moving",
        "podName": "db-abcde",
        "conditions": [{"type": "Ready", "status": "Unknown", "reason": "AgentSilent", "message": "?"}],
        "record": {
            "pod": {"name": "db-abcde", "uid": "1"},
            "node": "node1",
            "failures": 1,
            "endedAt": 1.5,
            "podRefusal": refusal,
            "budgetRefusal": refusal,
        },
        "eviction": {"podUID": "1", "at": 1.5, "cordoned": True},
        "nodes": {"node1.example": {"savedAt": 1.5, "savedBytes": 3, "lapsesAt": 2.5}},
    }
    assert faults(EXAMPLE | {"status": status}) == []


def test_the_status_has_rights_of_its_own() -> None:
    assert definition()["spec"]["versions"][0]["subresources"] == {"status": {}}
