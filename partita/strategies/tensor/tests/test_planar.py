"""Laws of blocks on a plane as said: derived volumes, layouts, what stays whole, and what is refused with which words."""

import functools

import pytest

from partita.errors import Refused
from partita.mesh import Mesh
from partita.program import Phase, Split
from partita.program.fold import unfold
from partita.runtime.programs import program_of
from partita.strategies.data.ddp import DDP
from partita.strategies.tensor.grid import Grid
from partita.strategies.tensor.summa import Summa
from partita.strategies.tensor.tesseract import Tesseract
from partita.strategy import check, compose
from partita.workload import GPT, Llama, Workload

SMALL = {"layers": 3, "hidden": 48, "heads": 6, "vocab": 72, "sequence": 16}
WIDTH = 4  # bytes of a float32
B = 12


@functools.cache
def gpt(**changes):
    return program_of(Workload("gpt", GPT(**{**SMALL, **changes}), batch=B))


def plane(rows, columns, **more):
    return Mesh.of({**more, "tp_row": rows, "tp_col": columns})


def sent(program, mesh, phase, inside):
    """Elements on the wire over the whole mesh: of what the products move in the modules `inside` names."""
    total = 0.0
    for e, n in program.counted():
        if getattr(e, "axis", None) and e.phase == phase and e.op in ("broadcast", "send") and inside in e.module:
            ranks = mesh.size(e.axis)
            each = e.nbytes * (ranks - 1) / ranks if e.op == "broadcast" else e.nbytes
            total += n * each * mesh.ranks / WIDTH
    return total


# ---------------------------------------------------------------- what is said
@pytest.mark.published
@pytest.mark.parametrize("q", [2, 3])
def test_a_layer_moves_what_was_derived_for_optimus(q):
    """Forward (q-1)(7bsh + 12h^2) elements over the whole mesh, backward twice that (methods: Xu et al. 2021, section 3.1)."""
    mesh = plane(q, q)
    said = Summa().rewrite(gpt(), mesh)
    bs, h = B * SMALL["sequence"], SMALL["hidden"]
    layer = (q - 1) * (7 * bs * h + 12 * h * h)
    assert sent(said, mesh, Phase.FORWARD, "blocks.") == pytest.approx(SMALL["layers"] * layer)
    assert sent(said, mesh, Phase.BACKWARD, "blocks.") == pytest.approx(SMALL["layers"] * 2 * layer)


@pytest.mark.law
@pytest.mark.parametrize(("r", "c"), [(2, 3), (3, 2), (1, 3), (3, 1)])
def test_a_mesh_of_r_rows_and_c_columns_moves_each_operand_over_its_own_axis(r, c):
    """(c-1)|A| + (r-1)|B|: activations 7bsh over the columns, matrices 12h^2 over the rows."""
    mesh = plane(r, c)
    said = Summa().rewrite(gpt(), mesh)
    bs, h = B * SMALL["sequence"], SMALL["hidden"]
    layer = (c - 1) * 7 * bs * h + (r - 1) * 12 * h * h
    assert sent(said, mesh, Phase.FORWARD, "blocks.") == pytest.approx(SMALL["layers"] * layer)


@pytest.mark.published
@pytest.mark.parametrize(("q", "d"), [(2, 2), (3, 2), (2, 1)])
def test_a_layer_moves_what_was_derived_for_tesseract(q, d):
    """(q-1)(|A| + d|B|) forward; gradients of matrices 2(d-1)|B| over the depth (Wang et al. 2021)."""
    mesh = plane(q, q, tp_depth=d)
    said = Tesseract().rewrite(gpt(), mesh)
    bs, h, layers = B * SMALL["sequence"], SMALL["hidden"], SMALL["layers"]
    layer = (q - 1) * (7 * bs * h + d * 12 * h * h)
    assert sent(said, mesh, Phase.FORWARD, "blocks.") == pytest.approx(layers * layer)
    summed = [(e, n) for e, n in said.counted() if getattr(e, "axis", "") == "tp_depth" and e.module.endswith("weight")]
    matrices = sum(n * e.nbytes for e, n in summed if e.module.startswith("blocks.") and "norm" not in e.module)
    ring = 2 * (d - 1) / d * mesh.ranks / WIDTH
    assert matrices * ring == pytest.approx(layers * 2 * (d - 1) * 12 * h * h)


@pytest.mark.law
def test_every_matrix_and_every_activation_is_cut_over_both_axes():
    said = Summa().rewrite(gpt(tie_embeddings=True), plane(2, 3))
    for t in said.parameters():
        cut = {axis for axis, layout in t.layouts.items() if isinstance(layout, Split)}
        assert cut == ({"tp_row", "tp_col"} if len(t.shape) == 2 and t.name != "positions.weight" else {"tp_col"}), t.name
    held = sum(said.local_bytes(t.id) for t in said.parameters() if len(t.shape) == 2 and t.name != "positions.weight")
    whole = sum(t.nbytes for t in said.parameters() if len(t.shape) == 2 and t.name != "positions.weight")
    assert held * 6 == whole


@pytest.mark.law
def test_flop_of_products_are_shared_by_all_ranks():
    program = gpt()
    assert Summa().rewrite(program, plane(2, 3)).flop() * 6 == program.flop()


@pytest.mark.law
def test_folding_changes_nothing_that_is_said():
    def calls(program):
        return [(c.op, c.axis, c.nbytes) for c in compose(program, (Summa(),), plane(2, 2)).collectives()]

    folded, flat = calls(gpt(layers=5)), calls(unfold(gpt(layers=5)))
    assert folded == flat


@pytest.mark.law
def test_tesseract_of_one_layer_is_summa():
    mesh = plane(2, 2, tp_depth=1)
    one, other = (s.rewrite(gpt(), mesh).collectives() for s in (Tesseract(), Summa()))
    assert one == other


@pytest.mark.law
def test_tesseract_says_what_summa_beside_a_data_axis_says():
    """Wang et al. 2021: arithmetically, d layers are data parallelism around one."""
    mesh = plane(2, 2, tp_depth=2)
    one = compose(gpt(), (Tesseract(),), mesh).collectives()
    other = compose(gpt(), (Summa(), DDP(axis="tp_depth", bucket=1)), mesh).collectives()
    for axis in ("tp_row", "tp_col"):
        assert [(c.op, c.nbytes) for c in one if c.axis == axis] == [(c.op, c.nbytes) for c in other if c.axis == axis]
    both = [sorted((c.op, c.nbytes) for c in said if c.axis == "tp_depth") for said in (one, other)]
    assert both[0] == both[1]


# ---------------------------------------------------------------- what is refused, or stays whole
@pytest.mark.law
def test_every_dim_that_does_not_divide_is_named_at_once():
    spec = Llama(layers=2, hidden=60, heads=6, kv_heads=3, ffn=75, vocab=64, sequence=8)
    faults = check(program_of(Workload("llama", spec, batch=4)), (Summa(),), plane(2, 2))
    assert [(f.code, f.have) for f in faults] == [
        ("P104", "kv_heads = 3, tp_row = 2, tp_col = 2"),
        ("P104", "ffn = 75, tp_row = 2, tp_col = 2"),
    ]
    faults = check(gpt(), (Summa(),), plane(4, 4))
    assert [f.what for f in faults][:1] == ["Summa cannot split dim 'heads'"]
    assert faults[0].cure == "tp_row and tp_col each one of 1, 2, 3, 6"


@pytest.mark.law
def test_an_odd_vocabulary_stays_whole_and_is_noted():
    said = Summa().rewrite(gpt(vocab=71), plane(2, 2))
    assert "summa: the vocabulary stays whole: 71 classes do not divide over tp_row = 2 and tp_col = 2" in said.notes


@pytest.mark.law
def test_tesseract_wants_a_square():
    (fault,) = check(gpt(), (Tesseract(),), plane(2, 3))
    assert (fault.code, fault.have) == ("P104", "tp_row = 2, tp_col = 3")
    with pytest.raises(Refused):
        Tesseract().rewrite(gpt(), plane(2, 3))


@pytest.mark.law
def test_a_batch_that_does_not_divide_is_refused():
    faults = check(program_of(Workload("gpt", GPT(**SMALL), batch=4)), (Summa(),), plane(3, 3))
    assert [f.code for f in faults] == ["P104"]
    assert "batch" in faults[0].what


@pytest.mark.law
@pytest.mark.parametrize("kind", [Summa, Tesseract, Grid])
def test_a_part_of_the_modules_is_refused_with_the_reason(kind):
    with pytest.raises(Refused) as caught:
        kind(modules=("blocks.*",))
    (fault,) = caught.value.faults
    assert (fault.code, fault.law.rpartition(": ")[2]) in [
        ("P112", "they are split in all or in none"),
        ("P112", "it is split in all or in none"),
    ]


@pytest.mark.law
@pytest.mark.parametrize(
    ("strategy", "sizes", "suits"),
    [
        (Summa(), {"tp_row": 2, "tp_col": 4}, True),
        (Summa(), {"tp_row": 2, "tp_col": 8}, False),
        (Tesseract(), {"tp_depth": 2, "tp_row": 2, "tp_col": 2}, True),
        (Tesseract(), {"tp_depth": 4, "tp_row": 2, "tp_col": 2}, False),
        (Grid(), {"tp_x": 2, "tp_y": 4}, True),
        (Grid(), {"tp_x": 4, "tp_y": 2}, False),
    ],
)
def test_a_search_looks_at_shapes_that_may_pay(strategy, sizes, suits):
    assert strategy.suits(Mesh.of(sizes)) is suits
