"""Measures this machine: what `here` predicts with.

Two forked ranks run the same list at the same time, so every core is as busy as in a real run. Each entry is the lower
quartile of its repeats. What was kept out of the tables is predicted from them, and the residual of each class printed; last
a small real training step is predicted and compared. Nothing of it enters the tables.

    products      matrix products of a layer: forward, gradient of the input, gradient of the weight
    ops           every other op a model spends time in, over bytes moved (attention and convolution over flop)
    overheads     a view, a node of the autograd graph, an op of the optimizer's loop
    collectives   each one over eight sizes, per group size
    beside        matrix products beside an all-reduce: the two-rate interference
"""

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from partita.cluster import from_file, probe_path
from partita.cost.fit import assembled, merged, table_of
from partita.mesh import Mesh
from partita.plans.writing import toml
from partita.runtime.entries import (
    Entry,
    Pool,
    Shape,
    aten,
    attention_entries,
    convolution_entries,
    op_entries,
    product_entry,
    product_shapes,
    quartile,
    timed,
)
from partita.runtime.meter import STATUS, resident
from partita.runtime.net import Net
from partita.runtime.programs import program_of
from partita.runtime.ranks import run_ranks
from partita.runtime.task import subject_of
from partita.simulate import simulate
from partita.units import format_time
from partita.workload import GPT, Workload

AXIS = "probe"
SIZES = tuple(1 << k for k in (8, 12, 14, 16, 18, 20, 22, 24))  # bytes of a collective
CALLS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
HELD_OUT = Workload("gpt", GPT(layers=3, hidden=192, heads=4, vocab=256, sequence=96), batch=12)  # sizes no entry has


@dataclass(frozen=True)
class Budget:
    """How much to measure.

    Args:
        quick: The short list.
        entry: Seconds an entry may take.
        ends: Clock (`time.monotonic`) from which on entries are only run twice: a busy machine takes longer.
    """

    quick: bool
    entry: float
    ends: float

    def slice(self, share: float = 1.0) -> float:
        """Seconds for the next entry."""
        return self.entry * share if time.monotonic() < self.ends else 0.0


# ---- on the ranks


def measure(net: Net, budget: Budget) -> dict[str, Any]:
    """Everything, on one rank of two; the ranks stay in step by a tiny all_reduce before each entry."""
    torch.set_num_threads(1)
    with torch.no_grad(), net.quiet():
        pool = Pool(torch.float32)
        shapes = list(product_shapes(quick=budget.quick))
        found: dict[str, Any] = {"products": products(net, pool, budget, shapes), "ops": ops(net, pool, budget)}
        found["products"] += products(
            net, Pool(torch.bfloat16), budget, [s for s in shapes if s.m == 2048][:: 4 if budget.quick else 2]
        )
        found["products"] += convolutions(net, pool, budget)
        found |= {"collectives": collectives(net, budget), "beside": beside(net, pool)}
    return found | {"kernel": {"bytes": kernel()}, "overheads": overheads(), "step": real_step(net)}


def together(net: Net) -> None:
    """Wait for the other ranks."""
    net.all_reduce(torch.zeros(1), AXIS)


def products(net: Net, pool: Pool, budget: Budget, shapes: list[Shape]) -> list[list[Any]]:
    """[op, dtype, count, m, n, k, seconds] of each shape."""
    rows, dtype = [], str(pool.block.dtype).removeprefix("torch.")
    for shape, entry in ((shape, product_entry(pool, shape)) for shape in shapes):
        together(net)
        rows.append(["mm", dtype, *shape[:4], timed(entry.make, entry.call, budget.slice())])
    return rows


def convolutions(net: Net, pool: Pool, budget: Budget) -> list[list[Any]]:
    """The same of convolutions, forward and backward."""
    rows = []
    for shape, entry in convolution_entries(pool):
        together(net)
        rows.append([entry.op, "float32", *shape[:4], timed(entry.make, entry.call, budget.slice(0.5))])
    return rows


def ops(net: Net, pool: Pool, budget: Budget) -> list[list[Any]]:
    """[op, bytes or flop, seconds] of everything that is not a product."""
    sizes = (8, 13, 16, 19, 21) if budget.quick else (8, 11, 13, 15, 17, 19, 21, 22)
    entries: list[Entry] = [entry for k in sizes for entry in op_entries(pool, 1 << k)]
    entries += attention_entries(pool, quick=budget.quick)
    rows = []
    for entry in entries:
        together(net)
        rows.append([entry.op, entry.amount, timed(entry.make, entry.call, budget.slice(0.5))])
    return rows


def overheads() -> dict[str, float]:
    """Seconds of a view, of what autograd adds to an op (half for making, half for running a node), of an optimizer's op."""
    x, many = torch.ones(4, requires_grad=True), 64

    def chain(x: Tensor) -> Tensor:
        for _ in range(many):
            x = torch.sigmoid(x)
        return x

    def views(x: Tensor) -> Tensor:
        for _ in range(many):
            x = x.view(2, 2).view(4)
        return x

    with torch.no_grad():
        plain = timed(lambda: (x,), chain, 0.02) / many
        back = timed(lambda: (x, x), lambda g, y: [aten.sigmoid_backward(g, y) for _ in range(many)], 0.02) / many
    forward = timed(lambda: (x,), chain, 0.02) / many
    backward = timed(lambda: (chain(x).sum(),), lambda y: y.backward(), 0.05) / many
    view = timed(lambda: (x,), views, 0.02) / (2 * many)
    return {
        "autograd": max(0.0, (forward - plain + backward - back) / 2),
        "view": view,
        "step": max(0.0, optimizer_op() - plain),
    }


def optimizer_op() -> float:
    """Seconds an op of AdamW's loop takes on parameters of 4 elements: ten ops a parameter."""
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(32)]
    for p in parameters:
        p.grad = torch.ones(4)
    optimizer = torch.optim.AdamW(parameters)
    return timed(lambda: (), optimizer.step, 0.05) / (10 * len(parameters))


def kernel() -> float:
    """Bytes that stay resident for every new shape of a bfloat16 product; 0 where that cannot be read."""
    block, sizes = torch.ones(1 << 16, dtype=torch.bfloat16), range(97, 105)  # shapes nothing else has

    def product(n: int) -> None:
        torch.mm(block[: n * 128].view(n, 128), block[: 128 * 128].view(128, 128))

    if not STATUS.exists():
        return 0.0
    product(96)
    before = resident("RssAnon")
    for n in sizes:
        product(n)
    return max(0.0, (resident("RssAnon") - before) / len(sizes))


def collectives(net: Net, budget: Budget) -> list[list[Any]]:
    """[op, ranks, bytes of the large side, seconds] of every collective."""
    size, rows = net.size(AXIS), []
    for nbytes, op in itertools.product(SIZES, CALLS):
        whole = torch.ones(nbytes // 4)
        part = whole[: len(whole) // size]
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda x=whole: net.all_reduce(x, AXIS),
            "all_gather": lambda x=part: net.all_gather(x, AXIS),
            "reduce_scatter": lambda x=whole: net.reduce_scatter(x, AXIS),
            "all_to_all": lambda x=whole: net.all_to_all(x, AXIS),
            "broadcast": lambda x=whole: net.broadcast(x, AXIS),
        }
        count = (30 if nbytes <= 1 << 18 else 10 if nbytes <= 1 << 22 else 5) * (1 if budget.quick else 2)
        late = net.share(time.monotonic() > budget.ends + 3)
        times = [clock(net, calls[op]) for _ in range(4 if late else count)]
        rows.append([op, size, nbytes, quartile(times)])
    return rows


def clock(net: Net, call: Callable[[], Any]) -> float:
    """Seconds of one call that all ranks enter together."""
    together(net)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def beside(net: Net, pool: Pool) -> dict[str, float]:
    """What overlap costs: (both - compute) / communication, over rounds of products alone, an all_reduce alone, and both."""
    payload, weight, shares = torch.ones(1 << 22), pool(256, 1024), []

    def compute() -> None:
        for _ in range(8):
            torch.mm(pool(512, 256), weight)

    def both() -> None:
        work = net.all_reduce(payload, AXIS, overlapped=True)
        compute()
        if work:
            work.wait()

    for _ in range(12):
        alone, moving, joint = clock(net, compute), clock(net, lambda: net.all_reduce(payload, AXIS)), clock(net, both)
        shares.append((joint - alone) / moving)
    return {"lost": median(shares)}


def real_step(net: Net) -> float:
    """Seconds of a real training step of `HELD_OUT` without communication, both ranks at once (10th percentile of up to 20)."""
    subject = subject_of(HELD_OUT, synthetic=True)
    module = subject.make()
    optimizer, batch = subject.optimizer(module), subject.batches(0)

    def step() -> None:
        loss = subject.evaluate(module, batch)
        assert isinstance(loss, Tensor)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with net.quiet():
        first = [clock(net, step) for _ in range(3)]
        count = net.share(max(5, min(20, round(3 / first[-1]))))
        return sorted(clock(net, step) for _ in range(count))[count // 10]


def collectives_only(net: Net, budget: Budget) -> list[list[Any]]:
    """The collectives of another group size."""
    torch.set_num_threads(1)
    with net.quiet():
        return collectives(net, budget)


# ---- the verb


def probe(folder: Path, *, quick: bool = False, out: Path | None = None, say: Callable[[str], None] | None = None) -> Path:
    """Measure this machine and write its cluster file.

    Args:
        folder: The user's cache folder: `here` finds the file there by the machine's fingerprint.
        quick: At most 20 s with fewer sizes, instead of at most 90 s.
        out: Where to write it instead.
        say: Called with each line a user should read; None writes them to standard error.

    Returns:
        The file written.
    """
    say = say or (lambda line: print(line, file=sys.stderr))  # noqa: T201
    began = time.perf_counter()
    budget = Budget(quick, 0.05 if quick else 0.15, time.monotonic() + (8 if quick else 60))
    ranks = run_ranks(Mesh(((AXIS, 2),)), lambda net: measure(net, budget))
    raw: dict[str, Any] = {name: merged([rank[name] for rank in ranks]) for name in ("products", "ops", "collectives")}
    raw |= {
        name: {k: sum(rank[name][k] for rank in ranks) / len(ranks) for k in ranks[0][name]}
        for name in ("overheads", "beside", "kernel")
    }
    if not quick:
        raw["collectives"] += merged(run_ranks(Mesh(((AXIS, 4),)), lambda net: collectives_only(net, budget)))
    path, measured = out or probe_path(folder), sum(rank["step"] for rank in ranks) / len(ranks)
    for line in _written(raw, path, measured, folder):
        say(line)
    say(f"{path} written after {time.perf_counter() - began:.0f} s")
    return path


def _written(raw: dict[str, Any], path: Path, measured: float, folder: Path) -> list[str]:
    """Write the file, predict the step that was kept out with it, write its error too; the lines to print."""
    tables, residuals = assembled(raw)
    when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(toml(table_of(raw, tables, residuals, when)), encoding="utf-8")
    predicted = simulate(program_of(HELD_OUT, folder), from_file(path), Mesh()).seconds
    lines = [f"{name:<24} {100 * residual:5.1f} % off what was kept out (median)" for name, residual in residuals.items()]
    residuals["step"] = abs(predicted / measured - 1)
    path.write_text(toml(table_of(raw, tables, residuals, when)), encoding="utf-8")
    step = f"{'a real training step':<24} {100 * residuals['step']:5.1f} % off"
    return [*lines, f"{step}: predicted {format_time(predicted)}, measured {format_time(measured)}"]
