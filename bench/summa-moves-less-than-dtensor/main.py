"""What an MLP moves on four ranks, forward and backward: SUMMA's products, DTensor left alone on the same blocks, Megatron 1D.

Bytes are counted on the ranks' own sockets; SUMMA's also in the ledger. Every contestant's output and gradients are compared
with the dense MLP first, in float64.
"""

import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import row, write

from partita.mesh import Mesh
from partita.runtime.grid import Plane, ab
from partita.runtime.net import Net
from partita.runtime.ranks import run_ranks
from partita.runtime.wire import Wire

Q, ROWS, WIDTH, FFN, REPEATS = 2, 1024, 512, 2048, 3
SUMMA = 3 * (Q - 1) * (5 * ROWS * WIDTH + 8 * WIDTH**2) * 4  # bytes over the mesh: two layers, three products each
MEGATRON = 4 * (Q * Q - 1) * ROWS * WIDTH * 4  # two all-reduces of ROWS x WIDTH
PUBLISHED = 84e6  # DTensor left alone, as once measured with torch 2.13


@dataclass
class Task:
    """Whole inputs, weights as torch keeps them, the gradient of the output, and what one device makes of them."""

    x: Tensor
    up: Tensor
    down: Tensor
    grad: Tensor

    @staticmethod
    def of(dtype: torch.dtype) -> "Task":
        g = torch.Generator().manual_seed(0)
        shapes = ((ROWS, WIDTH), (FFN, WIDTH), (WIDTH, FFN), (ROWS, WIDTH))
        x, up, down, grad = (torch.randn(s, generator=g, dtype=torch.float64) for s in shapes)
        return Task(*(t.to(dtype) for t in (x, up / 20, down / 20, grad)))

    def truth(self) -> list[Tensor]:
        x, up, down = (t.clone().requires_grad_() for t in (self.x, self.up, self.down))
        y = F.linear(F.relu(F.linear(x, up)), down)
        y.backward(self.grad)
        return [y.detach(), x.grad, up.grad, down.grad]


Activation = Callable[[Tensor], Tensor]
Contestant = Callable[[Net, Task], Callable[[], list[Tensor]]]  # -> its step: this rank's blocks of the truth


def cut(t: Tensor, plane: Plane) -> Tensor:
    return t.chunk(Q, 0)[plane.i].chunk(Q, 1)[plane.j].contiguous()


def turned(t: Tensor, plane: Plane) -> Tensor:
    """A weight's block: outputs over the columns, inputs over the rows."""
    return t.chunk(Q, 0)[plane.j].chunk(Q, 1)[plane.i].contiguous()


def summa(net: Net, task: Task) -> Callable[[], list[Tensor]]:
    plane = Plane(net, "tp_row", "tp_col")
    parts = [cut(task.x, plane), turned(task.up, plane), turned(task.down, plane)]
    grad = cut(task.grad, plane)

    def step() -> list[Tensor]:
        x, up, down = (p.clone().requires_grad_() for p in parts)
        y = ab(F.relu(ab(x, up.t(), plane)), down.t(), plane)
        y.backward(grad)
        return [y.detach(), x.grad, up.grad, down.grad]

    return step


def megatron(net: Net, task: Task) -> Callable[[], list[Tensor]]:
    up, down = task.up.chunk(Q * Q, 0)[net.rank].contiguous(), task.down.chunk(Q * Q, 1)[net.rank].contiguous()

    def step() -> list[Tensor]:
        x, u, d = (p.clone().requires_grad_() for p in (task.x, up, down))
        part = F.linear(F.relu(F.linear(x, u)), d)
        y = part.detach().clone()
        dist.all_reduce(y)
        part.backward(task.grad)
        dist.all_reduce(x.grad)
        return [y, x.grad, u.grad, d.grad]

    return step


def dtensor(net: Net, task: Task, *, home: bool = True, act: Activation = F.relu) -> Callable[[], list[Tensor]]:
    """`home`: gradients are brought to their parameters' blocks, where an optimizer needs them; else they stay as they come."""
    mesh = init_device_mesh("cpu", (Q, Q))
    blocks = [Shard(0), Shard(1)]
    share = lambda t: distribute_tensor(t, mesh, blocks, src_data_rank=None)
    whole = [share(t) for t in (task.x, task.up.t().contiguous(), task.down.t().contiguous())]  # inputs x outputs
    grad = share(task.grad)

    def step() -> list[Tensor]:
        x, up, down = (t.clone().detach().requires_grad_() for t in whole)
        y = (act(x @ up) @ down).redistribute(mesh, blocks)
        y.backward(grad)
        gradients = [t.grad.redistribute(mesh, blocks) if home else t.grad for t in (x, up, down)]
        return [t.to_local() for t in (y.detach(), *gradients)]

    return step


ALONE, HOME, GELU = "DTensor left alone", "DTensor, gradients brought home", "DTensor left alone, GELU for ReLU"
CONTESTANTS: dict[str, Contestant] = {
    "SUMMA": summa,
    ALONE: partial(dtensor, home=False),
    HOME: dtensor,
    GELU: partial(dtensor, home=False, act=F.gelu),
    "Megatron 1D": megatron,
}


COMPARED = ("SUMMA", HOME, "Megatron 1D")  # the others hold their gradients in other layouts, or compute something else


def wanted(name: str, net: Net, truth: list[Tensor]) -> list[Tensor]:
    """This rank's blocks of the truth, as the contestant holds them."""
    plane = Plane(net, "tp_row", "tp_col")
    y, x, up, down = truth
    if name == "SUMMA":
        return [cut(y, plane), cut(x, plane), turned(up, plane), turned(down, plane)]
    if name == "Megatron 1D":
        return [y, x, up.chunk(Q * Q, 0)[net.rank], down.chunk(Q * Q, 1)[net.rank]]
    return [cut(t, plane) for t in (y, x, up.t(), down.t())]


def work(net: Net) -> dict[str, dict[str, float]]:
    warnings.simplefilter("ignore")  # DTensor warns of what it redistributes
    exact, plain = Task.of(torch.float64), Task.of(torch.float32)
    truth, found = exact.truth(), {}
    for name, make in CONTESTANTS.items():
        error = name in COMPARED and max(
            ((got - want).abs().max() / want.abs().max()).item()
            for got, want in zip(make(net, exact)(), wanted(name, net, truth), strict=True)
        )
        step, counted, at = make(net, plain), [], 0
        for _ in range(REPEATS):
            net.barrier()
            wire, at = Wire(net.excluded), len(net.ledger)
            wire.start()
            step()
            wire.stop()
            counted.append(wire.total)
        said = sum(e.nbytes * {"broadcast": (Q - 1) / Q, "send": 1.0}.get(e.op, 0.0) for e in net.ledger[at:])
        found[name] = {"error": float(error), "wire": statistics.median(counted), "ledger": said}
    return found


def main() -> int:
    ranks = run_ranks(Mesh.of({"tp_row": Q, "tp_col": Q}), work)
    total = {name: sum(r[name]["wire"] for r in ranks) for name in CONTESTANTS}
    ledger = sum(r["SUMMA"]["ledger"] for r in ranks)
    error = max(r[name]["error"] for r in ranks for name in CONTESTANTS)
    megabytes = lambda n: f"{n / 1e6:.2f} MB"
    rows = [
        row(
            "MLP on 2 x 2 ranks: outputs and gradients against one device, float64",
            "<= 1e-12",
            f"{error:.0e}",
            held=error <= 1e-12,
        ),
        row(
            "MLP on 2 x 2 ranks, moved: SUMMA, sum of the ledgers",
            f"{megabytes(SUMMA)} exactly",
            megabytes(ledger),
            held=ledger == SUMMA,
        ),
        _near("the same, on the sockets", total["SUMMA"], SUMMA, 0.005),
        _near("the same MLP on 4 ranks, moved: Megatron 1D", total["Megatron 1D"], MEGATRON, 0.005),
        _near(
            f"the same MLP on 2 x 2 ranks, moved: {ALONE}, gradients in the layout they come in", total[ALONE], PUBLISHED, 0.05
        ),
        row(
            f"the same MLP, moved: SUMMA / {ALONE}",
            "< 0.75",
            f"{total['SUMMA'] / total[ALONE]:.3f}",
            held=total["SUMMA"] < 0.75 * total[ALONE],
        ),
        {"what": f"{GELU}: its backward reads what came in, which is gathered once more", "moved": megabytes(total[GELU])},
        {"what": f"{HOME} (an optimizer needs them there; SUMMA's are), on the sockets", "moved": megabytes(total[HOME])},
    ]
    return write(__file__, rows, task={"rows": ROWS, "width": WIDTH, "ffn": FFN, "mesh": [Q, Q], "dtype": "float32"})


def _near(what: str, got: float, want: float, within: float) -> dict[str, object]:
    target = f"{want / 1e6:.2f} MB, within {100 * within:g} %"
    return row(what, target, f"{got / 1e6:.2f} MB ({100 * (got / want - 1):+.2f} %)", held=abs(got / want - 1) <= within)


if __name__ == "__main__":
    sys.exit(main())
