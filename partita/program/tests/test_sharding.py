"""Rows shared out, as said: which rows, how many bytes, in which order, and what is refused."""

import math
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.mesh import Mesh
from partita.program import Collective, Kind, Phase, Rows
from partita.program.fold import unfold
from partita.program.sharding import chunk, own, padded
from partita.program.text import from_json, to_json
from partita.program.units import units_of
from partita.runtime.programs import program_of
from partita.strategies import DDP, FSDP, TensorParallel, Zero1, Zero2
from partita.strategy import check, compose
from partita.workload import GPT, MLP, Workload

pytestmark = pytest.mark.law
ODD = GPT(layers=4, hidden=30, heads=3, vocab=101, sequence=8)  # no dim 0 divides over 4 but those of ffn
TWO, FOUR = Mesh.of({"dp": 2}), Mesh.of({"dp": 4})


@cache
def gpt(spec=ODD, batch=8, **changes):
    return program_of(Workload("gpt", spec, batch=batch, **changes))


def calls(program, mesh, *strategies):
    return [(c.op, c.axis, c.nbytes) for c in compose(program, strategies, mesh).collectives()]


# ---------------------------------------------------------------- rows
@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 9))
def test_rows_are_shared_out_once_each_in_order(rows, ranks):
    found = [own(rows, ranks, rank) for rank in range(ranks)]
    assert [i for first, n in found for i in range(first, first + n)] == list(range(rows))
    assert max(n for _, n in found) == chunk(rows, ranks)
    assert padded((rows, 3), ranks) == 3 * ranks * max(n for _, n in found)


def test_a_number_without_dims_is_sent_to_every_rank():
    assert padded((), 4) == 4


# ---------------------------------------------------------------- zero1, zero2
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_scatter_and_a_gather_take_the_place_of_each_all_reduce(accumulate):
    program = unfold(gpt(batch=8 * accumulate, accumulate=accumulate))
    sums = [c for c in calls(program, TWO, DDP()) if c[2] != 16]
    for kind, times in ((Zero1, 1), (Zero2, accumulate)):
        found = calls(program, TWO, kind())
        assert [c for c in found if c[0] == "all_reduce"] == [("all_reduce", "dp", 16)]
        scatters = [c[2] for c in found if c[0] == "reduce_scatter"]
        gathers = [c[2] for c in found if c[0] == "all_gather"]
        assert len(scatters) == times * len(sums)
        assert scatters == times * gathers  # parameters and gradients have one dtype
        assert all(a >= b for a, (_, _, b) in zip(scatters, sums, strict=False))  # padded


def test_padding_is_by_parameter():
    program = unfold(gpt())
    want = sum(4 * padded(p.shape, 4) for p in program.parameters())
    (sent,) = (c[2] for c in calls(program, FOUR, Zero1()) if c[0] == "reduce_scatter")
    assert sent == want > sum(p.nbytes for p in program.parameters())


def test_what_the_optimizer_keeps_shrinks_and_what_forward_reads_does_not():
    program = unfold(gpt(optimizer="adamw"))
    plain = compose(program, [DDP()], FOUR)
    for kind in (Zero1, Zero2, FSDP):
        said = compose(program, [kind()], FOUR)
        for t in said.tensors:
            whole = math.prod(t.shape)
            rows = chunk(t.shape[0], 4) * math.prod(t.shape[1:]) if t.shape else 1
            if t.kind == Kind.OPTIMIZER:
                assert said.held_bytes(t.id) == 4 * rows
            if t.kind == Kind.PARAMETER:
                assert said.owned_bytes(t.id) == 4 * rows
                assert said.held_bytes(t.id) == 4 * (rows if kind is FSDP else whole)
            assert said.local_shape(t.id) == plain.local_shape(t.id)


def test_the_norm_needs_a_sum_over_the_axis_that_shares_rows_out():
    clipped = gpt(clip=1.0)
    assert ("all_reduce", "dp", 8) not in calls(clipped, TWO, DDP())
    for kind in (Zero1, Zero2, FSDP):
        assert calls(clipped, TWO, kind()).count(("all_reduce", "dp", 8)) == 1


def test_the_dtypes_of_sums_and_parameters_are_their_own():
    half = gpt(dtype="bfloat16", master="float32", reduce_dtype="float32")
    found = compose(half, [Zero1()], TWO).collectives()
    assert {(c.op, c.dtype) for c in found if c.tensors} >= {("reduce_scatter", "float32"), ("all_gather", "bfloat16")}


# ---------------------------------------------------------------- fsdp: the closed list of fully_shard
def closed(blocks, root, *, ranks=4, reshard=True, replicas=1, micro=1):
    """(op, axis, bytes) of one step, from the shapes of the units in forward order alone."""
    sizes = [4 * sum(padded(s, ranks) for s in unit) for unit in (*blocks, root)]
    n, found = len(blocks), []
    for _ in range(micro):
        found += [("all_gather", "dp", sizes[n]), *(("all_gather", "dp", s) for s in sizes[:n])]
        again = [("all_gather", "dp", s) for s in reversed(sizes[:n])] if reshard else []
        found += again[:2]
        for i in range(n + 1):
            size = sizes[n - 1 - i] if i < n else sizes[n]
            found.append(("reduce_scatter", "dp", size))
            found += [("all_reduce", "outer", size // ranks)] * (replicas > 1)
            found += again[i + 2 : i + 3]
    return found


@pytest.mark.parametrize("layers", [1, 2, 4, 6])
@pytest.mark.parametrize(
    "how", [{}, {"reshard": False}, {"micro": 3}, {"replicas": 2}], ids=["plain", "keep", "accumulate", "hybrid"]
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_fully_sharded_step_says_the_closed_list(layers, how, tied):
    micro, replicas = how.get("micro", 1), how.get("replicas", 1)
    program = gpt(replace(ODD, layers=layers, tie_embeddings=tied), batch=8 * micro * replicas, accumulate=micro)
    own_ = FSDP(reshard=how.get("reshard", True), replicate="outer" if replicas > 1 else None)
    mesh = Mesh.of({**({"outer": 2} if replicas > 1 else {}), "dp": 4})
    shapes = {p.name: p.shape for p in unfold(program).parameters()}
    inside = [[s for name, s in shapes.items() if name.startswith(f"blocks.{n}.")] for n in range(layers)]
    root = [s for name, s in shapes.items() if not name.startswith("blocks.")]
    found = calls(program, mesh, own_)
    for axis in ("dp", "outer"):
        want = [c for c in closed(inside, root, **how) if c[1] == axis]
        want += [("all_reduce", axis, 16)] * (axis in mesh.names)
        assert [c for c in found if c[1] == axis] == want


def test_a_folded_program_stays_folded():
    program = gpt(replace(ODD, layers=40))
    said = compose(program, [FSDP()], TWO)
    assert [s.count for s in said.segments if s.block] == [38] * sum(bool(s.block) for s in program.segments)


def test_a_unit_whose_input_has_no_gradient_is_scattered_after_the_root():
    program = program_of(Workload("mlp", MLP(layers=3, inputs=4, hidden=8, outputs=4), batch=8))
    units = units_of(program)
    assert [(u.path, u.late) for u in units] == [("layers.0", True), ("layers.1", False), ("layers.2", False), ("", True)]
    sizes = {u.path: 4 * sum(padded(program.tensors[i].shape, 2) for i in u.parameters) for u in units}
    scatters = [c[2] for c in calls(program, TWO, FSDP()) if c[0] == "reduce_scatter"]
    assert scatters == [sizes["layers.2"], sizes["layers.1"], sizes["layers.0"]]


def test_a_block_whose_parameter_is_read_elsewhere_belongs_to_the_root():
    program = unfold(gpt(replace(ODD, layers=3)))
    events = program.segments[0].events
    stolen = next(p.id for p in program.parameters() if p.name == "blocks.1.norm1.weight")
    at = next(n for n, e in enumerate(events) if e.module == "head")
    moved = replace(events[at], ins=(*events[at].ins, stolen))
    changed = replace(program.segments[0], events=(*events[:at], moved, *events[at + 1 :]))
    units = units_of(replace(program, segments=(changed, *program.segments[1:])))
    assert [u.path for u in units] == ["blocks.0", "blocks.2", ""]
    assert stolen in units[-1].parameters


# ---------------------------------------------------------------- with other axes
def test_rows_are_those_of_the_part_a_tensor_rank_holds():
    spec = GPT(layers=2, hidden=32, heads=4, vocab=64, sequence=8)
    mesh = Mesh.of({"dp": 2, "tp": 2})
    for kind in (Zero1, Zero2, FSDP):
        said = unfold(compose(gpt(spec), [TensorParallel(), kind()], mesh))
        by_name = {p.name: said.owned_bytes(p.id) for p in said.parameters()}
        assert by_name["blocks.0.attention.qkv.weight"] == 4 * 96 * 32 // 4
        assert by_name["blocks.0.attention.out.weight"] == 4 * 32 * 32 // 4
        assert by_name["blocks.0.norm1.weight"] == 4 * 32 // 2


@pytest.mark.parametrize("kind", [Zero1, Zero2, FSDP])
def test_a_second_data_axis_sums_rows_and_stands_outside(kind):
    mesh = Mesh.of({"outer": 2, "dp": 2})
    program = gpt()
    said = compose(program, [kind(), DDP(axis="outer")], mesh)
    again = sum(c.nbytes for c in said.collectives() if c.axis == "outer" and c.nbytes != 16)
    assert again == 4 * sum(padded(p.shape, 2) // 2 for p in unfold(program).parameters())
    (fault,) = check(program, [DDP(axis="outer"), kind()], mesh)
    assert fault.code == "P116"
    assert (fault.have, fault.cure) == ("outer = 2, dp = 2", "the table of 'dp' before that of 'outer'")


def test_a_program_with_rows_is_the_same_after_a_trip_through_json():
    said = compose(gpt(), [FSDP()], TWO)
    assert any(isinstance(x, Rows) for t in said.tensors for x in t.layouts.values())
    assert to_json(from_json(to_json(said))) == to_json(said)


# ---------------------------------------------------------------- refused
def test_control_flow_that_depends_on_data_is_followed_by_the_zeros_alone():
    program = replace(gpt(), dynamic=True)
    assert not check(program, [Zero1()], TWO)
    assert not check(program, [Zero2()], TWO)
    (fault,) = check(program, [FSDP()], TWO)
    assert fault.code == "P116"
    assert fault.cure.startswith("zero2")


def test_hybrid_sharding_that_shares_nothing_is_refused():
    (fault,) = check(gpt(), [FSDP(replicate="outer")], Mesh.of({"outer": 2, "dp": 1}))
    assert (fault.code, fault.have) == ("P112", "dp = 1, outer = 2")


def test_gathers_say_when_they_happen():
    said = unfold(compose(gpt(), [FSDP()], TWO))
    found = [e for e in said.events() if isinstance(e, Collective) and e.op == "all_gather"]
    assert [e.phase for e in found] == [Phase.FORWARD] * 5 + [Phase.BACKWARD] * 4
    zero = compose(gpt(), [Zero1()], TWO)
    assert {e.phase for e in zero.events() if isinstance(e, Collective) and e.op == "all_gather"} == {Phase.OPTIMIZER}
