"""The matrix: strategies x workloads x meshes, each cell proved on real ranks or refused with its law.

    main.py                     every cell that this commit has not proved yet, then the table
    main.py zbv resnet          only cells whose plan or workload has all these words

A cell is kept in results/cells.jsonl as soon as it is done, so a run that was stopped goes on where it was.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import commit, row, write

import partita as pt
from partita.errors import PartitaError, Refused
from partita.mesh import Mesh
from partita.program.schedules import one_f_one_b
from partita.program.schedules import write as written
from partita.proof.prove import data_ranks, prove_plan
from partita.strategies import GARDEN
from partita.strategy import Strategy, TextFile, microbatches
from partita.workload import GPT, Llama, ResNet, Workload

BOUND, CLIP = 1e-10, 0.5
KEPT = Path(__file__).parent / "results" / "cells.jsonl"
WORKLOADS = {
    "gpt": Workload(
        "gpt", GPT(layers=4, hidden=32, heads=4, vocab=64, sequence=8, tie_embeddings=True, dropout=0.1), clip=CLIP
    ),
    "llama": Workload("llama", Llama(layers=4, hidden=64, heads=8, kv_heads=4, vocab=64, sequence=8, ffn=96), clip=CLIP),
    "resnet": Workload("resnet", ResNet(layers=2, stages=2, hidden=4, classes=4, size=8), clip=CLIP),
}
PIPELINES = ("gpipe", "one_f_one_b", "interleaved", "looped_bfs", "zero_bubble", "zbv", "dualpipev")
DATA = ("ddp", "zero1", "zero2", "fsdp")
PARTS = 4  # microbatches of a pipeline


class Partly(nn.Module):
    """An MLP with a frozen layer in the middle and one that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.spare, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.layers[2].requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def batch_of(size: int) -> Callable[[int], dict[str, torch.Tensor]]:
    def batch(step: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(step)
        return {"x": torch.randn(size, 16), "y": torch.randint(4, (size,))}

    return batch


def error_of(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch["y"])


# ---------------------------------------------------------------- the plans
def made(name: str, **settings: Any) -> Strategy:
    kind = GARDEN[name]
    more = {"microbatches": PARTS} if name in PIPELINES else {}
    return kind(**more, **settings)


def plans() -> Iterator[tuple[dict[str, int], list[Strategy]]]:
    """Mesh (outermost first) and strategies (innermost first): alone, in pairs, in threes."""
    for name in DATA:
        yield {"dp": 2}, [made(name)]
    yield {"dp": 4}, [made("ddp")]
    yield {"dp": 4}, [made("fsdp")]
    yield {"slow": 2, "dp": 2}, [made("fsdp", replicate="slow")]
    yield {"tp": 2}, [made("tensor_parallel")]
    yield {"tp": 4}, [made("tensor_parallel")]
    for policy in ("block", "selective", "full"):
        yield {}, [made("recompute", policy=policy)]
    yield {}, [made("offload")]
    for name in PIPELINES:
        yield {"pp": 2}, [made(name)]
    yield {"pp": 4}, [made("one_f_one_b")]
    own = TextFile(written(one_f_one_b(2, PARTS)))
    yield {"pp": 2}, [GARDEN["own_schedule"](file=own, microbatches=PARTS)]
    yield from _pairs()
    for name in DATA:
        yield {"dp": 2, "pp": 2, "tp": 2}, [made("tensor_parallel"), made(name), made("one_f_one_b")]
    yield {"dp": 2, "pp": 2, "tp": 2}, [made("tensor_parallel"), made("recompute"), made("ddp"), made("interleaved")]


def _pairs() -> Iterator[tuple[dict[str, int], list[Strategy]]]:
    for name in DATA:
        yield {"dp": 2, "tp": 2}, [made("tensor_parallel"), made(name)]
        yield {"dp": 2}, [made("recompute"), made(name)]
        yield {"dp": 2}, [made("offload"), made(name)]
        for pipeline in PIPELINES if name == "ddp" else ("one_f_one_b", "interleaved", "zbv"):
            yield {"dp": 2, "pp": 2}, [made(name), made(pipeline)]
    yield {"tp": 2, "dp": 2}, [made("tensor_parallel"), made("ddp")]
    yield {"pp": 2, "dp": 2}, [made("ddp"), made("one_f_one_b")]
    yield {"tp": 2}, [made("tensor_parallel"), made("recompute")]
    for pipeline in PIPELINES:
        yield {"pp": 2, "tp": 2}, [made("tensor_parallel"), made(pipeline)]
        yield {"pp": 2}, [made("recompute"), made(pipeline)]
    yield {"pp": 2}, [made("recompute", policy="full"), made("one_f_one_b")]


def named(strategies: Sequence[Strategy]) -> str:
    def one(s: Strategy) -> str:
        default = {"policy": "block", "replicate": None}
        other = [f"{k}={v}" for k, v in s.settings().items() if k in default and v != default[k]]
        return f"{s.name}({', '.join(other)})" if other else s.name

    return " + ".join(map(one, strategies))


# ---------------------------------------------------------------- the cells
def cell(workload: str, mesh: dict[str, int], strategies: list[Strategy]) -> dict[str, Any]:
    """Error and square of one proof, or the law of its refusal."""
    sized = Mesh.of(mesh)
    batch = 2 * data_ranks(strategies, sized) * microbatches(strategies, 1)
    try:
        if workload in WORKLOADS:
            plan = pt.Plan(replace(WORKLOADS[workload], batch=batch, seed=1), mesh=sized, strategies=strategies)
            proof = prove_plan(plan, shrink=False)
        else:
            plan = pt.Plan(mesh=sized, strategies=strategies)
            proof = pt.prove(plan, model=Partly, batches=batch_of(batch), loss=error_of, clip=CLIP)
    except Refused as refused:
        fault = refused.faults[0]
        return {"refused": fault.code, "what": fault.what, "law": fault.law}
    except PartitaError as failed:
        return {"failed": str(failed).partition("\n")[0]}
    error = proof.numerics.max_relative_error
    proved = proof.proved and (error <= BOUND or proof.numerics.bound > BOUND)
    return {"error": error, "calls": proof.said, "proved": proved, "reasons": list(proof.reasons)}


def shown(found: dict[str, Any]) -> str:
    if "refused" in found:
        return f"refused, {found['refused']}"
    if "failed" in found:
        return f"FAILED: {found['failed']}"
    return f"{found['error']:.0e}, {found['calls']} calls" if found["proved"] else f"NOT PROVED: {'; '.join(found['reasons'])}"


def main(words: Sequence[str]) -> int:
    KEPT.parent.mkdir(exist_ok=True)
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    known = {(d["commit"], d["key"]): d["found"] for d in map(json.loads, lines)}
    here, rows, laws, all_found = commit(), [], {}, {}
    for mesh, strategies in plans():
        sizes = " x ".join(f"{a}={n}" for a, n in mesh.items()) or "one device"
        table = {"plan": named(strategies), "mesh": sizes}
        for workload in (*WORKLOADS, "mlp"):
            key = f"{table['plan']}; {sizes}; {workload}"
            if not all(word in key for word in words):
                continue
            began = time.perf_counter()
            found = known.get((here, key)) or cell(workload, mesh, strategies)
            if (here, key) not in known:
                with KEPT.open("a") as kept:
                    kept.write(json.dumps({"commit": here, "key": key, "found": found}) + "\n")
            all_found[key], table[workload] = found, shown(found)
            laws |= (
                {found["what"]: {"code": found["refused"], "refused": found["what"], "law": found["law"]}}
                if "refused" in found
                else {}
            )
            print(f"{time.perf_counter() - began:6.1f} s  {key}: {table[workload]}", flush=True)
        rows.append(table)
    return write(__file__, [*summary(all_found), *rows, *laws.values()])


def summary(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a workload: what the table comes to."""
    rows = []
    for workload in (*WORKLOADS, "mlp"):
        mine = [f for key, f in found.items() if key.endswith(f"; {workload}")]
        proved = [f for f in mine if f.get("proved")]
        refused = [f for f in mine if "refused" in f]
        worst = max((f["error"] for f in proved), default=0.0)
        said = (
            f"{len(proved)} proved, at most {worst:.1e}; {len(refused)} refused; {len(mine) - len(proved) - len(refused)} wrong"
        )
        what = f"{workload}: {len(mine)} combinations of strategies and meshes"
        rows.append(
            row(what, f"<= {BOUND:g} and calls said = heard, or refused", said, held=len(mine) == len(proved) + len(refused))
        )
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
