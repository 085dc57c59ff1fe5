"""From raw times to tables: what is kept out, what the residuals say, and that the file reads back."""

import pytest

from partita.cluster import from_file
from partita.cost.fit import CLASS_OF_ENTRY, assembled, curves, interference, interior_errors, merged, split_out, table_of
from partita.plans.writing import toml

RATE = 1e10


def raw(noise=1.0):
    """Products at 10 Gflop/s, ops that move 1 GB/s after 1 us, calls of 100 us + 1 ns a byte."""
    shapes = [(1, m, n, k) for m in (64, 256, 1024) for n in (64, 256) for k in (64, 256)]
    products = [
        ["mm", "float32", *s, 2.0 * s[0] * s[1] * s[2] * s[3] / RATE * (noise if at % 5 == 2 else 1)]
        for at, s in enumerate(shapes)
    ]
    names = [*CLASS_OF_ENTRY.values(), "x_attention"]
    ops = [[op, size, 1e-6 + size * 1e-9] for op in names for size in (1e3, 1e4, 1e5, 1e6, 1e7)]
    calls = [["all_reduce", 2, size, 1e-4 + size * 1e-9] for size in (256, 1 << 12, 1 << 16, 1 << 20, 1 << 24)]
    overheads = {"autograd": 1e-6, "view": 5e-7, "step": 2e-6}
    return {"products": products, "ops": ops, "collectives": calls, "beside": {"lost": 1.0}, "overheads": overheads}


def test_ranks_are_averaged():
    assert merged([[["add", 8, 1.0]], [["add", 8, 3.0]]]) == [["add", 8, 2.0]]


def test_every_fifth_row_is_kept_out():
    kept, out = split_out(list(range(12)))
    assert out == [2, 7]
    assert sorted(kept + out) == list(range(12))


@pytest.mark.law
def test_an_affine_machine_has_no_residual():
    _, residuals = assembled(raw())
    assert set(residuals) == {"matmul", "elementwise and norms", "attention", "collectives"}
    assert all(value < 1e-9 for value in residuals.values()), residuals


def test_the_residual_is_of_what_was_kept_out():
    _, residuals = assembled(raw(noise=2.0))
    assert residuals["matmul"] == pytest.approx(0.5)


def test_curves_rise_and_are_judged_inside():
    points = curves([["add", 2.0, 3.0], ["add", 1.0, 4.0], ["add", 3.0, 5.0]])["add"]
    assert points == [(1.0, 4.0), (2.0, 4.0), (3.0, 5.0)]
    assert interior_errors(points) == [pytest.approx(4.5 / 4 - 1)]


@pytest.mark.parametrize(("lost", "share"), [(1.0, 0.5), (0.0, 0.0), (-0.3, 0.0), (3.0, 0.5), (1 / 3, 0.25)])
def test_interference_is_between_none_and_a_half(lost, share):
    assert interference(lost) == pytest.approx(share)


def test_the_file_reads_back(tmp_path):
    data = raw()
    tables, residuals = assembled(data)
    path = tmp_path / "probe.toml"
    path.write_text(toml(table_of(data, tables, residuals, "2026-01-01")))
    cluster = from_file(path)
    assert cluster.backend == "gloo"
    assert cluster.measured.ops["elementwise", "float32"](1e4) == pytest.approx(1.1e-5)
    assert cluster.measured.collectives["all_reduce", 2](1 << 20) == pytest.approx(1e-4 + (1 << 20) * 1e-9)
    assert cluster.flop_per_second("float32") == pytest.approx(RATE)
    assert cluster.value("interference.compute") == 0.5
    assert "probe of this machine" in cluster.source("device.bandwidth")
    assert cluster.measured.residuals == pytest.approx(residuals)
