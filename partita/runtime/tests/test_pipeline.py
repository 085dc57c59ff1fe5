"""Pipelines of modules that nobody wrote for them: skip connections, keywords, dataclasses, frozen and unused parameters."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig

import partita as pt
from partita.errors import Refused, RunFailed
from partita.runtime.pipeline import Pipe
from partita.strategies import DDP, ZBV, GPipe, Interleaved, OneFOneB, Recompute, TensorParallel, ZeroBubble
from partita.workload import GPT


@dataclass
class Out:
    logits: torch.Tensor
    extra: dict


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, *, scale, mask=None):
        return x + torch.relu_(self.a(x)) * scale + self.b(x) * (0 if mask is None else mask)


class Skips(nn.Module):
    """Every layer sees the embedding; some parameters are frozen, some unused; the output is a dataclass with a dict."""

    def __init__(self, width=8, depth=5):
        super().__init__()
        self.inp, self.out = nn.Linear(4, width), nn.Linear(width, 3)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.unused = nn.Linear(2, 2)
        self.register_buffer("gain", torch.ones(width))
        self.layers[1].a.weight.requires_grad_(False)
        self.inp.weight.requires_grad_(False)

    def forward(self, x):
        first = h = self.inp(x)
        mask = (x.sum(-1, keepdim=True) > 0).to(x.dtype)
        for layer in self.layers:
            h = layer(h + first, scale=0.5, mask=mask)
        return Out(self.out(h * self.gain), {"h": h})


class Conv(nn.Module):
    """No list of blocks; a stage may begin with a module that writes to its input."""

    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.fc = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))

    def forward(self, x):
        return self.fc(self.c2(F.relu(self.c1(x), inplace=True)))


class Frozen(nn.Module):
    """The first layers are frozen: no gradient crosses back to them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        for layer in self.layers[:2]:
            layer.requires_grad_(requires_grad=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def seeded(kind):
    def make():
        torch.manual_seed(0)
        return kind().double()

    return make


def data(*shape, samples=8):
    def batches(step):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(samples, *shape, generator=draw, dtype=torch.float64)
        return {"x": x, "y": torch.randint(3, (samples,), generator=draw)}

    return batches


def adamw(module):
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], 1e-2)


def skips_loss(out, batch):
    return F.cross_entropy(out.logits, batch["y"]) + 0.01 * out.extra["h"].pow(2).mean()


def plain_loss(out, batch):
    return F.cross_entropy(out, batch["y"])


def proof(kind, shape, mesh, strategies, loss=plain_loss, **more):
    plan = pt.Plan(cluster="cpu", mesh=mesh, strategies=strategies)
    return pt.prove(plan, model=seeded(kind), batches=data(*shape), loss=loss, optimizer=adamw, steps=3, **more)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("mesh", "strategies"),
    [
        ({"pp": 2}, [OneFOneB(microbatches=4)]),
        ({"pp": 4}, [GPipe(microbatches=4)]),
        ({"pp": 2}, [ZBV(microbatches=4)]),
        ({"dp": 2, "pp": 2}, [DDP(), ZeroBubble(microbatches=2)]),
    ],
)
def test_values_that_several_stages_read_are_passed_on(mesh, strategies):
    found = proof(Skips, (4,), mesh, strategies, skips_loss, clip=(0.5, 2.0))
    assert found.proved, found.reasons


@pytest.mark.gloo
@pytest.mark.parametrize("cut", ["auto", "memory", ("c2",), ("fc",)])  # "auto": any module with parameters may begin a stage
def test_a_module_without_a_list_of_blocks_is_cut_at_any_module(cut):
    found = proof(Conv, (1, 8, 8), {"pp": 2}, [OneFOneB(microbatches=2, cut=cut)])
    assert found.proved, found.reasons


@pytest.mark.gloo
@pytest.mark.parametrize("kind", [OneFOneB, ZeroBubble])
def test_no_gradient_goes_back_to_frozen_stages(kind):
    found = proof(Frozen, (4,), {"pp": 2}, [kind(microbatches=2, cut=("layers.2",))])
    assert found.proved, found.reasons
    plan = pt.Plan(cluster="cpu", mesh={"pp": 2}, strategies=[kind(microbatches=2, cut=("layers.2",))])
    run = pt.train(plan, model=seeded(Frozen), batches=data(4), loss=plain_loss, optimizer=adamw, steps=1)
    assert {(t.axis, t.op): t.count for t in run.figures.traffic}["pp", "send"] == 2  # two microbatches, forward only


@pytest.mark.gloo
def test_accumulation_runs_rounds_of_the_pipeline():
    plan = pt.Plan(cluster="cpu", mesh={"pp": 2}, strategies=[Interleaved(microbatches=2)], accumulate=2)
    found = pt.prove(plan, model=seeded(Skips), batches=data(4), loss=skips_loss, optimizer=adamw, steps=2)
    assert found.proved, found.reasons


@pytest.mark.gloo
def test_counted_targets_weigh_as_on_one_device_wherever_they_fall():
    def loss(out, batch):
        y = torch.where(torch.arange(len(batch["y"])) % 3 == 0, batch["y"], -100)
        return F.cross_entropy(out, y, ignore_index=-100)

    def batches(step):
        batch = data(4)(step)
        batch["y"][:4] = -100  # two microbatches have nothing to learn from
        return batch

    def skewed(out, batch):
        return F.cross_entropy(out, batch["y"], ignore_index=-100)

    plan = pt.Plan(cluster="cpu", mesh={"pp": 2}, strategies=[OneFOneB(microbatches=4)])
    found = pt.prove(plan, model=seeded(Frozen), batches=batches, loss=skewed, optimizer=adamw, steps=2)
    assert found.proved, found.reasons


@pytest.mark.gloo
def test_pipelines_of_shards_open_each_other_s_checkpoints(tmp_path):
    """Saved by stages of shards, opened whole, and the other way: the curve goes on as if nothing had been split."""

    def train(plan, steps, **more):
        return pt.train(plan, model=seeded(Skips), batches=data(4), loss=skips_loss, optimizer=adamw, steps=steps, **more)

    one = pt.Plan(cluster="cpu")
    two = pt.Plan(cluster="cpu", mesh={"pp": 2}, strategies=[OneFOneB(microbatches=2)])
    whole = train(one, 4)
    for k, (first, second) in enumerate(((one, two), (two, one))):
        train(first, 2, out=tmp_path / f"run{k}")
        rest = train(second, 4, resume=tmp_path / f"run{k}", out=tmp_path / f"rest{k}")
        assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-12)
        for name, tensor in whole.state_dict().items():
            torch.testing.assert_close(rest.state_dict()[name], tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.gloo
def test_a_users_own_loop_runs_a_pipeline():
    plan = pt.Plan(cluster="cpu", mesh={"pp": 2}, strategies=[OneFOneB(microbatches=2)])

    def story(session):
        model, optimizer = session.wrap(seeded(Skips)(), adamw)
        losses = []
        for batch in session.shard([data(4)(step) for step in range(3)]):
            losses.append(float(session.step(model, batch, skips_loss)))
            session.clip(model, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        return losses

    found = pt.spawn(plan, story)
    one = pt.spawn(pt.Plan(cluster="cpu"), story)
    assert found[0] == pytest.approx(one[0], rel=1e-12)
    assert found[1] == found[0]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("kind", "shape", "cut", "words"),
    [
        (Conv, (1, 8, 8), ("nope",), "no stage can begin with 'nope'"),
        (Conv, (1, 8, 8), ("c2", "fc"), "cut has 2 paths"),
        (Frozen, (4,), ("head", "layers.1"), "cut has 2 paths"),
    ],
)
def test_bad_cut_points_are_refused_before_anything_starts(kind, shape, cut, words):
    with pytest.raises(Refused, match=words) as refused:
        proof(kind, shape, {"pp": 2}, [OneFOneB(microbatches=2, cut=cut)])
    assert refused.value.faults[0].code == "P121"


@pytest.mark.gloo
def test_a_stage_without_parameters_is_refused():
    class Plain(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))

        def forward(self, x):
            return super().forward(x)

    with pytest.raises(Refused, match="has no parameters"):
        proof(Plain, (4,), {"pp": 3}, [OneFOneB(microbatches=4, cut=("1", "2"))])


@pytest.mark.gloo
def test_what_steers_by_data_is_not_cut():
    class Steered(Frozen):
        def forward(self, x):
            x = self.layers[2](x)
            return self.head(x if x.sum() > 0 else -x)

    with pytest.raises(Refused, match="depends on data"):
        proof(Steered, (4,), {"pp": 2}, [OneFOneB(microbatches=2)])


@pytest.mark.law
def test_a_backward_in_halves_is_not_of_what_is_computed_again():
    work = pt.Workload("gpt", GPT(layers=4, hidden=32, heads=4, vocab=256, sequence=16), batch=8)
    plan = pt.Plan(work, cluster="cpu", mesh={"pp": 2}, strategies=[Recompute(), ZeroBubble(microbatches=2)])
    with pytest.raises(Refused, match="cannot split the backward pass"):
        pt.estimate(plan)


@pytest.mark.gloo
def test_stages_of_a_tensor_axis_pass_on_what_each_rank_holds():
    found = proof(Skips, (4,), {"pp": 2, "tp": 2}, [TensorParallel(), OneFOneB(microbatches=2)], skips_loss)
    assert found.proved, found.reasons


@pytest.mark.gloo
@pytest.mark.parametrize("kind", [OneFOneB, ZBV])
def test_a_gradient_is_summed_before_it_crosses_to_the_stage_before(kind, tmp_path):
    """BERT normalises after each sum, so the gradient that crosses a cut is the first whole one behind a split region."""
    config = BertConfig(
        num_hidden_layers=4, hidden_size=16, intermediate_size=32, num_attention_heads=2, vocab_size=64,
        max_position_embeddings=16, architectures=["BertForMaskedLM"],
    )  # fmt: skip
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    work = pt.Workload(f"hf:{tmp_path}/config.json", batch=4, extra={"sequence": 8})
    mesh = {"pp": 2, "tp": 2}
    plan = pt.Plan(work, cluster="cpu", mesh=mesh, strategies=[TensorParallel(), kind(microbatches=2)])
    found = pt.prove(plan)
    assert found.proved, found.reasons


@pytest.mark.gloo
def test_a_value_that_did_not_arrive_ends_the_run_and_is_no_zero(monkeypatch):
    arrived = Pipe._arrived
    monkeypatch.setattr(Pipe, "_arrived", lambda self, stage, m, way: {} if way == "F" else arrived(self, stage, m, way))
    plan = pt.Plan(cluster="cpu", mesh={"pp": 2}, strategies=[OneFOneB(microbatches=2)])
    with pytest.raises(RunFailed, match="did not receive what"):
        pt.train(plan, model=seeded(Skips), batches=data(4), loss=skips_loss, optimizer=adamw, steps=1)
