"""How cloud-init documents are merged."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtshim.guestinit.merge import merged


@pytest.mark.parametrize(
    ("lower", "upper", "result"),
    [
        ({"a": "X"}, {"b": "Y"}, {"a": "X", "b": "Y"}),
        ({"a": "X", "b": "Y"}, {"c": "Z", "b": "Q"}, {"a": "X", "b": "Q", "c": "Z"}),
        ({"a": [1, 2]}, {"a": [2, 3]}, {"a": [1, 2, 2, 3]}),
        ({"a": {"b": {"c": [1]}, "d": 1}}, {"a": {"b": {"c": [2]}}}, {"a": {"b": {"c": [1, 2]}, "d": 1}}),
        ({"a": 3}, {"a": 0}, {"a": 0}),
        ({"a": [1]}, {"a": "x"}, {"a": "x"}),
        ({"a": {"b": 1}}, {"a": [1]}, {"a": [1]}),
        ({"a": [1]}, {"a": []}, {"a": [1]}),
        ({"a": None}, {"a": None}, {"a": None}),
        ({"a": 1}, {"a": None}, {"a": None}),
        ({}, {"a": None}, {"a": None}),
    ],
)
def test_table(lower: dict[str, Any], upper: dict[str, Any], result: dict[str, Any]) -> None:
    assert merged(lower, upper) == result


trees = st.dictionaries(
    st.sampled_from("abc"),
    st.recursive(
        st.none() | st.integers(0, 3) | st.text(max_size=2),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
)


@given(trees)
def test_the_empty_mapping_changes_nothing(tree: dict[str, Any]) -> None:
    assert merged(tree, {}) == tree == merged({}, tree)


@given(trees, trees)
def test_the_arguments_are_left_alone(lower: dict[str, Any], upper: dict[str, Any]) -> None:
    before = copy.deepcopy((lower, upper))
    merged(lower, upper)
    assert (lower, upper) == before


@given(trees, trees)
def test_keys_of_both_are_there(lower: dict[str, Any], upper: dict[str, Any]) -> None:
    assert set(merged(lower, upper)) == set(lower) | set(upper)
