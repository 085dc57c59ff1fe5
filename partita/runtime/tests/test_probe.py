"""The probe on this machine: the entries run, and the file it writes predicts a step."""

import pytest
import torch

from partita.cluster import cluster_of
from partita.cost.compute import class_of, work_of
from partita.program.events import Compute
from partita.runtime.entries import (
    Entry,
    Pool,
    attention_entries,
    convolution_entries,
    op_entries,
    product_entry,
    product_shapes,
    repeats,
    timed,
)
from partita.runtime.probe import HELD_OUT, overheads, probe
from partita.runtime.programs import program_of


@pytest.fixture(scope="module")
def pool():
    return Pool(torch.float32)


def entries(pool):
    return [
        *op_entries(pool, 1 << 10),
        *attention_entries(pool, quick=True),
        *(entry for _, entry in convolution_entries(pool)),
    ]


def test_every_entry_runs(pool):
    with torch.no_grad():
        for entry in entries(pool):
            assert entry.call(*entry.make()) is not None, entry.op
            assert entry.amount > 0


def test_products_have_the_shapes_they_say(pool):
    for shape in list(product_shapes(quick=True))[:12] + list(product_shapes(quick=True))[-2:]:
        out = (entry := product_entry(pool, shape)).call(*entry.make())
        assert out.numel() == shape.batch * shape.m * shape.n
        assert entry.amount == 2.0 * out.numel() * shape.k


def test_convolutions_amount_to_the_products_they_say(pool):
    for shape, entry in convolution_entries(pool):
        assert entry.amount == 2.0 * shape.batch * shape.m * shape.n * shape.k
        if entry.op == "convolution":
            out = entry.call(*entry.make())
            assert (out.numel() // shape.n, out.shape[1]) == (shape.m, shape.n)


def test_entries_move_the_bytes_that_programs_count(pool):
    """The amount an op is measured over is the amount it is priced by: the step's own norm, activation and residual."""
    program = program_of(HELD_OUT)
    found = {}
    for event in program.events():
        if isinstance(event, Compute) and not event.view:
            found.setdefault(event.op, work_of(event, program))
    tokens = 12 * 96
    assert found["native_layer_norm"].bytes == pytest.approx(2 * tokens * 192 * 4 + 8 * tokens, rel=0.01)
    assert found["gelu"].bytes == 2 * tokens * 768 * 4
    assert found["embedding"].bytes == pytest.approx(2 * tokens * 192 * 4 + 8 * tokens, rel=0.01)
    names = {entry.op for entry in entries(pool)}
    heavy = {op for op, work in found.items() if work.bytes > tokens * 192 * 4 and not work.m}
    assert heavy - names <= {"nll_loss_forward", "ones_like"}, "an op of the step that no entry stands for"


def test_a_pool_never_repeats_a_place_in_a_row(pool):
    a, b = pool(64), pool(64)
    assert a.data_ptr() != b.data_ptr()
    assert a.data_ptr() % 64 == b.data_ptr() % 64


def test_repeats_keep_within_their_slice():
    assert repeats(1.0, 0.05) == 5
    assert repeats(1e-6, 0.05) == 50
    assert repeats(1.0, 0.0) == 2
    assert timed(lambda: (), lambda: None, 0.0) >= 0
    assert Entry("x", 1.0, tuple, len).op == "x"


def test_overheads_are_microseconds():
    assert all(0 <= seconds < 1e-3 for seconds in overheads().values())


def test_every_measured_op_has_a_class(pool):
    assert {class_of(entry.op) for entry in entries(pool)} >= {"attention", "norm", "softmax", "gather", "activation", "copy"}


@pytest.mark.slow
@pytest.mark.gloo
def test_a_quick_probe_predicts_the_step_it_kept_out(tmp_path):
    lines = []
    path = probe(tmp_path, quick=True, say=lines.append)
    here = cluster_of("here", probe_dir=tmp_path)
    assert path.parent == tmp_path
    assert here.measured.residuals["step"] < 1.0  # a gate for other load on the cores, not for accuracy
    assert any("real training step" in line for line in lines)
