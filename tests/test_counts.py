"""Losses that divide by a count of the batch, however they read it: the numbers of one device, or a refusal before step 1."""

import pytest
import torch
import torch.nn.functional as F
from cases import Task, refused, run, same
from torch import nn

from partita.errors import RunFailed

pytestmark = pytest.mark.gloo


class Small(nn.Module):
    """Two linear layers; given targets, it is its own loss."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return self.b(self.a(x).tanh())


class Judging(Small):
    def forward(self, x, y):
        return F.cross_entropy(super().forward(x), y, reduction="sum") / max((y != -100).sum().item(), 1)


def make(kind=Small):
    torch.manual_seed(5)
    return kind().double()


PLAIN = Task(make, lambda step: {}, lambda o, b: o)


def labels(counts):
    """Eight samples of six classes, of which the first so many count; counts depend on the step."""

    def data(step):
        y = (torch.arange(8) * 5 + step) % 6
        y[counts(step) :] = -100
        x = torch.sin(torch.arange(48).reshape(8, 6) * (0.37 + step)).double()
        return {"x": x, "y": y}

    return data


def total(o, b):
    return F.cross_entropy(o, b["y"], reduction="sum")


def singles(o, b):
    return F.cross_entropy(o, b["y"], reduction="none")


def kept(b):
    return b["y"] != -100


def shares_of(mask):
    return mask / max(mask.sum(), 1)


def early(o, b):
    n = kept(b).sum()
    return o.sum() * 0 if n == 0 else total(o, b) / n.item()


ALL_THEN_HALF = labels(lambda step: 8 if step == 0 else 4)  # from step 2 on nothing counts on the second of two parts
SOME_THEN_FEWER = labels(lambda step: 6 if step == 0 else 5)
FOLLOWED = {
    "item, kept from zero": lambda o, b: total(o, b) / max(kept(b).sum().item(), 1),
    "item": lambda o, b: total(o, b) / kept(b).sum().item(),
    "item or one": lambda o, b: total(o, b) / (kept(b).sum().item() or 1),
    "item and a little": lambda o, b: total(o, b) / (kept(b).sum().item() + 0.5),
    "item, a floor of six": lambda o, b: total(o, b) / max(kept(b).sum().item(), 6),
    "float": lambda o, b: total(o, b) / max(float(kept(b).sum()), 1.0),
    "int": lambda o, b: total(o, b) / max(int(kept(b).sum()), 1),
    "times its inverse": lambda o, b: total(o, b) * (1 / max(kept(b).sum().item(), 1)),
    "len of what a mask selects": lambda o, b: total(o, b) / max(len(b["y"][kept(b)]), 1),
    "size of nonzero": lambda o, b: total(o, b) / max(kept(b).nonzero().size(0), 1),
    "numel": lambda o, b: total(o, b) / max(b["y"][kept(b)].numel(), 1),
    "a tensor again": lambda o, b: total(o, b) / torch.tensor(max(kept(b).sum().item(), 1)),
    "where": lambda o, b: total(o, b) / torch.where(kept(b).sum() > 0, kept(b).sum(), 1),
    "one where it is zero": lambda o, b: total(o, b) / (kept(b).sum() + (kept(b).sum() == 0)),
    "clamped in place": lambda o, b: total(o, b) / kept(b).sum().clamp_(min=1),
    "inside the sum": lambda o, b: (singles(o, b) / max(kept(b).sum().item(), 1)).sum(),
    "inside the sum, a tensor": lambda o, b: (singles(o, b) / kept(b).sum()).sum(),
    "over the share that counts": lambda o, b: (singles(o, b) * kept(b) / kept(b).double().mean()).mean(),
    "a dot product": lambda o, b: torch.dot(singles(o, b), kept(b).double()) / kept(b).sum(),
    "another sum than is counted": lambda o, b: o.square().sum() / max(kept(b).sum().item(), 1),
    "two of a kind": lambda o, b: total(o, b) / max(kept(b).sum().item(), 1) + total(2 * o, b) / kept(b).sum().clamp(min=1),
    "smoothed": lambda o, b: F.cross_entropy(o, b["y"], reduction="sum", label_smoothing=0.1) / max(int(kept(b).sum()), 1),
    "an early return": early,
    "a pair, kept from zero": lambda o, b: (total(o, b), max(kept(b).sum().item(), 1)),
}
NOT_FOLLOWED = {
    "a list": lambda o, b: total(o, b) / max(sum(1 for t in b["y"].tolist() if t != -100), 1),
    "len of a list": lambda o, b: total(o, b) / max(len([t for t in b["y"] if t != -100]), 1),
    "a python sum": lambda o, b: total(o, b) / max(sum(int(t != -100) for t in b["y"]), 1),
    "numpy": lambda o, b: total(o, b) / max(int((b["y"].numpy() != -100).sum()), 1),
    "weights": lambda o, b: (singles(o, b) * (kept(b) / kept(b).sum().clamp(min=1))).sum(),
    "weights of a number": lambda o, b: (singles(o, b) * (kept(b).double() / max(kept(b).sum().item(), 1))).sum(),
    "weights of numpy": lambda o, b: (singles(o, b) * torch.from_numpy(shares_of(b["y"].numpy() != -100))).sum(),
    "a branch": lambda o, b: total(o, b) / (8 if kept(b).sum().item() > 5 else 4),
    "a slice": lambda o, b: o[: kept(b).sum()].square().mean(),
    "a factor": lambda o, b: o.square().mean() * (1 + 0.1 * kept(b).sum().item()),
    "a floor under a share": lambda o, b: singles(o, b).mean() / kept(b).double().mean().clamp(min=0.001),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_count_is_that_of_the_whole_batch_however_it_is_read(name):
    for data in (ALL_THEN_HALF, SOME_THEN_FEWER):
        whole = PLAIN.but(data=data, loss=FOLLOWED[name])
        for layout in ("dp=2", "accumulate=2"):
            same(whole, layout)


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_a_count_that_is_lost_from_sight_is_refused_though_all_count_at_first(name):
    for layout in ("dp=2", "accumulate=2"):
        refused(
            PLAIN.but(data=ALL_THEN_HALF, loss=NOT_FOLLOWED[name]), layout, "P114", "clamp(min=1)", "(loss.sum(), mask.sum())"
        )


def test_what_is_not_zero_over_a_count_that_is_ends_the_run():
    """A part whose loss is infinite does not tell its sum, which one device would have added."""
    for loss in (lambda o, b: o.square().sum() / kept(b).sum().item(), lambda o, b: o.square().sum() / kept(b).sum()):
        for layout in ("dp=2", "accumulate=2"):
            with pytest.raises(RunFailed, match="in step 2 of this run"):
                run(PLAIN.but(data=ALL_THEN_HALF, loss=loss), layout)


def test_numbers_that_are_only_looked_at_do_no_harm():
    def loss(o, b):
        right = (o.argmax(-1) == b["y"]).double().mean().item()
        told = [right, b["y"].tolist(), o.detach().numpy(), int(kept(b).sum())]
        assert len(told) == 4
        return F.cross_entropy(o, b["y"])

    for layout in ("dp=2", "accumulate=2"):
        same(PLAIN.but(data=ALL_THEN_HALF, loss=loss), layout)


@pytest.mark.parametrize("layout", ["tp=2", "dp=2 tp=2", "tp=2 accumulate=2"])
def test_counts_are_followed_on_shards_too(layout):
    for name in ("item, kept from zero", "len of what a mask selects", "inside the sum"):
        same(PLAIN.but(data=ALL_THEN_HALF, loss=FOLLOWED[name]), layout)


def test_a_count_that_a_model_takes_inside_is_that_of_the_whole_batch():
    for layout in ("dp=2", "accumulate=2"):
        same(Task(lambda: make(Judging), ALL_THEN_HALF, lambda o, b: o), layout)


def test_samples_with_counts_of_their_own_need_no_care():
    def loss(o, b):
        means = [row[:n].mean() for row, n in zip(o.square(), (b["y"].clamp(min=0) + 1).tolist(), strict=True)]
        return torch.stack(means).sum() / len(o)

    for layout in ("dp=2", "accumulate=2"):
        same(PLAIN.but(data=SOME_THEN_FEWER, loss=loss), layout)
