"""Small tasks of many kinds under many layouts: always the numbers of one device, or a refusal before the first step."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Task, alike, plan_of, refused, run, same, split
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import partita as pt
from partita.errors import Refused

pytestmark = pytest.mark.gloo
Linear = nn.Linear


def seeded(kind, *args, dtype=torch.float64, **settings):
    """A factory of the same module every time."""

    def make():
        torch.manual_seed(11)
        return kind(*args, **settings).to(dtype)

    return make


def module(forward, dtype=torch.float64, **parts):
    """A factory of a module with these parts, and what forward(self, ...) makes of them."""

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part())

    Small.forward = forward
    return seeded(Small, dtype=dtype)


def waves(*shape, name="x", dtype=torch.float64):
    """Batches that differ from step to step."""
    count = torch.Size(shape).numel()
    return lambda step: {name: torch.sin(torch.arange(count).reshape(shape) * (0.37 + step)).to(dtype)}


def square(out, batch):
    return out.square().mean()


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


class Words(nn.Module):
    """Embedding, one residual MLP, a head that shares the embedding's weight or not."""

    def __init__(self, vocab=12, width=8, tied=True):
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab, width), nn.LayerNorm(width)
        self.up, self.down, self.head = Linear(width, 4 * width), Linear(4 * width, width), Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


def words(samples=4, length=6, vocab=12, counts=None):
    """Token batches; `counts` targets of each sample count, the rest is ignored."""

    def data(step):
        ids = (torch.arange(samples * length).reshape(samples, length) * 7 + 3 * step) % vocab
        y = ids.roll(-1, 1).clone()
        for row, n in enumerate(counts or ()):
            y[row, n:] = -100
        return {"ids": ids, "y": y}

    return data


def entropy(out, batch, **settings):
    return F.cross_entropy(out.flatten(0, 1), batch["y"].flatten(), **settings)


def masked(out, batch):
    mask = (batch["y"] != -100).flatten().double()
    return (entropy(out, batch, reduction="none") * mask).sum() / mask.sum()


class Heads(nn.Module):
    """Causal attention with grouped query heads; `fixed` writes sizes down."""

    def __init__(self, heads=6, groups=2, width=24, fixed=False):
        super().__init__()
        self.size, self.groups, self.fixed = width // heads, groups, fixed
        self.q, self.kv, self.out = Linear(width, width), Linear(width, 2 * groups * self.size), Linear(width, width)

    def forward(self, x):
        b, t, _ = (4, 5, 24) if self.fixed else x.shape
        q = self.q(x).view(b, t, -1, self.size).transpose(1, 2)
        k, v = self.kv(x).view(b, t, 2 * self.groups, self.size).transpose(1, 2).chunk(2, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class Norms(nn.Module):
    """A convolution with batch norm, and two buffers: one that counts samples, one outside the state dict."""

    def __init__(self, **settings):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, **settings), Linear(4, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.rand(4), persistent=False)

    def forward(self, x):
        self.seen += x.shape[0]
        return self.out((self.norm(self.conv(x)) * self.table[:, None, None]).relu().mean((2, 3)))


def pictures(step):
    return {**waves(8, 1, 7, 7)(step), "y": torch.arange(8) % 2}


def label(out, batch):
    return F.cross_entropy(out, batch["y"])


class Adapter(nn.Module):
    """A frozen layer with a low-rank addition, twice."""

    def __init__(self, width=6):
        super().__init__()
        self.frozen = nn.ModuleList(Linear(width, width).requires_grad_(False) for _ in range(2))
        self.down, self.up = Linear(width, 2, bias=False), Linear(2, width, bias=False)

    def forward(self, x):
        for layer in self.frozen:
            x = torch.tanh(layer(x) + self.up(self.down(x)))
        return x


def routed(self, x):
    """Every sample takes one of two ways."""
    y = self.first(x)
    return torch.stack([(self.plus if float(r.sum()) > 0 else self.minus)(q) for r, q in zip(x, y, strict=True)])


def one_sided(step):
    """The first half of the samples goes one way, the second the other; in step 1 all go the same way."""
    x = torch.linspace(0.1, 1, 48, dtype=torch.float64).reshape(8, 6)
    return {"x": x if step == 1 else torch.cat([x[:4], -x[4:]])}


@dataclasses.dataclass
class Answer:
    value: torch.Tensor
    more: Any = None


PERCEPTRON = module(
    lambda s, x: s.out(s.norm(s.b(F.gelu(s.a(x))))), a=lambda: Linear(6, 16), b=lambda: Linear(16, 6),
    norm=lambda: nn.LayerNorm(6), out=lambda: Linear(6, 3),
)  # fmt: skip
X = waves(8, 6)


def answered(self, *, x, scale=None):
    h = self.a(x).relu()
    return Answer(self.b(h), {"v": (self.c(h), [h.detach()], None)})


def clipped(p):
    return Task(PERCEPTRON, waves(8, 6), lambda o, b: (5 * o).square().sum(), sgd, more={"clip": (0.5, p)})


SAME = {
    "tied weights": (Task(seeded(Words), words(), entropy), ["dp=2", "tp=2", "dp=2 tp=2", "tp=2 accumulate=2"]),
    "a vocabulary that does not divide": (Task(seeded(Words, 11), words(vocab=11), entropy), ["tp=2"]),
    "ignored targets": (Task(seeded(Words), words(counts=(6, 1, 3, 2)), entropy), ["dp=4", "accumulate=4", "dp=2 tp=2"]),
    "no target on one rank": (Task(seeded(Words), words(counts=(5, 3, 0, 0)), entropy), ["dp=2", "tp=2 accumulate=2"]),
    "label smoothing": (
        Task(seeded(Words), words(counts=(6, 1, 3, 2)), lambda o, b: entropy(o, b, label_smoothing=0.1)),
        ["dp=2"],
    ),
    "class weights": (
        Task(seeded(Words), words(counts=(6, 1, 3, 2)), lambda o, b: entropy(o, b, weight=torch.linspace(0.2, 2, 12).double())),
        ["dp=2 accumulate=2"],
    ),
    "a mean over a mask": (Task(seeded(Words), words(counts=(6, 1, 3, 2)), masked), ["dp=2", "accumulate=2"]),
    "a mean of means": (
        Task(seeded(Words), words(), lambda o, b: entropy(o, b, reduction="none").view(b["y"].shape).mean(1).mean()),
        ["dp=2"],
    ),
    "a pair": (
        Task(seeded(Words), words(counts=(6, 1, 3, 2)), lambda o, b: (entropy(o, b, reduction="sum"), (b["y"] >= 0).sum())),
        ["dp=2", "accumulate=2", "one"],
    ),
    "a penalty on the weights": (
        Task(
            module(lambda s, x: (s.a(x), s.a.weight.square().sum()), a=lambda: Linear(6, 6)),
            X,
            lambda o, b: 1e-2 * o[1] + o[0].square().mean(),
        ),
        ["dp=2", "accumulate=2"],
    ),
    "grouped heads": (Task(seeded(Heads), waves(4, 5, 24), square), ["tp=2", "dp=2 tp=2", "accumulate=2"]),
    "one key head": (Task(seeded(Heads, groups=1), waves(4, 5, 24), square), ["tp=3"]),
    "sizes written down": (Task(seeded(Heads, fixed=True), waves(4, 5, 24), square), ["tp=2"]),
    "batch norm": (Task(seeded(Norms), pictures, label, sgd, more={"forward": ("x",)}), ["dp=2", "dp=4"]),
    "batch norm without running statistics": (Task(seeded(Norms, track_running_stats=False), pictures, label, sgd), ["dp=2"]),
    "adapters on frozen layers": (Task(seeded(Adapter), X, square), ["dp=2", "tp=2", "accumulate=2"]),
    "samples that go different ways": (
        Task(
            module(routed, first=lambda: Linear(6, 6), plus=lambda: Linear(6, 6), minus=lambda: Linear(6, 6)),
            one_sided,
            square,
            lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.1),
        ),
        ["dp=2", "dp=4", "dp=2 accumulate=2"],
    ),
    "any output, None in the batch": (
        Task(
            module(answered, a=lambda: Linear(6, 8), b=lambda: Linear(8, 3), c=lambda: Linear(8, 1)),
            lambda step: {**X(step), "scale": None, "name": "text", "factor": torch.tensor(2.0)},
            lambda o, b: o.value.square().mean() * b["factor"] + o.more["v"][0].mean(),
        ),
        ["dp=2", "dp=4", "accumulate=2"],
    ),
    "clipping, p = 2": (clipped(2.0), ["dp=2 tp=2", "tp=2 accumulate=2"]),
    "clipping, p = inf": (clipped(float("inf")), ["dp=2 tp=2"]),
    "clipping, p = 1": (clipped(1.0), ["tp=2"]),
    "float32": (
        Task(lambda: PERCEPTRON().float(), waves(8, 6, dtype=torch.float32), square, sgd),
        ["dp=2", "tp=2", "accumulate=4"],
    ),
    "small bfloat16 gradients, many": (
        Task(
            lambda: module(lambda s, x: (x * s.w).sum(-1), w=lambda: nn.Parameter(torch.zeros(4)))().bfloat16(),
            lambda step: {"x": torch.cat([torch.full((1, 4), 256.0), torch.full((511, 4), 0.5)]).bfloat16()},
            lambda o, b: o.float().mean(),
            lambda m: torch.optim.SGD(m.parameters(), lr=1.0),
        ),
        ["accumulate=512", "dp=4 accumulate=128", "dp=2"],
    ),
    "weight norm": (
        Task(
            module(
                lambda s, x: s.b(s.a(x).tanh()), a=lambda: parametrizations.weight_norm(Linear(6, 8)), b=lambda: Linear(8, 3)
            ),
            X,
            square,
        ),
        ["dp=2", "tp=2"],
    ),
    "a module, no factory": (Task(PERCEPTRON(), X, square), ["dp=2", "tp=2"]),
    "a module in evaluation mode": (Task(lambda: PERCEPTRON().eval(), X, square), ["dp=2"]),
    "batches in a list": (Task(PERCEPTRON, [X(k) for k in range(3)], square), ["dp=2", "one"]),
    "integers, not contiguous": (
        Task(PERCEPTRON, lambda step: {"x": (torch.arange(48).reshape(6, 8) % 7).T.double() + step}, square),
        ["dp=2", "tp=2"],
    ),
    "sequences that grow": (Task(seeded(Words), lambda step: words(length=4 + 2 * step)(step), entropy), ["dp=2", "tp=2"]),
    "one sample a rank": (Task(seeded(Words), words(), entropy), ["dp=4", "accumulate=4"]),
    "recurrent": (
        Task(module(lambda s, x: s.cell(x)[0], cell=lambda: nn.LSTM(6, 5, 2, batch_first=True)), waves(8, 4, 6), square),
        ["dp=2"],
    ),
    "samples on dim 1 inside": (
        Task(
            module(lambda s, x: s.m(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1), m=lambda: nn.MultiheadAttention(24, 4)),
            waves(4, 5, 24),
            square,
        ),
        ["dp=2", "tp=2"],
    ),
    "momentum and groups": (
        Task(
            PERCEPTRON,
            X,
            square,
            lambda m: torch.optim.SGD([{"params": m.a.parameters()}, {"params": m.b.parameters(), "lr": 0.5}], 0.1, 0.9),
        ),
        ["dp=2", "tp=2"],
    ),
    "a schedule in a hook": (
        Task(PERCEPTRON, X, square, lambda m: _scheduled(torch.optim.SGD(m.parameters(), lr=0.1))),
        ["dp=2", "tp=2"],
    ),
}


def _scheduled(optimizer):
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


@pytest.mark.parametrize(("kind", "layout"), [(kind, layout) for kind, (_, layouts) in SAME.items() for layout in layouts])
def test_a_layout_gives_the_numbers_of_one_device(kind, layout):
    same(SAME[kind][0], layout)


SHARDED = {  # kinds that rows, gathered blocks or scattered gradients could get wrong
    "tied weights": ["zero1=2", "fsdp=2 tp=2"],
    "ignored targets": ["zero2=4", "fsdp=4"],
    "no target on one rank": ["zero2=2 accumulate=2", "fsdp=2", "fsdp=2 accumulate=2", "fsdp=2 tp=2"],
    "a penalty on the weights": ["fsdp=2", "zero1=2"],
    "grouped heads": ["zero2=2 tp=2", "fsdp=2 tp=2"],
    "batch norm": ["zero1=2", "fsdp=4"],
    "adapters on frozen layers": ["zero2=2 accumulate=2", "fsdp=2 accumulate=2"],
    "samples that go different ways": ["zero1=4", "zero2=2 accumulate=2"],
    "any output, None in the batch": ["fsdp=2"],
    "clipping, p = 2": ["zero1=2 tp=2", "fsdp=2 tp=2"],
    "clipping, p = inf": ["zero2=4", "fsdp=4"],
    "small bfloat16 gradients, many": ["zero1=2 accumulate=256", "zero2=4 accumulate=128", "fsdp=2 accumulate=256"],
    "weight norm": ["zero1=2", "fsdp=2"],
    "a module in evaluation mode": ["fsdp=2"],
    "sequences that grow": ["fsdp=2"],
    "recurrent": ["zero2=2", "fsdp=2"],
    "momentum and groups": ["zero1=4", "fsdp=2"],
    "a schedule in a hook": ["zero2=2", "fsdp=2"],
}


@pytest.mark.parametrize(("kind", "layout"), [(kind, layout) for kind, layouts in SHARDED.items() for layout in layouts])
def test_a_sharded_layout_gives_the_numbers_of_one_device(kind, layout):
    same(SAME[kind][0], layout)


def own(forward):
    """A task on one linear layer `a`."""
    return Task(module(forward, a=lambda: Linear(6, 6)), X, square)


TWO = {"a": lambda: Linear(6, 12), "b": lambda: Linear(12, 6)}
MEAN = Task(seeded(Linear, 6, 6), waves(8, 6, name="input"), square)
HEADS, NORMS = Task(seeded(Heads), waves(4, 5, 24), square), Task(seeded(Norms), pictures, label)
UNEVEN = Task(seeded(Words), words(counts=(6, 1, 3, 2)), entropy)
REFUSED = {  # task, layout, and what the message says
    "a batch that does not divide": (MEAN, "accumulate=5", ("P104", "batch = 8", "accumulate = 5", "batch = 5 or 10")),
    "more ranks than samples": (MEAN.but(data=waves(2, 6, name="input")), "dp=4", ("P104", "batch = 2, dp = 4")),
    "heads over 3": (HEADS, "tp=3", ("P104", "heads = 6, kv_heads = 2", "tp = 1 or 2")),
    "heads over 4": (HEADS, "tp=4", ("P104", "heads = 6, kv_heads = 2", "tp = 1 or 2")),
    "a root": (MEAN.but(loss=lambda o, b: o.square().mean().sqrt()), "dp=2", ("P114", "(sum, weight)")),
    "a ratio": (MEAN.but(loss=lambda o, b: o.square().sum() / (1 + o.abs().sum())), "accumulate=2", ("P114", "(sum, weight)")),
    "two counts": (UNEVEN.but(loss=lambda o, b: entropy(o, b) + o.square().mean()), "dp=2", ("P114", "(sum, weight)")),
    "no number": (MEAN.but(loss=lambda o, b: o.square().mean(1)), "one", ("P114", "shape (8,)")),
    "samples compared": (MEAN.but(loss=lambda o, b: F.cross_entropy(o @ o.T, torch.arange(len(o)))), "dp=2", ("P114",)),
    "samples centred": (own(lambda s, x: s.a(x - x.mean(0))), "dp=2", ("P116", "mixes samples")),
    "batch norm, accumulated": (NORMS, "accumulate=2", ("P115", "'norm'", 'batch_norm="microbatch"')),
    "a running mean of samples": (
        Task(lambda: nn.Sequential(nn.InstanceNorm1d(3, track_running_stats=True), Linear(6, 6)).double(),
             waves(8, 3, 6, name="input"), square),
        "dp=2", ("P116", "'0' mixes samples"),
    ),
    "sizes of the whole batch": (HEADS.but(make=seeded(Heads, fixed=True)), "accumulate=2", ("P115", "2 samples")),
    "nothing learns": (own(lambda s, x: s.a(x).detach()), "dp=2", ("P114", "no parameter")),
    "no parameters": (
        Task(module(lambda s, x: 2 * x), X, square, lambda m: torch.optim.SGD([nn.Parameter(torch.ones(1))])), "one", ("P114",)
    ),
    "an optimizer with a closure": (MEAN.but(opt=lambda m: torch.optim.LBFGS(m.parameters())), "dp=2", ("P115", "LBFGS")),
    "random integers": (own(lambda s, x: s.a(x) + torch.randint(3, x.shape)), "dp=2", ("P115", "'randint'")),
    "a bad clip": (MEAN.but(clip=(0.0, 2.0)), "one", ("P112", "clip")),
    "batches that are no mappings": (MEAN.but(data=lambda step: X(step)["x"]), "one", ("P102", "Tensor")),
    "empty batches": (MEAN.but(data=[]), "dp=2", ("P110",)),
    "checkpointing, split": (
        Task(module(lambda s, x: checkpoint(lambda y: s.b(s.a(y).relu()), x, use_reentrant=False), **TWO), X, square),
        "tp=2", ("P116", "'a'", "checkpointing"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_the_same_is_refused_before_the_first_step(kind):
    task, layout, said = REFUSED[kind]
    refused(task, layout, *said)


# ---------------------------------------------------------------- draws: the reference is one rank under the same stream
def dropped(self, x):
    return self.b(F.dropout(self.a(x).tanh(), 0.3, self.training))


DRAWS = {
    "dropout": (dropped, ["dp=2", "accumulate=2", "tp=2", "dp=2 tp=2"]),
    "noise": (lambda s, x: s.b((s.a(x) + 0.1 * torch.randn_like(s.a(x))).tanh()), ["dp=2", "tp=2"]),
    "a layer left out by chance": (
        lambda s, x: s.b(s.a(x) if torch.rand(()).item() < 0.5 else s.a(-x)),
        ["dp=2", "accumulate=2"],
    ),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_draws_do_not_depend_on_the_layout(kind):
    forward, layouts = DRAWS[kind]
    task = Task(module(forward, a=lambda: Linear(6, 12), b=lambda: Linear(12, 6)), X, square)
    whole = split(task, "one")
    for layout in layouts:
        alike(split(task, layout), whole)


# ---------------------------------------------------------------- going on under another layout
RESUMED = Task(PERCEPTRON, X, square, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), steps=6)
GOES_ON = {
    "fsdp=4 -> zero2=2": RESUMED,
    "zero1=2 tp=2 -> fsdp=2": RESUMED.but(clip=(0.1, 2.0)),
    "one -> zero1=4": RESUMED,
    "tp=4 -> dp=2 tp=2": RESUMED,
    "dp=2 tp=2 -> one": RESUMED.but(clip=(0.1, 2.0)),
    "accumulate=2 -> dp=4": RESUMED.but(opt=lambda m: torch.optim.SGD(m.parameters(), 0.1, 0.9)),
    "one -> tp=2": Task(seeded(Words), words(counts=(6, 1, 3, 2)), entropy, steps=6),
    "dp=2 -> dp=4": Task(seeded(Norms), pictures, label, sgd, steps=6),
}


@pytest.mark.parametrize("layout", GOES_ON)
def test_a_run_goes_on_under_another_layout(layout, tmp_path):
    same(GOES_ON[layout], layout, folder=tmp_path)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    run(MEAN, "dp=2", out=tmp_path / "run")
    refused(MEAN.but(make=seeded(Linear, 6, 5), steps=6), "one", "P117", resume=tmp_path / "run")
    refused(MEAN, "one", "P112", "steps = 3", resume=tmp_path / "run")


# ---------------------------------------------------------------- what is not there yet
@pytest.mark.parametrize(("name", "axis"), [("one_bit", "dp"), ("cube", "tp")])
def test_a_strategy_that_is_not_there_is_refused_by_name(name, axis, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(f'partita = 1\n[workload]\nmodel = "mlp"\n[mesh]\n{axis} = 2\n[[strategy]]\nname = "{name}"\n')
    with pytest.raises(Refused, match="P107") as caught:
        pt.load(path)
    assert repr(name) in str(caught.value)
    assert "ddp" in str(caught.value)


# ---------------------------------------------------------------- proofs say the same
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("ignored targets", "dp=2 tp=2"),
        ("no target on one rank", "tp=2 accumulate=2"),
        ("samples that go different ways", "dp=2"),
        ("clipping, p = 2", "dp=2 tp=2"),
    ],
)
def test_a_proof_holds_where_the_numbers_are_the_same(kind, layout):
    task = SAME[kind][0]
    how = {k: v for k, v in task.more.items() if k in ("clip", "forward")}
    proof = pt.prove(plan_of(layout), model=task.make, batches=task.data, loss=task.loss, optimizer=task.opt, steps=2, **how)
    assert proof.proved, proof.json()
