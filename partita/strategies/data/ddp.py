"""Replicates the model, splits the batch, and sums gradients in buckets while backward still runs.

    batch over dp  ->  every gradient is Partial over dp  ->  one all_reduce a bucket, launched in fixed order
                       the loss is Partial over dp        ->  one all_reduce of (sum, weight), 16 bytes

Batch norm keeps the statistics of the global batch: one all_reduce of two numbers a channel, forward and backward.

Source: Li et al. 2020, "PyTorch Distributed", VLDB 13(12), section 3.2 (bucketing, overlap). Unlike there, buckets are
fixed from the first step, in reverse registration order, and end where blocks end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from partita.program import Collective, Phase, Program
from partita.program.data import rewrite_batch, say_loss
from partita.program.reduction import bucketed, gradients_by_name, has_buckets, late, launched
from partita.strategy import Bucketed, Case

if TYPE_CHECKING:
    from partita.runtime.site import Site


@dataclass(frozen=True)
class DDP(Bucketed):
    """Data parallelism with our own buckets. It is of the whole model: `modules` stays at all of them.

    Args:
        axis: The mesh axis that carries the batch.
        bucket: Bytes at which a bucket of gradients is sent.

    Example:
        >>> DDP(bucket=1 << 20).axis
        'dp'
    """

    name: ClassVar[str] = "ddp"

    def say(self, program: Program, size: int) -> Program:
        said = rewrite_batch(program, self.axis, size, self.name)
        if not program.gradients:
            said = said.with_notes(f"{self.name}: nothing is learned, so no gradient is summed over {self.axis} = {size}")
        return say_loss(_with_buckets(said, self.axis, self.bucket), self.axis)

    def send(self, site: "Site") -> None:
        site.average_gradients(self.axis, site.buckets(self.bucket), site.program.reduce_dtype)

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"dp": 2}, {}),
            Case({"dp": 4}, {"bucket": 1 << 12}),
            Case({"dp": 2}, {}, workload="resnet"),
            Case({"dp": 2}, {"bucket": 1}, workload="mlp"),
            Case({"dp": 2, "tp": 2}, {}),
            Case({"tp": 2, "dp": 2}, {}),
        )


def _with_buckets(program: Program, axis: str, limit: int) -> Program:
    """Places each bucket's all_reduce after the op that makes its last gradient, in launch order.

    Over a second data axis the sums of the first are summed, so its buckets wait for the end of the backward pass.
    """
    again = has_buckets(program)
    found = bucketed(program, limit, flat=again)
    gradient = gradients_by_name(found.program)

    def call(names: Sequence[str]) -> Collective:
        return Collective(
            "all_reduce", axis, tuple(gradient[n] for n in names), sum(found.sizes[n] for n in names), found.dtypes[names[0]],
            Phase.SYNC if again else Phase.BACKWARD, names[-1], overlapped=not again, once=True,
        )  # fmt: skip

    return late(found, call) if again else launched(found, call)
