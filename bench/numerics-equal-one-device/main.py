"""Parameters, gradients and losses of split runs against one device, float64, after 3 steps."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import row, write

import partita as pt
from partita.strategies import DDP, TensorParallel
from partita.workload import GPT, MLP, Llama, ResNet

BOUND = 1e-10
WORKLOADS = {
    "gpt, tied, dropout 0.1": pt.Workload("gpt", GPT(tie_embeddings=True, dropout=0.1), batch=16, clip=0.5),
    "gpt, accumulate 2": pt.Workload("gpt", GPT(), batch=16, accumulate=2, clip=0.5),
    "llama, grouped heads": pt.Workload("llama", Llama(heads=8, kv_heads=4), batch=16),
    "resnet": pt.Workload("resnet", ResNet(), batch=16),
    "mlp": pt.Workload("mlp", MLP(), batch=16),
}
PLANS = {
    "dp=2": ({"dp": 2}, [DDP()]),
    "dp=4": ({"dp": 4}, [DDP()]),
    "tp=2": ({"tp": 2}, [TensorParallel()]),
    "tp=4": ({"tp": 4}, [TensorParallel()]),
    "dp=2 tp=2": ({"dp": 2, "tp": 2}, [TensorParallel(), DDP()]),
    "tp=2 dp=2": ({"tp": 2, "dp": 2}, [TensorParallel(), DDP()]),
}


def main() -> int:
    rows = []
    for what, workload in WORKLOADS.items():
        for name, (mesh, strategies) in PLANS.items():
            ranks = max(mesh.values()) if len(mesh) == 1 else None
            proof = pt.prove(pt.Plan(workload, mesh=mesh, strategies=strategies), ranks=ranks)
            error = proof.numerics.max_relative_error
            rows.append(row(f"{what}; {name}", f"<= {BOUND:g}", f"{error:.1e}", held=proof.proved and error <= BOUND))
    return write(__file__, rows)


if __name__ == "__main__":
    sys.exit(main())
