"""Laws of the 4D grid as said: the ring terms of its paper, its degenerate cases, and what is refused with which words."""

import functools

import pytest

from partita.mesh import Mesh
from partita.program import Collective, Phase, Split
from partita.program.fold import unfold
from partita.runtime.programs import program_of
from partita.strategies.data.ddp import DDP
from partita.strategies.data.fsdp import FSDP
from partita.strategies.tensor.grid import Grid
from partita.strategies.tensor.tensor_parallel import TensorParallel
from partita.strategy import check, compose
from partita.workload import GPT, Llama, Workload

LAYERS, HIDDEN, SEQUENCE, BATCH, WIDTH = 3, 48, 16, 12, 4
LINEARS = ((HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN))  # (k, n) of a block, in turn


@functools.cache
def gpt(**changes):
    sizes = {"layers": LAYERS, "hidden": HIDDEN, "heads": 6, "vocab": 72, "sequence": SEQUENCE}
    return program_of(Workload("gpt", GPT(**{**sizes, **changes}), batch=BATCH))


def calls(program, axis, op, phase):
    """Sizes of calls of blocks, statistics of norms left out."""
    found = [
        (e.nbytes, n)
        for e, n in program.counted()
        if isinstance(e, Collective) and (e.axis, e.op, e.phase) == (axis, op, phase) and e.keeps is None
        if e.module.startswith("blocks.")
    ]
    return sorted(size for size, n in found for _ in range(n))


@pytest.mark.published
@pytest.mark.parametrize(("x", "y", "data"), [(2, 2, 1), (2, 3, 1), (3, 2, 2)])
def test_a_block_moves_the_ring_terms_of_its_paper(x, y, data):
    """Singh et al. 2024: for an m x k input and k x n weight, all_reduce of m n / Gy forward over the inner group, of m k / Gx
    backward over the outer one; the next layer has them the other way round. m is of one data group."""
    mesh = Mesh.of({"dp": data, "tp_x": x, "tp_y": y})
    said = compose(gpt(), (Grid(), DDP()), mesh) if data > 1 else Grid().rewrite(gpt(), mesh)
    m = BATCH // data * SEQUENCE
    forward, backward = {"tp_x": [], "tp_y": []}, {"tp_x": [], "tp_y": []}
    for number, (k, n) in enumerate(LINEARS):
        inner, outer = ("tp_x", "tp_y") if number % 2 == 0 else ("tp_y", "tp_x")
        forward[inner].append(m * n // mesh.size(outer) * WIDTH)
        backward[outer].append(m * k // mesh.size(inner) * WIDTH)
    for axis in ("tp_x", "tp_y"):
        assert calls(said, axis, "all_reduce", Phase.FORWARD) == sorted(forward[axis] * LAYERS)
        assert calls(said, axis, "all_reduce", Phase.BACKWARD) == sorted(backward[axis] * LAYERS)


@pytest.mark.published
def test_blocks_are_gathered_and_scattered_over_z():
    """AG_z = RS_z: a weight's k n / (Gx Gy) elements, gathered forward and again backward, scattered once."""
    said = compose(gpt(), (Grid(), FSDP(axis="dp")), Mesh.of({"dp": 2, "tp_x": 2, "tp_y": 2}))
    own = [t for t in said.parameters() if t.name.startswith("blocks.0.")]
    block = sum(said.local_bytes(t.id) for t in own)
    linears = sum(k * n for k, n in LINEARS) * WIDTH // 4
    assert linears == sum(said.local_bytes(t.id) for t in own if len(t.shape) == 2)
    over = [(e.op, e.nbytes) for e in said.collectives() if e.axis == "dp" and e.module.startswith("blocks.0")]
    assert sorted(set(over)) == [("all_gather", block), ("reduce_scatter", block)]


@pytest.mark.law
def test_every_matrix_is_cut_over_both_axes_and_its_flop_too():
    program = gpt(tie_embeddings=True)
    said = Grid().rewrite(program, Mesh.of({"tp_x": 2, "tp_y": 3}))
    for t in said.parameters():
        if len(t.shape) == 2 and t.name != "positions.weight":
            assert {axis for axis, layout in t.layouts.items() if isinstance(layout, Split)} == {"tp_x", "tp_y"}, t.name
    assert said.notes == program.notes


@pytest.mark.law
def test_one_rank_along_x_is_tensor_parallelism():
    one = Grid(y="tp").rewrite(gpt(), Mesh.of({"tp_x": 1, "tp": 2}))
    other = TensorParallel().rewrite(gpt(), Mesh.of({"tp": 2}))
    assert one.collectives() == other.collectives()


@pytest.mark.law
def test_folding_changes_nothing_that_is_said():
    def said(program):
        return [(c.op, c.axis, c.nbytes) for c in compose(program, (Grid(),), Mesh.of({"tp_x": 2, "tp_y": 2})).collectives()]

    assert said(gpt(layers=5)) == said(unfold(gpt(layers=5)))


@pytest.mark.law
def test_every_dim_that_does_not_divide_is_named_at_once():
    program = program_of(
        Workload("llama", Llama(layers=2, hidden=60, heads=6, kv_heads=3, ffn=75, vocab=64, sequence=8), batch=4)
    )
    faults = check(program, (Grid(),), Mesh.of({"tp_x": 8, "tp_y": 2}))
    assert [(f.code, f.have) for f in faults] == [
        ("P104", "hidden = 60, tp_x = 8"),
        ("P104", "heads = 3, tp_y = 2"),
        ("P104", "kv = 3, tp_y = 2"),
        ("P104", "ffn = 75, tp_y = 2"),
    ]
    assert faults[0].cure.startswith("tp_x = 1 or 2 or 3")
