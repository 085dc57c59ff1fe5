"""Rows shared out within the stages of other people's modules: frozen, unused and odd parameters, parts that count nothing."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt
from partita.strategies import DDP, FSDP, ZBV, DualPipeV, Interleaved, OneFOneB, TensorParallel, Zero1, Zero2, ZeroBubble

KINDS = [Zero1, Zero2, FSDP]
MESH = {"dp": 2, "pp": 2}


@dataclass
class Out:
    h: torch.Tensor
    first: torch.Tensor


class Layer(nn.Module):
    """Gives back a dataclass, or a view that is written to outside."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, first):
        h = torch.tanh(self.a(x) + first) + self.b(x)
        return Out(h.unflatten(-1, (1, -1)).flatten(-2), first)


class Odd(nn.Module):
    """Five rows a parameter; a frozen layer among others, a block never run, a head that also reads the first value."""

    def __init__(self, width=5, norm=False):
        super().__init__()
        self.inp, self.out = nn.Linear(4, width), nn.Linear(width, 3)
        self.layers = nn.ModuleList(Layer(width) for _ in range(5))
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.layers[1].requires_grad_(requires_grad=False)
        self.layers[3].a.weight.requires_grad_(requires_grad=False)

    def forward(self, x):
        h = first = self.inp(x)
        for layer in list(self.layers)[:4]:
            found = layer(h, first)
            h = found.h
            h += 1
        return self.out(self.norm(h) + first)


def seeded(kind=Odd, **how):
    def make():
        torch.manual_seed(0)
        return kind(**how).double()

    return make


def batches(step):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(16, 4, generator=draw, dtype=torch.float64)
    return {"x": x, "y": torch.randint(3, (16,), generator=draw)}


def partly(step):
    batch = batches(step)
    batch["y"][:5] = -100  # microbatches of one data rank have nothing to learn from
    return batch


def loss(out, batch):
    return F.cross_entropy(out, batch["y"], ignore_index=-100)


def adamw(module):
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], 1e-2)


def sgd(module):
    """A bias before a batch norm has no gradient but rounding, which Adam would blow up."""
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.1)


def proof(strategies, mesh=MESH, *, model=None, data=batches, **how):
    plan = pt.Plan(cluster="here", mesh=mesh, strategies=strategies, accumulate=how.pop("accumulate", 1))
    made = seeded() if model is None else model
    found = pt.prove(plan, model=made, batches=data, loss=loss, optimizer=adamw, steps=2, clip=(0.1, 2.0), **how)
    assert found.proved, found.reasons


@pytest.mark.gloo
@pytest.mark.parametrize(
    "strategies",
    [[Zero2(), OneFOneB(microbatches=4)], [FSDP(), ZeroBubble(microbatches=4)]],
    ids=["zero2", "fsdp"],
)
def test_parts_of_one_rank_that_count_nothing(strategies):
    proof(strategies, data=partly)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("data", [batches, partly])
@pytest.mark.parametrize("schedule", [OneFOneB, Interleaved, ZBV, DualPipeV])
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_and_unused_parameters_views_and_dataclasses(kind, schedule, data):
    proof([kind(), schedule(microbatches=4)], data=data)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("schedule", [OneFOneB, ZeroBubble])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_that_count_nothing_on_a_tensor_axis(kind, schedule):
    proof(
        [TensorParallel(), kind(), schedule(microbatches=2)],
        {**MESH, "tp": 2},
        model=seeded(width=6),
        data=partly,
        accumulate=2,
    )


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("kind", KINDS)
def test_batch_norm_of_microbatches(kind):
    """Its statistics are of the parts that all data ranks run at once: as under `ddp`."""

    def trained(data):
        plan = pt.Plan(cluster="here", mesh=MESH, strategies=[data, OneFOneB(microbatches=2)])
        how = {"model": seeded(norm=True), "batches": batches, "loss": loss, "optimizer": sgd}
        return pt.train(plan, steps=3, batch_norm="microbatch", **how)

    run, whole = trained(kind()), trained(DDP())
    assert run.losses == pytest.approx(whole.losses, rel=1e-10)
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(run.state_dict()[name], tensor, rtol=1e-9, atol=1e-11)


def curve(strategies, steps, *, mesh=MESH, **more):
    plan = pt.Plan(cluster="here", mesh=mesh, strategies=strategies)
    return pt.train(plan, model=seeded(), batches=batches, loss=loss, optimizer=adamw, steps=steps, **more)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("kind", KINDS)
def test_they_open_what_one_device_saved_and_the_other_way(kind, tmp_path):
    ours, one = [kind(), ZBV(microbatches=4)], []
    whole = curve(one, 4, mesh={})
    for k, (first, second) in enumerate(((one, ours), (ours, one), (ours, ours))):
        curve(first, 2, mesh=MESH if first else {}, out=tmp_path / f"run{k}")
        rest = curve(second, 4, mesh=MESH if second else {}, resume=tmp_path / f"run{k}", out=tmp_path / f"rest{k}")
        assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-12)
        for name, tensor in whole.state_dict().items():
            torch.testing.assert_close(rest.state_dict()[name], tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.gloo
def test_a_users_own_loop_with_rows_of_stages():
    plan = pt.Plan(cluster="here", mesh=MESH, strategies=[FSDP(), OneFOneB(microbatches=2)])

    def story(session):
        model, optimizer = session.wrap(seeded()(), adamw)
        losses = []
        for batch in session.shard([batches(step) for step in range(3)]):
            losses.append(float(session.step(model, batch, loss)))
            losses.append(float(session.clip(model, max_norm=0.1)))
            optimizer.step()
            optimizer.zero_grad()
        return [losses, {n: t.tolist() for n, t in session.state_dict().items()}]

    found = pt.spawn(plan, story)
    one = pt.spawn(pt.Plan(cluster="here"), story)
    for rank in found:
        assert rank[0] == pytest.approx(one[0][0], rel=1e-10)
        for name, want in one[0][1].items():
            torch.testing.assert_close(torch.tensor(rank[1][name]), torch.tensor(want), rtol=1e-5, atol=1e-6)
