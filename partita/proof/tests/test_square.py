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
        (Call("all_reduce", "pp", 128, "float32"), ("axis",)),
        (Call("all_reduce", "pp", 64, "float32"), ("axis", "nbytes")),
        (Call("all_gather", "pp", 128, "float32"), ("call",)),
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


@pytest.mark.law
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_forgotten_call_is_named_as_one_wherever_it_stands(at):
    said = [Call("all_reduce", "tp", n, "float32") for n in (8, 16, 32)]
    less = [c for k, c in enumerate(said) if k != at]
    found = first_difference(said, {0: less})
    assert found is not None
    assert (found.index, found.fields, found.said, found.heard) == (at, ("call",), said[at], None)
    found = first_difference(less, {0: said})
    assert found is not None
    assert (found.fields, found.said, found.heard) == (("call",), None, said[at])


@pytest.mark.law
def test_calls_on_another_axis_differ_in_the_axis():
    moved = [Call(c.op, "dp", c.nbytes, c.dtype) if c.axis == "tp" else c for c in SAID]
    found = first_difference(SAID, {0: moved})
    assert found is not None
    assert (found.axis, found.fields) == ("tp", ("axis",))
    assert str(found).startswith("rank 0, call 0 on tp differs in axis: said all_reduce on tp of 64 bytes")
