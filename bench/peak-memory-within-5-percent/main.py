"""Predicted peak memory against the honest resident peak, over data, sharding, pipelines and recomputation."""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import row, write

import partita as pt
from partita.errors import Refused
from partita.strategies import DDP, FSDP, ZBV, GPipe, OneFOneB, Recompute, TensorParallel, Zero1, Zero2, ZeroBubble
from partita.workload import GPT, Llama

STEPS, BOUND, LEAST = 4, 0.05, 100 << 20
GPT_6 = pt.Workload("gpt", GPT(layers=6, hidden=384, heads=6, vocab=256, sequence=128), batch=32)
LLAMA_6 = pt.Workload("llama", Llama(layers=6, hidden=384, heads=8, kv_heads=4, vocab=512, sequence=128), batch=32)
PARTS = 8
FAMILIES = {
    "data": [({"dp": 2}, [DDP()]), ({"dp": 2, "tp": 2}, [TensorParallel(), DDP()])],
    "sharding": [({"dp": 2}, [Zero1()]), ({"dp": 2}, [Zero2()]), ({"dp": 2}, [FSDP()])],
    "pipelines": [({"pp": 2}, [kind(microbatches=PARTS)]) for kind in (GPipe, OneFOneB, ZeroBubble, ZBV)],
    "recomputation": [
        ({}, [Recompute()]),
        ({"dp": 2}, [Recompute(policy="selective"), DDP()]),
        ({"pp": 2}, [Recompute(), OneFOneB(microbatches=PARTS)]),
    ],
}


def one(workload: pt.Workload, mesh: dict[str, int], strategies: list[Any]) -> dict[str, Any]:
    """A plan's peak, predicted and measured."""
    told = {"plan": f"{workload.model}: {' + '.join(s.name for s in strategies)}"}
    told["mesh"] = " x ".join(f"{a}={n}" for a, n in mesh.items()) or "one device"
    try:
        run = pt.train(pt.Plan(workload, mesh=mesh, strategies=strategies), steps=STEPS).json()
    except Refused as refused:
        return {**told, "predicted": "refused", "measured_peak": refused.faults[0].code, "error": refused.faults[0].what}
    predicted, measured = run["predicted"]["memory_bytes"]["peak"], run["memory_bytes"]["peak"]
    sizes = {"predicted": f"{predicted / 2**20:.0f} MiB", "measured_peak": f"{measured / 2**20:.0f} MiB"}
    return {
        **told,
        **sizes,
        "error": f"{100 * (predicted / measured - 1):+.1f} %",
        "share": predicted / measured - 1,
        "size": measured,
    }


def main(words: Sequence[str]) -> int:
    rows, cells = [], []
    for family, plans in FAMILIES.items():
        if words and family not in words:
            continue
        mine = []
        for workload in (GPT_6, LLAMA_6):
            for mesh, strategies in plans:
                mine.append(one(workload, mesh, strategies))
                print(mine[-1], flush=True)
        judged = [abs(cell["share"]) for cell in mine if cell.get("size", 0) >= LEAST]
        middle = median(judged) if judged else float("inf")
        what, found = (
            f"{family}: median error of {len(judged)} plans",
            f"{100 * middle:.1f} %, at most {100 * max(judged, default=0):.1f} %",
        )
        rows.append(row(what, f"<= {100 * BOUND:.0f} %", found, held=middle <= BOUND))
        cells += mine
    return write(__file__, [*rows, *cells])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
