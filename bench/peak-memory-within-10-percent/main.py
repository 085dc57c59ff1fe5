"""Predicted peak memory against the honest resident peak, plans of 100 MiB and more."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import row, write

import partita as pt
from partita.strategies import DDP, TensorParallel
from partita.workload import GPT, Llama

STEPS, BOUND = 5, 0.10
WORKLOADS = {
    "gpt": pt.Workload("gpt", GPT(layers=4, hidden=256, heads=4, vocab=256, sequence=128), batch=32),
    "gpt, dropout, tied, accumulate 2": pt.Workload(
        "gpt",
        GPT(layers=4, hidden=256, heads=4, vocab=256, sequence=128, tie_embeddings=True, dropout=0.1),
        batch=64,
        accumulate=2,
    ),
    "llama": pt.Workload("llama", Llama(layers=4, hidden=384, heads=8, kv_heads=4, vocab=512, sequence=128), batch=32),
}
PLANS = {
    "dp=2": ({"dp": 2}, [DDP()]),
    "tp=2": ({"tp": 2}, [TensorParallel()]),
    "dp=2 tp=2": ({"dp": 2, "tp": 2}, [TensorParallel(), DDP()]),
}


def main() -> int:
    rows = []
    for what, workload in WORKLOADS.items():
        for name, (mesh, strategies) in PLANS.items():
            run = pt.train(pt.Plan(workload, mesh=mesh, strategies=strategies), steps=STEPS)
            error, peak = run.error["memory"], run.json()["memory_bytes"]["peak"]
            rows.append(
                row(
                    f"{what}; {name}",
                    f"within {100 * BOUND:.0f} %",
                    f"{100 * error:+.1f} % of {peak / 2**20:.0f} MiB",
                    held=abs(error) <= BOUND,
                )
            )
    return write(__file__, rows)


if __name__ == "__main__":
    sys.exit(main())
