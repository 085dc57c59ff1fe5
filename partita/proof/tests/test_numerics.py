"""The error of CONTRACT section 2, on values worked by hand."""

import pytest
import torch

from partita.proof.numerics import compare, errors
from partita.strategy import Promise


@pytest.mark.law
def test_error_is_relative_to_the_tensor_with_a_floor_from_its_kind():
    whole = {"big": torch.tensor([100.0, -50.0]), "tiny": torch.tensor([1e-12])}
    split = {"big": torch.tensor([100.0, -49.0]), "tiny": torch.tensor([2e-12])}
    found = errors(split, whole, "gradient")
    assert found["gradient big"] == pytest.approx(1 / 100)
    assert found["gradient tiny"] == pytest.approx(1e-12)  # 0.01 * 100 is its scale


@pytest.mark.law
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_never_pass(bad):
    found = errors({"w": torch.tensor([bad])}, {"w": torch.tensor([1.0])}, "parameter")
    assert found["parameter w"] == float("inf")


@pytest.mark.law
def test_what_is_no_number_in_the_same_places_is_equal_there_and_said():
    nan, inf = float("nan"), float("inf")
    one, two = torch.tensor([nan, 1.0, inf]), torch.tensor([nan, 1.5, inf])
    assert errors({"w": one}, {"w": one}, "parameter") == {"parameter w": 0.0}
    assert errors({"w": two}, {"w": one}, "parameter") == {"parameter w": 0.5}
    assert errors({"w": one}, {"w": one.flip(0)}, "parameter") == {"parameter w": inf}
    assert errors({"w": -one}, {"w": one}, "parameter") == {"parameter w": inf}
    found = compare(Promise.REORDERED, ([1.0, nan], [1.0, nan]), {"parameter": ({"w": one}, {"w": one})})
    assert found.held
    assert found.unnumbered == ("loss of step 2", "parameter w")
    assert not compare(Promise.REORDERED, ([nan], [1.0]), {}).held
    assert not compare(Promise.REORDERED, ([1.0], [nan]), {}).held


@pytest.mark.law
def test_a_missing_tensor_or_step_or_another_shape_is_infinite():
    one = torch.ones(2)
    assert errors({"a": one}, {"a": one, "b": one}, "parameter")["parameter b"] == float("inf")
    assert errors({"a": torch.ones(3)}, {"a": one}, "parameter")["parameter a"] == float("inf")
    assert not compare(Promise.REORDERED, ([1.0], [1.0, 2.0]), {}).held


@pytest.mark.law
def test_exact_means_bitwise_and_reordered_allows_rounding():
    kinds = {"parameter": ({"w": torch.tensor([1 + 1e-12], dtype=torch.float64)}, {"w": torch.ones(1, dtype=torch.float64)})}
    assert compare(Promise.REORDERED, ([1.0], [1.0]), kinds).held
    found = compare(Promise.EXACT, ([1.0], [1.0]), kinds)
    assert not found.held
    assert found.worst_tensor == "parameter w"
