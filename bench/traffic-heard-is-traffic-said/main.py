"""Said = heard, call by call, and the wire within 1 % of the backend's model for payloads of 1 MB and more."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import row, write

import partita as pt
from partita.strategies import DDP, TensorParallel
from partita.workload import GPT

PLANS = {
    "ddp, dp=2": ({"dp": 2}, [DDP()]),
    "ddp, dp=4": ({"dp": 4}, [DDP()]),
    "tensor_parallel, tp=2": ({"tp": 2}, [TensorParallel()]),
    "tensor_parallel, tp=4": ({"tp": 4}, [TensorParallel()]),
    "both, dp=2 tp=2": ({"dp": 2, "tp": 2}, [TensorParallel(), DDP()]),
    "both, tp=2 dp=2": ({"tp": 2, "dp": 2}, [TensorParallel(), DDP()]),
}
LARGE = pt.Workload("gpt", GPT(layers=2, hidden=512, heads=8, vocab=512, sequence=128), batch=16)  # payloads of 1 MB and more
STEPS, BOUND = 5, 0.01


def main() -> int:
    rows = []
    for name, (mesh, strategies) in PLANS.items():
        proof = pt.prove(pt.Plan(pt.Workload("gpt", GPT(), batch=16), mesh=mesh, strategies=strategies))
        equal = proof.difference is None and proof.ledger_equal
        rows.append(
            row(f"{name}: calls said = heard", "equal", f"{proof.said} = {proof.heard}" if equal else "not equal", held=equal)
        )
    for name in ("ddp, dp=2", "tensor_parallel, tp=2", "ddp, dp=4", "tensor_parallel, tp=4"):
        mesh, strategies = PLANS[name]
        run = pt.train(pt.Plan(LARGE, mesh=mesh, strategies=strategies), steps=STEPS, out=None)
        got = run.json()
        wire = got["wire_bytes_per_rank"] / sum(t["backend_bytes"] for t in got["traffic"]) - 1
        rows.append(
            row(f"{name}: traffic predicted against recorded", "0", got["error"]["traffic"], held=got["error"]["traffic"] == 0)
        )
        rows.append(row(f"{name}: wire against the gloo model", "within 1 %", f"{100 * wire:+.2f} %", held=abs(wire) <= BOUND))
    return write(__file__, rows)


if __name__ == "__main__":
    sys.exit(main())
