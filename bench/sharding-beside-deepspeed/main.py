"""`zero2` and `fsdp` against DeepSpeed's ZeRO stages 2 and 3 on gloo: same model, same ranks, interleaved.

Run it with a Python that has DeepSpeed (0.19.8) beside partita; without it the rows say so.
"""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from interleave import interleaved, slowest
from record import row, write

from partita.mesh import Mesh
from partita.runtime.capture import capture
from partita.runtime.net import Net
from partita.runtime.prepare import prepare
from partita.runtime.ranks import run_ranks
from partita.runtime.subject import Subject
from partita.runtime.task import subject_of
from partita.runtime.training import Training
from partita.strategies import FSDP, Zero2
from partita.workload import GPT, Workload

GPT_4 = GPT(layers=4, hidden=256, heads=4, vocab=1024, sequence=128)
WORKLOAD = Workload("gpt", GPT_4, batch=8, optimizer="sgd", learning_rate=0.1)
STAGES = {"zero2": (Zero2(), 2), "fsdp": (FSDP(), 3)}
REPEATS, ROUNDS, BOUND, CLOSE = 3, 20, 1.0, 1e-5
ABSENT = "not measured: this Python has no deepspeed (pip install deepspeed==0.19.8)"


def stepping(subject: Subject, stage: int, batch: dict[str, Any]) -> Callable[[], float]:
    """A step of DeepSpeed on its half of the batch; returns this rank's loss."""
    import deepspeed  # noqa: PLC0415 - the peer may be absent

    deepspeed.ops.__compatible_ops__.clear()  # ops it would compile first, one that goes around gloo among them
    deepspeed.init_distributed(dist_backend="gloo", verbose=False, auto_mpi_discovery=False)
    config = {
        "train_micro_batch_size_per_gpu": WORKLOAD.batch // 2,
        "train_batch_size": WORKLOAD.batch,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    model = subject.make()
    engine, *_ = deepspeed.initialize(model=model, optimizer=subject.optimizer(model), config=config)

    def step() -> float:
        loss = subject.evaluate(engine, batch)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def main() -> int:
    if importlib.util.find_spec("deepspeed") is None:
        return write(__file__, [{"what": f"{name} / ZeRO stage {n}", "measured": ABSENT} for name, (_, n) in STAGES.items()])
    subject = subject_of(WORKLOAD, synthetic=True)
    program, batch = capture(subject, WORKLOAD.batch), subject.batches(0)
    rows = []
    for name, (strategy, stage) in STAGES.items():

        def work(net: Net, strategy: Any = strategy, stage: int = stage) -> dict[str, list[float]]:
            os.environ |= {"RANK": str(net.rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(net.rank)}
            step = prepare(net, subject, subject.make(), batch, (strategy,), program, Training(1))
            plain = step.site.optimizer()
            step.site.adopt(plain)
            optimizer = step.site.stepping(plain)
            losses: dict[str, list[float]] = {"partita": [], "deepspeed": []}
            with contextlib.redirect_stdout(sys.stderr):
                theirs = stepping(subject, stage, {k: v.chunk(2)[net.rank] for k, v in batch.items()})

            def partita() -> None:
                losses["partita"].append(step.run(batch, 0, optimizer).loss)
                optimizer.zero_grad()

            def deepspeed() -> None:
                losses["deepspeed"].append(theirs())

            times = interleaved(net, {"partita": partita, "deepspeed": deepspeed}, ROUNDS)
            return {**times, **{f"{who} losses": found for who, found in losses.items()}}

        ratios, apart = [], 0.0
        for _ in range(REPEATS):
            ranks = run_ranks(Mesh((("dp", 2),)), work)
            found = slowest([{k: r[k] for k in ("partita", "deepspeed")} for r in ranks])
            ratios.append(found["partita"] / found["deepspeed"])
            theirs = torch.tensor([r["deepspeed losses"] for r in ranks]).mean(0)
            apart = max(apart, float((torch.tensor(ranks[0]["partita losses"]) / theirs - 1).abs().max()))
        middle, shown = median(ratios), ", ".join(f"{r:.3f}" for r in sorted(ratios))
        what = f"{name} / ZeRO stage {stage}, step p10, 2 ranks"
        rows.append(row(what, f"<= {BOUND}", f"{middle:.3f} ({shown})", held=middle <= BOUND))
        rows.append(row(f"{name}: losses of both", f"within {CLOSE:g}", f"{apart:.1e}", held=apart <= CLOSE))
    return write(__file__, rows)


if __name__ == "__main__":
    sys.exit(main())
