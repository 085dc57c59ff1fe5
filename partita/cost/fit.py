"""From a probe's raw times to the measured tables of a cluster file, and how far they miss what was kept out.  Pure.

Every fifth product is kept out and predicted from the others. Of a curve, every second inner point is judged by the curve
through the others.
"""

import os
from collections.abc import Mapping
from statistics import median
from typing import Any

from partita.cluster import Curve, Product, cores, fingerprint, machine
from partita.cost.collective import algorithmic
from partita.cost.compute import Work, product_rate

KEPT_OUT = 5  # every fifth product
CLASS_OF_ENTRY = {  # a class -> the entry that stands for its ops that were not measured
    "elementwise": "add", "activation": "silu", "norm": "native_layer_norm_backward", "softmax": "_softmax",
    "gather": "embedding", "random": "bernoulli_", "reduction": "sum", "copy": "clone", "optimizer": "addcdiv_",
}  # fmt: skip
Points = list[tuple[float, float]]


def merged(ranks: list[list[list[Any]]]) -> list[list[Any]]:
    """The same rows with the mean of the ranks' seconds."""
    return [[*rows[0][:-1], sum(row[-1] for row in rows) / len(rows)] for rows in zip(*ranks, strict=True)]


def split_out(rows: list[Any], first: int = 2) -> tuple[list[Any], list[Any]]:
    """(kept, kept out): every fifth row is out, the first two never."""
    out = rows[first::KEPT_OUT]
    return [row for at, row in enumerate(rows) if at < first or (at - first) % KEPT_OUT], out


def interference(lost: float) -> float:
    """The u = w of a two-rate model in which total = compute + communication u / (1 - w).

    Args:
        lost: (both - compute) / communication, as measured; 1 means that overlap bought nothing.

    Example:
        >>> interference(1.0)
        0.5
    """
    return min(0.5, max(0.0, lost / (1 + lost)))


def curves(rows: list[list[Any]]) -> dict[str, Points]:
    """Points of each op, ascending, their times never falling."""
    found: dict[str, Points] = {}
    for op, x, seconds in sorted(rows, key=lambda row: (row[0], row[1])):
        points = found.setdefault(op, [])
        points.append((float(x), max(seconds, points[-1][1] if points else 0.0)))
    return found


def interior_errors(points: Points) -> list[float]:
    """Every second inner point of a curve against the curve through the others."""
    found = []
    for at in range(1, len(points) - 1, 2):
        rest = points[:at] + points[at + 1 :]
        curve = Curve(tuple(x for x, _ in rest), tuple(y for _, y in rest))
        found.append(curve(points[at][0]) / points[at][1] - 1)
    return found


def product_errors(kept: list[Product], out: list[Product]) -> list[float]:
    """Products kept out against the rates of the nearest that were kept."""
    found = []
    for p in out:
        near = [q for q in kept if (q.dtype, q.op) == (p.dtype, p.op)]
        work = Work(p.op, "matmul", p.dtype, 2 * p.count * p.m * p.n * p.k, 0, p.count, p.m, p.n, p.k)
        found.append(work.flop / product_rate(work, near) / p.seconds - 1)
    return found


def heading(op: str) -> str:
    """The heading an op's residual is printed under."""
    known = {"mm": "matmul", "convolution": "convolution", "convolution_backward": "convolution"}
    return known.get(op, "attention" if "attention" in op else "elementwise and norms")


def assembled(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """The measured tables, and the median residual of each class."""
    kept, out = (
        [Product(dtype, count, m, n, k, seconds, op) for op, dtype, count, m, n, k, seconds in rows]
        for rows in split_out(raw["products"])
    )
    errors: dict[str, list[float]] = {}
    for p in out:
        errors.setdefault(heading(p.op), []).extend(product_errors(kept, [p]))
    ops = curves(raw["ops"])
    for op, points in ops.items():
        errors.setdefault(heading(op), []).extend(interior_errors(points))
    calls: dict[tuple[str, int], Points] = {}
    for op, ranks, size, seconds in raw["collectives"]:
        calls.setdefault((op, ranks), []).append((float(size), seconds))
    for points in calls.values():
        errors.setdefault("collectives", []).extend(interior_errors(points))
    rows = [{"op": op, "dtype": "float32", "points": points} for op, points in ops.items()]
    rows += [{"op": name, "dtype": "float32", "points": ops[op]} for name, op in CLASS_OF_ENTRY.items() if op in ops]
    tables = {
        "ops": rows,
        "products": [
            {"op": p.op, "dtype": p.dtype, "count": p.count, "m": p.m, "n": p.n, "k": p.k, "seconds": p.seconds} for p in kept
        ],
        "collectives": [{"op": op, "ranks": ranks, "points": points} for (op, ranks), points in calls.items()],
    }
    return tables, {name: median(map(abs, found)) for name, found in errors.items() if found}


def table_of(raw: Mapping[str, Any], tables: Mapping[str, Any], residuals: Mapping[str, float], when: str) -> dict[str, Any]:
    """The cluster file of this machine: catalogue entry `cpu` with its numbers measured."""
    here = machine()
    source = f"probe of this machine ({here['cpu']}, {here['cores']} cores, torch {here['torch']})"

    def number(value: float) -> dict[str, Any]:
        return {"value": float(value), "source": source, "date": when}

    rates: dict[str, list[float]] = {}
    for p in (p for p in tables["products"] if p["op"] == "mm"):
        rates.setdefault(p["dtype"], []).append(2.0 * p["count"] * p["m"] * p["n"] * p["k"] / p["seconds"])
    points = next(row["points"] for row in tables["ops"] if row["op"] == "add")
    reduce = [(size, seconds) for op, ranks, size, seconds in raw["collectives"] if op == "all_reduce" and ranks == 2]
    (_, floor), (size, seconds) = reduce[0], reduce[-1]
    half_width = 2 * max(residuals.get("matmul", 0.0), residuals.get("step", 0.0), 0.1)
    share = interference(raw["beside"]["lost"])
    return {
        "partita": 1,
        "cluster": {"device": "cpu", "nodes": 1, "per_node": cores(), "backend": "gloo"},
        "machine": {"fingerprint": fingerprint(), **here},
        "device": {
            "memory": number(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
            "bandwidth": number(points[-1][0] / points[-1][1]),
            "launch": number(points[0][1] + raw["overheads"]["autograd"]),
            "flop": {dtype: number(max(found)) for dtype, found in rates.items()},
            "efficiency": {"matmul": number(median(rates["float32"]) / max(rates["float32"])), "memory": number(1.0)},
            **{name: number(raw["overheads"][name]) for name in ("autograd", "view", "step")},
            **({"kernel": number(raw["kernel"]["bytes"])} if raw.get("kernel") else {}),
        },
        "links": {
            "node": {
                "start": number(floor / 2),
                "latency": number(floor / 4),  # an all-reduce of two ranks takes two steps
                "bandwidth": number(algorithmic("all_reduce", size, 2) / seconds),
                "efficiency": number(1.0),
            }
        },
        "band": {"low": number(1 / (1 + half_width)), "high": number(1 + half_width)},
        "interference": {"compute": number(share), "communication": number(share)},
        "measured": {"source": f"{source} ({when})", **tables, "residuals": dict(residuals)},
    }
