"""Our data parallelism against torch's DistributedDataParallel: same model, same ranks, interleaved."""

import sys
from pathlib import Path
from statistics import median

import torch
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))
from interleave import interleaved, slowest
from record import row, write

from partita.mesh import Mesh
from partita.runtime.capture import capture
from partita.runtime.net import Net
from partita.runtime.prepare import prepare
from partita.runtime.ranks import run_ranks
from partita.runtime.task import subject_of
from partita.runtime.training import Training
from partita.strategies import DDP
from partita.workload import GPT, Workload

WORKLOAD = Workload("gpt", GPT(layers=4, hidden=256, heads=4, vocab=1024, sequence=64), batch=16)
REPEATS, ROUNDS, BOUND = 3, 40, 1.05


def main() -> int:
    subject = subject_of(WORKLOAD, synthetic=True)
    program, batch = capture(subject, WORKLOAD.batch), subject.batches(0)

    def work(net: Net) -> dict[str, list[float]]:
        ours = subject.make()
        step = prepare(net, subject, ours, batch, (DDP(),), program, Training(1))
        optimizer = subject.optimizer(ours)
        theirs = DistributedDataParallel(subject.make(), gradient_as_bucket_view=True)
        reference = subject.optimizer(theirs)
        half = {k: v.chunk(2)[net.rank] for k, v in batch.items()}

        def partita() -> None:
            step.run(batch, 0, optimizer)
            optimizer.zero_grad()

        def torch_ddp() -> None:
            subject.evaluate(theirs, half).backward()
            reference.step()
            reference.zero_grad()

        return interleaved(net, {"partita": partita, "torch": torch_ddp}, ROUNDS)

    ratios = []
    for _ in range(REPEATS):
        found = slowest(run_ranks(Mesh((("dp", 2),)), work))
        ratios.append(found["partita"] / found["torch"])
    middle = median(ratios)
    shown = ", ".join(f"{r:.3f}" for r in sorted(ratios))
    found_row = row("ddp / torch DDP, step p10, 2 ranks", f"<= {BOUND}", f"{middle:.3f} ({shown})", held=middle <= BOUND)
    return write(__file__, [found_row], torch=torch.__version__)


if __name__ == "__main__":
    sys.exit(main())
