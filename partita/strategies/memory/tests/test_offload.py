"""Offload as said, and on real ranks."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import partita as pt
from partita.cluster import cluster_of
from partita.cost.memory import occupancy
from partita.errors import Refused
from partita.mesh import Mesh
from partita.plans import Plan
from partita.program import Compute, Kind, Phase
from partita.program.fold import unfold
from partita.program.text import from_json, to_json
from partita.proof.laws import broken
from partita.proof.matrix import small_workloads
from partita.proof.prove import prove_plan
from partita.proof.shrink import SAMPLES
from partita.runtime.offload import Offloaded
from partita.runtime.programs import program_of
from partita.simulate import estimate
from partita.strategies import DDP, Offload, Recompute, TensorParallel
from partita.strategy import compose
from partita.workload import GPT, Workload

SMALL = GPT(layers=5, hidden=32, heads=4, vocab=64, sequence=8)


def program(**changes):
    return program_of(Workload("gpt", SMALL, batch=8, **changes))


def plan_of(name, mesh, accumulate=1, strategies=()):
    split = [TensorParallel()] * ("tp" in mesh), [DDP()] * ("dp" in mesh)
    workload = replace(small_workloads()[name], batch=mesh.get("dp", 1) * accumulate * SAMPLES, accumulate=accumulate)
    return Plan(workload, mesh=Mesh.of(mesh), strategies=[*split[0], *strategies, Offload(), *split[1]])


@pytest.mark.law
def test_it_keeps_every_law_that_needs_no_ranks():
    assert broken(Offload) == []


@pytest.mark.law
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_state_leaves_the_device_where_the_host_is_another(backend):
    plain, said = occupancy(program(), backend), occupancy(Offload().rewrite(program(), Mesh()), backend)
    assert plain.parts["optimizer"] > 0
    if backend == "gloo":
        assert said == plain
    else:
        assert said.parts["optimizer"] == 0
        assert said.peak == plain.peak - plain.parts["optimizer"]


@pytest.mark.law
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_go_and_parameters_come_once_a_step(dtype):
    flat = unfold(program(dtype=dtype, accumulate=2, master=None if dtype == "float32" else "float32"))
    said = Offload().rewrite(flat, Mesh())
    moved = {op: [said.tensors[e.ins[0]].nbytes for e in said.events() if e.op == op] for op in ("to_host", "to_device")}
    weights, gradients = (
        sum(t.nbytes for t in ts) for ts in (flat.parameters(), [flat.tensors[g] for g in flat.gradients.values()])
    )
    assert sum(moved["to_device"]) == weights
    assert sum(moved["to_host"]) == gradients + (weights if dtype == "float32" else 0)  # masters need no parameter
    assert all(said.times(e) == 1 for e in said.events() if e.op in moved)


@pytest.mark.law
def test_all_the_optimizer_does_is_the_hosts():
    said = Offload().rewrite(unfold(program()), Mesh())
    for e in said.events():
        if e.phase == Phase.OPTIMIZER and e.op not in ("to_host", "to_device"):
            assert all(said.tensors[i].host for i in (*e.ins, *e.outs)), e
        elif e.phase != Phase.OPTIMIZER and isinstance(e, Compute):
            assert not any(said.tensors[i].host for i in (*e.ins, *e.outs)), e
    assert all(t.host for t in said.tensors if t.kind == Kind.OPTIMIZER)
    assert from_json(to_json(said)) == said


@pytest.mark.law
def test_globs_choose_whose_state_goes():
    said = Offload(modules=("blocks.*",)).rewrite(unfold(program()), Mesh())
    state = {t.name: t.host for t in said.tensors if t.kind == Kind.OPTIMIZER}
    assert all(host == name.startswith("blocks.") for name, host in state.items())
    with pytest.raises(Refused) as caught:
        pt.estimate(Plan(Workload("gpt", SMALL, batch=8), strategies=[Offload(modules=("nothing",))]))
    assert caught.value.faults[0].code == "P116"


@pytest.mark.law
def test_copies_take_the_link_and_the_step_the_hosts_memory():
    cluster = cluster_of("1x8-h100")
    plain, said = (estimate(p, cluster, Mesh(), Workload("gpt")) for p in (program(), Offload().rewrite(program(), Mesh())))
    size = sum(t.nbytes for t in unfold(program()).parameters())
    link, share = (cluster.value(f"device.host.{k}") for k in ("link", "efficiency"))
    assert said.step_seconds > plain.step_seconds + 3 * size / (link * share)
    terms = {w.constant.partition(" ")[0] for w in said.why}
    assert {"device.host.link", "device.host.bandwidth"} <= terms


@pytest.mark.law
@pytest.mark.parametrize("mesh", [{}, {"dp": 2}, {"dp": 2, "tp": 2}])
def test_nothing_more_is_sent(mesh):
    outer = [TensorParallel()] * ("tp" in mesh), [DDP()] * ("dp" in mesh)
    with_it, without = (
        compose(program(), [*outer[0], *inner, *outer[1]], Mesh.of(mesh)).collectives() for inner in ([Offload()], [])
    )
    assert with_it == without or [(c.op, c.nbytes) for c in with_it] == [(c.op, c.nbytes) for c in without]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "mesh", "accumulate", "inner"),
    [
        ("gpt", {}, 1, ()),
        ("gpt", {"dp": 2}, 3, ()),
        ("llama", {"tp": 2}, 1, (Recompute(),)),
        ("resnet", {"dp": 2}, 1, ()),
        ("mlp", {"tp": 2, "dp": 2}, 3, (Recompute(policy="selective"),)),
        ("gpt", {"dp": 2, "tp": 2}, 1, (Recompute(),)),
    ],
)
def test_the_square_commutes(name, mesh, accumulate, inner):
    proof = prove_plan(plan_of(name, mesh, accumulate, inner), shrink=False)
    assert proof.proved, proof.reasons


def test_the_optimizer_a_user_holds_steps_on_the_host(monkeypatch):
    moved = []

    def away(self, p):
        moved.append(p)
        return True

    monkeypatch.setattr(Offloaded, "_away", away)

    def trained(plan):
        torch.manual_seed(0)
        with pt.session(plan) as session:
            model, optimizer = session.wrap(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), adam)
            for step in range(3):
                x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
                session.step(model, {"input": x}, lambda out, batch: out.square().mean())
                optimizer.step()
                optimizer.zero_grad()
            return session.state_dict()

    plain, ours = trained(Plan()), trained(Plan(strategies=[Offload()]))
    assert len(moved) == 3 * 4
    assert all(torch.equal(plain[name], ours[name]) for name in plain)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.gloo
def test_a_run_resumes_with_its_state(tmp_path):
    spec = GPT(layers=2, hidden=32, heads=4, vocab=256, sequence=8)
    plan = Plan(Workload("gpt", spec, batch=4), mesh={"dp": 2}, strategies=[Offload(), DDP()])
    whole = pt.train(plan, steps=4).state_dict()
    pt.train(plan, steps=2, out=tmp_path / "run")
    state = pt.train(plan, steps=4, resume=tmp_path / "run").state_dict()
    assert all(torch.equal(whole[name], state[name]) for name in whole)
