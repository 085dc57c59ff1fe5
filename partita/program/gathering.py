"""Says a fully sharded model: parameters, gradients and optimizer state by rows, whole parameters only where they are used."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from partita.errors import Fault
from partita.program.data import rewrite_batch, say_loss
from partita.program.events import WIDTH, Collective, Event, Phase, Rows
from partita.program.fold import unfold
from partita.program.program import Program
from partita.program.sharding import padded, share_rows
from partita.program.units import Moment, Unit, moments, units_of


def unit_faults(program: Program, axis: str, size: int, who: str) -> list[Fault]:
    """Why the parameters of a model cannot be gathered unit by unit; empty if they can."""
    if size == 1:
        return []
    at, cure = f"mesh.{axis}", "zero2, which keeps parameters whole"
    found = []
    if program.dynamic:
        what = f"{who} cannot follow control flow that depends on data"
        law = "all ranks gather the same blocks in the same order, so no rank may leave one out"
        found.append(Fault("P116", what, "which parameters get a gradient may differ per rank and step", law, cure, at))
    for p in program.parameters():
        if not p.shape:
            what = f"{who} cannot share out parameter {p.name!r}"
            law = "what is shared out are rows: a number without dims has none"
            found.append(Fault("P116", what, "shape ()", law, f"shape (1,); or {cure}", at))
    for unit in units_of(program):
        dtypes = sorted({program.tensors[i].dtype for i in unit.parameters})
        if len(dtypes) > 1:
            what = f"{who} cannot gather {unit.path or 'the model outside its blocks'!r} in one call"
            law = "the parameters of a block are gathered together, so they have one dtype"
            found.append(Fault("P116", what, ", ".join(dtypes), law, f"one dtype a block; or {cure}", at))
    return found


def say_sharded(
    program: Program, axis: str, size: int, *, name: str, reshard: bool, replicate: tuple[str, int] | None
) -> Program:
    """The program of a rank that holds rows of everything.

    Args:
        program: Under the axes inside.
        axis, size: Over which rows are shared out.
        name: Of the strategy, for notes.
        reshard: Blocks give whole parameters back after forward.
        replicate: A further data axis and its size, on which ranks hold the same rows.
    """
    axes = [(axis, size)] if replicate is None else [replicate, (axis, size)]
    axes = [(a, n) for a, n in axes if n > 1]
    for a, n in axes:
        program = rewrite_batch(program, a, n, name)
    program = replace(program, axes={**program.axes, axis: size, **({} if replicate is None else {replicate[0]: replicate[1]})})
    if size > 1:
        if not program.gradients:
            program = program.with_notes(f"{name}: nothing is learned, so no gradient is summed over {axis} = {size}")
        program = _said(program if _uniform(program, size) else unfold(program), axis, size, reshard, replicate)
    for a, _ in axes:
        program = say_loss(program, a)
    return program


def _uniform(program: Program, size: int) -> bool:
    """Whether every copy of a repeated block does the same: each asks for the one below it, the first for block 0."""
    body = next((s.block for s in program.segments if s.block), "")
    if not body:
        return True
    units = [u for u in units_of(program) if u.path]
    paths = [u.path for u in units]
    if body not in paths:
        return False
    at = paths.index(body)
    return at > 0 and _gathered(program, units[at - 1], size) == _gathered(program, units[at], size)


def _said(program: Program, axis: str, size: int, reshard: bool, replicate: tuple[str, int] | None) -> Program:  # noqa: FBT001
    units = units_of(program)
    before: dict[int, list[Event]] = {}
    after: dict[int, list[Event]] = {}
    for moment in moments(program, units, reshard=reshard):
        place = before if moment.before else after
        place.setdefault(moment.event, []).extend(_calls(program, moment, axis, size, replicate))
    said = _carrying(_placed(program, before, after), units)
    return share_rows(said, axis, size, parameters={p.id for p in said.parameters()})


def _gathered(program: Program, unit: Unit, size: int) -> int:
    width = WIDTH[program.tensors[unit.parameters[0]].dtype]
    return width * sum(padded(program.local_shape(i), size) for i in unit.parameters)


def _calls(program: Program, moment: Moment, axis: str, size: int, replicate: tuple[str, int] | None) -> list[Collective]:
    unit = moment.unit
    dtype = program.tensors[unit.parameters[0]].dtype
    if moment.op == "gather":
        sent = _gathered(program, unit, size)
        return [Collective("all_gather", axis, unit.parameters, sent, dtype, moment.phase, moment.asked)]
    learned = [i for i in unit.parameters if i in program.gradients]
    if not learned:
        return []
    kind = program.reduce_dtype or dtype
    sent = WIDTH[kind] * sum(padded(program.local_shape(i), size) for i in learned)
    tensors = tuple(program.gradients[i] for i in learned)
    calls = [Collective("reduce_scatter", axis, tensors, sent, kind, moment.phase, moment.asked, overlapped=True)]
    if replicate is not None and replicate[1] > 1:
        calls.append(Collective("all_reduce", replicate[0], tensors, sent // size, kind, moment.phase, moment.asked))
    return calls


def _placed(program: Program, before: Mapping[int, Sequence[Event]], after: Mapping[int, Sequence[Event]]) -> Program:
    segments, at = [], 0
    for segment in program.segments:
        events: list[Event] = []
        for event in segment.events:
            events += [*before.get(at, ()), event, *after.get(at, ())]
            at += 1
        segments.append(replace(segment, events=tuple(events)))
    return replace(program, segments=tuple(segments))


def _carrying(program: Program, units: Sequence[Unit]) -> Program:
    """Of a folded program: each copy of the block gathers the copy before it, the first one the block before all."""
    body = next((s.block for s in program.segments if s.block), "")
    paths = [u.path for u in units]
    if not body:
        return program
    at = paths.index(body)
    pairs = tuple(zip(units[at - 1].parameters, units[at].parameters, strict=True))

    def asks(events: Sequence[Event]) -> bool:
        return any(isinstance(e, Collective) and e.op == "all_gather" and e.phase == Phase.BACKWARD for e in events)

    segments = tuple(replace(s, carried=(*s.carried, *pairs)) if s.block and asks(s.events) else s for s in program.segments)
    return replace(program, segments=segments)


def is_sharded(program: Program) -> bool:
    """Whether parameters are held by rows."""
    return any(isinstance(x, Rows) and x.held for t in program.parameters() for x in t.layouts.values())
