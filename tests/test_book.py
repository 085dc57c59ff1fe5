"""The closed forms of docs/book/tensor.md are what the kernels move."""

import importlib.util
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("layouts", Path(__file__).parents[1] / "scripts" / "layouts.py")
layouts = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(layouts)


def closed(name, p, rho):
    """Section 6 of the page: elements a rank sends, over hidden squared."""
    mesh = layouts.best(name, p, rho)
    q = mesh[-1]
    if name == "1D":
        return 8 * (p - 1) / p * rho
    if name == "2D":
        return 3 * (q - 1) / p * (7 * rho + 12)
    if name == "2.5D":
        d = mesh[0]
        return 3 * (q - 1) / p * (7 * rho + 12 * d) + 2 * (d - 1) / d * 12 / q**2
    return 2 * (q - 1) / p * (16 * rho + 12)


@pytest.mark.law
@pytest.mark.parametrize("rho", [0.1, 1.0, 30.0])
@pytest.mark.parametrize(("name", "p"), [("1D", 8), ("2D", 4), ("2D", 64), ("2.5D", 8), ("2.5D", 32), ("3D", 8), ("3D", 512)])
def test_closed_forms_are_what_is_moved(name, p, rho):
    assert layouts.sent(name, p, rho) == pytest.approx(closed(name, p, rho), rel=1e-9)


@pytest.mark.case
def test_the_crossings_that_the_page_names():
    first = lambda rho: next(q for q in range(2, 99) if layouts.sent("2D", q * q, rho) < layouts.sent("1D", q * q, rho))
    assert (first(1e6), first(1.0)) == (2, 7)
    assert layouts.held("1D", 64, 1.0) / layouts.held("2D", 64, 1.0) == pytest.approx(11.9, rel=0.01)
