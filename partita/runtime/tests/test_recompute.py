"""A second pass finds everything as the first one did: masks, calls, buffers, counters; and it changes nothing twice."""

import copy
import inspect
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from partita.program import Phase
from partita.runtime.random import Stream
from partita.runtime.recompute import recomputed
from partita.runtime.tape import Where
from partita.runtime.through import ASKED


class Block(nn.Module):
    """Counts, keeps a cache, normalises by its batch, drops, and takes and gives whatever it likes."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), nn.BatchNorm1d(8)
        self.calls, self.scale = 0, None
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, *, extra=None):
        self.calls += 1
        self.seen += len(x)
        if self.scale is None:
            self.scale = 2.0
        y = F.dropout(self.norm(self.a(x["x"] if isinstance(x, dict) else x)), 0.5, self.training)
        return self.scale * self.b(y) + (0 if extra is None else extra), y.mean()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        total = 0
        for n, block in enumerate(self.blocks):
            x, more = block({"x": x} if n == 1 else x, extra=x if n else None)
            total = total + more
        return x.square().mean() + total


def made():
    torch.manual_seed(0)
    return Net().double()


def passed(net, *, wrap=None, stream=True):
    """Loss, gradients, buffers and counters after two steps."""
    if wrap is not None:
        for path in wrap:
            recomputed(net.get_submodule(path))
    x, served = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), Stream(3)
    torch.manual_seed(5)
    for step in range(2):
        if stream:
            with served.step(step, 0, 4):
                loss = net(x)
        else:
            loss = net(x)
        loss.backward()
    state = {**{n: p.grad for n, p in net.named_parameters()}, **dict(net.named_buffers()), "loss": loss.detach()}
    return state, [(b.calls, b.scale) for b in net.blocks], torch.rand(1)


BLOCKS = [f"blocks.{n}" for n in range(3)]


@pytest.mark.parametrize("stream", [True, False], ids=["keyed", "plain"])
@pytest.mark.parametrize("wrap", [BLOCKS, [""], ["blocks.1"], [*BLOCKS, ""]], ids=["blocks", "whole", "one", "nested"])
def test_a_second_pass_changes_no_bit(wrap, stream):
    (want, counts, after), (have, counted, later) = passed(made(), stream=stream), passed(made(), wrap=wrap, stream=stream)
    assert want.keys() == have.keys()
    for name, value in want.items():
        assert torch.equal(value, have[name]), name
    assert counts == counted
    assert torch.equal(after, later)


def test_nothing_stays_changed_in_torch():
    kept = [getattr(F, name) for name in ASKED]
    passed(made(), wrap=BLOCKS)
    assert [getattr(F, name) for name in ASKED] == kept
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_copy_is_recomputed_as_itself():
    net = made()
    for path in BLOCKS:
        recomputed(net.get_submodule(path))
    twin = copy.deepcopy(net)
    want, counts, _ = passed(made())
    have, counted, _ = passed(twin)
    assert all(torch.equal(want[n], have[n]) for n in want)
    assert counts == counted
    assert all(p.grad is None for p in net.parameters())
    assert [b.calls for b in net.blocks] == [0, 0, 0]


def test_without_gradients_the_forward_runs_once():
    net, seen = made(), []
    recomputed(net.blocks[0])
    net.blocks[0].a.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    with torch.no_grad():
        net(torch.randn(4, 6, dtype=torch.float64))
    assert seen == [False]


def test_hooks_of_the_module_itself_run_once_and_the_second_pass_bears_its_name():
    net, seen, phases = made(), [], []
    recomputed(net.blocks[1])
    net.blocks[1].register_forward_hook(lambda *_: seen.append("hook"))
    with Where(net) as where:
        net.blocks[1].a.register_forward_pre_hook(lambda *_: phases.append((where.phase(), where.here())))
        net(torch.randn(4, 6, dtype=torch.float64)).backward()
    assert seen == ["hook"]
    assert phases == [(Phase.FORWARD, "blocks.1.a"), (Phase.RECOMPUTE, "blocks.1.a")]


def test_a_forward_of_the_instance_is_kept():
    net = made()
    net.blocks[0].forward = lambda x, *, extra=None: (x * 2, x.mean())
    recomputed(net.blocks[0])
    x = torch.randn(4, 6, dtype=torch.float64)
    assert torch.equal(net.blocks[0](x)[0], x * 2)


@dataclass
class Out:
    x: torch.Tensor


def test_outputs_of_any_kind_come_through():
    class Odd(nn.Linear):
        def forward(self, x):
            return Out(super().forward(x).tanh())

    torch.manual_seed(0)
    odd = Odd(3, 3)
    x = torch.randn(2, 3)
    odd(x).x.sum().backward()
    want = odd.weight.grad.clone()
    odd.weight.grad = None
    recomputed(odd)
    odd(x).x.sum().backward()
    assert torch.equal(odd.weight.grad, want)


@pytest.mark.parametrize("keep", [("addmm",), ("addmm", "tanh"), ("nothing",), ("*",)])
def test_kept_ops_run_once_and_give_the_same(keep):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    net(x).square().sum().backward()
    want = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    recomputed(net, keep)
    net(x).square().sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(want, net.parameters(), strict=True))


def test_a_wrapped_forward_accepts_what_it_did():
    """A batch's keys are chosen by it: a target that it does not take is not passed."""

    class Named(nn.Module):
        def forward(self, x, scale=2):
            return x * scale

    module = Named()
    before = inspect.signature(module.forward)
    recomputed(module)
    assert inspect.signature(module.forward) == before
