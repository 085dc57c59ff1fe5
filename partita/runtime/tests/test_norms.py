"""Laws of the split norms: torch's own value and gradients, also where a mean is far from zero."""

import pytest
import torch
import torch.nn.functional as F

from partita.mesh import Mesh
from partita.runtime.kernels.norms import layer_norm, rms_norm
from partita.runtime.ranks import run_ranks

FEATURES, EPS = 12, 1e-5


def theirs(kind, x, weight, bias):
    if kind == "layer":
        return F.layer_norm(x, (FEATURES,), weight, bias, EPS)
    return F.rms_norm(x, (FEATURES,), weight, EPS)


def ours(kind, x, weight, bias, reduce):
    return layer_norm(x, weight, bias, EPS, FEATURES, reduce) if kind == "layer" else rms_norm(x, weight, EPS, FEATURES, reduce)


def split(kind, affine, offset, dtype):
    """Errors of (value, gradients) on two ranks relative to torch's in float64, and the ledgers."""
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(3, 5, FEATURES, generator=g, dtype=torch.float64) + offset).to(dtype)
    weight, bias = (torch.randn(FEATURES, generator=g, dtype=torch.float64).to(dtype) if affine else None for _ in range(2))
    grad = torch.randn(3, 5, FEATURES, generator=g, dtype=torch.float64).to(dtype)
    whole = [None if t is None else t.double().requires_grad_() for t in (x, weight, bias)]
    out = theirs(kind, *whole)
    out.backward(grad.double())

    def work(net):
        cut = lambda t: None if t is None else t.detach().chunk(2, -1)[net.rank].contiguous()
        mine = [None if t is None else cut(t).requires_grad_() for t in (x, weight, bias)]
        y = ours(kind, *mine, lambda t, op: net.all_reduce(t, "tp", op=op))
        y.backward(cut(grad))
        pairs = [
            (y, out),
            *((m.grad, w.grad) for m, w in zip(mine, whole, strict=True) if m is not None and w.grad is not None),
        ]
        error = max((got - cut(want)).abs().max().item() / want.abs().max().item() for got, want in pairs)
        return error, len(pairs), [e.json()[:3] for e in net.ledger]

    return run_ranks(Mesh.of({"tp": 2}), work)


@pytest.mark.gloo
@pytest.mark.law
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_split_norms_are_torchs(kind, affine):
    rows = 15 * 8
    want = [rows, rows, 2 * rows] if kind == "layer" else [rows, rows]
    for error, compared, ledger in split(kind, affine, 0.3, torch.float64):
        assert error < 1e-13
        assert compared == 2 + affine * (2 if kind == "layer" else 1)
        assert ledger == [["all_reduce", "tp", n] for n in want]


@pytest.mark.gloo
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-4), (torch.bfloat16, 2**-6)])
def test_a_far_mean_cancels_nothing(dtype, bound):
    offset = 1000.0 if dtype == torch.float32 else 2.0  # the difference of mean squares would be 1e6 - 1e6, rounded to 0.06
    assert max(error for error, _, _ in split("layer", True, offset, dtype)) < bound
