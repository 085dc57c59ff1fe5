"""Replicates the model, splits the batch, and sums gradients in buckets while backward still runs.

    batch over dp  ->  every gradient is Partial over dp  ->  one all_reduce a bucket, launched in fixed order
                       the loss is Partial over dp        ->  one all_reduce of (sum, weight), 16 bytes

Batch norm keeps the statistics of the global batch: one all_reduce of two numbers a channel, forward and backward.

Source: Li et al. 2020, "PyTorch Distributed", VLDB 13(12), section 3.2 (bucketing, overlap). Unlike there, buckets are
fixed from the first step, in reverse registration order, and end where blocks end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from partita.errors import Fault, refuse
from partita.mesh import Mesh
from partita.program import Collective, Phase, Program
from partita.program.buckets import LIMIT
from partita.program.data import batch_faults, bucket_faults, loose_norms, module_faults, rewrite_batch, say_loss
from partita.program.reduction import bucketed, gradients_by_name, has_buckets, late, launched
from partita.strategy import Case, Place, Promise, Strategy

if TYPE_CHECKING:
    from partita.runtime.site import Site


@dataclass(frozen=True)
class DDP(Strategy):
    """Data parallelism with our own buckets. It is of the whole model: `modules` stays at all of them.

    Args:
        axis: The mesh axis that carries the batch.
        bucket: Bytes at which a bucket of gradients is sent.

    Example:
        >>> DDP(bucket=1 << 20).axis
        'dp'
    """

    name: ClassVar[str] = "ddp"
    place: ClassVar[Place] = Place.DATA
    promise: ClassVar[Promise] = Promise.REORDERED

    axis: str = "dp"
    bucket: int = LIMIT

    def __post_init__(self) -> None:
        refuse([*module_faults(self.name, self.modules), *bucket_faults(self.bucket)])

    def check(self, program: Program, mesh: Mesh) -> Sequence[Fault]:
        return batch_faults(program, self.axis, mesh.size(self.axis), self._who)

    def rewrite(self, program: Program, mesh: Mesh) -> Program:
        size = mesh.size(self.axis)
        if size == 1:
            return replace(program, axes={**program.axes, self.axis: 1})
        said = rewrite_batch(program, self.axis, size, self.name)
        if not program.gradients:
            said = said.with_notes(f"{self.name}: nothing is learned, so no gradient is summed over {self.axis} = {size}")
        return say_loss(_with_buckets(said, self.axis, self.bucket), self.axis)

    def apply(self, site: "Site") -> None:
        site.share_batch(self.axis)
        if site.mesh.size(self.axis) == 1:
            return
        refuse(loose_norms(site.program, site.batch_norms(), self.axis, self._who))
        site.synchronise_batch_norm(self.axis)
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

    @property
    def _who(self) -> str:
        return f"DDP(axis={self.axis!r})"


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
