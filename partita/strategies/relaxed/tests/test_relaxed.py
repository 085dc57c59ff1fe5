"""Relaxed strategies as plans: what is said, what is refused, and going on from a checkpoint."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt
from partita.errors import Refused
from partita.mesh import Mesh
from partita.plans import load_text
from partita.program.relaxing import lanes_of
from partita.program.rounds import rounds_of
from partita.runtime.checkpoint import read_whole
from partita.runtime.programs import program_of
from partita.strategies import (
    DDP,
    FSDP,
    GARDEN,
    DelayedAveraging,
    GPipe,
    LocalSGD,
    ParameterServer,
    PowerSGD,
    Quantized,
    SlimDP,
    TensorParallel,
    TopK,
)
from partita.strategy import check, compose
from partita.workload import GPT, Workload

FOUR = Mesh.of({"dp": 4})
SMALL = Workload("gpt", GPT(layers=5, hidden=32, heads=4, vocab=64, sequence=8), batch=32)


def task(dtype=torch.float64):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3)).to(dtype)

    def batches(step):
        g = torch.Generator().manual_seed(step)
        return {"input": torch.randn(12, 6, generator=g, dtype=dtype), "y": torch.randint(3, (12,), generator=g)}

    return {
        "model": make,
        "batches": batches,
        "loss": lambda o, b: F.cross_entropy(o, b["y"]),
        "optimizer": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    }


def train(strategy, steps, ranks=2, **more):
    return pt.train(pt.Plan(mesh={"dp": ranks}, strategies=[strategy]), **task(), steps=steps, **more)


# ---------------------------------------------------------------- what is said
@pytest.mark.law
@pytest.mark.parametrize("at", ["worker", "server"])
def test_a_regular_and_a_full_round_are_said_with_their_bytes(at):
    program = program_of(SMALL)
    (lane,) = lanes_of(program)
    width = lane.width(4)
    n, core, chosen = 4 * width, 4 * round(0.15 * width), 4 * round(0.3 * width)
    said = compose(program, [SlimDP(optimizer_at=at)], FOUR)
    full, regular = rounds_of([said])
    assert (full.count, regular.count, said.period) == (1, 19, 20)
    loss = [16]
    calls = [[c.nbytes for c in r.roles[0].collectives()] for r in (full, regular)]
    order = [[4 * n], [4 * n, 4 * -(-width // 8)]], [[4 * chosen, 4 * (chosen - core)], [4 * chosen]]
    assert calls == [loss + push + pull for push, pull in order]


@pytest.mark.law
@pytest.mark.parametrize("every", [1, 4])
def test_the_mean_traffic_of_a_period_is_that_of_the_formula(every):
    program = program_of(SMALL)
    (lane,) = lanes_of(program)
    figures = pt.estimate(pt.Plan(SMALL, "8x8-h100", 4, FOUR, [ParameterServer(every=every)]), program).figures
    sent = {(t.axis, t.op): t.bytes for t in figures.traffic}
    assert sent == {
        ("dp", "all_reduce"): 16,
        ("dp", "all_to_all"): 16 * lane.width(4) / every,
        ("dp", "all_gather"): 16 * lane.width(4) / every,
    }


# ---------------------------------------------------------------- what is refused
BAD = {
    "alpha below beta": ("slim_dp", "alpha = 0.1\nbeta = 0.2", "P112", "beta = 0.2"),
    "nothing exchanged": ("slim_dp", "alpha = 0.0\nbeta = 0.0", "P112", "alpha = 0.0"),
    "more than all": ("slim_dp", "alpha = 1.5", "P112", "alpha = 1.5"),
    "no full round": ("slim_dp", "q = 0", "P112", "q = 0"),
    "a negative weight": ("slim_dp", "c = -1.0", "P112", "c = -1.0"),
    "an unknown weight": ("slim_dp", 'c = "some"', "P107", "auto, gradient"),
    "an unknown place": ("slim_dp", 'optimizer_at = "home"', "P107", "worker, server"),
    "an unknown merge": ("slim_dp", 'merge = "max"', "P107", "mean, sum"),
    "later than the next": ("delayed_averaging", "every = 2\ndelay = 3", "P112", "delay = 3"),
    "nothing but its own": ("delayed_averaging", "keep = 1.0", "P112", "keep = 1.0"),
    "workers that never meet": ("local_sgd", "period = 0", "P112", "period = 0"),
    "momentum that grows": ("local_sgd", "outer_momentum = 1.0", "P112", "outer_momentum = 1.0"),
    "nothing large": ("top_k", "ratio = 0.0", "P112", "ratio = 0.0"),
    "more than there is": ("top_k", "ratio = 2.0", "P112", "ratio = 2.0"),
    "three bits": ("quantized", "bits = 3", "P112", "bits = 8, 4 or 2"),
    "an empty bucket": ("quantized", "bucket = 0", "P112", "bucket = 0"),
    "no column": ("power_sgd", "rank = 0", "P112", "rank = 0"),
    "never exchanged": ("parameter_server", "every = 0", "P112", "every = 0"),
    "an unknown form": ("parameter_server", 'form = "ring"', "P107", "server, collective"),
    "some modules": ("parameter_server", 'modules = ["a.*"]', "P112", "modules"),
}


@pytest.mark.law
@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_refused(name):
    kind, settings, code, part = BAD[name]
    text = f'partita = 1\n[workload]\nmodel = "gpt"\n[mesh]\ndp = 2\n[[strategy]]\nname = "{kind}"\n{settings}\n'
    with pytest.raises(Refused) as caught:
        load_text(text, strategies=GARDEN)
    assert [f.code for f in caught.value.faults] == [code]
    assert part in str(caught.value)


@pytest.mark.law
@pytest.mark.parametrize("kind", [ParameterServer, SlimDP])
def test_where_it_cannot_stand_is_refused(kind):
    program, mesh = program_of(SMALL), Mesh.of({"outer": 2, "dp": 2})
    outside = check(program, [kind(), DDP(axis="outer")], mesh)
    assert [f.code for f in outside] == ["P116"]
    assert "relaxed" in outside[0].what
    assert check(program, [DDP(axis="outer"), kind()], mesh) == []
    rows = check(program, [FSDP(axis="outer"), kind()], mesh)
    assert "rows" in rows[0].what
    deep = GPipe(microbatches=2).cast(program, Mesh.of({"pp": 2, "dp": 2}))[0]
    assert "stages" in kind().check(deep, Mesh.of({"pp": 2, "dp": 2}))[0].what
    half = program_of(Workload("gpt", SMALL.spec, batch=32, dtype="bfloat16"))
    assert "bfloat16" in check(half, [kind()], FOUR)[0].have


@pytest.mark.gloo
@pytest.mark.law
def test_an_optimizer_that_looks_across_a_parameter_stays_at_the_worker():
    class Across(torch.optim.SGD):
        pass

    own = {**task(), "optimizer": lambda m: Across(m.parameters(), lr=0.1)}
    with pytest.raises(Refused) as caught:
        pt.train(pt.Plan(mesh={"dp": 2}, strategies=[ParameterServer(optimizer_at="server")]), **own, steps=1)
    assert [f.code for f in caught.value.faults] == ["P116"]
    assert "Across" in caught.value.faults[0].what
    assert len(pt.train(pt.Plan(mesh={"dp": 2}, strategies=[ParameterServer()]), **own, steps=1).losses) == 1


def test_the_planner_offers_no_other_algorithm_unasked():
    found = pt.plan(SMALL, on="8x8-h100", ranks=4)
    named = [c.family for c in found.plans] + [r.family for r in found.rejected]
    assert not any("slim" in name or "server" in name for name in named)


# ---------------------------------------------------------------- going on
PLANS = {
    "worker": ParameterServer(every=2),
    "server": ParameterServer(every=2, optimizer_at="server"),
    "collective": ParameterServer(form="collective"),
    "local": LocalSGD(period=3, outer_rate=0.7, outer_momentum=0.9),
    "late": DelayedAveraging(every=3, delay=3, keep=0.1),
    "largest": TopK(ratio=0.2, momentum=0.5),
    "rounded": Quantized(bits=4, bucket=16, both=True),
    "thin": PowerSGD(rank=1),
    "slim at worker": SlimDP(alpha=0.4, beta=0.2, q=3),
    "slim at server": SlimDP(alpha=0.4, beta=0.2, q=3, optimizer_at="server", explorer="seed"),
    "slim everywhere": SlimDP(alpha=0.4, beta=0.2, q=3, form="collective"),
}


@pytest.mark.gloo
@pytest.mark.law
@pytest.mark.parametrize("name", PLANS)
def test_going_on_is_as_if_it_had_never_stopped(name, tmp_path):
    whole = train(PLANS[name], 8)
    train(PLANS[name], 5, out=tmp_path)
    rest = pt.train(pt.Plan(mesh={"dp": 2}, strategies=[PLANS[name]]), **task(), steps=8, resume=tmp_path)
    assert rest.losses == whole.losses[5:]
    for key, value in whole.state_dict().items():
        assert torch.equal(rest.state_dict()[key], value), key


@pytest.mark.gloo
@pytest.mark.law
def test_servers_state_opens_under_other_ranks_and_other_strategies(tmp_path):
    """With the optimizer at the server its state is that of one device."""
    own = ParameterServer(optimizer_at="server")
    train(own, 3, out=tmp_path / "a")
    whole = train(DDP(), 6)
    for k, (strategy, ranks) in enumerate(((DDP(), 2), (own, 4), (SlimDP(alpha=1.0, beta=1.0, optimizer_at="server"), 3))):
        folder = shutil.copytree(tmp_path / "a", tmp_path / str(k))
        rest = pt.train(pt.Plan(mesh={"dp": ranks}, strategies=[strategy]), **task(), steps=6, resume=folder)
        for key, value in whole.state_dict().items():
            assert torch.allclose(rest.state_dict()[key], value, rtol=0, atol=1e-12), (strategy, key)
    train(DDP(), 3, out=tmp_path / "b")
    back = pt.train(pt.Plan(mesh={"dp": 2}, strategies=[own]), **task(), steps=6, resume=tmp_path / "b")
    for key, value in whole.state_dict().items():
        assert torch.allclose(back.state_dict()[key], value, rtol=0, atol=1e-12), key


@pytest.mark.gloo
@pytest.mark.law
def test_slim_starts_anew_on_other_ranks(tmp_path):
    train(PLANS["slim at worker"], 4, out=tmp_path)
    rest = pt.train(pt.Plan(mesh={"dp": 3}, strategies=[PLANS["slim at worker"]]), **task(), steps=9, resume=tmp_path)
    assert len(rest.losses) == 5
    assert rest.error["traffic"] == 0


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.law
@pytest.mark.parametrize("at", ["worker", "server"])
def test_slim_with_everything_is_the_plain_server_on_real_ranks(at):
    plain, thin = ParameterServer(optimizer_at=at), SlimDP(alpha=1.0, beta=1.0, q=3, optimizer_at=at)
    one, two = (train(s, 5, ranks=3).state_dict() for s in (plain, thin))
    assert all(torch.equal(one[k], two[k]) for k in one)


@pytest.mark.gloo
@pytest.mark.law
@pytest.mark.parametrize("strategy", [ParameterServer(), SlimDP(alpha=0.3, beta=0.15, q=4)], ids=["plump", "slim"])
def test_the_wire_carries_what_is_said(strategy):
    """Sockets within 1 % of what the ledger says the backend sends, over whole periods of megabytes."""

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(512, 2048), nn.Linear(2048, 512))

    def batches(step):
        return {"input": torch.randn(4, 512, generator=torch.Generator().manual_seed(step))}

    plan = pt.Plan(mesh={"dp": 2}, strategies=[strategy])
    run = pt.train(plan, model=make, batches=batches, loss=lambda o, b: o.square().mean(), steps=8)
    assert run.error["traffic"] == 0
    sent = sum(t.backend_bytes for t in run.predicted.figures.traffic)
    assert run.outcome.wire_bytes_per_rank == pytest.approx(sent, rel=0.01)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.law
@pytest.mark.parametrize("strategy", [SlimDP(q=5), SlimDP(q=5, optimizer_at="server"), TopK(ratio=0.05)])
def test_copies_over_a_tensor_axis_stay_copies(strategy, tmp_path):
    """What is chosen and drawn of parameters that all tensor ranks hold is the same on them, bit by bit."""
    small = Workload("gpt", GPT(layers=2, hidden=32, heads=4, vocab=256, sequence=16), batch=8)
    mesh = Mesh.of({"dp": 2, "tp": 2})
    run = pt.train(pt.Plan(small, "here", 4, mesh, [TensorParallel(), strategy]), steps=8, out=tmp_path)
    assert run.error["traffic"] == 0
    kept, _ = read_whole(tmp_path)
    mine = [name for name in kept if name.startswith("exchange/0/") and name.endswith("/0")]
    assert mine
    for name in mine:
        for first, second in mesh.groups("tp"):
            one, two = (kept[name.replace("exchange/0/", f"exchange/{rank}/", 1)] for rank in (first, second))
            assert torch.equal(one, two), name
