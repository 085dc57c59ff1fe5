"""The comparison itself: a check that cannot fail is a defect."""

import pytest

from partita.proof.square import Call, first_difference

SAID = [
    Call("all_reduce", "tp", 64, "float32"),
    Call("all_reduce", "dp", 128, "float32"),
    Call("all_reduce", "tp", 32, "float32"),
]


@pytest.mark.law
def test_equal_lists_have_no_difference():
    assert first_difference(SAID, {0: SAID, 1: list(SAID)}) is None


@pytest.mark.law
def test_interleaving_of_axes_is_free():
    assert first_difference(SAID, {0: [SAID[1], SAID[0], SAID[2]]}) is None


@pytest.mark.law
def test_order_within_an_axis_is_not_free():
    found = first_difference(SAID, {0: [SAID[2], SAID[1], SAID[0]]})
    assert found is not None
    assert (found.axis, found.index, found.fields) == ("tp", 0, ("nbytes",))


@pytest.mark.law
@pytest.mark.parametrize(
    ("heard", "fields"),
    [
        (Call("all_gather", "dp", 128, "float32"), ("op",)),
        (Call("all_reduce", "dp", 129, "float32"), ("nbytes",)),
        (Call("all_reduce", "dp", 128, "bfloat16"), ("dtype",)),
        (Call("all_reduce", "pp", 128, "float32"), ("call",)),
        (None, ("call",)),
    ],
)
def test_difference_names_the_field_and_rank(heard, fields):
    calls = [SAID[0], *([heard] if heard else []), SAID[2]]
    found = first_difference(SAID, {0: SAID, 3: calls})
    assert found is not None
    assert (found.rank, found.fields) == (3, fields)
    assert found.json()["said"]["axis"] == "dp"


@pytest.mark.law
def test_one_call_too_many_is_a_difference():
    found = first_difference(SAID, {0: [*SAID, SAID[0]]})
    assert found is not None
    assert found.said is None
    assert found.fields == ("call",)
