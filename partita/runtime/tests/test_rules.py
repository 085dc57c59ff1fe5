"""Every row of the rule table, proved by running it: an op on halves of a label, put together, is the op on the whole."""

import collections

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from partita.program.events import Compute
from partita.runtime.models import build
from partita.runtime.rules import RULES, TABLE
from partita.runtime.tape import Tape, Where, nested
from partita.workload import GPT, Llama, ResNet

pytestmark = pytest.mark.law

# The local op is not the same op: it takes shapes as arguments, draws, or is told its place by `apply`.
SKIP = {
    "native_dropout", "native_dropout_backward", "bernoulli", "view", "_unsafe_view", "expand", "slice", "select", "split",
    "split_with_sizes", "slice_backward", "select_backward", "embedding_dense_backward", "embedding",
    "max_pool2d_with_indices_backward", "repeat", "roll", "native_group_norm", "native_group_norm_backward", "new_zeros",
    "convolution_backward", "upsample_nearest2d", "upsample_nearest2d_backward", "avg_pool2d_backward",
    "_adaptive_avg_pool2d_backward",
}  # fmt: skip
# Needs an index range, a causal offset, or the global count: also another op, which apply's kernels know.
PLACED = {
    ("nll_loss_forward", "c"), ("nll_loss_backward", "c"), ("nll_loss2d_forward", "c"), ("nll_loss2d_backward", "c"),
    ("_scaled_dot_product_flash_attention_for_cpu", "t"), ("_scaled_dot_product_flash_attention_for_cpu_backward", "t"),
    ("index", "d0"), ("index_select", "d0"), ("index_select", "d1"), ("index", "d1"), ("gather", "d2"),
    ("index_put", "d0"), ("convolution", "g"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    """The ops are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Halves(Tape):
    """Runs each op again on halves along each label that may be split, and compares."""

    def __init__(self, where):
        super().__init__(where)
        self.ran: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        flat, spec = tree_flatten(tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, (args, kwargs or {})))
        before = len(self.events)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.events) > before:
            self.check(func, self.events[before], flat, spec, [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)])
        return out

    def check(self, func, event: Compute, flat, spec, outs):
        sig, name = event.signature, event.op
        if sig is None or sig.creates or sig.unread or name in SKIP or name.endswith("_"):
            return
        at = [i for i, t in enumerate(flat) if isinstance(t, torch.Tensor)]
        for k in {k for cells in sig.ins for c in cells for k in c} - sig.whole - set(sig.inner):
            if self.size(sig, k) % 2 or not self.size(sig, k) or (name, k) in PLACED:
                continue
            got = [self.half(func, name, sig, k, half, flat, spec, at) for half in (0, 1)]
            for j, (o, cells) in enumerate(zip(outs, sig.outs, strict=True)):
                if not o.dtype.is_floating_point:
                    continue
                fed = any(
                    self.halves(sig, flat[i], c, k)
                    for n, (i, c) in enumerate(zip(at, sig.ins, strict=True))
                    if (n, j) not in sig.independent
                )
                mean = 2 if name == "mean" or (name in ("nll_loss_forward", "nll_loss2d_forward") and j == 0) else 1
                want = self.halves(sig, o, cells, k) or ([o] if fed else [o, o])
                have = [g[j] for g in got] if len(want) == 2 else [(got[0][j] + got[1][j]) / mean]
                for x, y in zip(want, have, strict=True):
                    assert torch.allclose(x.double(), y.double(), rtol=1e-8, atol=1e-10), (name, k, j, sig)
                self.ran[name] += 1

    def size(self, sig, k):
        return self.atoms.numel(self.atoms.leaves(sig.dims.get(k, ())))

    def halves(self, sig, t, cells, k):
        for d, c in enumerate(cells):
            if k in c:
                wide = t.reshape(*t.shape[:d], *(self.size(sig, x) for x in c), *t.shape[d + 1 :]).chunk(2, d + c.index(k))
                return [x.reshape(*t.shape[:d], t.shape[d] // 2, *t.shape[d + 1 :]).contiguous() for x in wide]
        return None

    def half(self, func, name, sig, k, half, flat, spec, at):
        new = list(flat)
        for i, cells in zip(at, sig.ins, strict=True):
            new[i] = (self.halves(sig, flat[i], cells, k) or [flat[i]] * 2)[half]
        if name in ("addmm", "baddbmm") and k == "k" and half:
            new[at[0]] = torch.zeros_like(flat[at[0]])  # what is whole is added by one rank
        if name == "convolution" and k == "c" and half and len(at) > 2:
            new[at[2]] = torch.zeros_like(flat[at[2]])
        a, kw = tree_unflatten(new, spec)
        return [t for t in tree_leaves(func(*a, **kw)) if isinstance(t, torch.Tensor)]


def ran(module, batch, loss):
    module = module.double()
    with Where(module) as where, Halves(where) as tape:
        for name, t in nested(batch, ""):
            tape.add(t, name=name)
        loss(module, batch).backward()
    assert not tape.faults, tape.faults
    return tape.ran


def tokens(spec):
    torch.manual_seed(0)
    batch = {k: torch.randint(spec.vocab, (4, spec.sequence)) for k in ("x", "y")}
    return ran(build(spec), batch, lambda m, b: F.cross_entropy(m(b["x"]).flatten(0, 1), b["y"].flatten()))


@pytest.mark.parametrize("spec", [GPT(2, 32, 4, 64, 16), Llama(2, 32, 4, 2, 64, 16, ffn=48)], ids=lambda s: s.kind)
def test_rules_hold_on_token_models(spec):
    found = tokens(spec)
    assert {"mm", "add", "mean" if spec.kind == "llama" else "gelu", "_scaled_dot_product_flash_attention_for_cpu"} <= set(
        found
    )
    assert found.total() > 400


def test_rules_hold_on_images():
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 3, 32, 32).double()}
    found = ran(build(ResNet(1, 2, 8, size=32)), batch, lambda m, b: m(b["x"]).square().mean())
    assert {"convolution", "native_batch_norm"} & set(found)


class Rows(nn.Module):
    """Ops the catalogue does not use."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 6, 8)), nn.Parameter(torch.randn(4, 8, 6))
        self.v, self.table, self.stem = nn.Parameter(torch.randn(8)), nn.Embedding(8, 6), nn.Conv2d(2, 4, 2, 2)
        self.cube = nn.Parameter(torch.randn(2, 8, 8))
        self.grouped, self.turned = nn.Conv1d(4, 8, 3, padding=1, groups=2), nn.ConvTranspose1d(4, 6, 3)
        self.group_norm, self.layer_norm = nn.GroupNorm(2, 4), nn.LayerNorm(8)

    def forward(self, x, ids, image):
        a, b = self.a * x.unsqueeze(-1).unsqueeze(-1), self.b
        parts = [
            torch.baddbmm(a @ b, a, b), a.softmax(-1) @ b, (a @ self.v).sin(), torch.dot(self.v, self.v), a.logsumexp(1),
            a.amax(0), a.var(1), torch.cat([a, a.flip(1)], 1).cumsum(0), torch.stack([a, a]).mean(1), a.norm(dim=2),
            a.tril(), self.table(ids), a.gather(2, ids[:, None].expand(4, 6, 2) % 8), a.index_select(1, ids[0]),
            a[:, ids[0]], F.pad(a, (1, 1)), a.repeat(1, 2, 1), a.roll(1, 1), a.topk(2, -1).values, self.stem(image),
            self.grouped(a[:, :4]), self.turned(a[:, :4]), self.group_norm(a[:, :4]), self.layer_norm(a),
            F.max_pool2d(image * self.v[0], 2), F.adaptive_avg_pool2d(image * self.v[0], 1),
            F.avg_pool2d(image * self.v[0], 2), F.interpolate(image * self.v[0], scale_factor=2),
            F.cross_entropy(a, ids[:, :1].expand(4, 8) % 6, reduction="none"), torch.where(a > 0, a, a.clamp(max=1.0)),
            a.masked_fill(a > 1, 0.0), F.softplus(a), F.elu(a), F.leaky_relu(a), F.hardswish(a),
            torch.lerp(a, a * 2, 0.5), torch.addcmul(a, a, a), a.sort(-1).values, a.std(1),
            a.unflatten(2, (2, 4)).permute(0, 3, 1, 2), F.glu(a), torch.fft.rfft(a).abs(),
            F.pixel_shuffle(image * self.v[0], 1), F.bilinear(a, a, self.cube),
        ]  # fmt: skip
        return sum(p.double().square().mean() for p in parts)


def test_rules_hold_on_ops_the_catalogue_does_not_use():
    torch.manual_seed(0)
    batch = {"x": torch.randn(4).double(), "ids": torch.randint(4, (4, 2)), "image": torch.randn(4, 2, 4, 4).double()}
    found = ran(Rows(), batch, lambda m, b: m(**b))
    assert found.total() > 300


def test_table_names_each_op_once():
    names = [name for row, _ in TABLE for name in row.split()]
    assert len(names) == len(set(names)) == len(RULES)
