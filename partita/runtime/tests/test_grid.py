"""Laws of the plane's products: the dense product and its gradients, on blocks; what is said is sent; buffers do not grow."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from partita.mesh import Mesh
from partita.program import panels
from partita.runtime.grid import Plane, ab, abt, atb, lookup
from partita.runtime.ranks import run_ranks

DENSE = {"ab": lambda a, b: a @ b, "abt": lambda a, b: a @ b.T, "atb": lambda a, b: a.T @ b}
OURS = {"ab": ab, "abt": abt, "atb": atb}


def mesh(r, c):
    return Mesh.of({"tp_row": r, "tp_col": c})


def plane_of(net, **more):
    return Plane(net, "tp_row", "tp_col", **more)


def block(whole, plane, *, upright=True):
    """This rank's block, as a leaf; `upright` or lying column by column."""
    mine = whole.detach().chunk(plane.rows, 0)[plane.i].chunk(plane.columns, 1)[plane.j]
    mine = mine.contiguous() if upright else mine.t().contiguous().t()
    return mine.requires_grad_()


def operands(kind, r, c, dtype=torch.float64):
    """Two operands that every cut of an r x c mesh divides, no two sizes alike; and a gradient."""
    step, g = r * c, torch.Generator().manual_seed(0)
    m, k, n = 2 * step, 3 * step, 5 * step
    shapes = {"ab": ((m, k), (k, n)), "abt": ((m, k), (n, k)), "atb": ((k, m), (k, n))}[kind]
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in (*shapes, (m, n))]


def both_ways(kind, r, c):
    """On every rank: how far result and gradients are off, the ledger, and whether waiting at once gives the same bits."""

    def work(net):
        a, b, grad = operands(kind, r, c)
        whole = [t.clone().requires_grad_() for t in (a, b)]
        out = DENSE[kind](*whole)
        out.backward(grad)
        found = []
        for overlapped in (True, False):
            plane = plane_of(net, overlapped=overlapped)
            for upright in (True, False):
                x, y = block(a, plane, upright=upright), block(b, plane, upright=not upright)
                before = len(net.ledger)
                z = OURS[kind](x, y, plane, "here")
                z.backward(block(grad, plane).detach())
                assert x.grad.stride() == x.stride()
                assert y.grad.stride() == y.stride()
                wants = [block(t, plane) for t in (out, whole[0].grad, whole[1].grad)]
                error = max((got - want).abs().max().item() for got, want in zip((z, x.grad, y.grad), wants, strict=True))
                found.append((error, [e.json() for e in net.ledger[before:]], [t.detach() for t in (z, x.grad, y.grad)]))
        same = all(
            torch.equal(p, q)
            for first, second in ((0, 2), (1, 3))
            for p, q in zip(found[first][2], found[second][2], strict=True)
        )
        return [max(error for error, _, _ in found), [ledger for _, ledger, _ in found], same]

    return run_ranks(mesh(r, c), work)


def said(kind, r, c):
    """The calls of forward and backward by axis, from the pure side."""
    a, b, out = (t.nbytes // (r * c) for t in operands(kind, r, c))
    calls = {
        "ab": [panels.ab(r, c, a, b), panels.abt(r, c, b, a), panels.atb(r, c, a, b)],
        "abt": [panels.abt(r, c, b, out), panels.ab(r, c, out, b), panels.atb(r, c, out, b)],
        "atb": [panels.atb(r, c, a, out), panels.abt(r, c, out, a), panels.ab(r, c, a, out)],
    }[kind]
    return {
        axis: [[m.op, axis, m.nbytes, "float64", "here"] for moved in calls for m in moved if m.over == over]
        for axis, over in (("tp_row", "row"), ("tp_col", "col"))
    }


def holds(kind, r, c):
    ranks = both_ways(kind, r, c)
    want = said(kind, r, c)
    for error, ledgers, same in ranks:
        assert error < 1e-12
        assert same
        for ledger in ledgers:
            assert {axis: [e for e in ledger if e[1] == axis] for axis in want} == want
    sent = [e for _, ledgers, _ in ranks for e in ledgers[0]]
    assert volume(sent) == elements(kind, r, c) * 8


def volume(sent):
    """Bytes over the whole mesh."""
    return sum(n for op, _, n, *_ in sent if op == "send")


def elements(kind, r, c):
    """The published volumes of a product and its two gradients."""
    a, b, out = (t.numel() for t in operands(kind, r, c))
    one = {
        "ab": lambda x, y, z: (c - 1) * x + (r - 1) * y,
        "abt": lambda x, y, z: (r - 1) * y + (c - 1) * z,
        "atb": lambda x, y, z: (c - 1) * x + (r - 1) * z,
    }
    gradients = {
        "ab": [("abt", out, b, a), ("atb", a, out, b)],
        "abt": [("ab", out, b, a), ("atb", out, a, b)],
        "atb": [("abt", b, out, a), ("ab", a, out, b)],
    }[kind]
    return one[kind](a, b, out) + sum(one[k](x, y, z) for k, x, y, z in gradients)


@pytest.mark.law
@pytest.mark.parametrize(("r", "c"), [(1, 1), (2, 2), (2, 3), (3, 2), (2, 4), (4, 6), (3, 3)])
def test_in_every_turn_each_rank_serves_one_and_all_work_on_what_they_need(r, c):
    place = lambda i, j: Plane(SimpleNamespace(size={"row": r, "col": c}.get, coordinate={"row": i, "col": j}), "row", "col")
    count = panels.panel_count(r, c)
    for i, j in itertools.product(range(r), range(c)):
        along_row, along_column = (place(i, j).turns(axis) for axis in ("col", "row"))
        numbers = [(j + d) % c * (count // c) + n for d, n in along_row]
        assert numbers == [(i + d) % r * (count // r) + n for d, n in along_column]  # one panel, found in either cut
        assert sorted(numbers) == list(range(count))
        assert all(along_row == place(i, other).turns("col") for other in range(c))  # so the owners of a turn are all different
        assert all(along_column == place(other, j).turns("row") for other in range(r))


@pytest.mark.gloo
@pytest.mark.law
@pytest.mark.parametrize("kind", ["ab", "abt", "atb"])
def test_products_are_the_dense_ones_and_send_what_is_said(kind):
    holds(kind, 2, 2)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ab", "abt", "atb"])
@pytest.mark.parametrize(("r", "c"), [(1, 2), (2, 1), (1, 4), (2, 3), (3, 2), (2, 4), (3, 3)])
def test_products_on_any_mesh(kind, r, c):
    holds(kind, r, c)


@pytest.mark.gloo
@pytest.mark.law
def test_linear_of_torch_needs_no_copy_and_buffers_do_not_grow():
    g = torch.Generator().manual_seed(0)
    x, w, grad = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((2, 4, 6), (10, 6), (2, 4, 10)))
    whole = [t.clone().requires_grad_() for t in (x, w)]
    F.linear(*whole).backward(grad)

    def work(net):
        plane, held, error = plane_of(net), [], 0.0
        mine = x.chunk(2, 0)[plane.i].chunk(2, 2)[plane.j].contiguous().requires_grad_()
        weight = w.chunk(2, 0)[plane.j].chunk(2, 1)[plane.i].contiguous().requires_grad_()
        for _ in range(4):
            mine.grad = weight.grad = None
            y = ab(mine, weight.t(), plane)
            y.backward(grad.chunk(2, 0)[plane.i].chunk(2, 2)[plane.j])
            held.append([plane.space.nbytes, *sorted(t.data_ptr() for t in plane.space._held.values())])
            wants = (
                whole[0].grad.chunk(2, 0)[plane.i].chunk(2, 2)[plane.j],
                whole[1].grad.chunk(2, 0)[plane.j].chunk(2, 1)[plane.i],
            )
            error = max(error, *((p.grad - q).abs().max().item() for p, q in zip((mine, weight), wants, strict=True)))
        assert weight.grad.is_contiguous()
        # two panels of either operand at most, two summands, two received: a block of x and of w at the largest
        return error, held, mine.nbytes, weight.nbytes

    for error, held, x_bytes, w_bytes in run_ranks(mesh(2, 2), work):
        assert error < 1e-12
        assert all(h == held[0] for h in held)
        assert held[0][0] <= 2 * (x_bytes + w_bytes) + 2 * max(x_bytes, w_bytes)


@pytest.mark.gloo
@pytest.mark.law
@pytest.mark.parametrize("padding", [None, 3])
def test_lookup_is_torchs(padding):
    g = torch.Generator().manual_seed(0)
    table, tokens = torch.randn(8, 6, generator=g, dtype=torch.float64), torch.randint(8, (4, 5), generator=g)
    grad = torch.randn(4, 5, 6, generator=g, dtype=torch.float64)
    whole = table.clone().requires_grad_()
    out = F.embedding(tokens, whole, padding_idx=padding)
    out.backward(grad)

    def work(net):
        plane = plane_of(net)
        mine = block(table, plane)
        some = lambda t: t.chunk(2, 0)[plane.i].chunk(2, 2)[plane.j].contiguous()
        y = lookup(tokens.chunk(2, 0)[plane.i], mine, plane, padding, "words")
        y.backward(some(grad))
        error = max((y - some(out)).abs().max().item(), (mine.grad - block(whole.grad, plane)).abs().max().item())
        try:
            lookup(torch.full((2, 5), 8), mine, plane)
        except IndexError as fault:
            told = str(fault)
        return error, [e.json() for e in net.ledger[:4]], told

    n = table.nbytes // 4
    for error, ledger, told in run_ranks(mesh(2, 2), work):
        assert error < 1e-14
        assert [e[:3] for e in ledger] == [
            ["send", "tp_row", n], ["receive", "tp_row", n], ["send", "tp_row", n], ["receive", "tp_row", n],
        ]  # fmt: skip
        assert told == "token 8 is outside the 8 classes"


@pytest.mark.gloo
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-6)])
def test_narrow_types_are_within_their_rounding(dtype, bound):
    a, b, grad = operands("ab", 2, 2, dtype)
    whole = [t.double().requires_grad_() for t in (a, b)]
    out = whole[0] @ whole[1]
    out.backward(grad.double())

    def work(net):
        plane = plane_of(net)
        x, y = block(a, plane), block(b, plane)
        z = ab(x, y, plane)
        z.backward(block(grad, plane).detach())
        wants = [block(t, plane) for t in (out, whole[0].grad, whole[1].grad)]
        return max(
            (got - w).abs().max().item() / w.abs().max().item() for got, w in zip((z, x.grad, y.grad), wants, strict=True)
        )

    assert max(run_ranks(mesh(2, 2), work)) < bound
