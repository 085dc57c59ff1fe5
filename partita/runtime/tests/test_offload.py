"""An optimizer on the host steps as it would on the device, bit for bit on the same arithmetic."""

import copy

import pytest
import torch
from torch import nn, optim

from partita.runtime.master import Mastered
from partita.runtime.offload import Offloaded

MAKERS = {
    "adamw": lambda p: optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "foreach": lambda p: optim.Adam(p, lr=0.1, foreach=True),
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "groups": lambda p: optim.AdamW([{"params": [q], "lr": 0.1 * (n + 1)} for n, q in enumerate(p)]),
}


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def steps(module, optimizer, number=3, between=None):
    for step in range(number):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).to(next(module.parameters()).dtype)
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()
        if between:
            between(module)
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("apart", [True, None], ids=["apart", "one memory"])
@pytest.mark.parametrize("name", MAKERS)
def test_its_steps_are_those_of_the_device(name, apart):
    a, b = net(), net()
    plain, ours = MAKERS[name](list(a.parameters())), Offloaded(MAKERS[name](list(b.parameters())), apart=apart)
    for want, have in zip(steps(a, plain), steps(b, ours), strict=True):
        assert torch.equal(want, have)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert plain.state[p].keys() == ours.state[q].keys()
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(ours.state[q][k])) for k, v in plain.state[p].items())
    assert set(ours.state) == set(b.parameters())


@pytest.mark.parametrize("apart", [True, None])
def test_master_copies_live_on_the_host_too(apart):
    a, b = net(torch.bfloat16), net(torch.bfloat16)
    plain = Mastered(optim.AdamW(a.parameters(), lr=0.1))
    ours = Offloaded(Mastered(optim.AdamW(b.parameters(), lr=0.1)), apart=apart)
    for want, have in zip(steps(a, plain), steps(b, ours), strict=True):
        assert torch.equal(want, have)


def test_what_else_writes_to_a_parameter_is_heeded():
    def halve(module):
        for p in module.parameters():
            p.data.mul_(0.5)  # no version tells of it

    a, b = net(), net()
    plain, ours = optim.AdamW(a.parameters(), lr=0.1), Offloaded(optim.AdamW(b.parameters(), lr=0.1), apart=True)
    for want, have in zip(steps(a, plain, between=halve), steps(b, ours, between=halve), strict=True):
        assert torch.equal(want, have)


def test_parameters_without_a_gradient_and_those_not_chosen_stay_where_they_are():
    module = net()
    frozen, *rest = module.parameters()
    frozen.requires_grad_(False)
    twin = copy.deepcopy(module)
    ours = Offloaded(optim.AdamW(module.parameters(), lr=0.1), rest[:1], apart=True)
    want, have = steps(twin, optim.AdamW(twin.parameters(), lr=0.1)), steps(module, ours)
    assert all(map(torch.equal, want, have))
    assert list(ours._twins) == [id(rest[0])]


def test_rates_are_those_of_the_groups():
    module = net()
    ours = Offloaded(optim.SGD(module.parameters(), lr=0.1), apart=True)
    before = [p.detach().clone() for p in module.parameters()]
    ours.param_groups[0]["lr"] = 0.0
    assert all(map(torch.equal, before, steps(module, ours, 1)))


def test_a_failing_step_leaves_the_groups_as_they_were():
    class Broken(optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no")

    module = net()
    ours = Offloaded(Broken(module.parameters(), lr=0.1), apart=True)
    with pytest.raises(RuntimeError, match="no"):
        steps(module, ours, 1)
    assert [id(p) for p in ours.inner.param_groups[0]["params"]] == [id(p) for p in module.parameters()]
