"""What the strategies of a data axis share: they split the batch, and say what the step itself sends over the axis.

    batch over dp      gradients and the loss are left Partial: each strategy repairs gradients in its own way
    at the end         who has a gradient (only if control flow depends on data), then (loss, weight): 16 bytes

Only batch norm and the loss rule look across samples; what else would is refused.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import replace

from partita.errors import Fault, Refused
from partita.program.buckets import LIMIT
from partita.program.derivation import Derivation, Move
from partita.program.events import Collective, Compute, Kind, Phase, Split
from partita.program.program import Program, before_optimizer
from partita.program.split import derive, rewrite

INSIDE = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD)  # the phases of the model itself
PICKING = ("index", "index_select", "gather", "take")  # samples picked by number: as a rule a rank's own, by numbers of its own
ADDING = ("mul", "add", "add_")  # what routed samples are weighted and added up with
SELECTING = ("index", "index_put", "index_put_", "nonzero", "masked_select", "masked_scatter", "masked_fill", "masked_fill_")
COUNTING = ("any", "sum", "count_nonzero")
COMPARING = ("gt", "eq", "ne", "ge")
LOOSE = "a call of F.batch_norm outside a batch norm module"
NORM = "nn.BatchNorm1d, 2d or 3d instead of a call of F.batch_norm"
LOSS_BYTES = 16  # two float64: the weighted loss and its weight


def split_batch(program: Program, axis: str, size: int) -> Derivation:
    """The batch over an axis; gradients and scalars stay Partial."""
    batch = program.classes.get("batch", frozenset())
    return derive(program, axis, size, batch, gradients=False, scalars=False)


def samples_of(program: Program) -> int:
    """Samples of one microbatch of this rank, under the axes rewritten so far."""
    batch = program.classes.get("batch", frozenset())
    cut = {
        axis
        for t in program.tensors
        if t.kind == Kind.INPUT
        for axis, layout in t.layouts.items()
        if isinstance(layout, Split) and t.dims[layout.dim][layout.atom] in batch
    }
    whole = max((program.atoms[a] for a in batch), default=1)
    return whole // math.prod(program.axes[a] for a in cut)


def batch_faults(program: Program, axis: str, size: int, who: str) -> list[Fault]:
    """Why the batch cannot be split over an axis; empty if it can.

    Args:
        program: Under the axes rewritten so far.
        axis, size: The data axis.
        who: The strategy, e.g. "DDP(axis='dp')".
    """
    if size == 1:
        return []
    if program.relaxed:
        return [_outside_relaxed(program.relaxed, axis, who)]
    samples = samples_of(program)
    if samples % size:
        return [_does_not_divide(samples * program.microbatches, size, program.microbatches, axis, who)]
    try:
        mixing = mixes_samples(program, split_batch(program, axis, size))
    except Refused as refused:
        return list(refused.faults)
    wanted: dict[str, list[str]] = {}
    for module, op, nbytes in mixing:
        wanted.setdefault(module, []).append(f"{op} of {nbytes} bytes")
    return [
        mixing_fault(axis, who, module, f"{', '.join(calls)} in the middle of the step") for module, calls in wanted.items()
    ]


def microbatch_mixing(program: Program, microbatches: int) -> list[Fault]:
    """P116 for modules that look across samples, which microbatches do not let them."""
    if microbatches == 1:
        return []
    who = f"accumulate = {microbatches}"
    return [
        replace(
            mixing_fault("", who, module, f"{op} of {nbytes} bytes in the middle of the step"),
            cure="compute each sample by itself, or accumulate = 1",
            at="workload.accumulate",
        )
        for module, op, nbytes in mixes_samples(program, split_batch(program, "accumulate", 1))
    ]


def mixes_samples(program: Program, derivation: Derivation) -> list[tuple[str, str, int]]:
    """(module, op, bytes) of every repair inside the model that is not a batch norm's statistics."""
    events, lost = list(program.events()), across(program, derivation)

    def is_batch_norm(move: Move) -> bool:
        event = events[move.event]
        return move.inner and isinstance(event, Compute) and "batch_norm" in event.op

    inside = [m for m in derivation.moves if m.phase in INSIDE and not is_batch_norm(m)]
    return list(dict.fromkeys((m.module, m.op, m.nbytes) for m in inside if m not in lost))


def across(program: Program, derivation: Derivation) -> list[Move]:
    """Repairs that are no proof of mixing: samples were only lost from sight.

    So it is with an op without a rule, a selection by a mask or by numbers, a loop over samples, a backward formula. That
    samples mix is proved where the forward pass, or the Python code around it, reads numbers reduced over the batch. For the
    rest no rank gathers anything: whole against parts, losses and gradients, the set-up of a run finds out before step 1.
    """
    events = list(program.events())
    picked, tests = _picked(program), _tests(program)

    def proved(move: Move) -> bool:
        event = events[move.event] if move.event < len(events) else None
        known = isinstance(event, Compute) and event.signature is not None and move.tensor not in picked
        inside = move.phase in (Phase.FORWARD, Phase.RECOMPUTE)
        return known and move.op == "all_reduce" and inside and move.event not in tests

    def normalising(move: Move) -> bool:
        event = events[move.event] if move.event < len(events) else None
        return move.inner and isinstance(event, Compute) and "batch_norm" in event.op

    inside = [m for m in derivation.moves if m.phase in INSIDE]
    return [m for m in inside if not proved(m) and not normalising(m)]


def _picked(program: Program) -> set[int]:
    """Tensors of samples picked by number, as they are, in part, weighted, or added to others."""
    found: set[int] = set()
    for e in program.events():
        if isinstance(e, Compute) and (e.op in PICKING or ((e.view or e.op in ADDING) and found.intersection(e.ins))):
            found.update(e.outs)
    return found


def _tests(program: Program) -> set[int]:
    """Events that ask whether a mask selects anything, where the same mask then selects: nothing is done to nothing."""
    events = list(program.events())
    made = {out: (e.op, e.ins) for e in events if isinstance(e, Compute) for out in e.outs}

    def mask(tensor: int) -> tuple[str, tuple[int, ...]] | None:
        found = made.get(tensor)
        return mask(found[1][0]) if found and found[0] in ("_to_copy", "view") and found[1] else found

    picking = [e for e in events if isinstance(e, Compute) and e.op in SELECTING]
    masks = {mask(i) for e in picking for i in (e.ins if e.op == "nonzero" else e.ins[1:])} - {None}
    asked = {k: e.ins[0] for k, e in enumerate(events) if isinstance(e, Compute) and e.op in COUNTING and e.ins}
    counts = {out: tensor for k, tensor in asked.items() if isinstance(e := events[k], Compute) for out in e.outs}
    compared = {
        k: counts[e.ins[0]]
        for k, e in enumerate(events)
        if isinstance(e, Compute) and e.op in COMPARING and len(e.ins) == 1 and e.ins[0] in counts
    }
    return {k for k, tensor in (*asked.items(), *compared.items()) if mask(tensor) in masks}


def normalises(program: Program) -> list[str]:
    """Modules that normalise by the statistics of their batch."""
    batch = program.classes.get("batch", frozenset())
    events = (e for e in program.events() if isinstance(e, Compute) and e.phase == Phase.FORWARD and "batch_norm" in e.op)
    found = (e.module for e in events if e.signature and any(batch & set(e.signature.dims[k]) for k in e.signature.inner))
    return list(dict.fromkeys(found))


def loose_norms(program: Program, modules: Container[str], axis: str, who: str) -> list[Fault]:
    """P116 for what normalises over the batch outside a batch norm module: its statistics cannot be told from others.

    Args:
        program: Under the axes inside.
        modules: Paths of the batch norm modules.
        axis, who: As in `batch_faults`.
    """
    loose = [name for name in normalises(program) if name not in modules]
    return [mixing_fault(axis, who, module, LOOSE, NORM) for module in loose]


WHOLE = "data parallelism is of the whole model: every gradient is summed"


def module_faults(name: str, modules: Sequence[str], law: str = WHOLE) -> list[Fault]:
    """P112 unless a strategy is of the whole model."""
    if tuple(modules) == ("*",):
        return []
    cure = "modules = ['*'], or no such key"
    return [Fault("P112", f"{name} cannot be of some modules: modules = {list(modules)!r}", str(modules), law, cure, "modules")]


def bucket_faults(bucket: int) -> list[Fault]:
    """P112 for a bucket without bytes."""
    if bucket >= 1:
        return []
    cure = f"bucket = {LIMIT}; 1 sends every parameter by itself"
    return [Fault("P112", f"bucket = {bucket} is out of range", f"bucket = {bucket}", "a bucket has bytes", cure, "bucket")]


def mixing_fault(axis: str, who: str, module: str, have: str, cure: str = "compute each sample by itself") -> Fault:
    """P116 for a module that looks across samples."""
    what = f"module {module!r}" if module else "the model itself, or its loss,"
    return Fault(
        "P116",
        f"{who} cannot split the batch: {what} mixes samples",
        have,
        "each rank computes its own samples; only batch norm modules and the loss rule look across them",
        f"{cure}, or set the size of axis {axis!r} to 1",
        f"mesh.{axis}",
    )


def _does_not_divide(batch: int, size: int, microbatches: int, axis: str, who: str) -> Fault:
    unit = size * microbatches
    legal = dict.fromkeys((batch // unit * unit or unit, (batch // unit + 1) * unit))
    return Fault(
        "P104",
        f"{who} cannot split dim 'batch'",
        f"batch = {batch}, {axis} = {size}, accumulate = {microbatches}",
        f"batch = data ranks x accumulate x microbatch size, so {unit} must divide {batch}",
        f"batch = {' or '.join(map(str, legal))}",
        "workload.batch",
    )


def _outside_relaxed(inner: str, axis: str, who: str) -> Fault:
    return Fault(
        "P116",
        f"{who} cannot sum over ranks whose models differ: axis {inner!r} is relaxed",
        f"the table of {inner!r} stands before that of {axis!r}",
        "gradients are summed first where that is exact; a relaxed axis is the outermost of the data axes, and there is one",
        f"the table of {axis!r} before that of {inner!r}, or an exact strategy for {inner!r}",
        f"mesh.{axis}",
    )


def rewrite_batch(program: Program, axis: str, size: int, name: str) -> Program:
    """The program of one data rank; what no rule could follow is noted."""
    derivation = split_batch(program, axis, size)
    lost = across(program, derivation)
    said = rewrite(program, replace(derivation, moves=tuple(m for m in derivation.moves if m not in lost)))
    events = list(program.events())
    ops = sorted({e.op for m in lost if isinstance(e := events[m.event], Compute)})
    notes = [f"{name}: {op} has no rule; that it mixes no samples is checked before step 1" for op in ops]
    return said.with_notes(*(note for note in notes if note not in program.notes))


def say_loss(program: Program, axis: str) -> Program:
    """The program with what the step itself sends over a data axis, after everything else."""
    calls: Sequence[Collective] = [
        Collective("all_reduce", axis, (program.loss,), LOSS_BYTES, "float64", Phase.SYNC, "loss", once=True)
    ]
    if program.dynamic:
        copies = program.copies()
        count = sum(copies.get(p, 1) for p in program.gradients)
        calls = [Collective("all_reduce", axis, (), count, "uint8", Phase.SYNC, "used", once=True), *calls]
    return before_optimizer(program, tuple(calls))
