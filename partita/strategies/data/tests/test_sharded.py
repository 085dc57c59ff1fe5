"""Sharded data parallelism on real ranks: what only a run can show, and what is refused with which words."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import partita as pt
from partita.errors import Refused
from partita.mesh import Mesh
from partita.plans import Plan
from partita.proof.prove import prove_plan
from partita.runtime.capture import capture
from partita.runtime.subject import Subject
from partita.strategies import DDP, FSDP, TensorParallel, Zero1, Zero2
from partita.strategy import check
from partita.workload import GPT, Workload

KINDS = [Zero1, Zero2, FSDP]
ODD = GPT(layers=2, hidden=30, heads=3, vocab=101, sequence=4, tie_embeddings=True)
X = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(8, 6)


def proved(strategies, mesh, *, spec=ODD, samples=4, **changes):
    workload = Workload("gpt", spec, batch=samples * changes.get("accumulate", 1), seed=1, **changes)
    proof = prove_plan(Plan(workload, mesh=mesh, strategies=strategies), shrink=False)
    assert proof.proved, proof.reasons
    return proof


# ---------------------------------------------------------------- shapes and dtypes
@pytest.mark.gloo
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_do_not_divide_are_padded(kind):
    proved([kind()], {"dp": 4}, clip=0.5, accumulate=2)


@pytest.mark.gloo
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduce_dtype", [None, "float32"])
def test_half_types_with_a_reduction_dtype_and_a_master_copy(kind, reduce_dtype):
    proved([kind()], {"dp": 2}, dtype="bfloat16", reduce_dtype=reduce_dtype, accumulate=3, clip=0.5)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("strategies", "mesh"),
    [
        ([FSDP(replicate="outer")], {"outer": 2, "dp": 2}),
        ([FSDP(replicate="outer", reshard=False)], {"dp": 2, "outer": 2}),
        ([Zero2(bucket=1 << 10), DDP(axis="outer", bucket=1 << 9)], {"outer": 2, "dp": 2}),
        ([FSDP(), DDP(axis="outer")], {"dp": 2, "outer": 2}),
    ],
)
def test_two_data_axes(strategies, mesh):
    proved(strategies, mesh, clip=0.5, accumulate=2, samples=8)


# ---------------------------------------------------------------- a user's own modules
class Numbers(nn.Module):
    """A number, a single row, an empty parameter, and one that is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 1)
        self.scale = nn.Parameter(torch.ones(()))
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)) * self.scale)


class Shared(nn.Module):
    """Blocks, two of which share a weight; one runs twice, one never, and one gives back a view that is written to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Unflatten(-1, (2, 3)), nn.Flatten(-2)) for _ in range(5))
        self.blocks[1][0].weight = self.blocks[0][0].weight
        self.frozen = nn.ModuleList(nn.Linear(6, 6).requires_grad_(mode) for mode in (False, True))

    def forward(self, x):
        for n in (0, 1, 2, 2, 3):
            x = self.blocks[n](x)
            x += 1
            x = torch.tanh(x)
        return self.frozen[0](self.frozen[1](self.frozen[0](x)))


def subject(make, optimizer=None):
    def double():
        return make().double()

    return Subject(
        double, lambda step: {"x": X + step}, lambda o, b: o.square().mean(),
        optimizer or (lambda m: torch.optim.AdamW(m.parameters(), lr=0.01)),
    )  # fmt: skip


def prove(strategies, mesh, make, **how):
    s = subject(make, how.pop("optimizer", None))
    plan = pt.Plan(mesh=mesh, strategies=strategies, accumulate=how.pop("accumulate", 1))
    return pt.prove(plan, model=s.make, batches=s.batches, loss=s.loss, optimizer=s.optimizer, **how)


@pytest.mark.gloo
@pytest.mark.parametrize("kind", [Zero1, Zero2])
@pytest.mark.parametrize("size", [2, 4])
def test_numbers_and_single_rows(kind, size):
    proof = prove([kind()], {"dp": size}, Numbers, clip=(0.1, 2.0), accumulate=2)
    assert proof.proved, proof.reasons


@pytest.mark.gloo
@pytest.mark.parametrize("kind", KINDS)
def test_shared_and_repeated_blocks_views_and_frozen_ones(kind):
    proof = prove([kind()], {"dp": 2}, Shared, accumulate=2)
    assert proof.proved, proof.reasons


@pytest.mark.law
def test_a_number_is_refused_where_parameters_are_gathered():
    (fault,) = check(capture(subject(Numbers), 8), [FSDP()], Mesh.of({"dp": 2}))
    assert fault.code == "P116"
    assert "'scale'" in fault.what
    assert "zero2" in fault.cure


@pytest.mark.law
def test_a_block_of_two_dtypes_is_refused_where_it_is_gathered():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6).half()})])
            self.out = nn.Linear(6, 6)

        def forward(self, x):
            y = self.layers[0]["a"](x)
            return self.out(y + self.layers[0]["b"](y.half()).to(y.dtype))

    s = Subject(Mixed, lambda step: {"x": X.float()}, lambda o, b: o.mean(), lambda m: torch.optim.SGD(m.parameters(), 0.1))
    (fault,) = check(capture(s, 8), [FSDP()], Mesh.of({"dp": 2}))
    assert "float16, float32" in fault.have
    assert not check(capture(s, 8), [Zero2()], Mesh.of({"dp": 2}))


class Centring(torch.optim.SGD):
    """Takes the mean of each gradient away: it looks across rows."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.dim() > 1:
                    p.grad.sub_(p.grad.mean(0, keepdim=True))
        return super().step(closure)


@pytest.mark.gloo
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_looks_across_rows_is_refused(kind):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make()

        def forward(self, x):
            return self.inner(x)

    with pytest.raises(Refused, match=r"P116.*Centring"):
        prove([kind()], {"dp": 2}, Named, optimizer=lambda m: Centring(m.parameters(), lr=0.1))


# ---------------------------------------------------------------- sessions
@pytest.mark.gloo
@pytest.mark.parametrize("strategies", [[Zero1()], [Zero2()], [FSDP()], [TensorParallel(), FSDP()]])
def test_a_users_own_loop(strategies, tmp_path):
    mesh = {"dp": 2} if len(strategies) == 1 else {"dp": 2, "tp": 2}
    s = subject(Numbers if not isinstance(strategies[-1], FSDP) else lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)))
    make = s.make

    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make()

        def forward(self, x):
            return self.inner(x)

    def story(session):
        model, optimizer = session.wrap(Called(), s.optimizer)
        losses, norms = [], []
        for step, batch in enumerate(session.shard(s.batches(k) for k in range(3))):
            losses.append(float(session.step(model, batch, s.loss)))
            norms.append(float(session.clip(model, max_norm=0.1)))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():  # a look in between, with what the step has made of the parameters
                losses.append(float(model(batch["x"]).detach().square().mean().item() < losses[0] * 10 + step))
        state = session.state_dict()
        return losses, norms, {n: t.tolist() for n, t in state.items()}

    told = pt.spawn(pt.Plan(mesh=mesh, strategies=strategies), story)
    module = Called()
    optimizer = s.optimizer(module)
    losses, norms = [], []
    for step in range(3):
        loss = s.loss(module(X + step), {})
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_([p for p in module.parameters() if p.grad is not None], 0.1)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    for got, got_norms, state in told:
        assert got[::2] == pytest.approx(losses, rel=1e-10)
        assert got_norms == pytest.approx(norms, rel=1e-10)
        for name, t in module.state_dict().items():
            assert torch.allclose(torch.tensor(state[name], dtype=t.dtype), t, rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------- going on under another strategy
@pytest.mark.gloo
@pytest.mark.parametrize(("before", "after"), [(FSDP, Zero1), (Zero2, FSDP), (Zero1, DDP), (DDP, Zero2)])
def test_a_checkpoint_opens_under_another_strategy(before, after, tmp_path):
    workload = Workload("gpt", replace(ODD, layers=1, vocab=257), batch=8, dtype="float64", seed=1)

    def run(kind, **how):
        return pt.train(Plan(workload, "cpu", mesh={"dp": 4}, strategies=[kind()]), **how)

    whole = run(DDP, steps=4, out=tmp_path / "whole")
    run(before, steps=2, out=tmp_path / "first")
    rest = run(after, steps=4, resume=tmp_path / "first", out=tmp_path / "rest")
    assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-10)
    for name, t in whole.state_dict().items():
        assert torch.allclose(rest.state_dict()[name], t, rtol=1e-8, atol=1e-10), name
