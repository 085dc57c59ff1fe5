"""Laws of a mesh."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.mesh import Mesh

meshes = st.lists(st.integers(1, 4), min_size=0, max_size=4).map(
    lambda sizes: Mesh(tuple((f"a{i}", n) for i, n in enumerate(sizes)))
)


@pytest.mark.law
@given(meshes)
def test_coordinates_are_distinct_and_complete(mesh: Mesh):
    seen = {tuple(mesh.coordinate(rank).values()) for rank in range(mesh.ranks)}
    assert len(seen) == mesh.ranks == math.prod(size for _, size in mesh.axes)


@pytest.mark.law
@given(meshes)
def test_groups_of_an_axis_partition_the_ranks(mesh: Mesh):
    for axis, size in mesh.axes:
        groups = list(mesh.groups(axis))
        assert all(len(group) == size for group in groups)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.ranks))


@pytest.mark.case
def test_the_last_axis_varies_fastest():
    mesh = Mesh.of({"dp": 2, "tp": 3})
    assert mesh.coordinate(4) == {"dp": 1, "tp": 1}
    assert mesh.group("tp", 4) == (3, 4, 5)
    assert mesh.group("dp", 4) == (1, 4)
    assert mesh.size("pp") == 1
