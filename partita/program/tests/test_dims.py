"""Laws of atoms: unify, regroup, settle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.program.dims import Atoms, Signature


@pytest.mark.law
@given(
    st.lists(st.sampled_from([2, 3, 4, 6]), min_size=1, max_size=4),
    st.lists(st.sampled_from([2, 3, 4, 6]), min_size=1, max_size=4),
)
def test_unify_makes_equal_or_leaves_alone(xs, ys):
    atoms = Atoms()
    x, y = (sum((atoms.new(n) for n in sizes), ()) for sizes in (xs, ys))
    before = len(atoms.up)
    if atoms.unify(x, y):
        assert atoms.leaves(x) == atoms.leaves(y)
        assert atoms.numel(atoms.leaves(x)) == atoms.numel(x)
    else:
        assert len(atoms.up) == before, "a failed unify joins nothing"


@pytest.mark.law
@given(st.permutations([2, 3, 4]), st.integers(0, 2))
def test_regroup_keeps_the_order_of_atoms(sizes, joined):
    atoms = Atoms()
    dims = [atoms.new(n) for n in sizes]
    shape = tuple([*sizes[:joined], sizes[joined] * sizes[joined + 1], *sizes[joined + 2 :]] if joined < 2 else [2 * 3 * 4])
    out = atoms.regroup(dims, shape)
    assert out is not None
    assert sum(out, ()) == atoms.leaves(sum(dims, ()))
    assert tuple(map(atoms.numel, out)) == shape


def test_a_dim_of_size_one_has_no_atom():
    atoms = Atoms()
    assert atoms.new(1) == ()
    assert atoms.regroup([atoms.new(4)], (1, 4, 1)) == [(), atoms.leaves((0,)), ()]


def test_regroup_refuses_what_is_no_regrouping():
    atoms = Atoms()
    assert atoms.regroup([atoms.new(6)], (4,)) is None


def _cut(atoms, big, n, pieces):
    s = Signature([[("big",)]], [[(f"piece{j}",)] for j in range(len(pieces))])
    s.dims = {"big": big} | {f"piece{j}": atoms.new(size) for j, (_, size) in enumerate(pieces)}
    atoms.cuts.append((s, n, pieces))
    return s


def test_equal_pieces_settle_as_a_product():
    atoms = Atoms()
    big = atoms.new(12)
    s = _cut(atoms, big, 12, [(0, 4), (4, 4), (8, 4)])
    atoms.settle()
    assert [atoms.size[a] for a in atoms.leaves(big)] == [3, 4]
    assert s.whole == {"outer"}
    assert s.outs == [[("piece0",)]] * 3


def test_unequal_pieces_settle_as_a_direct_sum():
    atoms = Atoms()
    big = atoms.new(10)
    s = _cut(atoms, big, 10, [(0, 6), (6, 2), (8, 2)])
    atoms.settle()
    assert len(s.summands) == 3
    assert atoms.leaves(big) == big, "a direct sum stays one atom"
    assert s.parts == {"piece0": "big", "piece1": "big", "piece2": "big"}


def test_overlapping_pieces_stay_whole():
    atoms = Atoms()
    s = _cut(atoms, atoms.new(10), 10, [(0, 6), (4, 6)])
    s.whole = {"big", "piece0", "piece1"}
    atoms.settle()
    assert s.whole == {"big", "piece0", "piece1"}
