"""A worker of `make test` takes the right test file next."""

import pytest
from gate import expected_seconds, next_unit, unit_of


@pytest.mark.parametrize(
    ("nodeid", "unit"),
    [
        ("tests/unit/system/test_files.py::test_a[x::y]", "tests/unit/system/test_files.py"),
        ("tests/vfio/test_nic.py::test_a", "tests/vfio"),
        ("tests/faults/test_kill_matrix.py::test_a[x y]", "tests/faults/test_kill_matrix.py::test_a[x y]"),
    ],
)
def test_a_file_is_one_piece_of_work_and_so_are_the_passthrough_machine_and_each_row_of_kills(
    nodeid: str, unit: str
) -> None:
    assert unit_of(nodeid) == unit


def test_a_row_of_kills_is_in_the_room_of_its_file() -> None:
    waiting = {"tests/faults/test_kill_matrix.py::test_a[x/y]": 1.0, "b/test_1.py": 3.0}
    row = "tests/faults/test_kill_matrix.py::test_a[x/y]"
    assert next_unit(waiting, here="tests/faults", elsewhere=set()) == row


def test_the_room_with_the_most_work_comes_first_and_in_it_the_longest_file() -> None:
    waiting = {"a/test_1.py": 5.0, "b/test_1.py": 3.0, "b/test_2.py": 4.0}
    assert next_unit(waiting, here=None, elsewhere=set()) == "b/test_2.py"


def test_a_worker_finishes_its_room_before_it_leaves() -> None:
    waiting = {"a/test_1.py": 50.0, "b/test_1.py": 3.0, "b/test_2.py": 4.0}
    assert next_unit(waiting, here="b", elsewhere=set()) == "b/test_2.py"


def test_a_worker_stays_in_its_area_as_long_as_it_can() -> None:
    waiting = {"tests/a/test_1.py": 50.0, "tests/b/below/test_1.py": 3.0}
    assert next_unit(waiting, here="tests/b", elsewhere=set()) == "tests/b/below/test_1.py"


def test_a_worker_shares_a_room_only_when_no_other_is_left() -> None:
    waiting = {"a/test_1.py": 50.0, "b/test_1.py": 3.0}
    assert next_unit(waiting, here=None, elsewhere={"a"}) == "b/test_1.py"
    assert next_unit({"a/test_1.py": 50.0}, here=None, elsewhere={"a"}) == "a/test_1.py"


def test_an_unmeasured_file_gets_the_typical_time_of_its_area() -> None:
    assert expected_seconds("tests/e2e/test_a.py", 10, {}) > expected_seconds("tests/unit/test_a.py", 10, {})
    assert expected_seconds("tests/e2e/test_a.py", 10, {"tests/e2e/test_a.py": 0.5}) == 0.5
