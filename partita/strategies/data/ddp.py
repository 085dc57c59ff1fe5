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
from partita.program import Collective, Compute, Event, Phase, Program
from partita.program.buckets import LIMIT, Entry, cut_buckets
from partita.program.data import batch_faults, mixing_fault, normalises, rewrite_batch, say_loss
from partita.program.events import WIDTH
from partita.program.fold import unfold
from partita.program.program import before_optimizer, insert
from partita.strategy import Case, Place, Promise, Strategy

if TYPE_CHECKING:
    from partita.runtime.site import Site

LOOSE = "a call of F.batch_norm outside a batch norm module"
NORM = "nn.BatchNorm1d, 2d or 3d instead of a call of F.batch_norm"


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
        refuse([*_modules_faults(self.modules), *_bucket_faults(self.bucket)])

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
        refuse([mixing_fault(self.axis, self._who, module, LOOSE, NORM) for module in loose_norms(site)])
        site.synchronise_batch_norm(self.axis)
        dtype = site.program.reduce_dtype
        entries = [
            (name, p.numel() * WIDTH[dtype or site.dtype(p)], dtype or site.dtype(p))
            for name, p in site.module.named_parameters()
            if p.requires_grad and site.has_gradient(name)
        ]
        site.average_gradients(self.axis, cut_buckets(entries, limit=self.bucket), dtype)

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


def loose_norms(site: "Site") -> list[str]:
    """Modules that normalise over the batch without a batch norm module: its statistics cannot be told from others."""
    modules = {name for name, m in site.module.named_modules() if any(c.__name__ == "_BatchNorm" for c in type(m).__mro__)}
    return [name for name in normalises(site.program) if name not in modules]


def _modules_faults(modules: Sequence[str]) -> list[Fault]:
    if tuple(modules) == ("*",):
        return []
    law = "data parallelism is of the whole model: every gradient is summed"
    cure = "modules = ['*'], or no such key"
    return [Fault("P112", f"ddp cannot be of some modules: modules = {list(modules)!r}", str(modules), law, cure, "modules")]


def _bucket_faults(bucket: int) -> list[Fault]:
    if bucket >= 1:
        return []
    cure = f"bucket = {LIMIT}; 1 sends every parameter by itself"
    return [Fault("P112", f"bucket = {bucket} is out of range", f"bucket = {bucket}", "a bucket has bytes", cure, "bucket")]


def _with_buckets(program: Program, axis: str, limit: int) -> Program:
    """Places each bucket's all_reduce after the op that makes its last gradient, in launch order.

    Over a second data axis the sums of the first are summed, so its buckets wait for the end of the backward pass.
    """
    again = any(isinstance(e, Collective) and e.overlapped and e.once for e in program.events())
    entries = _entries(program)
    buckets = cut_buckets(entries, limit=limit)
    if again or _spans(program, buckets):  # blocks are small: buckets hold several, and no copy of the body is like the next
        program = unfold(program)
        entries = _entries(program)
        buckets = cut_buckets(entries, limit=limit)
    size, kind = {name: nbytes for name, nbytes, _ in entries}, {name: dtype for name, _, dtype in entries}
    gradient = {program.tensors[p].name: g for p, g in program.gradients.items()}

    def call(names: Sequence[str]) -> Collective:
        return Collective(
            "all_reduce", axis, tuple(gradient[n] for n in names), sum(size[n] for n in names), kind[names[0]],
            Phase.SYNC if again else Phase.BACKWARD, names[-1], overlapped=not again, once=True,
        )  # fmt: skip

    if again:
        return before_optimizer(program, tuple(map(call, buckets)))
    made = {o: at for at, e in enumerate(program.events()) if isinstance(e, Compute) for o in e.outs}
    after: dict[int, list[Event]] = {}
    at = -1
    for names in buckets:
        at = max([at, *(made[gradient[n]] for n in names)])
        after.setdefault(at, []).append(call(names))
    return insert(program, after)


def _entries(program: Program) -> list[Entry]:
    """(name, bytes on this rank, dtype) of every parameter with a gradient, as it is reduced."""
    found = []
    for p in program.parameters():
        if p.id in program.gradients:
            dtype = program.reduce_dtype or p.dtype
            found.append((p.name, program.local_bytes(p.id) // WIDTH[p.dtype] * WIDTH[dtype], dtype))
    return found


def _spans(program: Program, buckets: Sequence[Sequence[str]]) -> bool:
    """Whether a bucket holds gradients of a repeated block beside others."""
    repeated = {f"{s.block}." for s in program.segments if s.block}
    inside = [[any(name.startswith(block) for block in repeated) for name in names] for names in buckets]
    return any(any(found) and not all(found) for found in inside)
