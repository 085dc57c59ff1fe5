"""The one rule on a program written by hand: y = gelu(x W1) W2, its loss and backward.  No torch anywhere."""

import builtins
import sys

import pytest

from partita.errors import Refused
from partita.program.dims import Signature
from partita.program.events import Collective, Compute, Kind, Partial, Phase, Repeat, Split, Tensor
from partita.program.program import Program
from partita.program.split import check_divides, derive, ranges, rewrite
from partita.program.text import from_json, to_json

B, D, F = 0, 1, 2  # atoms: batch 8, hidden 4, ffn 16
X, W1, W2, H, A, Y, GY, GW2, GA, GH, GW1, GX = range(12)


def signature(text, **more):
    ins, outs = ([[(c,) for c in part] for part in side.split(",")] for side in text.replace(" ", "").split("->"))
    dims = {"b": (B,), "d": (D,), "f": (F,), "e": (D,)}
    labels = {c[0] for side in (ins, outs) for cells in side for c in cells}
    return Signature(ins, outs, dims={k: dims[k] for k in labels}, **more)


def mlp(batch=8, ffn=16):
    def tensor(i, dims, kind=Kind.ACTIVATION, name=""):
        sizes = {B: batch, D: 4, F: ffn}
        return Tensor(i, tuple(sizes[d] for d in dims), "float32", tuple((d,) for d in dims), kind, name, i)

    tensors = (
        tensor(X, (B, D), Kind.INPUT, "x"), tensor(W1, (D, F), Kind.PARAMETER, "w1"), tensor(W2, (F, D), Kind.PARAMETER, "w2"),
        tensor(H, (B, F)), tensor(A, (B, F)), tensor(Y, (B, D)), tensor(GY, (B, D)), tensor(GW2, (F, D), Kind.GRADIENT, "w2"),
        tensor(GA, (B, F)), tensor(GH, (B, F)), tensor(GW1, (D, F), Kind.GRADIENT, "w1"), tensor(GX, (B, D)),
    )  # fmt: skip
    forward, backward, flop = Phase.FORWARD, Phase.BACKWARD, 2 * batch * 4 * ffn
    events = (
        Compute("mm", "up", forward, (X, W1), (H,), flop, signature("bd,df->bf")),
        Compute("gelu", "", forward, (H,), (A,), 0, signature("bf->bf")),
        Compute("mm", "down", forward, (A, W2), (Y,), flop, signature("bf,fd->bd")),
        Compute("gelu", "", forward, (Y,), (GY,), 0, signature("bd->bd")),
        Compute("mm", "down", backward, (A, GY), (GW2,), flop, signature("bf,bd->fd")),
        Compute("mm", "down", backward, (GY, W2), (GA,), flop, signature("bd,fd->bf")),
        Compute("gelu_backward", "", backward, (GA, H), (GH,), 0, signature("bf,bf->bf")),
        Compute("mm", "up", backward, (X, GH), (GW1,), flop, signature("bd,bf->df")),
        Compute("mm", "up", backward, (GH, W1), (GX,), flop, signature("bf,df->bd")),
        Compute("gelu", "", backward, (GX,), (GX,), 0, signature("bd->bd")),
    )
    classes = {"batch": frozenset({B}), "hidden": frozenset({D}), "ffn": frozenset({F})}
    return Program({B: batch, D: 4, F: ffn}, tensors, (Repeat(1, events),), {W1: GW1, W2: GW2}, classes)


def said(program):
    return [(c.phase, c.op, c.axis, c.nbytes) for c in program.collectives()]


@pytest.mark.law
def test_split_ffn_takes_one_all_reduce_each_way():
    p = mlp()
    d = derive(p, "tp", 2, p.classes["ffn"])
    assert d.layouts[W1] == Split(1, 0)
    assert d.layouts[W2] == Split(0, 0)
    assert said(rewrite(p, d)) == [("forward", "all_reduce", "tp", 8 * 4 * 4), ("backward", "all_reduce", "tp", 8 * 4 * 4)]


@pytest.mark.law
def test_split_batch_leaves_one_partial_gradient_per_parameter():
    p = mlp()
    d = derive(p, "dp", 4, p.classes["batch"], gradients=False)
    assert {g: d.layouts[g] for g in p.gradients.values()} == {GW1: Partial(), GW2: Partial()}
    assert not d.moves
    whole = derive(p, "dp", 4, p.classes["batch"])
    assert [(m.op, m.tensor, m.phase) for m in whole.moves] == [("all_reduce", GW1, "sync"), ("all_reduce", GW2, "sync")]


@pytest.mark.law
def test_held_parameters_are_gathered_per_phase_and_gradients_scattered():
    p = mlp()
    d = derive(p, "dp", 4, p.classes["batch"], held=True)
    assert [(m.op, m.tensor, m.phase) for m in d.moves] == [
        ("all_gather", W1, "forward"), ("all_gather", W2, "forward"), ("all_gather", W2, "backward"),
        ("all_gather", W1, "backward"), ("reduce_scatter", GW1, "sync"), ("reduce_scatter", GW2, "sync"),
    ]  # fmt: skip


@pytest.mark.law
@pytest.mark.parametrize("order", [("tp", "dp"), ("dp", "tp")])
def test_axes_compose_and_payloads_shrink_in_either_order(order):
    p = mlp()
    for axis in order:
        p = rewrite(p, derive(p, axis, 2, p.classes["ffn" if axis == "tp" else "batch"]))
    moved = sorted((c.axis, c.op, c.nbytes) for c in p.collectives())
    half = 8 * 4 * 4 // 2
    assert moved == [("dp", "all_reduce", 4 * 16 * 4 // 2)] * 2 + [("tp", "all_reduce", half)] * 2
    assert p.flop() == mlp().flop() // 4
    assert p.local_shape(H) == (4, 8)


@pytest.mark.law
def test_two_axes_on_one_dim_divide_it_twice():
    p = mlp()
    for axis in ("a", "b"):
        p = rewrite(p, derive(p, axis, 2, p.classes["ffn"]))
    assert p.local_shape(W2) == (4, 4)
    held = [set(range(s, s + n)) for axis in ("a", "b") for c in (0, 1) for s, n in ranges(p, W2, axis, c)[1]]
    assert held[0] == set(range(8))
    assert set().union(*(set(range(s, s + n)) for s, n in ranges(p, W2, "b", 1)[1])) & held[0] == {4, 5, 6, 7}
    with pytest.raises(Refused):
        derive(p, "c", 8, p.classes["ffn"])


def test_a_dim_that_does_not_divide_is_refused_with_numbers():
    p = mlp(ffn=6)
    with pytest.raises(Refused) as refused:
        derive(p, "tp", 4, p.classes["ffn"] | p.classes["batch"])
    text = str(refused.value)
    assert "P104" in text
    assert "'ffn'" in text
    assert "ffn = 6" in text
    assert "tp = 1 or 2" in text
    assert not check_divides(p, "tp", 2, p.classes["ffn"])


@pytest.mark.law
def test_saying_is_pure_on_any_mesh(monkeypatch):
    p = mlp(batch=1 << 13, ffn=1 << 12)
    real = builtins.__import__

    def guarded(name, *args, **kwargs):
        assert not name.startswith("torch"), "saying imports torch"
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guarded)
    for name in [n for n in sys.modules if n.split(".")[0] == "torch"]:
        monkeypatch.setitem(sys.modules, name, None)
    p = rewrite(p, derive(p, "tp", 4096, p.classes["ffn"]))
    p = rewrite(p, derive(p, "dp", 4096, p.classes["batch"], gradients=False, scalars=False))
    assert p.local_shape(H) == (2, 1)


@pytest.mark.law
def test_ranges_tile_the_dim():
    p = mlp()
    p = rewrite(p, derive(p, "tp", 4, p.classes["ffn"]))
    parts = [ranges(p, W1, "tp", c) for c in range(4)]
    assert [dim for dim, _ in parts] == [1] * 4
    assert sorted(i for _, found in parts for s, n in found for i in range(s, s + n)) == list(range(16))


@pytest.mark.law
def test_json_round_trips_a_rewritten_program():
    p = mlp()
    p = rewrite(p, derive(p, "tp", 2, p.classes["ffn"]))
    p = rewrite(p, derive(p, "dp", 2, p.classes["batch"], gradients=False)).with_notes("a note")
    assert from_json(to_json(p)) == p
    assert any(isinstance(e, Collective) for e in from_json(to_json(p)).events())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"partita_program": 1}', '{"partita_program": 99}', "not json"])
def test_what_is_no_program_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"program|Expecting"):
        from_json(text)
