"""Past faults of others' tools, each as the single-device truth it must give, or the refusal before step 1.

Every module here is small, float64, and stands for a kind.
"""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from partita.errors import Refused
from partita.runtime.subject import Subject

pytestmark = pytest.mark.gloo


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def adamw(module):
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.05, weight_decay=0.1)


def seeded(kind, *args):
    def make():
        torch.manual_seed(1)
        return kind(*args).double()

    return make


def waves(*shape, speed=0.7):
    count = torch.Size(shape).numel()
    return lambda step: torch.sin(torch.arange(count).reshape(shape) * (speed + step)).double()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(10, 6), nn.Linear(6, 6), nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.middle(self.embed(ids))))


@pytest.mark.parametrize("mesh", [{"dp": 3}, {"tp": 2}, {"dp": 2, "tp": 2}], ids=["dp3", "tp2", "dp2 tp2"])
def test_tied_weights_stay_tied_and_count_once(equal, mesh):
    def batches(step):
        return {"ids": (torch.arange(24).reshape(6, 4) * 7 + step) % 10}

    def loss(out, batch):
        return F.cross_entropy(out[:, :-1].reshape(-1, 10), batch["ids"][:, 1:].reshape(-1))

    got = equal(Subject(seeded(Tied), batches, loss, sgd), mesh, clip=(0.1, 2.0))
    assert torch.equal(got.whole["state"]["head.weight"], got.whole["state"]["embed.weight"])


class Labelled(nn.Module):
    """A model that computes its own loss, as Hugging Face models do."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, ids, labels):
        return {"loss": F.cross_entropy(self.out(self.embed(ids)).flatten(0, 1), labels.flatten(), ignore_index=-100)}


def uneven(counts):
    def batches(step):
        ids = (torch.arange(12 * len(counts)).reshape(len(counts), 12) * 5 + step) % 20
        labels = ids.roll(-1, 1).clone()
        for row, count in enumerate(counts):
            labels[row, count:] = -100
        return {"ids": ids, "labels": labels}

    return batches


@pytest.mark.parametrize("counts", [(12, 1, 7, 2), (12, 3, 0, 0)], ids=["uneven", "a rank with nothing"])
@pytest.mark.parametrize(("mesh", "accumulate"), [({"dp": 1}, 4), ({"dp": 2}, 1), ({"dp": 4}, 1), ({"dp": 2}, 2)])
def test_ignored_targets_do_not_bias_the_mean(equal, counts, mesh, accumulate):
    subject = Subject(seeded(Labelled), uneven(counts), lambda out, batch: out["loss"], sgd)
    equal(subject, mesh, accumulate=accumulate, clip=(0.05, 2.0))


def test_counts_that_change_from_step_to_step(equal):
    def batches(step):
        return uneven(((12, 12, 12, 12), (12, 1, 7, 2), (1, 1, 12, 0))[step])(step)

    equal(Subject(seeded(Labelled), batches, lambda out, batch: out["loss"], sgd), {"dp": 2}, accumulate=2)


def test_a_pair_gives_any_weighted_mean(equal):
    def loss(out, batch):
        weight = batch["w"]
        return (out.square().sum(-1) * weight).sum(), weight.sum()

    def batches(step):
        return {"input": waves(8, 4)(step), "w": torch.linspace(0.0, 3.0, 8).double()}

    equal(Subject(seeded(nn.Linear, 4, 3), batches, loss, sgd), {"dp": 4})
    equal(Subject(seeded(nn.Linear, 4, 3), batches, loss, sgd), {"dp": 2}, accumulate=2)


def test_a_loss_over_the_whole_batch_is_refused_before_step_1(split):
    def loss(out, batch):
        return (out @ out.T).logsumexp(-1).mean()  # every sample against every other

    subject = Subject(seeded(nn.Linear, 4, 3), lambda s: {"input": waves(8, 4)(s)}, loss, sgd)
    with pytest.raises(Refused, match="NoLossRule"):
        split(subject, {"dp": 2})
    split(subject, {"dp": 1})


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.ways = nn.ModuleDict({"neg": nn.Linear(4, 4), "pos": nn.Linear(4, 4)})
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x):
        y = self.first(x)
        return torch.stack([self.ways["pos" if float(row.sum()) > 0 else "neg"](q) for row, q in zip(x, y, strict=True)])


@pytest.mark.parametrize(("mesh", "accumulate"), [({"dp": 2}, 1), ({"dp": 4}, 1), ({"dp": 1}, 2), ({"dp": 2}, 2)])
def test_parameters_used_by_some_ranks_or_by_none(equal, mesh, accumulate):
    def batches(step):
        x = torch.linspace(0.1, 1, 32).reshape(8, 4).double()
        x[4:] *= -1
        return {"x": x if step != 1 else x.abs()}

    got = equal(Subject(seeded(Branches), batches, lambda o, b: o.square().mean(), adamw), mesh, accumulate=accumulate)
    assert "never" not in got.whole["gradients"]


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(6, 6), nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}], ids=["dp2", "tp2"])
def test_frozen_parameters_stay_and_have_no_gradient(equal, mesh):
    make = seeded(lambda: nn.Sequential(Adapter(), Adapter()))
    got = equal(
        Subject(make, lambda s: {"input": waves(8, 6)(s)}, lambda o, b: o.square().mean(), adamw), mesh, clip=(0.1, 2.0)
    )
    assert "0.base.weight" not in got.whole["gradients"]


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.rand(4), persistent=False)

    def forward(self, x):
        self.seen += x.shape[0]
        return self.out((self.norm(self.conv(x)) * self.table[:, None, None]).relu().mean((2, 3)))


def images(step):
    return {"x": waves(8, 1, 7, 7, speed=0.37)(step), "y": torch.arange(8) % 2}


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 4}], ids=["dp2", "dp4"])
def test_buffers_and_batch_norm_are_those_of_the_whole_batch(equal, mesh):
    got = equal(Subject(seeded(Counted), images, lambda o, b: F.cross_entropy(o, b["y"]), sgd), mesh)
    assert got.whole["state"]["seen"] == 24
    assert got.ranks[0]["transient"] == ["table"]


def test_batch_norm_under_accumulation_is_refused_unless_accepted(split):
    subject = Subject(seeded(Counted), images, lambda o, b: F.cross_entropy(o, b["y"]), sgd)
    with pytest.raises(Refused, match=r"batch norm 'norm' under accumulate = 2"):
        split(subject, {"dp": 2}, accumulate=2)
    split(subject, {"dp": 2}, accumulate=2, batch_norm="microbatch")


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}], ids=["dp2", "tp2", "dp2 tp2"])
@pytest.mark.parametrize("p", [2.0, 1.0, float("inf")])
def test_clipping_is_that_of_one_device(equal, mesh, p):
    def make():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 3)).double()

    subject = Subject(make, lambda s: {"input": 5 * waves(8, 8)(s)}, lambda o, b: o.square().sum(), sgd)
    equal(subject, mesh, clip=(0.5, p))


@dataclasses.dataclass
class Out:
    logits: torch.Tensor
    extra: Any = None
    note: str = "n"


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, *, x, scale=None):
        h = self.a(x).relu()
        return Out(self.b(h), {"v": (self.c(h), [h.detach()], None)}, "ok")


@pytest.mark.parametrize(("mesh", "accumulate"), [({"dp": 2}, 1), ({"dp": 3}, 1), ({"dp": 1}, 2)])
def test_any_output_and_none_in_a_batch(equal, mesh, accumulate):
    def loss(out, batch):
        return out.logits.square().mean() + out.extra["v"][0].mean()

    equal(Subject(seeded(Nested), lambda s: {"x": waves(6, 4)(s), "scale": None}, loss, sgd), mesh, accumulate=accumulate)


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return (x * self.w).sum(-1)


@pytest.mark.parametrize(("mesh", "accumulate"), [({"dp": 1}, 512), ({"dp": 4}, 128)])
def test_small_bfloat16_gradients_are_not_rounded_away(equal, mesh, accumulate):
    def batches(step):
        return {"x": torch.cat([torch.full((1, 4), 256.0), torch.full((511, 4), 0.5)]).bfloat16()}

    def plain(module):
        return torch.optim.SGD(module.parameters(), lr=1.0)

    subject = Subject(lambda: Weights().bfloat16(), batches, lambda o, b: o.float().mean(), plain)
    equal(subject, mesh, accumulate=accumulate, bound=1e-2)


@pytest.mark.parametrize("accumulate", [3, 5])
def test_a_batch_that_does_not_divide_is_refused_with_both_numbers(split, accumulate):
    subject = Subject(seeded(nn.Linear, 5, 5), lambda s: {"input": waves(8, 5)(s)}, lambda o, b: o.square().mean(), sgd)
    with pytest.raises(Refused, match=f"batch = 8, data ranks = 1, accumulate = {accumulate}"):
        split(subject, {"dp": 1}, accumulate=accumulate)


def test_float32_stays_within_its_rounding(equal):
    def make():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 4))

    subject = Subject(
        make,
        lambda s: {"input": waves(8, 6)(s).float(), "y": torch.arange(8) % 4},
        lambda o, b: F.cross_entropy(o, b["y"]),
        sgd,
    )
    equal(subject, {"dp": 2}, bound=2e-5)
    equal(replace(subject, optimizer=adamw), {"dp": 4}, bound=2e-4)


class Stubborn(nn.Module):
    """Written for one batch size."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x):
        return self.inner(x).view(8, 3)


def test_a_module_written_for_one_batch_size_is_refused_when_the_batch_is_cut(split, equal):
    subject = Subject(seeded(Stubborn), lambda s: {"x": waves(8, 4)(s)}, lambda o, b: o.square().mean(), sgd)
    with pytest.raises(Refused, match="Stubborn does not run on a part of its batch"):
        split(subject, {"dp": 2})
    equal(subject, {"dp": 1})
