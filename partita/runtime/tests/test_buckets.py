"""Buckets: fixed order, views, unused parameters, dtypes, no leak."""

import gc
import weakref

import pytest
import torch
from torch import nn

from partita.errors import RunFailed
from partita.mesh import Mesh
from partita.runtime.buckets import Buckets, reduce_again
from partita.runtime.net import Net
from partita.runtime.ranks import run_ranks

pytestmark = pytest.mark.gloo
TWO = Mesh.of({"dp": 2})


class Three(nn.Module):
    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(3, 3, bias=False, dtype=dtype) for _ in range(3))
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x, use=("a", "b", "c")):
        for name in use:
            x = torch.tanh(getattr(self, name)(x))
        return (x * self.scale).sum()


def inputs(rank: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)).to(dtype)


def names(module):
    return dict(module.named_parameters())


def test_gradients_are_summed_and_are_views_of_the_buckets():
    def work(net):
        m = Three()
        buckets = Buckets(net, "dp", names(m), [["c.weight", "scale"], ["b.weight", "a.weight"]])
        for _ in range(2):
            buckets.begin()
            buckets.start(last=True)
            m(inputs(net.rank)).backward()
            buckets.finish()
            buckets.settle()
        views = [p.grad.untyped_storage().data_ptr() for p in m.parameters()]
        return [[p.grad.tolist() for p in m.parameters()], len(set(views)), [e.json() for e in net.ledger]]

    whole = Three()
    (whole(inputs(0)) + whole(inputs(1))).backward()
    want = [p.grad for p in whole.parameters()]
    for got, storages, ledger in run_ranks(TWO, work):
        assert all(torch.allclose(torch.tensor(g, dtype=torch.float64), w, rtol=1e-13) for g, w in zip(got, want, strict=True))
        assert storages == 2
        assert ledger == 2 * [["all_reduce", "dp", 80, "float64", "scale"], ["all_reduce", "dp", 144, "float64", "a.weight"]]


def test_microbatches_are_reduced_once():
    def work(net):
        m = Three()
        buckets = Buckets(net, "dp", names(m), [["scale", "c.weight", "b.weight", "a.weight"]], microbatches=2)
        buckets.begin()
        for k in range(2):
            buckets.start(last=k == 1)
            m(inputs(2 * net.rank + k)).backward()
        buckets.finish()
        buckets.settle()
        return [[p.grad.tolist() for p in m.parameters()], len(net.ledger)]

    whole = Three()
    sum(whole(inputs(k)) for k in range(4)).backward()
    for got, calls in run_ranks(TWO, work):
        assert calls == 1
        for g, p in zip(got, whole.parameters(), strict=True):
            assert torch.allclose(torch.tensor(g, dtype=torch.float64), p.grad, rtol=1e-13)


def test_a_parameter_used_on_one_rank_only_has_its_gradient_everywhere():
    def work(net):
        m = Three()
        buckets = Buckets(net, "dp", names(m), [["scale", "c.weight"], ["b.weight", "a.weight"]], optional=True)
        buckets.begin()
        buckets.start(last=True)
        m(inputs(net.rank), ("a",) if net.rank else ("a", "b")).backward()
        buckets.finish()
        buckets.settle()
        buckets.used("dp")
        buckets.drop()
        ops = [(e.op, e.nbytes, e.dtype, e.label) for e in net.ledger]
        return [{n: None if p.grad is None else p.grad.abs().sum().item() for n, p in m.named_parameters()}, ops]

    first, second = run_ranks(TWO, work)
    assert first[0] == second[0]
    assert first[0]["c.weight"] is None
    assert first[0]["b.weight"] > 0
    assert [tuple(o) for o in first[1]][-1] == ("all_reduce", 4, "uint8", "used")
    assert first[1] == second[1]


def test_a_missing_gradient_that_was_not_announced_fails_with_its_name():
    def work(net):
        m = Three()
        buckets = Buckets(net, "dp", names(m), [["scale", "c.weight", "b.weight", "a.weight"]])
        buckets.begin()
        buckets.start(last=True)
        m(inputs(net.rank), ("a", "b")).backward()
        buckets.finish()

    with pytest.raises(RunFailed, match=r"parameter 'c.weight' got no gradient on rank"):
        run_ranks(TWO, work)


def test_gradients_may_be_summed_in_another_dtype():
    def work(net):
        m = Three(torch.bfloat16)
        buckets = Buckets(net, "dp", names(m), [["scale", "c.weight", "b.weight", "a.weight"]], dtype=torch.float32)
        buckets.begin()
        buckets.start(last=True)
        m(inputs(net.rank, torch.bfloat16)).backward()
        buckets.finish()
        buckets.settle()
        return [[str(p.grad.dtype) for p in m.parameters()], [(e.nbytes, e.dtype) for e in net.ledger]]

    for dtypes, calls in run_ranks(TWO, work):
        assert set(dtypes) == {"torch.bfloat16"}
        assert calls == [[4 * 28, "float32"]]


def test_half_gradients_accumulate_in_float32():
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    buckets = Buckets(Net(Mesh(), 0), None, {"w": weight}, [["w"]], microbatches=512)
    buckets.begin()
    for k in range(512):
        buckets.start(last=k == 511)
        (weight * (256.0 if k == 0 else 0.5)).sum().backward()
    buckets.finish()
    buckets.settle()
    assert weight.grad.item() == 512.0  # 511.5 to the nearest; added up in bfloat16 it stays 256


def test_a_second_data_axis_sums_again():
    def work(net):
        m = Three()
        buckets = Buckets(net, "dp", names(m), [["scale", "c.weight", "b.weight", "a.weight"]])
        buckets.begin()
        buckets.start(last=True)
        m(inputs(net.rank)).backward()
        buckets.finish()
        buckets.settle()
        reduce_again(net, "pod", names(m), [["scale", "c.weight"], ["b.weight", "a.weight"]])
        return [p.grad.tolist() for p in m.parameters()]

    whole = Three()
    sum(whole(inputs(k)) for k in range(4)).backward()
    for got in run_ranks(Mesh.of({"pod": 2, "dp": 2}), work):
        for g, p in zip(got, whole.parameters(), strict=True):
            assert torch.allclose(torch.tensor(g, dtype=torch.float64), p.grad, rtol=1e-13)


def test_buckets_are_collected_with_their_module():
    def make():
        m = Three()
        return m, Buckets(Net(Mesh(), 0), None, names(m), [["scale", "a.weight"]])

    module, buckets = make()
    gone = weakref.ref(buckets)
    del buckets
    assert gone() is None
    module(inputs(0)).backward()  # the hook finds nobody and lets be
    model = weakref.ref(module)
    del module
    gc.collect()
    assert model() is None
