"""Rules of ops that compute along dims: reductions, softmax and its kin, norms, picking by index."""

from collections.abc import Callable
from dataclasses import replace

import torch

from partita.program.dims import Cell, Signature
from partita.runtime.patterns import Call, labels, pointwise


def reduce(c: Call) -> Signature:
    n, at = len(c.ins[0].shape), c.arg(2 if c.name == "linalg_vector_norm" else 1, "dim")
    given = (
        [at] if isinstance(at, int) and not isinstance(at, bool) else at if isinstance(at, list | tuple) and at else range(n)
    )
    gone = {i % max(n, 1) for i in given}
    d, keep = labels(n), len(c.shapes[0]) == n
    outs: list[list[Cell]] = [[() if i in gone else d[i] for i in range(n) if keep or i not in gone] for _ in c.shapes]
    s = Signature([d], outs, linear="pass" if c.name in ("sum", "mean") else "no")
    if c.name in ("argmax", "argmin", "prod", "median", "mode"):
        s.whole = {f"d{i}" for i in gone}
    elif s.linear == "no":
        s.inner = {f"d{i}": (1, 2 if "var" in c.name or "std" in c.name else 1, True) for i in gone}
    return s


def along(arg: int, inner: int = 0, name: str = "dim", *, new: bool = False) -> Callable[[Call], Signature]:
    """Pointwise along every dim but one: softmax (a few small all_reduces), cumsum, sort, flip, topk (whole)."""

    def rule(c: Call) -> Signature:
        n, at = len(c.ins[0].shape), c.arg(arg, name, -1)
        gone = {f"d{i % max(n, 1)}" for i in (at if isinstance(at, list | tuple) else [at])}
        s = pointwise(c)
        if new:
            s.outs, gone = [[("new",) if d[0] in gone else d for d in labels(n)] for _ in c.shapes], gone | {"new"}
        # The class sum of the gradient of a picked log-probability is known: minus the upstream gradient.
        times = (
            0
            if c.name == "_log_softmax_backward_data" and c.ins[0].origin in ("nll_loss_backward", "nll_loss2d_backward")
            else inner
        )
        return replace(s, inner=dict.fromkeys(gone, (times, 1, True))) if inner else replace(s, whole=gone)

    return rule


def halved(c: Call) -> Signature:
    """glu: two halves of one dim become one; that dim stays whole."""
    n, at = len(c.ins[0].shape), c.arg(2 if "backward" in c.name else 1, "dim", -1)
    dim = at % max(n, 1)

    def cells(s: tuple[int, ...]) -> list[Cell]:
        return [("whole" if s[dim] == c.ins[-1].shape[dim] else "half",) if i == dim else (f"d{i}",) for i in range(n)]

    return Signature([cells(v.shape) for v in c.ins], [cells(s) for s in c.shapes], {"whole", "half"})


def scattered(c: Call) -> Signature | None:
    """scatter, scatter_add, index_add: the indexed dim stays whole; the others must agree."""
    dim, n = c.args[1] % max(len(c.ins[0].shape), 1), len(c.ins[0].shape)
    full, part = labels(n), [("i",) if i == dim else (f"d{i}",) for i in range(n)]
    index: list[Cell] = [("i",)] if c.name == "index_add" else list(part)
    agree = all(a == b for i, (a, b) in enumerate(zip(c.ins[0].shape, c.ins[-1].shape, strict=False)) if i != dim)
    return Signature([full, index, *([list(part)] * (len(c.ins) - 2))], [full], {f"d{dim}", "i"}) if agree else None


def fourier(c: Call) -> Signature:
    """Transformed dims stay whole; a half spectrum is a dim of its own."""
    n = len(c.ins[0].shape)
    gone = {i % n for i in c.args[1]}
    outs: list[Cell] = [(f"w{i}",) if i in gone else (f"d{i}",) for i in range(n)]
    return Signature([labels(n)], [outs], {f"{k}{i}" for i in gone for k in "dw"}, linear="pass")


def pairs(c: Call) -> Signature:
    """view_as_real and view_as_complex: the last dim of the real side is two numbers."""
    d = labels(min(len(c.ins[0].shape), len(c.shapes[0])))
    sides: list[list[Cell]] = [d, [*d, ("two",)]] if c.name == "view_as_real" else [[*d, ("two",)], d]
    return Signature([sides[0]], [sides[1]], {"two"}, linear="pass")


def trilinear(c: Call) -> Signature:
    """Three factors on aligned dims, some of them summed."""
    n = len(c.ins[0].shape) + len(c.args[3])
    ins = [[(f"d{i}",) for i in range(n) if i not in gone] for gone in c.args[3:6]]
    return Signature(ins, [[(f"d{i}",) for i in range(n) if i not in c.args[6]]])


def weight_norm(c: Call) -> Signature:
    """Rows of a weight over their norms; the backward is linear in the gradient."""
    back = "backward" in c.name
    n, dim = len(c.ins[0].shape), c.arg(4 if back else 2, "dim", 0)
    full, norms = labels(n), [(f"d{i}",) if i == dim else () for i in range(n)]
    whole = {f"d{i}" for i in range(n) if i != dim}
    if back:
        return Signature([full, full, norms, norms], [full, norms], whole, linear="first")
    return Signature([full, norms], [full, norms], whole)


def recurrent(c: Call) -> Signature:
    """A fused recurrent layer: split by sample only. The workspace is a matter of each rank's own."""
    weights: list[list[Cell]] = [[("t",), ("b",), ("f",)], [("g",), ("f",)], [("g",), ("h",)], [("g",)], [("g",)]]
    state: list[Cell] = [("l",), ("b",), ("h",)][3 - len(c.ins[5].shape) :]
    out: list[Cell] = [("t",), ("b",), ("h",)]
    space: list[Cell] = [("w",)]
    whole, held = {"t", "f", "g", "h", "w", "l"}, [*weights, state, state]
    if "backward" not in c.name:
        return Signature(held, [out, state, state, space], whole, independent={(i, 3) for i in range(7)})
    given = [s for s, g in zip((out, state, state), c.args[10:13], strict=True) if g is not None]
    ins = [*held, out, state, state, *given, space]
    return Signature(ins, held, whole, unread={len(ins) - 1})


def triangle(c: Call) -> Signature:
    """Pointwise, but a block of a triangle is another triangle."""
    n = len(c.ins[0].shape)
    return replace(pointwise(c), whole={f"d{n - 2}", f"d{n - 1}"})


def layer_norm(c: Call) -> Signature:
    shape = tuple(c.args[2 if "backward" in c.name else 1])
    n, k = len(c.ins[0].shape), len(shape)

    def cells(s: tuple[int, ...]) -> list[Cell]:
        if len(s) != n:
            return labels(k, n - k)
        return labels(n) if s[n - k :] == shape else labels(n - k) + [()] * k

    ins, outs = [cells(v.shape) for v in c.ins], [cells(s) for s in c.shapes]
    kinds, back = 1 if "rms" in c.name else 2, "backward" in c.name  # a mean, and then a variance about it; back, both at once
    exchanged = (1, kinds, True) if back else (kinds, 1, True)
    return Signature(ins, outs, inner={f"d{i}": exchanged for i in range(n - k, n)})


def group_norm(c: Call) -> Signature:
    """Split by sample only: groups of channels stay whole."""
    back = "backward" in c.name
    n = len(c.ins[0].shape)
    channels = c.ins[0].shape[1]
    group = c.args[8 if back else 6]

    def cells(s: tuple[int, ...]) -> list[Cell]:
        if len(s) == n:
            return labels(n)
        return [("d0",), ("g",)] if len(s) == 2 and s[1] == group else [("d1",)] if s == (channels,) else [("x",)] * len(s)

    whole = {f"d{i}" for i in range(1, n)} | {"g"}
    return Signature([cells(v.shape) for v in c.ins], [cells(s) for s in c.shapes], whole)


def batch_norm(c: Call) -> Signature:
    """Statistics over a split batch: one all_reduce of 2 c numbers. Local statistics would be another function."""
    n, back = len(c.ins[0].shape), "backward" in c.name

    def cells(s: tuple[int, ...]) -> list[Cell]:
        return labels(n) if len(s) == n else [("d1",)] if s == c.ins[0].shape[1:2] else [("x",)] * len(s)

    s = Signature([cells(v.shape) for v in c.ins], [cells(o) for o in c.shapes])
    flags = [a for a in c.args if isinstance(a, bool)]  # the first one is `training` ("train" in the backward)
    if flags and flags[0]:
        s.inner = {f"d{i}": (1, 2, not back) for i in range(n) if i != 1}
    return s


def nll(c: Call) -> Signature:
    """Picks one class per position; with a mean or a sum the positions are summed, and counted.

    The last tensor is the weight of all targets (forward: the second result), which the log-probabilities do not feed.
    """
    back = "backward" in c.name
    x = c.ins[1 if back else 0]
    rest = [("n",), *((f"x{i}",) for i in range(len(x.shape) - 2))] if len(x.shape) > 1 else []
    full: list[Cell] = [*rest[:1], ("c",), *rest[1:]]
    weighted = c.args[3 if back else 2] is not None
    per_class: list[list[Cell]] = [[("c",)]] if weighted else []
    loss = list(rest) if len(c.ins[0].shape if back else c.shapes[0]) == len(rest) else []
    if back:
        return Signature([loss, full, list(rest), *per_class, []], [full])
    return Signature([full, list(rest), *per_class], [loss, []], independent={(0, 1)})


def index(c: Call) -> Signature | None:
    """x[i, j], tensors on adjacent dims, and its backward. One index is a one-hot contraction; arange keeps the dim."""
    idx, put = c.args[1], "put" in c.name
    at = [i for i, t in enumerate(idx) if t is not None]
    if not at or at != list(range(at[0], at[-1] + 1)) or any(idx[i].dtype in (torch.bool, torch.uint8) for i in at):
        return None
    d, rank = labels(len(c.ins[0].shape)), max(idx[i].dim() for i in at)
    cells: list[Cell] = [(f"i{k}",) for k in range(rank)]
    whole = {f"d{i}" for i in at} if len(at) > 1 or put else set()
    read = d[: at[0]] + cells + d[at[-1] + 1 :]
    ins = [list(d)] + [cells[rank - idx[i].dim() :] for i in at]
    if put:
        add = c.arg(3, "accumulate") is True
        whole |= set() if add else {x[0] for x in cells}
        return Signature([*ins, read[len(read) - c.args[2].dim() :]], [d], whole, linear="last" if add else "no")
    for i, v in zip(at, c.ins[1:], strict=True):
        long = [k for k, n in enumerate(v.shape) if n > 1]
        if v.iota and len(long) == 1 and v.shape[long[0]] == c.ins[0].shape[i]:
            ins[0][i] = cells[rank - len(v.shape) + long[0]]
            whole.discard(f"d{i}")
    return Signature(ins, [read], whole)


def gather(c: Call) -> Signature | None:
    dim, d = c.args[1] % len(c.ins[0].shape), labels(len(c.ins[0].shape))
    out: list[Cell] = [*d[:dim], ("i",), *d[dim + 1 :]]
    if c.name == "index_select":
        return Signature([d, [("i",)]], [out])
    same = all(a == b for i, (a, b) in enumerate(zip(c.ins[0].shape, c.ins[1].shape, strict=True)) if i != dim)
    return Signature([d, out], [out]) if same else None
