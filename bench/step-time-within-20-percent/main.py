"""Predicted step time against measured, 2 ranks, 10th percentile against 10th percentile.

Probe and run alternate within the same minutes; of three repeats the middle error counts.
"""

import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import row, write

import partita as pt
from partita.strategies import DDP, TensorParallel
from partita.workload import GPT

REPEATS, STEPS, BOUND = 3, 24, 0.20
WORKLOAD = pt.Workload("gpt", GPT(layers=4, hidden=256, heads=4, vocab=256, sequence=128), batch=16)
PLANS = {"ddp, dp=2": ({"dp": 2}, [DDP()]), "tensor_parallel, tp=2": ({"tp": 2}, [TensorParallel()])}


def main() -> int:
    errors: dict[str, list[float]] = {name: [] for name in PLANS}
    for _ in range(REPEATS):
        pt.probe(quick=True)
        for name, (mesh, strategies) in PLANS.items():
            run = pt.train(pt.Plan(WORKLOAD, mesh=mesh, strategies=strategies), steps=STEPS)
            errors[name].append(run.error["time"])
    rows = []
    for name, found in errors.items():
        middle = median(found)
        shown = ", ".join(f"{100 * e:+.1f} %" for e in sorted(found))
        rows.append(
            row(
                f"{name}: step time predicted against measured",
                f"within {100 * BOUND:.0f} %",
                f"{100 * middle:+.1f} % ({shown})",
                held=abs(middle) <= BOUND,
            )
        )
    return write(__file__, rows, errors=errors)


if __name__ == "__main__":
    sys.exit(main())
