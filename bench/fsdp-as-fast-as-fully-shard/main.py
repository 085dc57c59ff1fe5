"""Our fully sharded data parallelism against `fully_shard` written by hand: same model, same ranks, interleaved."""

import sys
from pathlib import Path
from statistics import median

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

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
from partita.strategies import FSDP
from partita.workload import GPT, Workload

WORKLOAD = Workload("gpt", GPT(layers=4, hidden=256, heads=4, vocab=1024, sequence=64), batch=16)
REPEATS, ROUNDS, BOUND = 3, 40, 1.05


def main() -> int:
    subject = subject_of(WORKLOAD, synthetic=True)
    program, batch = capture(subject, WORKLOAD.batch), subject.batches(0)

    def work(net: Net) -> dict[str, list[float]]:
        ours = subject.make()
        step = prepare(net, subject, ours, batch, (FSDP(),), program, Training(1))
        optimizer = subject.optimizer(ours)
        step.site.adopt(optimizer)
        theirs = subject.make()
        mesh = DeviceMesh.from_group(net.group("dp"), "cpu", mesh_dim_names=("dp",))
        for block in (*theirs.get_submodule("blocks").children(), theirs):
            fully_shard(block, mesh=mesh)
        reference = subject.optimizer(theirs)
        half = {k: v.chunk(2)[net.rank] for k, v in batch.items()}

        def partita() -> None:
            step.run(batch, 0, optimizer)
            optimizer.zero_grad()

        def by_hand() -> None:
            subject.evaluate(theirs, half).backward()
            reference.step()
            reference.zero_grad()

        return interleaved(net, {"partita": partita, "torch": by_hand}, ROUNDS)

    ratios = []
    for _ in range(REPEATS):
        found = slowest(run_ranks(Mesh((("dp", 2),)), work))
        ratios.append(found["partita"] / found["torch"])
    middle = median(ratios)
    shown = ", ".join(f"{r:.3f}" for r in sorted(ratios))
    what = "fsdp / fully_shard by hand, step p10, 2 ranks"
    return write(__file__, [row(what, f"<= {BOUND}", f"{middle:.3f} ({shown})", held=middle <= BOUND)], torch=torch.__version__)


if __name__ == "__main__":
    sys.exit(main())
