"""The loss of a batch from the losses of its parts: which rule fits, and what is refused."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from partita.errors import Refused
from partita.runtime.loss import Rule, heard, joined, part_of
from partita.runtime.loss_rule import find_rule
from partita.runtime.loss_terms import Counts, terms
from partita.runtime.subject import Subject

SAMPLES = 6


def make():
    torch.manual_seed(0)
    return nn.Linear(5, 4)


def batches(step):
    g = torch.Generator().manual_seed(step)
    y = torch.randint(4, (SAMPLES, 3), generator=g)
    y[1, :2] = y[4, 1:] = y[2] = -100
    return {"input": torch.randn(SAMPLES, 3, 5, generator=g), "y": y}


def subject(loss, **changes):
    return replace(Subject(make, batches, loss, lambda m: torch.optim.SGD(m.parameters(), lr=0.1)), **changes)


def rule_of(loss, batch=None):
    return find_rule(subject(loss), make(), batch or batches(0), SAMPLES)


def entropy(out, batch, **settings):
    return F.cross_entropy(out.flatten(0, 1), batch["y"].flatten(), **settings)


def masked(out, batch):
    mask = batch["y"] >= 0
    each = entropy(out, batch, reduction="none").view(mask.shape)
    return (each * mask).sum() / mask.sum()


def per_sample(out, batch):
    each = [F.cross_entropy(o, y.clamp(min=0)) for o, y in zip(out, batch["y"], strict=True)]
    return torch.stack(each).mean()


def pair(out, batch):
    return entropy(out, batch, reduction="sum"), (batch["y"] >= 0).sum()


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (entropy, "counted"),
        (lambda o, b: entropy(o, b, weight=torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=o.dtype)), "counted"),
        (lambda o, b: entropy(o, b, label_smoothing=0.1), "counted"),
        (lambda o, b: 3 * entropy(o, b), "counted"),
        (lambda o, b: F.nll_loss(o.log_softmax(-1).flatten(0, 1), b["y"].flatten()), "counted"),
        (lambda o, b: nn.CrossEntropyLoss()(o.movedim(2, 1), b["y"]), "counted"),
        (lambda o, b: entropy(o, b, reduction="sum"), "sum"),
        (lambda o, b: entropy(o, b, reduction="sum") / 7, "sum"),
        (lambda o, b: o.square().mean(), "averaged"),
        (lambda o, b: F.mse_loss(o, torch.zeros_like(o)), "averaged"),
        (lambda o, b: F.smooth_l1_loss(o, torch.zeros_like(o), reduction="sum"), "sum"),
        (lambda o, b: 1 - o[b["y"] >= 0].mean(), "averaged"),
        (lambda o, b: torch.einsum("bti,bti->", o, o) * (1 / len(o)), "divided"),
        (lambda o, b: o.square().mean() + o.mean(), "averaged"),
        (lambda o, b: o.square().sum() / len(o), "divided"),
        (lambda o, b: o.square().sum(), "sum"),
        (masked, "divided"),
        (per_sample, "samples"),
        (pair, "pair"),
    ],
)
def test_the_rule_is_found(loss, kind):
    assert rule_of(loss).kind == kind


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, b: o.square().mean().sqrt(),
        lambda o, b: o.square().max(),
        lambda o, b: entropy(o, b) + o.square().sum(),
        lambda o, b: o.mean() - o.flatten(1).std(0).mean(),
        lambda o, b: (o.square().sum(), torch.tensor(float(len(b["y"])) ** 2)),
    ],
    ids=["root", "max", "mixed", "contrastive", "wrong pair"],
)
def test_a_loss_that_is_no_mean_of_parts_is_refused(loss):
    with pytest.raises(Refused) as caught:
        rule_of(loss)
    fault = caught.value.faults[0]
    assert fault.code == "P114"
    assert "(sum, weight)" in fault.cure
    assert "off by" in fault.have


@pytest.mark.parametrize("loss", [lambda o, b: o.square().mean((1, 2)), lambda o, b: 3.0, lambda o, b: None])
def test_a_loss_that_is_no_number_is_refused(loss):
    with pytest.raises(Refused, match="the loss returned"):
        rule_of(loss)


def test_equal_counts_still_count_targets():
    whole = batches(0)
    whole["y"] = whole["y"].clamp(min=0)
    assert rule_of(entropy, whole) == Rule("counted", 3.0 * SAMPLES, ratios=[1.0], fits=[None])


def test_the_nominal_weight_is_that_of_the_batch():
    assert rule_of(lambda o, b: o.mean()) == Rule("averaged", 12.0 * SAMPLES, ratios=[1.0], fits=[None])
    assert rule_of(lambda o, b: o.sum()) == Rule("sum", 1.0)


def test_dropout_and_buffers_do_not_disturb_the_search():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.drop, self.norm = nn.Linear(5, 4), nn.Dropout(0.5), nn.BatchNorm1d(3)
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

        def forward(self, input):
            self.seen += len(input)
            return self.drop(self.inner(self.norm(input)))

    module = Noisy()
    state, random = {k: v.clone() for k, v in module.state_dict().items()}, torch.get_rng_state()
    assert find_rule(subject(entropy), module, batches(0), SAMPLES).kind == "counted"
    assert module.training
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_half_precision_and_stubborn_dtypes_are_served():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 4).bfloat16()

        def forward(self, input):
            return self.inner(input.bfloat16()).float()

    assert find_rule(subject(lambda o, b: o.square().mean()), Half(), batches(0), SAMPLES).kind == "averaged"


def test_one_sample_needs_no_rule():
    one = {k: t[:1] for k, t in batches(0).items()}
    assert find_rule(subject(entropy), make(), one, 1).kind == "counted"


LOSSES = {
    "counted": entropy,
    "averaged": lambda o, b: 2 * o[b["y"] >= 0].mean(),
    "divided": masked,
    "kept from zero": lambda o, b: 3 * ((o.sum(-1) * (b["y"] > 0)).sum() / (b["y"] > 0).sum().clamp(min=1)),
    "a little more": lambda o, b: (o.sum(-1) * (b["y"] > 0)).sum() / ((b["y"] > 0).float().sum() + 0.5),
    "pair": pair,
    "samples": lambda o, b: torch.einsum("bti->", o) / len(o),
    "sum": lambda o, b: o.sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_parts_join_to_the_whole(name):
    loss, module, whole = LOSSES[name], make(), batches(0)
    rule, read = find_rule(subject(loss), module, whole, SAMPLES), None
    total = weight = 0.0
    for cut in (slice(0, 1), slice(1, 5), slice(5, 6)):
        part = {k: t[cut] for k, t in whole.items()}
        with heard(rule, part) as counts:
            value = loss(module(part["input"]), part)
        one = part_of(rule, value, len(part["y"]), counts)
        read = one.read
        if one.numbers[1]:
            total, weight = total + one.numbers[0], weight + one.numbers[1]
    value = loss(module(whole["input"]), whole)
    value = value[0] / value[1] if isinstance(value, tuple) else value
    assert joined(rule, total, weight, read) == pytest.approx(value.item(), rel=1e-6)


def test_the_terms_of_a_loss_are_read_off_its_graph():
    x = torch.randn(4, 3, requires_grad=True)
    y = torch.tensor([0, 1, -100, 0])
    for loss, found in (
        (lambda: F.cross_entropy(x, y), [("counted", 3.0)]),
        (lambda: 0.5 * F.cross_entropy(x, y) - x.mean(), [("counted", 6.0), ("averaged", -12.0)]),
        (lambda: (x.sum() / 3).to(torch.float64) + 1, [("divided", 3.0)]),
        (lambda: torch.stack([x.sum(), x.mean()]).mean(), [("divided", 2.0), ("averaged", 24.0)]),
        (lambda: 1 - F.mse_loss(x, x.detach() + 1).sqrt(), [("other", 0.0)]),
        (lambda: x.mean() / x.sum(), [("other", 0.0)]),
    ):
        with Counts() as counts:
            value = loss()
        assert [(t.kind, float(t.by)) for t in terms(value, counts)] == found


def test_terms_that_leave_their_proportion_are_told():
    def loss(o, b):
        return entropy(o, b) + o.square().mean()

    even = batches(0) | {"y": batches(0)["y"].clamp(min=0)}
    rule = rule_of(loss, even)
    for batch, strays in ((even, False), (batches(0), True)):
        with heard(rule, batch) as counts:
            value = loss(make()(batch["input"]), batch)
        assert bool(part_of(rule, value, SAMPLES, counts).strays) is strays
