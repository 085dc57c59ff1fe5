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

from partita.errors import Fault, Refused, refuse
from partita.mesh import Mesh
from partita.program import Collective, Compute, Event, Phase, Program
from partita.program.buckets import LIMIT, Entry, cut_buckets
from partita.program.events import WIDTH
from partita.program.fold import unfold
from partita.program.program import before_optimizer, insert
from partita.program.split import Derivation, Move, derive, rewrite
from partita.strategy import Case, Place, Promise, Strategy

if TYPE_CHECKING:
    from partita.runtime.site import Site

LOSS_BYTES = 16  # two float64: the weighted loss and its weight
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
        size = mesh.size(self.axis)
        if size == 1:
            return []
        samples = samples_of(program)
        if samples % size:
            return [_does_not_divide(samples, size, program.microbatches, self.axis)]
        try:
            mixing = mixes_samples(program, self._derive(program, size))
        except Refused as refused:
            return list(refused.faults)
        return [_mixing(self.axis, module, f"{op} of {nbytes} bytes") for module, op, nbytes in mixing]

    def rewrite(self, program: Program, mesh: Mesh) -> Program:
        size = mesh.size(self.axis)
        if size == 1:
            return replace(program, axes={**program.axes, self.axis: 1})
        said = rewrite(program, self._derive(program, size))
        if not program.gradients:
            said = said.with_notes(f"{self.name}: nothing is learned, so no gradient is summed over {self.axis} = {size}")
        return _with_loss(_with_used(_with_buckets(said, self.axis, self.bucket), self.axis), self.axis)

    def apply(self, site: "Site") -> None:
        site.share_batch(self.axis)
        if site.mesh.size(self.axis) == 1:
            return
        refuse([_mixing(self.axis, module, "a batch norm that is no module", NORM) for module in loose_norms(site)])
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

    def _derive(self, program: Program, size: int) -> Derivation:
        batch = program.classes.get("batch", frozenset())
        return derive(program, self.axis, size, batch, gradients=False, scalars=False)


def samples_of(program: Program) -> int:
    """Samples of one global microbatch."""
    batch = program.classes.get("batch", frozenset())
    return max((program.atoms[a] for a in batch), default=1)


def mixes_samples(program: Program, derivation: Derivation) -> list[tuple[str, str, int]]:
    """(module, op, bytes) of every repair inside the model that is not a batch norm's statistics."""
    events = list(program.events())

    def is_batch_norm(move: Move) -> bool:
        event = events[move.event]
        return move.inner and isinstance(event, Compute) and "batch_norm" in event.op

    inside = [m for m in derivation.moves if m.phase in (Phase.FORWARD, Phase.BACKWARD) and not is_batch_norm(m)]
    return list(dict.fromkeys((m.module, m.op, m.nbytes) for m in inside))


def loose_norms(site: "Site") -> list[str]:
    """Modules that normalise over the batch without a batch norm module: its statistics cannot be told from others."""
    modules = {name for name, m in site.module.named_modules() if any(c.__name__ == "_BatchNorm" for c in type(m).__mro__)}
    found = [
        e.module
        for e in site.program.events()
        if isinstance(e, Compute) and e.phase == Phase.FORWARD and "batch_norm" in e.op and e.signature and e.signature.inner
    ]
    return [name for name in dict.fromkeys(found) if name not in modules]


def _mixing(axis: str, module: str, what: str, cure: str = "") -> Fault:
    who = f"module {module!r}" if module else "the model itself, or its loss,"
    return Fault(
        "P116",
        f"DDP(axis={axis!r}) cannot split the batch: {who} mixes samples",
        have=f"{what} would be needed in the middle of the step" if not cure else what,
        law="each rank computes its own samples; only batch norm modules and the loss rule look across them",
        cure=f"{cure or 'compute each sample by itself'}, or set the size of axis {axis!r} to 1",
        at=f"mesh.{axis}",
    )


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


def _does_not_divide(samples: int, size: int, microbatches: int, axis: str) -> Fault:
    batch, unit = samples * microbatches, size * microbatches
    return Fault(
        "P104",
        f"DDP(axis={axis!r}) cannot split dim 'batch'",
        have=f"batch = {batch}, {axis} = {size}, accumulate = {microbatches}",
        law=f"batch = data ranks x accumulate x microbatch size, so {unit} must divide {batch}",
        cure=f"batch = {batch // unit * unit or unit} or {(batch // unit + 1) * unit}",
        at="workload.batch",
    )


def _with_buckets(program: Program, axis: str, limit: int) -> Program:
    """Places each bucket's all_reduce after the op that makes its last gradient, in launch order."""
    entries = _entries(program)
    buckets = cut_buckets(entries, limit=limit)
    if _spans(program, buckets):  # blocks are small: buckets hold several, and no copy of the body is like the next
        program = unfold(program)
        entries = _entries(program)
        buckets = cut_buckets(entries, limit=limit)
    size, kind = {name: nbytes for name, nbytes, _ in entries}, {name: dtype for name, _, dtype in entries}
    gradient = {program.tensors[p].name: g for p, g in program.gradients.items()}
    made = {o: at for at, e in enumerate(program.events()) if isinstance(e, Compute) for o in e.outs}
    after: dict[int, list[Event]] = {}
    at = -1
    for names in buckets:
        at = max([at, *(made[gradient[n]] for n in names)])
        call = Collective(
            "all_reduce", axis, tuple(gradient[n] for n in names), sum(size[n] for n in names), kind[names[0]],
            Phase.BACKWARD, names[-1], overlapped=True, once=True,
        )  # fmt: skip
        after.setdefault(at, []).append(call)
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


def _with_used(program: Program, axis: str) -> Program:
    """With control flow that depends on data, ranks first tell which parameters have a gradient: one byte each."""
    if not program.dynamic:
        return program
    call = Collective("all_reduce", axis, (), len(program.gradients), "uint8", Phase.SYNC, "used", once=True)
    return before_optimizer(program, (call,))


def _with_loss(program: Program, axis: str) -> Program:
    call = Collective("all_reduce", axis, (program.loss,), LOSS_BYTES, "float64", Phase.SYNC, "loss", once=True)
    return before_optimizer(program, (call,))
