"""Peak memory with and without recomputation: predicted against measured, and the fall."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import row, write

import partita as pt
from partita.strategies import DDP, Recompute, TensorParallel
from partita.workload import GPT

STEPS, BOUND, SLACK = 3, 0.05, 2 << 20
TARGET = "within 5 % + 2 MiB, and below the peak without"
WORKLOAD = pt.Workload("gpt", GPT(layers=6, hidden=256, heads=4, vocab=256, sequence=128), batch=64)
MESHES = {"one device": {}, "dp=2": {"dp": 2}, "tp=2": {"tp": 2}}
POLICIES = {"without": [], "block": [Recompute()], "selective": [Recompute(policy="selective")]}


def peak_of(mesh: dict[str, int], memory: list) -> tuple[float, float, float]:
    """(predicted, measured) bytes at the peak, and seconds of a step."""
    strategies = [*[TensorParallel()] * ("tp" in mesh), *memory, *[DDP()] * ("dp" in mesh)]
    run = pt.train(pt.Plan(WORKLOAD, mesh=mesh, strategies=strategies), steps=STEPS)
    told = run.json()
    return told["predicted"]["memory_bytes"]["peak"], told["memory_bytes"]["peak"], told["step_seconds"]


def main() -> int:
    rows = []
    for where, mesh in MESHES.items():
        plain = 0.0
        for policy, memory in POLICIES.items():
            predicted, measured, _ = peak_of(mesh, memory)
            plain = plain or measured
            near = abs(predicted - measured) <= BOUND * measured + SLACK
            found = (
                f"{100 * (predicted / measured - 1):+.1f} % of {measured / 2**20:.0f} MiB, {measured / plain:.2f} of without"
            )
            held = near and (policy == "without" or measured < plain)
            rows.append(row(f"{where}; {policy}", TARGET, found, held=held))
            print(rows[-1], file=sys.stderr, flush=True)
    return write(__file__, rows)


if __name__ == "__main__":
    sys.exit(main())
