"""Rules of ops over whole neighbourhoods: convolutions, pools, attention."""

from dataclasses import replace

from partita.program.dims import Cell, Signature
from partita.runtime.patterns import Call, labels, pattern


def convolution(c: Call) -> Signature:
    back = c.name == "convolution_backward"
    x, w = c.args[1:3] if back else c.args[:2]
    y = c.args[0].shape if back else c.shapes[0]
    stride, pad, _, transposed, _, groups = c.args[4:10] if back else c.args[3:9]
    s, nd = Signature([], []), len(x.shape) - 2
    xs: list[Cell] = []
    ys: list[Cell] = []
    ks: list[Cell] = []
    for i in range(nd):
        k, st, p, a, b = w.shape[2 + i], stride[i % len(stride)], pad[i % len(pad)], x.shape[2 + i], y[2 + i]
        patches = k == st and p == 0 and a == b * k and not transposed  # (and 1 x 1): exact, no halo
        xs.append((f"y{i}", f"k{i}") if patches else (f"x{i}",))
        ys.append((f"y{i}",) if patches or a != b else (f"x{i}",))
        ks.append((f"k{i}",))
        if not patches:
            s.whole |= {f"x{i}", f"y{i}"}  # a halo exchange would do better than a gather
        s.whole.add(f"k{i}")
        s.dims |= {f"k{i}": c.atoms.new(k), f"y{i}": c.atoms.new(b)}
    big: list[list[Cell]] = [[("n",), ("g", "c"), *xs], [("n",), ("g", "o"), *ys]]
    weight: list[Cell] = [("g", "c"), ("o",), *ks] if transposed else [("g", "o"), ("c",), *ks]
    s.dims |= {"g": c.atoms.new(groups), "c": c.atoms.new(x.shape[1] // groups), "o": c.atoms.new(y[1] // groups)}
    s.ins = [big[1], big[0], weight] if back else [big[0], weight, [("g", "o")]][: len(c.ins)]
    s.outs = [o for o, m in zip((big[0], weight, [("g", "o")]), c.args[10], strict=True) if m] if back else [big[1]]
    s.independent = {(1, len(s.outs) - 1), (2, len(s.outs) - 1)} if back and c.args[10][2] else set()
    return s


def pool(c: Call) -> Signature:
    """Pointwise in samples and channels; space stays whole."""
    seen: dict[tuple[int, ...], int] = {}

    def cells(s: tuple[int, ...]) -> list[Cell]:
        k = seen.setdefault(s[-2:], len(seen))
        return [*labels(len(s) - 2), (f"x{k}",), (f"y{k}",)]

    s = Signature([cells(v.shape) for v in c.ins], [cells(s) for s in c.shapes])
    s.whole = {f"{side}{k}" for k in seen.values() for side in "xy"}
    return s


def attention(c: Call) -> Signature:
    """Query heads = kv heads x repetitions, so grouped and multi-query attention need no case of their own."""
    back = "backward" in c.name
    q, k = c.ins[1:3] if back else c.ins[:2]
    lse = "b (g r) t" if (c.ins[5].shape if back else c.shapes[1])[1] == q.shape[1] else "b t (g r)"
    qs, ks, vs, os = "b (g r) t e!", "b g s! e!", "b g s! f!", "b (g r) t f!"
    text = f"{os}, {qs}, {ks}, {vs}, {os}, {lse} -> {qs}, {ks}, {vs}" if back else f"{qs}, {ks}, {vs} -> {os}, {lse}"
    s = pattern(text)(replace(c, ins=c.ins[: 6 if back else 3]))
    mask: list[Cell] = [("b",), ("g", "r"), ("t",), ("s",)]
    s.ins += [mask[4 - len(v.shape) :] for v in c.ins[6 if back else 3 :]]
    s.dims = {"g": c.atoms.new(k.shape[1]), "r": c.atoms.new(q.shape[1] // k.shape[1])}
    return s
