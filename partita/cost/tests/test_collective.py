"""Closed forms, the bytes of gloo's ring, and which link an axis meets."""

from math import log2

import pytest

from partita.cluster import named
from partita.cost.collective import (
    algorithmic,
    backend_bytes,
    charge,
    gather_ring,
    halving_doubling,
    ring_all_reduce,
    route_of,
    tree_all_reduce,
)
from partita.mesh import Mesh


@pytest.mark.published
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
def test_ring_all_reduce_sends_the_optimum(ranks):
    """Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002: 2 (p-1)/p n, exact."""
    assert algorithmic("all_reduce", 1 << 20, ranks) == pytest.approx(2 * (ranks - 1) / ranks * (1 << 20), rel=1e-15)
    assert ring_all_reduce(1 << 20, ranks, 0.0, 1e9) == pytest.approx(2 * (ranks - 1) / ranks * (1 << 20) / 1e9, rel=1e-12)
    assert ring_all_reduce(0, ranks, 1e-6, 1e9) == pytest.approx(2 * (ranks - 1) * 1e-6)


@pytest.mark.published
@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_halving_doubling_and_tree_have_log_latency(ranks):
    """Thakur, Rabenseifner & Gropp 2005, doi:10.1177/1094342005051521: 2 log2(p) a + 2 (p-1)/p n/B, exact."""
    want = 2 * log2(ranks) * 1e-6 + 2 * (ranks - 1) / ranks * 1e6 / 1e9
    assert halving_doubling(1e6, ranks, 1e-6, 1e9) == pytest.approx(want)
    assert tree_all_reduce(0, ranks, 1e-6, 1e9) == pytest.approx(2 * log2(ranks) * 1e-6)


def test_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    assert ring_all_reduce(1e6, 8, 1e-6, 1e9) == pytest.approx(2 * gather_ring(1e6, 8, 1e-6, 1e9))


# Counted with TCP_INFO on the ranks' own sockets, torch 2.13, loopback: (op, ranks, bytes, messages a rank).
COUNTED = [
    ("all_reduce", 2, 16, 4), ("all_reduce", 2, 4 << 20, 4), ("all_reduce", 2, 16 << 20, 16), ("all_reduce", 2, 64 << 20, 64),
    ("all_reduce", 3, 12, 4), ("all_reduce", 3, 16777212, 24), ("all_reduce", 3, 67108860, 88),
    ("all_reduce", 4, 16, 6), ("all_reduce", 4, 4096, 12), ("all_reduce", 4, 16 << 20, 24), ("all_reduce", 4, 64 << 20, 96),
    ("reduce_scatter", 4, 16 << 20, 24), ("all_gather", 4, 16 << 20, 6), ("all_to_all", 3, 4092, 2),
    ("broadcast", 4, 4096, 0.75),
]  # fmt: skip


@pytest.mark.case
@pytest.mark.parametrize(("op", "ranks", "size", "messages"), COUNTED)
def test_gloo_sends_what_was_counted(op, ranks, size, messages):
    optimum = algorithmic("all_reduce" if op == "reduce_scatter" else op, size, ranks)
    assert backend_bytes("gloo", op, size, ranks) == pytest.approx(optimum + 144 * messages, rel=1e-12)


def test_nccl_bytes_are_algorithmic():
    assert backend_bytes("nccl", "reduce_scatter", 1 << 20, 8) == algorithmic("reduce_scatter", 1 << 20, 8)


def test_an_axis_of_size_1_moves_nothing():
    route = route_of("dp", Mesh.of({"dp": 1, "tp": 8}), named("8x8-h100"))
    assert charge("all_reduce", 1 << 20, route, named("8x8-h100")).seconds == 0
    assert backend_bytes("gloo", "all_reduce", 1 << 20, 1) == 0


def test_outermost_axis_meets_the_network():
    cluster, mesh = named("8x8-h100"), Mesh.of({"dp": 8, "tp": 8})
    dp, tp = route_of("dp", mesh, cluster), route_of("tp", mesh, cluster)
    assert (tp.inside, tp.across, tp.outer) == (8, 1, None)
    assert (dp.inside, dp.across) == (1, 8)
    assert charge("all_reduce", 1 << 26, tp, cluster).seconds < charge("all_reduce", 1 << 26, dp, cluster).seconds


def test_a_ring_over_whole_nodes_uses_every_port():
    cluster = named("8x8-h100")
    whole = route_of("dp", Mesh.of({"dp": 64}), cluster)
    assert (whole.inside, whole.across) == (8, 8)
    assert whole.bandwidth == pytest.approx(min(whole.inner.bandwidth, 8 * whole.outer.bandwidth))


def test_time_falls_with_bandwidth_and_grows_with_size():
    cluster, mesh = named("2x8-a100"), Mesh.of({"dp": 16})
    faster = named("2x8-h100")
    sizes = [1 << k for k in range(10, 30, 4)]
    slow = [charge("all_reduce", n, route_of("dp", mesh, cluster), cluster).seconds for n in sizes]
    fast = [charge("all_reduce", n, route_of("dp", mesh, faster), faster).seconds for n in sizes]
    assert slow == sorted(slow)
    assert all(f <= s for f, s in zip(fast, slow, strict=True))


def test_more_ranks_than_cores_are_crowded():
    cluster = named("1x2-cpu")
    two, four = route_of("dp", Mesh.of({"dp": 2}), cluster), route_of("dp", Mesh.of({"dp": 4}), cluster)
    assert (two.crowd, four.crowd) == (1.0, 2.0)
