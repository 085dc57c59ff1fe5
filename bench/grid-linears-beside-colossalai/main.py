"""Linear layers on a plane and on a cube, ours beside ColossalAI's legacy 2D, 2.5D and 3D ones, in one process group.

Each is first compared with the dense layer in float64, output and all gradients; then forward and backward are timed in turns
in float32, and the bytes of one turn are counted on the sockets.
"""

import importlib.util
import resource
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from interleave import interleaved, slowest
from record import row, write

from partita.mesh import Mesh
from partita.runtime.grid import Cube, Plane, ab, cube_ab
from partita.runtime.net import Net
from partita.runtime.ranks import run_ranks
from partita.runtime.wire import Wire

HERE = importlib.util.find_spec("colossalai") is not None
if HERE:
    warnings.simplefilter("ignore")  # its imports tell of CUDA that is missing
    import peer

BOUND, REPEATS, ROUNDS = 0.8, 3, 20
SIZES = {"small": (64, 64, 128), "middle": (256, 256, 512), "large": (1024, 512, 2048)}  # rows, inputs, outputs
MESHES = {  # outermost first, in the order of its ranks
    "2d": (("tp_row", 2), ("tp_col", 2)),
    "2.5d": (("tp_depth", 2), ("tp_row", 2), ("tp_col", 2)),
    "3d": (("tp_z", 2), ("tp_y", 2), ("tp_x", 2)),
}
SETTINGS = {"2.5d": {"depth": 2}}


@dataclass
class Layout:
    """How a contestant cuts each operand: the axes that cut each dim, outermost first."""

    x: tuple[tuple[str, ...], tuple[str, ...]]
    weight: tuple[tuple[str, ...], tuple[str, ...]]  # outputs x inputs
    y: tuple[tuple[str, ...], tuple[str, ...]]
    bias: tuple[str, ...]


PLANE = Layout(
    (("tp_depth", "tp_row"), ("tp_col",)), (("tp_col",), ("tp_row",)), (("tp_depth", "tp_row"), ("tp_col",)), ("tp_col",)
)
CUBE = Layout((("tp_x", "tp_y"), ("tp_z",)), (("tp_y", "tp_x"), ("tp_z",)), (("tp_x", "tp_z"), ("tp_y",)), ("tp_y",))
THEIRS = {  # the bias of their plane is cut over the rows as well, and gathered
    "2d": Layout(PLANE.x, PLANE.weight, PLANE.y, ("tp_col", "tp_row")),
    "2.5d": PLANE,
    "3d": Layout(CUBE.x, (("tp_y",), ("tp_z", "tp_x")), CUBE.y, ("tp_y",)),
}


def cut(net: Net, t: Tensor, axes: tuple[tuple[str, ...], ...]) -> Tensor:
    """This rank's block."""
    for dim, names in enumerate(axes):
        for name in names:
            t = t.chunk(net.size(name), dim)[net.coordinate.get(name, 0)]
    return t.contiguous()


Step = Callable[[], None]


@dataclass
class Layer:
    """A contestant's layer with its operands: a step fills their gradients."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    grad: Tensor
    forward: Callable[[Tensor], Tensor]
    after: Callable[[], None] = lambda: None  # sums of gradients that the layer leaves to its caller
    y: Tensor | None = None

    def step(self) -> None:
        self.x.grad = self.weight.grad = self.bias.grad = None
        self.y = self.forward(self.x)
        self.y.backward(self.grad)
        self.after()


def ours(net: Net, mode: str, task: dict[str, Tensor]) -> Layer:
    layout = CUBE if mode == "3d" else PLANE
    x, weight = (cut(net, task[name], axes).requires_grad_() for name, axes in (("x", layout.x), ("weight", layout.weight)))
    bias = cut(net, task["bias"], (layout.bias,)).requires_grad_()
    if mode == "3d":
        place, sums = Cube(net, "tp_y", "tp_x", "tp_z", keep=True), {"tp_x": (bias,), "tp_z": (bias,)}
        forward = lambda x: cube_ab(x, weight, place) + bias
    else:
        plane, sums = Plane(net, "tp_row", "tp_col"), {"tp_row": (bias,), "tp_depth": (bias, weight)}
        forward = lambda x: ab(x, weight.t(), plane) + bias

    def after() -> None:
        for axis, tensors in sums.items():
            for t in tensors:
                net.all_reduce(t.grad, axis)

    return Layer(x, weight, bias, cut(net, task["grad"], layout.y), forward, after)


def theirs(net: Net, mode: str, task: dict[str, Tensor]) -> Layer:
    layout, inputs, outputs = THEIRS[mode], task["weight"].shape[1], task["weight"].shape[0]
    module: nn.Module = peer.LINEAR[mode](inputs, outputs, dtype=task["x"].dtype)
    if mode == "3d":
        peer.layers_3d.swap_in_out_group()  # a layer that is made turns the groups for the next one; each of ours stands alone
    with torch.no_grad():
        module.weight.copy_(cut(net, task["weight"], layout.weight).t())
        module.bias.copy_(cut(net, task["bias"], (layout.bias,)))
    x = cut(net, task["x"], layout.x).requires_grad_()

    def after() -> None:
        if mode == "2.5d":  # left to its trainer, as ours leaves it to the strategy
            for t in (module.weight, module.bias):
                net.all_reduce(t.grad, "tp_depth")

    return Layer(x, module.weight, module.bias, cut(net, task["grad"], layout.y), module, after)


def task_of(size: str, dtype: torch.dtype) -> dict[str, Tensor]:
    rows, inputs, outputs = SIZES[size]
    g = torch.Generator().manual_seed(0)
    shapes = {"x": (rows, inputs), "weight": (outputs, inputs), "bias": (outputs,), "grad": (rows, outputs)}
    return {name: torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for name, s in shapes.items()}


def error(net: Net, mode: str, layer: Layer, layout: Layout, *, turned: bool) -> float:
    """Output and gradients against the dense layer's, relative to the largest value of each."""
    task = task_of("small", torch.float64)
    x, weight, bias = (task[name].clone().requires_grad_() for name in ("x", "weight", "bias"))
    y = F.linear(x, weight, bias)
    y.backward(task["grad"])
    layer.step()
    weights = layer.weight.grad.t() if turned else layer.weight.grad
    pairs = [
        (layer.y, cut(net, y, layout.y)),
        (layer.x.grad, cut(net, x.grad, layout.x)),
        (weights, cut(net, weight.grad, layout.weight)),
        (layer.bias.grad, cut(net, bias.grad, (layout.bias,))),
    ]
    if turned and mode == "2.5d" and net.coordinate["tp_row"]:
        pairs.pop()  # the bias of its 2.5D layer lives in the first row; the others keep zeros in its place
    return max(((got - want).abs().max() / want.abs().max()).item() for got, want in pairs)


def counted(net: Net, step: Step) -> int:
    found = []
    for _ in range(3):
        net.barrier()
        wire = Wire(net.excluded)
        wire.start()
        step()
        wire.stop()
        found.append(wire.total)
    return median(found)


def spent(net: Net, step: Step) -> tuple[float, float]:
    """Processor milliseconds and context switches of a rank for one step: what a busy machine disturbs least."""
    net.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(ROUNDS):
        step()
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    switches = after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw
    return 1e3 * seconds / ROUNDS, switches / ROUNDS


def work(net: Net, mode: str) -> dict[str, object]:
    warnings.simplefilter("ignore")
    peer.launch(mode, net.ranks, net.rank, **SETTINGS.get(mode, {}))
    exact = task_of("small", torch.float64)
    told: dict[str, object] = {
        "error": {
            "ours": error(net, mode, ours(net, mode, exact), CUBE if mode == "3d" else PLANE, turned=False),
            "theirs": error(net, mode, theirs(net, mode, exact), THEIRS[mode], turned=True),
        }
    }
    for size in SIZES:
        task = task_of(size, torch.float32)
        steps = {"ours": ours(net, mode, task).step, "theirs": theirs(net, mode, task).step}
        seconds = [interleaved(net, steps, ROUNDS) for _ in range(REPEATS)]
        told[size] = {
            "seconds": seconds,
            "bytes": {name: counted(net, step) for name, step in steps.items()},
            "spent": {name: spent(net, step) for name, step in steps.items()},
        }
    dist.barrier()
    return told


def main() -> int:
    if not HERE:
        print(
            "skipped: ColossalAI 0.5.0 is not installed; bench/grid-linears-beside-colossalai/install PYTHON", file=sys.stderr
        )
        return 0
    rows, table = [], []
    for mode, axes in MESHES.items():
        ranks = run_ranks(Mesh(axes), partial(work, mode=mode))
        worst = {who: max(r["error"][who] for r in ranks) for who in ("ours", "theirs")}
        what = f"{mode} linear on {len(ranks)} ranks"
        shown = f"ours {worst['ours']:.0e}, theirs {worst['theirs']:.0e}"
        rows.append(
            row(
                f"{what}: output and gradients against the dense layer, float64",
                "<= 1e-12",
                shown,
                held=max(worst.values()) <= 1e-12,
            )
        )
        for size, (m, k, n) in SIZES.items():
            times = [slowest([r[size]["seconds"][i] for r in ranks]) for i in range(REPEATS)]
            ratios = sorted(t["ours"] / t["theirs"] for t in times)
            sent = {who: sum(r[size]["bytes"][who] for r in ranks) for who in ("ours", "theirs")}
            mean = lambda who, n, size=size, ranks=ranks: sum(r[size]["spent"][who][n] for r in ranks) / len(ranks)
            line: dict[str, object] = {"layer": f"{mode}, {m} x {k} -> {n}"}
            for who in ("ours", "theirs"):
                line |= {
                    f"{who}_ms": round(1e3 * median(t[who] for t in times), 1),
                    f"{who}_processor_ms": round(mean(who, 0), 2),
                }
                line[f"{who}_switches"] = round(mean(who, 1))
            table.append(line)
            label, middle = f"{what}, {m} x {k} -> {n}", median(ratios)
            shown = f"{middle:.2f} ({', '.join(f'{r:.2f}' for r in ratios)})"
            rows.append(
                row(f"{label}: ours / ColossalAI's, forward + backward, p10", f"<= {BOUND}", shown, held=middle <= BOUND)
            )
            shown = f"{sent['ours'] / 1e6:.2f} MB, {sent['theirs'] / 1e6:.2f} MB"
            rows.append(
                row(f"{label}: bytes of ours and of theirs", "ours <= theirs", shown, held=sent["ours"] <= sent["theirs"])
            )
            print(rows[-2], rows[-1], line, file=sys.stderr, flush=True)
    return write(__file__, [*rows, *table], torch=torch.__version__, colossalai="0.5.0")


if __name__ == "__main__":
    sys.exit(main())
