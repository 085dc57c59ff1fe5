"""Rows on their way over an axis: packed, sent, put back; and gradients scattered from hooks."""

import gc
import weakref

import pytest
import torch
from torch import nn

from partita.errors import RunFailed
from partita.mesh import Mesh
from partita.runtime.cuts import slice_of
from partita.runtime.ranks import run_ranks
from partita.runtime.rows import Lines, piece_of
from partita.runtime.scatter import Gathering, Scattered

SHAPES = [(5, 3), (2,), (), (8, 2), (1, 4), (3, 2, 2), (0, 3)]


def tensors(seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g, dtype=torch.float64) for s in SHAPES]


@pytest.mark.law
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_a_line_holds_a_ranks_rows_and_all_lines_hold_everything(ranks):
    whole = tensors()
    lines = [Lines([t.shape for t in whole], ranks, rank) for rank in range(ranks)]
    packed = lines[0].pack(whole, torch.float64, torch.device("cpu"))
    assert packed.numel() == ranks * lines[0].width
    for rank, own in enumerate(lines):
        line = packed.view(ranks, -1)[rank]
        pieces = [piece_of(t, ranks, rank) for t in whole]
        assert all(torch.equal(a, b) for a, b in zip(own.rows(line), pieces, strict=True))
        assert torch.equal(own.line(pieces, torch.float64, torch.device("cpu")), line)
    back = [torch.full_like(t, torch.nan) for t in whole]
    lines[0].unpack(packed, back)
    assert all(torch.equal(a, b) for a, b in zip(back, whole, strict=True))


@pytest.mark.law
def test_what_is_missing_is_zero_and_what_is_not_contiguous_is_put_in_its_place():
    a, b = torch.arange(6.0).view(3, 2), torch.arange(6.0).view(2, 3).T
    lines = Lines([a.shape, b.shape], 2, 0)
    packed = lines.pack([None, b], torch.float32, a.device)
    back = [torch.ones(3, 2), torch.empty(2, 3).T]
    lines.unpack(packed, back)
    assert back[0].abs().sum() == 0
    assert torch.equal(back[1], b)


@pytest.mark.law
def test_rows_of_a_strided_part_are_ranges_of_the_whole():
    held = ((0, 2), (6, 2), (12, 2))
    assert [slice_of(held, first, 3) for first in (0, 3)] == [((0, 2), (6, 1)), ((7, 1), (12, 2))]
    assert slice_of(held, 6, 0) == ()


# ---------------------------------------------------------------- on ranks
class Odd(nn.Module):
    """Rows that do not divide, a single row, and a number."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 5, dtype=dtype), nn.Linear(5, 1, dtype=dtype)
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x, *, both=True):
        y = torch.tanh(self.a(x)) * self.scale
        return (self.b(y) if both else y).sum()


NAMES = [["scale", "b.bias", "b.weight"], ["a.bias", "a.weight"]]
TWO = Mesh.of({"dp": 2})


def inputs(seed, dtype=torch.float64):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def scattered(net, module, **settings):
    named = dict(module.named_parameters())
    pieces = {n: piece_of(p.detach(), net.size("dp"), net.coordinate["dp"]) for n, p in named.items()}
    return Scattered(net, "dp", named, pieces, NAMES, **settings), pieces


@pytest.mark.gloo
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_each_rank_ends_with_its_rows_of_the_sums(every, microbatches):
    def work(net):
        m = Odd()
        one, pieces = scattered(net, m, every=every, microbatches=microbatches)
        for _ in range(2):
            one.begin()
            for k in range(microbatches):
                one.start(last=k == microbatches - 1)
                m(inputs(microbatches * net.rank + k)).backward()
                one.end(idle=False)
            one.finish()
            one.settle()
        assert all(p.grad is None for p in m.parameters())
        return [{n: p.grad.tolist() for n, p in pieces.items()}, [[e.op, e.nbytes] for e in net.ledger]]

    whole = Odd()
    sum(whole(inputs(k)) for k in range(2 * microbatches)).backward()
    for rank, (got, ledger) in enumerate(run_ranks(TWO, work)):
        for name, p in whole.named_parameters():
            want = piece_of(p.grad, 2, rank)
            assert torch.allclose(torch.tensor(got[name], dtype=torch.float64).view(want.shape), want, rtol=1e-12)
        # scale 2, b.bias 2, b.weight 2 x 5 · a.bias 6, a.weight 6 x 3
        assert ledger == 2 * (microbatches if every else 1) * [["reduce_scatter", 14 * 8], ["reduce_scatter", 24 * 8]]


@pytest.mark.gloo
def test_half_gradients_are_added_up_in_float32():
    def work(net):
        m = Odd(torch.bfloat16)
        found = []
        for every in (False, True):
            one, _ = scattered(net, m, every=every, microbatches=2)
            found.append([str(b.sum.dtype) for b in one.buckets] + [str(b.homes[0].dtype) for b in one.buckets if b.homes])
        return found

    assert run_ranks(TWO, work)[0] == [["torch.bfloat16"] * 2 + ["torch.float32"] * 2, ["torch.float32"] * 2]


@pytest.mark.gloo
def test_a_gradient_on_one_rank_only_is_a_gradient_on_all():
    def work(net):
        m = Odd()
        one, pieces = scattered(net, m, every=True, optional=True)
        one.begin()
        one.start(last=True)
        m(inputs(net.rank), both=net.rank == 0).backward()
        one.end(idle=False)
        one.finish()
        one.settle()
        one.used("dp")
        one.drop()
        return sorted(n for n, p in pieces.items() if p.grad is not None)

    assert run_ranks(TWO, work) == [["a.bias", "a.weight", "b.bias", "b.weight", "scale"]] * 2


@pytest.mark.gloo
def test_a_gradient_that_stays_away_is_named():
    def work(net):
        m = Odd()
        one, _ = scattered(net, m, every=True)
        one.begin()
        one.start(last=True)
        m(inputs(0), both=False).backward()
        one.end(idle=False)

    with pytest.raises(RunFailed, match=r"'b\.bias' got no gradient"):
        run_ranks(TWO, work)


@pytest.mark.gloo
def test_gathering_fills_in_the_rows_of_the_others():
    def work(net):
        m = Odd()
        named = dict(m.named_parameters())
        pieces = {n: piece_of(p.detach(), 2, net.rank) for n, p in named.items()}
        gathering = Gathering(net, "dp", named, pieces, NAMES)
        for p in pieces.values():
            p.add_(1 + net.rank)
        gathering.run()
        return [[e.op, e.nbytes] for e in net.ledger], {n: p.tolist() for n, p in named.items()}

    ranks = run_ranks(TWO, work)
    assert ranks[0] == ranks[1]
    ledger, got = ranks[0]
    assert ledger == [["all_gather", 14 * 8], ["all_gather", 24 * 8]]
    before = Odd().a.weight.detach()
    more = torch.tensor(got["a.weight"], dtype=torch.float64) - before
    assert torch.allclose(more, torch.tensor([1.0, 1, 1, 2, 2], dtype=torch.float64)[:, None].expand(5, 3))


@pytest.mark.gloo
def test_hooks_hold_nothing_back():
    def work(net):
        m = Odd()
        one, _ = scattered(net, m, every=True)
        ref = weakref.ref(one)
        del one
        gc.collect()
        return ref() is None

    assert all(run_ranks(TWO, work))
