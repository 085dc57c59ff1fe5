"""Rules of ops that only shape: views, permutations, cuts and joins, padding.

Slice, split, cat and their backwards relate one big dim to its pieces; `Atoms.settle` decides what that means once all are
known.
"""

import itertools

from partita.program.dims import Cell, Dim, Signature
from partita.runtime.patterns import Call, labels, pointwise


def view(c: Call) -> Signature | None:
    """The same atoms in the same order, grouped anew."""
    out = c.atoms.regroup(c.ins[0].dims, c.shapes[0])
    if out is None:
        return None
    s = Signature([], [], linear="pass")
    for side, dims in ((s.ins, c.ins[0].dims), (s.outs, out)):
        count = itertools.count()
        side.append([tuple(f"v{next(count)}" for _ in c.atoms.leaves(d)) for d in dims])
    s.dims = {f"v{i}": (a,) for i, a in enumerate(a for d in out for a in c.atoms.leaves(d))}
    return s


def permute(c: Call) -> Signature:
    d = labels(n := len(c.ins[0].shape))
    if c.name == "permute":
        order = [i % n for i in c.args[1]]
    else:
        i, j = (0, n - 1) if c.name in ("t", "t_") else (c.args[1] % max(n, 1), c.args[2] % max(n, 1))
        order = [j if k == i else i if k == j else k for k in range(n)]
    return Signature([d], [[d[i] for i in order]], linear="pass")


def expand(c: Call) -> Signature:
    """1 -> n is a label of the output only."""
    n = len(c.shapes[0])
    return Signature([labels(len(c.ins[0].shape), n - len(c.ins[0].shape))], [labels(n)], linear="pass")


def repeat(c: Call) -> Signature:
    times, n = list(c.args[1]), len(c.ins[0].shape)
    k = len(times) - n
    out: list[Cell] = [(f"r{i}",) if i < k else (f"r{i}", f"d{i}") for i in range(len(times))]
    s = Signature([labels(n, k)], [out], linear="pass")
    s.dims = {f"r{i}": c.atoms.new(t) for i, t in enumerate(times)} | {f"d{i + k}": d for i, d in enumerate(c.ins[0].dims)}
    return s


def cut(c: Call, big: Dim, n: int, pieces: list[tuple[int, Dim, int]], s: Signature) -> Signature:
    s.whole = {"big"} | {f"piece{j}" for j in range(len(pieces))}
    s.dims = {"big": big} | {f"piece{j}": d for j, (_, d, _) in enumerate(pieces)}
    c.atoms.cuts.append((s, n, [(at, size) for at, _, size in pieces]))
    return s


def cat(c: Call) -> Signature:
    rank = len(c.shapes[0])
    dim, d, live = c.arg(1, "dim", 0) % rank, labels(rank), [v for v in c.ins if 0 not in v.shape]
    if (big := _looped(c)) is not None and (c.name == "stack" or all(v.shape[dim] == 1 for v in live)):
        kept = d[:dim] + ([()] if c.name == "cat" else []) + d[dim + 1 :]
        return Signature([kept for _ in c.ins], [d], linear="add", dims={f"d{dim}": big})
    if c.name == "stack":
        return Signature([d[:dim] + d[dim + 1 :] for _ in c.ins], [d], {f"d{dim}"}, linear="add")
    empty: list[list[Cell]] = [[(f"none{j}.{i}",) for i in range(len(v.shape))] for j, v in enumerate(c.ins)]
    if len(live) < 2:
        return Signature([e if 0 in v.shape else d for v, e in zip(c.ins, empty, strict=True)], [d], linear="add")
    count, starts = itertools.count(), itertools.accumulate([0] + [v.shape[dim] for v in live[:-1]])

    def at(k: str) -> list[Cell]:
        return [*d[:dim], (k,), *d[dim + 1 :]]

    ins = [e if 0 in v.shape else at(f"piece{next(count)}") for v, e in zip(c.ins, empty, strict=True)]
    n = c.shapes[0][dim]
    pieces = [(a, v.dims[dim], v.shape[dim]) for a, v in zip(starts, live, strict=True)]
    return cut(c, c.atoms.new(n), n, pieces, Signature(ins, [at("big")], linear="add"))


def _looped(c: Call) -> Dim | None:
    """The dim whose indices, one by one and in order, the inputs were made from."""
    pieces = [v.piece for v in c.ins if v.piece is not None]
    if not pieces or len(pieces) < len(c.ins):
        return None
    big = pieces[0][0]
    every = [(big, j) for j in range(c.atoms.numel(c.atoms.leaves(big)))]
    return big if pieces == every else None


def _spans(c: Call, dim: int, n: int, *, back: bool) -> list[tuple[int, int]] | None:
    """(start, size) of every piece; None for a stride other than 1."""
    if c.name in ("slice", "slice_backward"):
        if (c.arg(5 if back else 4, "step", 1) or 1) != 1:
            return None
        size = c.ins[0].shape[dim] if back else c.shapes[0][dim]
        start = (c.args[3] if back else c.arg(2, "start")) or 0
        return [(min(max(start + n, 0) if start < 0 else start, n), size)]
    if c.name in ("select", "select_backward"):
        return [((c.args[3] if back else c.arg(2, "index")) % n, 1)]
    sizes = [1] * n if c.name == "unbind" else [s[dim] for s in c.shapes]
    return list(zip(itertools.accumulate([0, *sizes[:-1]]), sizes, strict=True))


def piece(c: Call) -> Signature:
    """slice, select, split, unbind and the two backwards."""
    v, back, keep = c.ins[0], c.name.endswith("backward"), not c.name.startswith(("select", "unbind"))
    full = tuple(c.args[1]) if back else v.shape
    dim = c.arg(2 if back or "split" in c.name or c.name == "chunk" else 1, "dim", 0) % len(full)
    n, d = full[dim], labels(len(full))

    def at(k: str, *, keep: bool = True) -> list[Cell]:
        return d[:dim] + ([(k,)] if keep else []) + d[dim + 1 :]

    spans = _spans(c, dim, n, back=back)
    if spans is None:
        ins, outs = (at("piece0"), at("big")) if back else (at("big"), at("piece0"))
        return Signature([ins], [outs], {"big", "piece0"}, linear="pass")
    if all(b == n for _, b in spans):
        sides = [at(f"d{dim}")], [at(f"d{dim}", keep=keep) for _ in spans]
        return Signature(sides[1], sides[0], linear="pass") if back else Signature(*sides, linear="pass")
    if back:
        pieces = [(spans[0][0], v.dims[dim] if keep else (), spans[0][1])]
        return cut(c, c.atoms.new(n), n, pieces, Signature([at("piece0", keep=keep)], [at("big")], linear="pass"))
    outs = [at(f"piece{j}", keep=keep) for j in range(len(spans))]
    one = c.name in ("select", "slice") and spans[0][1] == 1
    s = Signature([at("big")], outs, linear="pass", index=spans[0][0] if one else -1)
    return cut(c, v.dims[dim], n, [(a, c.atoms.new(b), b) for a, b in spans], s)


def pad(c: Call) -> Signature:
    n, s = len(c.ins[0].shape), pointwise(c, "pass")
    for d in {n - 1 - i // 2 for i, p in enumerate(c.args[1]) if p}:
        s.outs[0][d], s.whole = (f"p{d}",), s.whole | {f"p{d}", f"d{d}"}
    return s


def shuffle(c: Call) -> Signature:
    """Pixel shuffle: channels (c r s) to space (h r) (w s), or back."""
    r, lead = c.args[1], labels(len(c.shapes[0]) - 3)
    deep: list[Cell] = [*lead, ("c", "r", "s"), ("h",), ("w",)]
    wide: list[Cell] = [*lead, ("c",), ("h", "r"), ("w", "s")]
    s = Signature([deep], [wide], {"r", "s"}, linear="pass")
    if c.name == "pixel_unshuffle":
        s.ins, s.outs = [wide], [deep]
    n = c.shapes[0] if c.name == "pixel_shuffle" else c.ins[0].shape
    sizes = {"c": n[-3], "r": r, "s": r, "h": n[-2] // r, "w": n[-1] // r}
    s.dims = {k: c.atoms.new(size) for k, size in sizes.items()}
    return s
