"""Our tensor parallelism against `parallelize_module`: same model, same ranks, interleaved.

torch's needs the model's head counts edited by hand and has no rule for attention on CPU, so attention runs on local tensors;
embedding and head stay whole on both sides.
"""

import sys
import warnings
from pathlib import Path
from statistics import median

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parents[1]))
from interleave import interleaved, slowest
from record import row, write

from partita.mesh import Mesh
from partita.runtime.capture import capture
from partita.runtime.models.llama import turned
from partita.runtime.net import Net
from partita.runtime.prepare import prepare
from partita.runtime.ranks import run_ranks
from partita.runtime.task import subject_of
from partita.runtime.training import Training
from partita.strategies import TensorParallel
from partita.workload import Llama, Workload

WORKLOAD = Workload("llama", Llama(layers=4, hidden=256, heads=8, vocab=1024, sequence=64), batch=8)
COLUMNS, ROWS = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"), ("attention.out", "mlp.down")
REPEATS, ROUNDS, BOUND = 3, 40, 1.05


def main() -> int:
    subject = subject_of(WORKLOAD, synthetic=True)
    program, batch = capture(subject, WORKLOAD.batch), subject.batches(0)

    def work(net: Net) -> dict[str, list[float]]:
        ours = subject.make()
        step = prepare(net, subject, ours, batch, (TensorParallel(modules=("blocks.*",)),), program, Training(1))
        optimizer = subject.optimizer(ours)
        theirs = subject.make()
        mesh = init_device_mesh("cpu", (2,))
        plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
        for block in theirs.blocks:
            parallelize_module(block, mesh, plan)
            block.attention.heads //= 2
            block.attention.key_heads //= 2
            block.attention.forward = _local(block.attention)
        reference = subject.optimizer(theirs)

        def partita() -> None:
            step.run(batch, 0, optimizer)
            optimizer.zero_grad()

        def torch_tp() -> None:
            subject.evaluate(theirs, batch).backward()
            reference.step()
            reference.zero_grad()

        return interleaved(net, {"partita": partita, "torch": torch_tp}, ROUNDS)

    ratios = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(REPEATS):
            found = slowest(run_ranks(Mesh((("tp", 2),)), work))
            ratios.append(found["partita"] / found["torch"])
    middle = median(ratios)
    shown = ", ".join(f"{r:.3f}" for r in sorted(ratios))
    found_row = row(
        "tensor_parallel / parallelize_module, step p10, 2 ranks",
        f"<= {BOUND}",
        f"{middle:.3f} ({shown})",
        held=middle <= BOUND,
    )
    return write(__file__, [found_row], torch=torch.__version__)


def _local(attention: torch.nn.Module) -> object:
    """The catalogue's attention with its last width left to the tensors: (samples, tokens, heads of this rank x size)."""

    def forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        samples, tokens, _ = x.shape
        q, k, v = (
            p(x).view(samples, tokens, attention.heads, -1).transpose(1, 2) for p in (attention.q, attention.k, attention.v)
        )
        y = torch.nn.functional.scaled_dot_product_attention(turned(q, cos, sin), turned(k, cos, sin), v, is_causal=True)
        return attention.out(y.transpose(1, 2).reshape(samples, tokens, -1))

    return forward


if __name__ == "__main__":
    sys.exit(main())
