"""Laws of the vocabulary kernels: the sum over ranks is torch's own op, value and gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from partita.runtime.kernels.vocabulary import PIECE, Classes, CrossEntropy, Known, LogSoftmax, Pick, Picked, embedding


class Together:
    """Runs ranks in turn in one process: every rank's forward is replayed until all exchanges are known."""

    def __init__(self, ranks):
        self.ranks, self.known = ranks, []

    def run(self, work):
        while True:
            given = [[] for _ in range(self.ranks)]
            results, stopped = [], False
            for rank in range(self.ranks):
                try:
                    results.append(work(rank, self._reduce(given[rank])))
                except _Waiting:
                    stopped = True
            if not stopped:
                return results
            last = [g[-1] for g in given]
            tensors, how = [t for t, _ in last], last[0][1]
            self.known.append(torch.stack(tensors).amax(0) if how == "max" else torch.stack(tensors).sum(0))

    def _reduce(self, given):
        def reduce(x, how):
            given.append((x.clone(), how))
            if len(given) > len(self.known):
                raise _Waiting
            x.copy_(self.known[len(given) - 1])

        return reduce


class _Waiting(Exception):
    pass


RANKS, CLASSES = 3, 12


def classes(rank):
    return Classes(rank * CLASSES // RANKS, CLASSES // RANKS, CLASSES)


def cut(x, rank, dim):
    return x.detach().chunk(RANKS, dim)[rank].requires_grad_()


@pytest.mark.law
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("shape", [(7, CLASSES), (4, CLASSES, 3), (CLASSES,)])
def test_cross_entropy_is_torchs(reduction, fused, shape):
    torch.manual_seed(0)
    x = (4 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    target = torch.randint(CLASSES, shape[:1] + shape[2:] if len(shape) > 1 else ())
    if len(shape) > 1:
        target.view(-1)[1] = -100
    whole = F.cross_entropy(x, target, reduction=reduction)
    weight = torch.randn_like(whole)
    (whole * weight).sum().backward()
    dim = min(1, len(shape) - 1)

    def work(rank, reduce):
        mine, pick = cut(x, rank, dim), Pick(classes(rank), reduction, known=Known())
        if fused:
            return mine, CrossEntropy.apply(mine, target, pick, reduce)
        return mine, Picked.apply(LogSoftmax.apply(mine, dim, pick.known, reduce), target, pick)

    got = Together(RANKS).run(work)
    torch.testing.assert_close(sum(loss for _, loss in got), whole, rtol=1e-12, atol=1e-12)
    for _, loss in got:
        (loss * weight).sum().backward()
    torch.testing.assert_close(torch.cat([mine.grad for mine, _ in got], dim), x.grad, rtol=1e-12, atol=1e-12)


def test_statistics_are_float32_at_least():
    seen = []

    def reduce(x, how):
        seen.append((how, x.dtype, x.shape))

    x = torch.randn(5, 4, dtype=torch.bfloat16)
    loss = CrossEntropy.apply(x, torch.randint(4, (5,)), Pick(Classes(0, 4, 4)), reduce)
    assert seen == [("max", torch.float32, (5, 1)), ("sum", torch.float32, (5, 1))]
    assert loss.dtype == torch.bfloat16


class Wide(TorchDispatchMode):
    """Elements of the largest float32 tensor an op makes."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            self.most = max(self.most, out.untyped_storage().nbytes() // 4)
        return out


@pytest.mark.law
def test_half_logits_are_widened_a_piece_at_a_time():
    torch.manual_seed(0)
    x = torch.randn(1100, 600, dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(600, (1100,))
    wide = x.detach().float().requires_grad_()
    F.cross_entropy(wide, target).backward()
    with Wide() as seen:
        loss = CrossEntropy.apply(x, target, Pick(Classes(0, 600, 600)), lambda t, how: None)
        loss.backward()
    assert seen.most <= PIECE < x.numel()
    torch.testing.assert_close(loss.float(), F.cross_entropy(wide, target), rtol=1e-2, atol=0)
    torch.testing.assert_close(x.grad.float(), wide.grad, rtol=2**-8, atol=0)  # one rounding


@pytest.mark.law
@pytest.mark.parametrize("padding", [None, 0, 5])
def test_embedding_is_torchs(padding):
    torch.manual_seed(0)
    weight = torch.randn(CLASSES, 4, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(CLASSES, (3, 5))
    tokens[0, 0] = padding or 0
    whole = F.embedding(tokens, weight, padding_idx=padding)
    seed = torch.randn_like(whole)
    whole.backward(seed)
    parts = [cut(weight, r, 0) for r in range(RANKS)]
    got = [embedding(tokens, w, classes(r), padding) for r, w in enumerate(parts)]
    assert torch.equal(sum(got), whole)
    for part in got:
        part.backward(seed)
    torch.testing.assert_close(torch.cat([w.grad for w in parts]), weight.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bad", [-1, CLASSES])
def test_a_token_outside_is_told(bad):
    with pytest.raises(IndexError, match=f"token {bad} is outside the {CLASSES} classes"):
        embedding(torch.tensor([bad]), torch.zeros(4, 2), Classes(0, 4, CLASSES))
