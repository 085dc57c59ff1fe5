"""Our 1F1B against torch's `Schedule1F1B` over stages cut by hand: same model, same ranks, interleaved."""

import sys
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

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
from partita.strategies import OneFOneB
from partita.workload import GPT, Workload

WORKLOAD = Workload("gpt", GPT(layers=4, hidden=256, heads=4, vocab=1024, sequence=64), batch=16)
CUT = "blocks.2"
PARTS, REPEATS, ROUNDS, BOUND, CLOSE = 4, 3, 40, 1.05, 1e-5


class ByHand(nn.Module):
    """One of two stages of the model, as a user would cut it."""

    def __init__(self, whole: nn.Module, rank: int) -> None:
        super().__init__()
        blocks = list(whole.get_submodule("blocks").children())
        self.rank, self.whole = rank, whole
        self.own = nn.ModuleList(blocks[:2] if rank == 0 else blocks[2:])
        if rank == 0:
            del whole.norm, whole.head
        else:
            del whole.tokens, whole.positions
        del whole.blocks

    def forward(self, x: Tensor) -> Tensor:
        if self.rank == 0:
            x = self.whole.tokens(x) + self.whole.positions(torch.arange(x.shape[1]))
        for block in self.own:
            x = block(x)
        return x if self.rank == 0 else self.whole.head(self.whole.norm(x))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> int:
    subject = subject_of(WORKLOAD, synthetic=True)
    program, batch = capture(subject, WORKLOAD.batch // PARTS), subject.batches(0)

    def work(net: Net) -> dict[str, list[float]]:
        ours = subject.make()
        training = Training(1, microbatches=PARTS)
        step = prepare(net, subject, ours, batch, (OneFOneB(microbatches=PARTS, cut=(CUT,)),), program, training)
        optimizer = step.site.optimizer()
        step.site.adopt(optimizer)
        theirs = ByHand(subject.make(), net.rank)
        stage = PipelineStage(theirs, net.rank, 2, torch.device("cpu"), group=net.group("pp"))
        schedule = Schedule1F1B(stage, PARTS, loss_fn=cross_entropy)
        reference = subject.optimizer(theirs)
        losses: dict[str, list[float]] = {"partita": [], "torch": []}
        tokens, targets = batch.values()

        def partita() -> None:
            losses["partita"].append(step.run(batch, 0, optimizer).loss)
            optimizer.zero_grad()

        def by_hand() -> None:
            parts: list[Tensor] = []
            schedule.step(tokens) if net.rank == 0 else schedule.step(target=targets, losses=parts)
            losses["torch"].append(float(torch.stack(parts).detach().mean()) if parts else 0.0)
            reference.step()
            reference.zero_grad()

        return {
            **interleaved(net, {"partita": partita, "torch": by_hand}, ROUNDS),
            **{f"{k} losses": v for k, v in losses.items()},
        }

    ratios, apart = [], 0.0
    for _ in range(REPEATS):
        ranks = run_ranks(Mesh((("pp", 2),)), work)
        last = ranks[-1]
        pairs = zip(last["partita losses"], last["torch losses"], strict=True)
        apart = max(apart, *(abs(a / b - 1) for a, b in pairs))
        found = slowest([{k: r[k] for k in ("partita", "torch")} for r in ranks])
        ratios.append(found["partita"] / found["torch"])
    middle = median(ratios)
    shown = ", ".join(f"{r:.3f}" for r in sorted(ratios))
    rows = [
        row("1F1B / Schedule1F1B by hand, step p10, 2 ranks", f"<= {BOUND}", f"{middle:.3f} ({shown})", held=middle <= BOUND),
        row("losses of both, 45 steps", f"within {CLOSE:g}", f"{apart:.1e}", held=apart <= CLOSE),
    ]
    return write(__file__, rows, torch=torch.__version__)


if __name__ == "__main__":
    sys.exit(main())
