"""Kubernetes quantities become bytes."""

import contextlib
from decimal import ROUND_CEILING, Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtshim.model.errors import InvalidRequest
from virtshim.model.text import parse_bytes


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("0", 0),
        ("4Gi", 4 * 1024**3),
        ("500M", 500_000_000),
        ("1e9", 10**9),
        ("1E9", 10**9),
        ("1E", 10**18),
        ("1Ei", 2**60),
        ("1.5Gi", 3 * 2**29),
        ("+1k", 1000),
        (".5Ki", 512),
        ("5.", 5),
        ("1.e3", 1000),
        ("100m", 1),
        ("1001m", 2),
        ("1n", 1),
        ("1u", 1),
        ("1e-3", 1),
        ("0e999", 0),
        ("-0", 0),
        ("0.0000001Ki", 1),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_quantities_become_bytes_rounded_up(text: str, amount: int) -> None:
    assert parse_bytes(text) == amount


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "Gi",
        ".",
        "+",
        "1 Gi",
        " 1",
        "1\n",
        "1gi",
        "1K",
        "1e",
        "1e1.5",
        "1e3Ki",
        "1KiB",
        "0x10",
        "1_0",
        "\u0661",
        "1,5",
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="not a quantity"):
        parse_bytes(text)


def test_a_negative_amount_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="negative"):
        parse_bytes("-1")


@pytest.mark.parametrize("text", ["9223372036854775808", "8Ei", "1e999999999", "1e99", "9" * 64])
def test_an_amount_beyond_the_limit_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="too large"):
        parse_bytes(text)


def test_the_callers_limit_counts() -> None:
    assert parse_bytes("1Ki", largest=1024) == 1024
    with pytest.raises(InvalidRequest, match="at most 1024 bytes"):
        parse_bytes("1025", largest=1024)


def test_a_text_of_any_length_is_refused_at_once() -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_bytes("1" * 1_000_000)
    assert len(str(error.value)) < 200


SUFFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "m": Decimal("0.001")}


@given(st.decimals(min_value=0, max_value=10**6, places=4), st.sampled_from(sorted(SUFFIXES)))
def test_the_result_is_the_least_whole_number_not_below_the_amount(number: Decimal, suffix: str) -> None:
    exact = number * Decimal(SUFFIXES[suffix])
    assert parse_bytes(f"{number:f}{suffix}") == int(exact.to_integral_value(ROUND_CEILING))


@given(st.text(alphabet="0123456789.+-eEKMGTPimunk ", max_size=12))
def test_any_text_gives_a_number_or_invalid_request(text: str) -> None:
    with contextlib.suppress(InvalidRequest):
        assert 0 <= parse_bytes(text) < 2**63
