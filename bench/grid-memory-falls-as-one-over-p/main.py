"""Bytes a rank holds between forward and backward of an MLP, counted by storage, in 1D, 2D, 2.5D and 3D, beside the formulas.

Parameters and kept activations are the storages that the layer's weights and autograd's saved tensors live in, its input and
its output; work buffers of the products stand apart. The same task on 4, 8 and 9 ranks. Then whole strategies on a GPT,
by the fold: the shares of one device's.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import row, write

from partita.cost.memory import occupancy
from partita.mesh import Mesh
from partita.runtime.grid import Cube, Plane, ab, cube_ab
from partita.runtime.net import Net
from partita.runtime.programs import program_of
from partita.runtime.ranks import run_ranks
from partita.strategies import Summa, TensorParallel, Tesseract
from partita.strategy import Strategy, compose
from partita.workload import GPT, Workload

ROWS, WIDTH, FFN, WITHIN = 1152, 288, 1152, 0.02  # divisible by 4, 8 and 9 ranks in every layout
X, H, W = 4 * ROWS * WIDTH, 4 * ROWS * FFN, 4 * 2 * WIDTH * FFN  # bytes of inputs, of the hidden value, of both weights
Held = tuple[float, float]  # bytes of parameters, and of activations: x, hidden before and after GELU, y


@dataclass
class Layout:
    """A layout on a mesh: its step, and what a rank should hold."""

    name: str
    mesh: dict[str, int]
    make: Callable[[Net], tuple[list[Tensor], Callable[[], Tensor], Callable[[], int]]]
    formula: Callable[[int], Held]


class _Reduced(torch.autograd.Function):
    """Sums forward over all ranks and passes the gradient on."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


def one(net: Net) -> tuple[list[Tensor], Callable[[], Tensor], Callable[[], int]]:
    up, down = torch.randn(FFN // net.ranks, WIDTH), torch.randn(WIDTH, FFN // net.ranks)
    held = [torch.randn(ROWS, WIDTH), up.requires_grad_(), down.requires_grad_()]
    return held, lambda: _Reduced.apply(F.linear(F.gelu(F.linear(held[0], up)), down)), lambda: 0


def plane(net: Net) -> tuple[list[Tensor], Callable[[], Tensor], Callable[[], int]]:
    place, depth = Plane(net, "tp_row", "tp_col"), net.size("tp_depth")
    r, c = place.rows, place.columns
    up, down = torch.randn(FFN // c, WIDTH // r).requires_grad_(), torch.randn(WIDTH // c, FFN // r).requires_grad_()
    held = [torch.randn(ROWS // (r * depth), WIDTH // c), up, down]
    return held, lambda: ab(F.gelu(ab(held[0], up.t(), place)), down.t(), place), lambda: place.space.nbytes


def cube(net: Net) -> tuple[list[Tensor], Callable[[], Tensor], Callable[[], int]]:
    place, q = Cube(net, "tp_y", "tp_x", "tp_z"), net.size("tp_x")
    up, down = torch.randn(FFN // q**2, WIDTH // q).requires_grad_(), torch.randn(WIDTH // q**2, FFN // q).requires_grad_()
    held = [torch.randn(ROWS // q**2, WIDTH // q), up, down]
    return held, lambda: cube_ab(F.gelu(cube_ab(held[0], up, place)), down, place.turned), lambda: place.space.nbytes


def even(p: int) -> Held:
    return W / p, (2 * X + 2 * H) / p


LAYOUTS = [
    *(Layout("1D", {"tp": p}, one, lambda p: (W / p, 2 * X + 2 * H / p)) for p in (4, 8, 9)),
    *(Layout("2D", {"tp_row": q, "tp_col": q}, plane, even) for q in (2, 3)),
    Layout("2D", {"tp_row": 2, "tp_col": 4}, plane, even),
    Layout("2.5D", {"tp_depth": 2, "tp_row": 2, "tp_col": 2}, plane, lambda p: (W / 4, (2 * X + 2 * H) / p)),
    Layout("3D", {"tp_z": 2, "tp_y": 2, "tp_x": 2}, cube, even),
]


def work(net: Net, layout: Layout) -> list[int]:
    """Bytes of parameters, of activations that are kept, and of work buffers after a step."""
    held, step, buffers = layout.make(net)
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = step()
    keep(held[0]), keep(y)
    parameters = {t.untyped_storage().data_ptr(): t.nbytes for t in held[1:]}
    y.backward(torch.ones_like(y))
    activations = sum(n for at, n in kept.items() if at not in parameters)
    return [sum(parameters.values()), activations, buffers()]


WORKLOAD = Workload("gpt", GPT(layers=6, hidden=768, heads=12, vocab=3072, sequence=128), batch=144)
STRATEGIES: dict[str, tuple[dict[str, int], Strategy, float]] = {  # mesh, and what a rank holds of the parameters
    "tensor_parallel, 4": ({"tp": 4}, TensorParallel(), 1 / 4),
    "summa, 2 x 2": ({"tp_row": 2, "tp_col": 2}, Summa(), 1 / 4),
    "summa, 2 x 3": ({"tp_row": 2, "tp_col": 3}, Summa(), 1 / 6),
    "tesseract, 2 x 2 x 2": ({"tp_depth": 2, "tp_row": 2, "tp_col": 2}, Tesseract(), 1 / 4),
}


def whole() -> list[dict[str, object]]:
    """What whole strategies hold at the peak by the fold, as shares of one device's; no ranks."""
    program = program_of(WORKLOAD)
    alone = occupancy(compose(program, (), Mesh())).parts
    rows = []
    for name, (mesh, strategy, share) in STRATEGIES.items():
        parts = occupancy(compose(program, (strategy,), Mesh.of(mesh))).parts
        part = {kind: parts[kind] / alone[kind] for kind in ("parameters", "activations")}
        ranks = prod(mesh.values())
        even = not isinstance(strategy, TensorParallel)
        held = abs(part["parameters"] / share - 1) <= WITHIN and (not even or abs(part["activations"] * ranks - 1) <= WITHIN)
        target = f"1/{1 / share:g} and {f'1/{ranks}' if even else 'more'}, within 2 %"
        shown = ", ".join(f"{kind} 1/{1 / n:.2f}" for kind, n in part.items())
        rows.append(row(f"GPT, {name} ranks, by the fold: held of one device's", target, shown, held=held))
    return rows


def main() -> int:
    rows, table = [], []
    for layout in LAYOUTS:
        p = prod(layout.mesh.values())
        ranks = run_ranks(Mesh.of(layout.mesh), partial(work, layout=layout))
        parameters, activations, buffers = (max(r[n] for r in ranks) for n in range(3))
        want = layout.formula(p)
        off = max(abs(parameters / want[0] - 1), abs(activations / want[1] - 1))
        name = f"{layout.name} on {' x '.join(map(str, layout.mesh.values()))} ranks"
        shown = f"{100 * off:.2f} %"
        rows.append(
            row(f"{name}: parameters and activations of a rank against the formula", "within 2 %", shown, held=off <= WITHIN)
        )
        table.append(
            {
                "layout": name,
                "parameters_kib": round(parameters / 1024),
                "activations_kib": round(activations / 1024),
                "activations_of_one_device": f"1/{(2 * X + 2 * H) / activations:.2f}",
                "work_buffers_kib": round(buffers / 1024),
            }
        )
    return write(__file__, [*rows, *whole(), *table], task={"rows": ROWS, "width": WIDTH, "ffn": FFN, "dtype": "float32"})


if __name__ == "__main__":
    sys.exit(main())
