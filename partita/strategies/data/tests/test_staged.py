"""Rows shared out within the stages of a pipeline: every kind with every schedule, tied and odd parameters, clipped."""

import math

import pytest
import torch
from safetensors.torch import load_file

import partita as pt
from partita.api.exporting import export
from partita.plans import Plan
from partita.proof.prove import prove_plan
from partita.strategies import (
    DDP,
    FSDP,
    ZBV,
    DualPipeV,
    GPipe,
    Interleaved,
    LoopedBFS,
    OneFOneB,
    Recompute,
    TensorParallel,
    Zero1,
    Zero2,
    ZeroBubble,
)
from partita.strategy import microbatches
from partita.workload import GPT, Workload

SCHEDULES = [GPipe, OneFOneB, Interleaved, ZeroBubble, ZBV, DualPipeV, LoopedBFS]
WHOLE = [GPipe, OneFOneB, Interleaved, LoopedBFS]  # backwards are not split in two
KINDS = [Zero1, Zero2, FSDP]
SMALL = 1 << 10  # a bucket a parameter or two


def proved(strategies, mesh, *, accumulate=1, **changes):
    """Vocabulary and biases do not divide by the data ranks; the embedding is on the first stage and on the last."""
    wide = 32 if "tp" in mesh else 30
    spec = GPT(layers=4, hidden=wide, heads=2, vocab=wide + 70, sequence=4, tie_embeddings=True, dropout=0.1)
    ranks = math.prod(size for axis, size in mesh.items() if axis in ("dp", "outer"))
    work = Workload("gpt", spec, ranks * microbatches(strategies, accumulate), accumulate, seed=1, clip=0.5, **changes)
    proof = prove_plan(Plan(work, mesh=mesh, strategies=strategies), shrink=False)
    assert proof.proved, proof.reasons
    return proof


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("data", "schedule"),
    [
        (Zero1(bucket=SMALL), OneFOneB(microbatches=2)),
        (Zero2(bucket=SMALL), ZBV(microbatches=4)),
        (FSDP(), ZeroBubble(microbatches=2)),
    ],
    ids=["zero1", "zero2", "fsdp"],
)
def test_rows_are_shared_out_within_stages(data, schedule):
    proved([data, schedule], {"pp": 2, "dp": 2})


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_schedule(kind, schedule):
    proved([kind(), schedule(microbatches=6)], {"dp": 3, "pp": 2}, accumulate=2)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_three_axes(kind, schedule):
    proved([TensorParallel(), kind(), schedule(microbatches=4)], {"dp": 2, "pp": 2, "tp": 2}, accumulate=2)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("schedule", WHOLE)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_blocks_that_are_computed_again(kind, schedule):
    strategies = [TensorParallel(), Recompute(), kind(), schedule(microbatches=2)]
    proved(strategies, {"dp": 2, "pp": 2, "tp": 2}, accumulate=2)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_data_axis_beside_stages(kind):
    strategies = [kind(), DDP(axis="outer", bucket=SMALL), OneFOneB(microbatches=2)]
    proved(strategies, {"outer": 2, "dp": 2, "pp": 2}, accumulate=2)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("kind", KINDS)
def test_half_types_within_stages(kind):
    proved([kind(), OneFOneB(microbatches=2)], {"dp": 2, "pp": 2}, dtype="bfloat16", reduce_dtype="float32", accumulate=2)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("schedule", [OneFOneB(microbatches=2), DualPipeV(microbatches=4)])
@pytest.mark.parametrize("how", [{"reshard": False}, {"replicate": "outer"}, {"replicate": "outer", "reshard": False}])
def test_stages_that_stay_whole_for_a_round_and_copies_of_rows(schedule, how):
    mesh = {"outer": 2, "dp": 2, "pp": 2} if "replicate" in how else {"dp": 3, "pp": 2}
    proved([FSDP(**how), schedule], mesh, accumulate=2)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("kind", KINDS)
def test_held_out_losses_gradients_and_an_exported_file_are_those_of_one_device(kind, tmp_path):
    spec = GPT(layers=4, hidden=30, heads=2, vocab=256, sequence=8, tie_embeddings=True)

    def trained(mesh, strategies, out, accumulate):
        work = Workload("gpt", spec, batch=8, accumulate=accumulate, seed=1, dtype="float64")
        plan = Plan(work, "cpu", mesh=mesh, strategies=strategies)
        return pt.train(plan, steps=3, eval_every=1, out=tmp_path / out, keep_gradients=True)

    split, one = (
        trained({"dp": 2, "pp": 2}, [kind(), Interleaved(microbatches=2)], "split", 1),
        trained({}, [], "one", 2),
    )
    held = [[loss for _, loss in run.outcome.results[0]["held_out"]] for run in (split, one)]
    assert held[0] == pytest.approx(held[1], rel=1e-10)
    assert len(held[0]) == 3
    for name, gradient in one.gradients().items():
        torch.testing.assert_close(split.gradients()[name], gradient, rtol=1e-9, atol=1e-12)
    export(tmp_path / "split", tmp_path / "model.safetensors")
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        torch.testing.assert_close(tensor, one.state_dict()[name], rtol=1e-9, atol=1e-12)
