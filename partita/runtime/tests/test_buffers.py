"""Buffers end as on one device, or are refused by name before step 1."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from partita.errors import Refused, RunFailed
from partita.runtime.buffers import Keeper, find_buffers
from partita.runtime.subject import Subject


class Counting(nn.Module):
    """A linear layer that keeps one more buffer, changed by `change(buffer, x)` in every forward pass."""

    def __init__(self, change, start):
        super().__init__()
        self.inner, self.norm, self.change = nn.Linear(4, 3).double(), nn.BatchNorm1d(4).double(), change
        self.register_buffer("extra", start.clone())

    def forward(self, x):
        self.extra = self.change(self.extra, x)
        return self.inner(self.norm(x))


def subject(change, start):
    def make():
        torch.manual_seed(0)
        return Counting(change, start)

    def batches(step):
        g = torch.Generator().manual_seed(step)
        return {"x": torch.randn(8, 4, generator=g, dtype=torch.float64), "y": torch.randint(3, (8,), generator=g)}

    return Subject(make, batches, lambda o, b: F.cross_entropy(o, b["y"]), lambda m: torch.optim.SGD(m.parameters(), lr=0.1))


COUNT, TABLE = torch.zeros((), dtype=torch.long), torch.zeros(4, dtype=torch.float64)
GOOD = {
    "fixed": (lambda e, x: e, TABLE, None),
    "steps": (lambda e, x: e + 1, COUNT, "steps"),
    "flag": (lambda e, x: torch.ones_like(e), torch.zeros((), dtype=torch.bool), "steps"),
    "samples": (lambda e, x: e + x.shape[0], COUNT, "samples"),
    "tokens": (lambda e, x: e + x.numel(), COUNT, "samples"),
    "per feature": (lambda e, x: e + torch.ones_like(x).sum(0), TABLE, "samples"),
}
BAD = {
    "running mean": (lambda e, x: 0.9 * e + 0.1 * x.mean(0), TABLE),
    "largest": (lambda e, x: torch.maximum(e, x.abs().amax(0)), TABLE),
    "sum": (lambda e, x: e + x.sum(0), TABLE),
    "size": (lambda e, x: torch.full_like(e, x.shape[0]), COUNT),
    "positive": (lambda e, x: e + (x > -100).sum() + (x == 0).sum(), COUNT),
}


@pytest.mark.parametrize("name", GOOD)
def test_harmless_buffers_are_told_apart(name):
    change, start, kind = GOOD[name]
    s = subject(change, start)
    module = s.make()
    assert find_buffers(s, module, s.batches(0), 8) == ({"extra": kind} if kind else {}, [])
    assert torch.equal(module.extra, start)


@pytest.mark.parametrize("name", BAD)
def test_buffers_that_depend_on_the_samples_are_refused_by_name(name):
    s = subject(*BAD[name])
    _, faults = find_buffers(s, s.make(), s.batches(0), 8)
    assert [f.code for f in faults] == ["P115"]
    assert "'extra'" in faults[0].what


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["steps", "flag", "samples", "per feature"])
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 4}], ids=["dp2", "dp4"])
def test_buffers_end_as_on_one_device(equal, name, mesh):
    change, start, _ = GOOD[name]
    equal(subject(change, start), mesh)


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["steps", "samples"])
def test_buffers_end_as_on_one_device_under_accumulation(equal, name):
    change, start, _ = GOOD[name]
    s = subject(lambda e, x: change(e, x), start)

    def make():
        module = s.make()
        module.norm = nn.Identity()
        return module

    equal(Subject(make, s.batches, s.loss, s.optimizer), {"dp": 2}, accumulate=2)


@pytest.mark.gloo
def test_a_bad_buffer_is_refused_before_step_1_and_only_if_the_batch_is_cut(split):
    s = subject(*BAD["running mean"])
    with pytest.raises(Refused, match="'extra'"):
        split(s, {"dp": 2})
    split(s, {"dp": 1})


def test_a_count_that_changes_its_mind_fails():
    module = Counting(lambda e, x: e, COUNT)
    keeper = Keeper(module, {"extra": "samples"}, 2, 1)
    for grown in (4, 4):
        keeper.begin()
        module.extra += grown
        keeper.finish()
    assert module.extra == 16
    keeper.begin()
    module.extra += 3
    with pytest.raises(RunFailed, match="'extra'"):
        keeper.finish()


def test_every_microbatch_finds_the_counter_of_the_start():
    module = Counting(lambda e, x: e, COUNT)
    keeper = Keeper(module, {"extra": "steps"}, 1, 3)
    keeper.begin()
    for m in range(3):
        keeper.starting(m)
        assert module.extra == 0
        module.extra += 1
        keeper.ran(m)
    keeper.finish()
    assert module.extra == 1
