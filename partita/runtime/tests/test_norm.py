"""The global norm is torch's, on any mesh."""

import math

import pytest
import torch
from torch import nn

from partita.mesh import Mesh
from partita.runtime.net import Net
from partita.runtime.norm import clip, clip_faults, global_norm
from partita.runtime.ranks import run_ranks
from partita.runtime.state import part, spans_of

SHAPES = {"both": (4, 6), "rows": (4, 3), "columns": (5, 6), "plain": (7,), "none": (2,)}


def gradients() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in SHAPES.items() if name != "none"}


def placements(at: dict[str, int]) -> dict[str, list]:
    rows, columns = ("tp", 0, ((2 * at["tp"], 2),)), ("cp", 1, ((at["cp"] * 2, 1), (at["cp"] * 2 + 1, 1), (4 + at["cp"], 1)))
    return {"both": [rows, columns], "rows": [rows], "columns": [columns]}


def parameters(at: dict[str, int]) -> dict[str, nn.Parameter]:
    cuts, out = placements(at), {}
    for name, shape in SHAPES.items():
        whole = gradients().get(name)
        local = part(torch.zeros(shape), spans_of(shape, cuts.get(name, [])))
        out[name] = nn.Parameter(torch.zeros(local.shape, dtype=torch.float64))
        out[name].grad = part(whole, spans_of(shape, cuts.get(name, []))).clone() if whole is not None else None
    return out


@pytest.mark.gloo
@pytest.mark.parametrize("p", [1.0, 2.0, 3.5, math.inf])
def test_every_block_counts_once(p):
    whole = {n: nn.Parameter(torch.zeros_like(g)) for n, g in gradients().items()}
    for name, q in whole.items():
        q.grad = gradients()[name]
    want = float(nn.utils.clip_grad_norm_(whole.values(), 0.7, p))

    def work(net):
        mine = parameters(net.coordinate)
        norm = global_norm(net, mine, placements(net.coordinate), p)
        clip(mine.values(), norm, 0.7)
        cuts = placements(net.coordinate)
        miss = max(
            (mine[n].grad - part(q.grad, spans_of(SHAPES[n], cuts.get(n, [])))).abs().max().item()
            for n, q in ((n, whole[n]) for n in mine if n in whole)
        )
        return [float(norm), miss, [e.json() for e in net.ledger]]

    for norm, miss, ledger in run_ranks(Mesh.of({"dp": 2, "tp": 2, "cp": 2}), work):
        assert norm == pytest.approx(want, rel=1e-13)
        assert miss < 1e-15
        assert ledger == [["all_reduce", axis, 8, "float64", "norm"] for axis in ("tp", "cp")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("p", [2.0, math.inf])
def test_one_rank_is_torch(dtype, p):
    mine = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (3, 500)]
    for q in mine:
        q.grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(len(q))).to(dtype)
    theirs = [nn.Parameter(q.detach().clone().double()) for q in mine]
    for a, b in zip(mine, theirs, strict=True):
        b.grad = a.grad.double().clone()
    want = nn.utils.clip_grad_norm_(theirs, 2.0, p)
    norm = global_norm(Net(Mesh(), 0), dict(zip("ab", mine, strict=True)), {}, p)
    clip(mine, norm, 2.0)
    assert float(norm) == pytest.approx(float(want), rel=1e-6)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_no_gradient_has_norm_zero_and_a_small_one_stays():
    q = nn.Parameter(torch.zeros(2))
    assert float(global_norm(Net(Mesh(), 0), {"q": q}, {})) == 0.0
    q.grad = torch.tensor([0.3, 0.4])
    clip([q], torch.tensor(0.5), 1.0)
    assert torch.equal(q.grad, torch.tensor([0.3, 0.4]))


@pytest.mark.parametrize(
    ("value", "bad"), [(None, False), ((1.0, 2.0), False), ((1.0, math.inf), False), ((0.0, 2.0), True), ((1.0, 0.0), True)]
)
def test_senseless_settings_are_faults(value, bad):
    assert bool(clip_faults(value)) is bad
