"""Recomputation on real ranks: proved under every axis, bit for bit what runs without it, and less memory."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import partita as pt
from partita.errors import Refused
from partita.mesh import Mesh
from partita.plans import Plan, load_text
from partita.program.fold import unfold
from partita.proof.laws import broken
from partita.proof.matrix import small_workloads
from partita.proof.prove import prove_plan
from partita.proof.shrink import SAMPLES
from partita.runtime.programs import program_of
from partita.strategies import DDP, GARDEN, OneFOneB, Recompute, TensorParallel, ZeroBubble
from partita.strategy import Promise
from partita.workload import GPT, MLP, Workload


def plan_of(name, mesh, accumulate=1, **settings):
    strategies = [TensorParallel()] * ("tp" in mesh) + [Recompute(**settings)] + [DDP()] * ("dp" in mesh)
    workload = replace(small_workloads()[name], batch=mesh.get("dp", 1) * accumulate * SAMPLES, accumulate=accumulate)
    return Plan(workload, mesh=Mesh.of(mesh), strategies=strategies)


@pytest.mark.law
def test_it_keeps_every_law_that_needs_no_ranks():
    assert broken(Recompute) == []


@pytest.mark.gloo
@pytest.mark.parametrize("policy", ["block", "full", "selective"])
@pytest.mark.parametrize("name", ["gpt", "llama", "resnet", "mlp"])
def test_on_one_rank_it_is_exact(name, policy):
    proof = prove_plan(plan_of(name, {}, policy=policy), shrink=False)
    assert proof.proved, proof.reasons
    assert proof.promise == Promise.EXACT
    assert proof.numerics.max_relative_error == 0.0


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "mesh", "accumulate", "policy"),
    [
        ("gpt", {"dp": 2}, 3, "block"),
        ("gpt", {"tp": 2}, 1, "selective"),
        ("gpt", {"tp": 2}, 1, "full"),
        ("gpt", {"dp": 2, "tp": 2}, 3, "block"),
        ("gpt", {"tp": 2, "dp": 2}, 1, "block"),
        ("llama", {"tp": 2}, 3, "block"),
        ("llama", {"tp": 2, "dp": 2}, 1, "selective"),
        ("resnet", {"dp": 2}, 1, "block"),
        ("resnet", {"dp": 2}, 1, "full"),
        ("resnet", {"tp": 2, "dp": 2}, 1, "selective"),
        ("mlp", {"dp": 2, "tp": 2}, 3, "block"),
    ],
)
def test_the_square_commutes(name, mesh, accumulate, policy):
    proof = prove_plan(plan_of(name, mesh, accumulate, policy=policy), shrink=False)
    assert proof.proved, proof.reasons


@pytest.mark.gloo
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}])
def test_a_run_is_bit_for_bit_the_run_without_it(mesh):
    """Masks, sums over ranks and buffers are those of the first pass."""
    states, spec = [], GPT(layers=2, hidden=32, heads=4, vocab=256, sequence=8, tie_embeddings=True, dropout=0.1)
    for strategies in ([Recompute()], [Recompute(policy="selective")], []):
        outer = [TensorParallel()] * ("tp" in mesh), [DDP()] * ("dp" in mesh)
        plan = Plan(Workload("gpt", spec, batch=4), mesh=mesh, strategies=[*outer[0], *strategies, *outer[1]])
        run = pt.train(plan, steps=3)
        states.append((run.losses, run.state_dict()))
    (_, plain) = states[-1]
    for losses, state in states[:-1]:
        assert losses == states[-1][0]
        assert all(torch.equal(state[name], plain[name]) for name in plain)


@pytest.mark.gloo
def test_batch_norm_counts_each_step_once():
    plan = Plan(replace(small_workloads()["resnet"], batch=4), mesh={"dp": 2}, strategies=[Recompute(), DDP()])
    state = pt.train(plan, steps=3).state_dict()
    assert {int(v) for name, v in state.items() if name.endswith("num_batches_tracked")} == {3}


@pytest.mark.law
def test_a_policy_is_one_of_three_in_a_file_and_in_python():
    text = Plan(Workload("gpt", GPT()), strategies=[Recompute(policy="selective", keep=("addmm",))]).to_toml()
    (back,) = load_text(text, strategies=GARDEN).strategies
    assert back == Recompute(policy="selective", keep=("addmm",))
    for bad in (lambda: load_text(text.replace('"selective"', '"some"'), strategies=GARDEN), lambda: Recompute(policy="some")):
        with pytest.raises(Refused, match="policy"):
            bad()


@pytest.mark.law
def test_ops_to_keep_belong_to_the_selective_policy():
    with pytest.raises(Refused, match="selective"):
        Recompute(keep=("mm",))


@pytest.mark.law
def test_a_model_without_a_list_of_blocks_is_refused_with_the_cure():
    plan = Plan(Workload("mlp", MLP(layers=3), batch=4), strategies=[Recompute(modules=("encoder.*",))])
    with pytest.raises(Refused) as caught:
        pt.estimate(plan)
    (fault,) = caught.value.faults
    assert fault.code == "P116"
    assert "modules" in fault.cure


@pytest.mark.gloo
def test_globs_choose_what_is_recomputed():
    for globs in (("blocks.1",), ("*.mlp",)):
        proof = prove_plan(plan_of("gpt", {"tp": 2}, modules=globs), shrink=False)
        assert proof.proved, proof.reasons


class Shared(nn.Module):
    """One block, called three times: twice in a row, and once more after something else."""

    def __init__(self, *, apart):
        super().__init__()
        self.blocks, self.apart = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))]), apart
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for _ in range(3):
            x = self.blocks[0](x)
            x = x.tanh() if self.apart else x
        return self.head(x)


@pytest.mark.gloo
@pytest.mark.parametrize("apart", [True, False], ids=["something between", "in a row"])
def test_each_call_of_a_shared_block_is_a_region(apart):
    def make():
        torch.manual_seed(0)
        return Shared(apart=apart)

    def batches(step):
        g = torch.Generator().manual_seed(step)
        return {"x": torch.randn(4, 8, generator=g), "y": torch.randn(4, 4, generator=g)}

    proof = pt.prove(
        Plan(mesh={"tp": 2}, strategies=[TensorParallel(), Recompute(modules=("blocks.0",))]),
        model=make,
        batches=batches,
        loss=lambda out, batch: (out - batch["y"]).square().mean(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    )
    assert proof.proved, proof.reasons
    assert proof.said >= 5


@pytest.mark.law
def test_calls_that_cannot_be_told_apart_are_refused():
    program = replace(unfold(program_of(Workload("gpt", GPT(layers=2), batch=2))), calls={"blocks.0": 5})
    (fault,) = Recompute().check(program, Mesh())
    assert fault.code == "P116"
    assert "5 times" in fault.have


@pytest.mark.gloo
@pytest.mark.parametrize("policy", ["block", "selective"])
def test_each_block_of_a_stage_is_a_region(policy):
    strategies = [Recompute(policy=policy), OneFOneB(microbatches=4)]
    proof = prove_plan(Plan(replace(small_workloads()["gpt"], batch=8), mesh={"pp": 2}, strategies=strategies), shrink=False)
    assert proof.proved, proof.reasons


@pytest.mark.case
@pytest.mark.parametrize(
    ("strategies", "words"),
    [
        ([Recompute(policy="full"), OneFOneB(microbatches=4)], "cut into stages"),
        ([Recompute(modules=("blocks",)), OneFOneB(microbatches=4)], "cut into stages"),
        ([Recompute(), ZeroBubble(microbatches=4)], "split the backward pass of modules that are computed again"),
    ],
    ids=["full", "a list of blocks", "halves"],
)
def test_estimate_refuses_what_training_cannot_do(strategies, words):
    plan = Plan(replace(small_workloads()["gpt"], batch=8), mesh={"pp": 2}, strategies=strategies)
    with pytest.raises(Refused, match=words):
        pt.estimate(plan)
    with pytest.raises(Refused, match=words):
        prove_plan(plan, shrink=False)
