"""Training on ranks is training on one device: losses, parameters, gradients; then files, schedules and stopping."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from partita.errors import RankLost, Refused
from partita.mesh import Mesh
from partita.runtime.capture import capture
from partita.runtime.loop import train_ranks
from partita.runtime.ranks import run_ranks
from partita.runtime.training import Training
from partita.strategies.data.ddp import DDP

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize(
    ("mesh", "accumulate"),
    [({"dp": 2}, 1), ({"dp": 2}, 2), ({"dp": 1}, 4), ({"tp": 2}, 2), ({"dp": 2, "tp": 2}, 1)],
    ids=["dp2", "dp2 accumulate2", "accumulate4", "tp2 accumulate2", "dp2 tp2"],
)
def test_a_split_gpt_equals_one_device(equal, gpt, mesh, accumulate):
    equal(gpt, mesh, accumulate=accumulate, clip=(0.5, 2.0), schedule="cosine", warmup=2, horizon=6)


def test_the_ledger_is_the_normative_order(split, gpt):
    got = split(gpt, {"dp": 2}, clip=(1.0, 2.0))
    ops = [(op, axis, dtype, label) for op, axis, _, dtype, label in got.ranks[0]["ledger"]]
    assert ops[-1] == ("all_reduce", "dp", "float64", "loss")
    assert got.ranks[0]["ledger"][-1][2] == 16
    assert len(got.ranks[0]["ledger_changes"]) == 1
    assert sum(n for *_, n, _, label in got.ranks[0]["ledger"] if label != "loss") == sum(
        t.nbytes for t in got.whole["gradients"].values()
    )


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=["dp2", "dp2 tp2"])
def test_a_resumed_run_is_bitwise_the_same_curve(split, gpt, tmp_path, mesh):
    settings = {"schedule": "cosine", "warmup": 2, "horizon": 9, "clip": (1.0, 2.0)}
    whole = split(gpt, mesh, 5, folder=tmp_path / "a", **settings)
    first = split(gpt, mesh, 3, folder=tmp_path / "b", **settings)
    rest = split(gpt, mesh, 5, folder=tmp_path / "b", resume=tmp_path / "b", **settings)
    assert first.losses + rest.losses == whole.losses
    assert rest.ranks[0]["first"] == 3
    for kind in ("state", "optimizer"):
        assert whole.whole[kind].keys() == rest.whole[kind].keys()
        assert all(torch.equal(t, rest.whole[kind][n]) for n, t in whole.whole[kind].items())


def test_a_checkpoint_opens_under_another_layout(equal, split, gpt, tmp_path):
    first = split(gpt, {"dp": 2, "tp": 2}, 2, folder=tmp_path)
    rest = split(gpt, {"dp": 2}, 4, 2, resume=tmp_path)
    whole = split(gpt, {"dp": 1}, 4)
    for a, b in zip(first.losses + rest.losses, whole.losses, strict=True):
        assert abs(a - b) < 1e-12
    assert max((rest.whole["state"][n] - t).abs().max().item() for n, t in whole.whole["state"].items()) < 1e-12


def test_random_state_goes_on_after_a_resume(split, tmp_path, gpt):
    def noisy(output, batch):
        return gpt.loss(output, batch) * (1 + torch.rand(()).item() * 1e-3)

    # not refused: the noise is a number, not part of the graph; one rank, so any draw is the run's own
    subject = replace(gpt, loss=noisy)
    whole = split(subject, {"dp": 1}, 4)
    first = split(subject, {"dp": 1}, 2, folder=tmp_path)
    rest = split(subject, {"dp": 1}, 4, resume=tmp_path)
    assert first.losses + rest.losses == whole.losses


def test_metrics_are_lines_of_json(split, gpt, tmp_path):
    got = split(gpt, {"dp": 2}, 4, folder=tmp_path, held_out=lambda k: gpt.batches(100 + k), evaluate_every=2, save_every=2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["ranks"] == 2
    assert lines[0]["pids"] == [r["pid"] for r in got.ranks]
    assert [line["step"] for line in lines[1:]] == [1, 2, 3, 4]
    assert [line["loss"] for line in lines[1:]] == got.losses
    assert all(line["seconds"] > 0 and line["gradient_norm"] > 0 for line in lines[1:])
    assert [line["step"] for line in lines[1:] if "held_out_loss" in line] == [2, 4]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-2", "step-4"]


def test_the_held_out_loss_is_that_of_one_device(split, gpt):
    held = [split(gpt, mesh, 2, held_out=lambda k: gpt.batches(100 + k)).ranks[0]["held_out"] for mesh in MESHES]
    assert held[0][0][0] == 2
    assert [h[0][1] for h in held] == pytest.approx([held[0][0][1]] * len(held), abs=1e-12)


MESHES = [{"dp": 1}, {"dp": 2}, {"dp": 2, "tp": 2}]


def test_measurements_are_there(split, gpt):
    got = split(gpt, {"dp": 2}, 4)
    for rank in got.ranks:
        assert rank["memory"]["peak"] > 0
        assert rank["memory"]["resident"] > rank["memory"]["peak"]
        gradients = sum(t.nbytes for t in got.whole["gradients"].values())
        assert gradients <= rank["wire_bytes"] <= 1.05 * gradients  # a ring of 2 sends what it reduces
        assert len(rank["seconds"]) == 4


# ---------------------------------------------------------------- batches
def test_batches_may_be_any_iterable(equal, split, gpt):
    batches = [gpt.batches(k) for k in range(3)]
    whole = split(gpt, {"dp": 1}, 3)
    assert split(replace(gpt, batches=batches), {"dp": 2}).losses == pytest.approx(whole.losses, rel=1e-12)
    assert split(replace(gpt, batches=(b for b in batches)), {"dp": 2}).losses == pytest.approx(whole.losses, rel=1e-12)


@pytest.mark.parametrize(
    ("batches", "steps", "code", "words"),
    [
        (lambda b: b[:2], 3, "P110", "the batches end after 2 steps"),
        (lambda b: [], 1, "P110", "the batches end after 0 steps"),
        (lambda b: [b[0], {k: t[:6] for k, t in b[1].items()}], 2, "P112", "the batch of step 2 has 6 samples"),
        (lambda b: [[1, 2]], 1, "P102", "the batch of step 1 is a list"),
        (lambda b: [{k: t[:7] for k, t in b[0].items()}], 1, "P104", "7"),
        (lambda b: [{k: t[:0] for k, t in b[0].items()}], 1, "P110", "holds no samples"),
    ],
    ids=["end", "empty", "size", "no mapping", "odd", "no samples"],
)
def test_bad_batches_are_refused(split, gpt, batches, steps, code, words):
    some = [gpt.batches(k) for k in range(3)]
    with pytest.raises(Refused, match=words) as caught:
        split(replace(gpt, batches=batches(some)), {"dp": 2}, steps)
    assert caught.value.faults[0].code == code


def test_batches_that_differ_between_ranks_are_refused(split, gpt):
    def differing(step):
        batch = gpt.batches(step)
        return {**batch, "tokens": (batch["tokens"] + os.getpid()) % 64}

    with pytest.raises(Refused, match="the first batch differs between rank 0 and rank 1"):
        split(replace(gpt, batches=differing), {"dp": 2})


def test_a_factory_without_a_seed_gives_all_ranks_the_same_weights(split, gpt):
    def make():
        torch.manual_seed(os.getpid())
        return gpt.make().apply(lambda m: m.reset_parameters() if isinstance(m, torch.nn.Linear) else None)

    got = split(replace(gpt, make=make), {"dp": 2})
    assert got.ranks[0]["losses"] == got.ranks[1]["losses"]


@pytest.mark.parametrize("clip", [(0.0, 2.0), (1.0, -1.0)])
def test_a_senseless_clip_is_refused(split, gpt, clip):
    with pytest.raises(Refused, match="clip"):
        split(gpt, {"dp": 2}, clip=clip)


# ---------------------------------------------------------------- stopping
def test_ctrl_c_finishes_the_step_and_saves(gpt, tmp_path):
    program = capture(gpt, 8)
    sent: list[int] = []

    def look(done: int, loss: float) -> None:
        if done >= 3 and not sent:
            sent.append(done)
            os.kill(os.getpid(), signal.SIGINT)

    ranks = run_ranks(
        Mesh.of({"dp": 2}),
        lambda net: train_ranks(net, gpt, [DDP()], program, Training(100_000, folder=tmp_path)),
        progress=look,
    )
    steps = len(ranks[0]["losses"])
    assert all(r["interrupted"] and len(r["losses"]) == steps for r in ranks)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [f"step-{steps}"]
    assert steps < 100_000


def test_a_rank_killed_in_training_is_named_with_what_it_did(gpt):
    program = capture(gpt, 8)

    def look(done: int, loss: float) -> None:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGKILL)

    with pytest.raises(RankLost, match=r"rank 1 of 2 was killed by SIGKILL") as caught:
        run_ranks(Mesh.of({"dp": 2}), lambda net: train_ranks(net, gpt, [DDP()], program, Training(100_000)), progress=look)
    assert "all ranks were ended" in str(caught.value)
