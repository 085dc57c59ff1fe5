"""Laws of the cube's product: two chained layers are the dense ones, back in the first layout; what is said is sent."""

import pytest
import torch
import torch.nn.functional as F

from partita.mesh import Mesh
from partita.program import panels
from partita.runtime.grid import Cube, cube_ab
from partita.runtime.ranks import run_ranks

AXES = ("tp_x", "tp_y", "tp_z")


def rows_of(x, net, first, second, features):
    """A rank's block of activations: dim 0 cut over two axes, the last dim over the third."""
    for axis in (first, second):
        x = x.chunk(net.size(axis), 0)[net.coordinate[axis]]
    return x.chunk(net.size(features), -1)[net.coordinate[features]].detach().contiguous()


def weight_of(w, net, inputs, weights, outputs):
    return rows_of(w, net, inputs, weights, outputs)


def chained(sizes, keep):
    """Per rank: the error of a layer up and one down, with all gradients; ledgers of forward and backward; buffers by step."""
    inputs, weights, outputs = "tp_y", "tp_x", "tp_z"
    x_, y_, z_ = (sizes[AXES.index(a)] for a in (inputs, weights, outputs))
    g, n = torch.Generator().manual_seed(0), x_ * y_ * z_
    rows, k, h = 2 * n, 3 * n, 5 * n
    shapes = ((rows, 3, k), (h, k), (k, h), (rows, 3, k))
    x, up, down, grad = (torch.randn(s, generator=g, dtype=torch.float64) for s in shapes)
    whole = [t.clone().requires_grad_() for t in (x, up, down)]
    out = F.linear(F.linear(whole[0], whole[1]).tanh(), whole[2])
    out.backward(grad)

    def work(net):
        cube = Cube(net, inputs, weights, outputs, keep=keep)
        cut = [
            lambda t: rows_of(t, net, weights, inputs, outputs),
            lambda t: weight_of(t, net, inputs, weights, outputs),
            lambda t: weight_of(t, net, outputs, weights, inputs),
        ]
        error, held = 0.0, []
        for _ in range(2):
            at = len(net.ledger)
            mine = [c(t).requires_grad_() for c, t in zip(cut, (x, up, down), strict=True)]
            y = cube_ab(cube_ab(mine[0], mine[1], cube, "up").tanh(), mine[2], cube.turned, "down")
            middle = len(net.ledger)
            y.backward(cut[0](grad))
            pairs = [(y, cut[0](out)), *((m.grad, c(w.grad)) for m, c, w in zip(mine, cut, whole, strict=True))]
            error = max(error, *((got - want).abs().max().item() for got, want in pairs))
            held.append(cube.space.nbytes)
        calls = [[e.json() for e in part] for part in (net.ledger[at:middle], net.ledger[middle:])]
        return error, calls, held, [t.nbytes for t in mine], [t.numel() for t in (x, up, down)]

    return run_ranks(Mesh(tuple(zip(AXES, sizes, strict=True))), work), (x_, y_, z_), h * 3 * rows // n * 8


def holds(sizes, *, keep):
    ranks, (i, w, o), hidden = chained(sizes, keep)
    over = {"inputs": "tp_y", "weights": "tp_x", "outputs": "tp_z"}
    turned = {"inputs": "tp_z", "weights": "tp_x", "outputs": "tp_y"}
    for error, (forward, backward), held, (x, up, down), _ in ranks:
        assert error < 1e-12
        assert held[0] == held[1]
        told = lambda moved, names, label: [[m.op, names[m.over], m.nbytes, "float64", label] for m in moved]
        assert forward == [
            *told(panels.cube(i, w, o, x, up, hidden), over, "up"),
            *told(panels.cube(o, w, i, hidden, down, x), turned, "down"),
        ]
        if keep:
            assert backward == [
                *told(panels.cube_backward(o, w, i, hidden, down, x), turned, "down"),
                *told(panels.cube_backward(i, w, o, x, up, hidden), over, "up"),
            ]
    return ranks


def total(calls, sizes):
    """Bytes sent over the whole cube."""
    size = dict(zip(AXES, sizes, strict=True))
    return sum(n * (size[a] - 1) // size[a] if op == "all_gather" else n * (op == "send") for op, a, n, *_ in calls)


@pytest.mark.gloo
@pytest.mark.law
def test_two_layers_are_the_dense_ones_and_move_the_published_volume():
    ranks = holds((2, 2, 2), keep=True)
    x, up, down = ranks[0][4]
    hidden = x * 5 // 3
    volume = 8 * (x + up + hidden + hidden + down + x)  # (q - 1)(|X| + |W| + |Y|) of either layer, q = 2
    assert sum(total(forward, (2, 2, 2)) for _, (forward, _), *_ in ranks) == volume
    assert sum(total(backward, (2, 2, 2)) for _, (_, backward), *_ in ranks) == volume


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 1, 3), (3, 1, 1), (1, 3, 2), (2, 3, 1)])
def test_cubes_of_any_sizes(sizes, keep):
    holds(sizes, keep=keep)
