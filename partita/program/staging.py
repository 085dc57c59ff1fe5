"""Says the stages of a pipeline's rank held by rows: whole parameters only while a pass of their stage needs them.

    0F     rest of 0 | block 0, run it, let go | block 1, run it, let go |
    0B     rest of 0 | block 1, its backward, scatter | block 0, its backward, scatter | scatter the rest
    0W     all of 0, the gradients of all, scatter            a backward of the weights alone, in no order of blocks

A block is a numbered module that runs once and alone reads its parameters; the rest of a stage, and what several stages of a
rank read, stays gathered for the length of a pass. Where nothing is let go between passes, a round begins with all gathers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from partita.program.blocks import inside
from partita.program.data import rewrite_batch, say_loss
from partita.program.events import WIDTH, Collective, Compute, Event, Phase, Repeat
from partita.program.program import Program, Turn, before_optimizer, stage_and_kind
from partita.program.reduction import Bucketed, entries_of, gradients_by_name, launched_in_passes, of_buckets, stages_of
from partita.program.sharding import padded, scattering, share_rows
from partita.program.units import units_of

BACKWARD = ("B", "I", "W")


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered together.

    Args:
        path: Of the block; "" of a rest.
        stages: That read them.
        parameters: Ids, in registration order.
    """

    path: str
    stages: tuple[int, ...]
    parameters: tuple[int, ...]


def groups_of(program: Program) -> list[Group]:
    """The groups of a role: its blocks in the order they run, then the rest of each stage, then what several stages read."""
    names = stages_of(program)
    stages = {p.id: names[p.name] for p in program.parameters()}
    blocks = [u for u in units_of(program) if u.path and u.parameters]
    blocks = [u for u in blocks if len(stages[u.parameters[0]]) == 1 and len({stages[i] for i in u.parameters}) == 1]
    found = [Group(u.path, stages[u.parameters[0]], u.parameters) for u in blocks]
    found.sort(key=lambda g: g.stages)
    taken = {i for g in found for i in g.parameters}
    rest: dict[tuple[int, ...], list[int]] = {}
    for i, at in stages.items():
        if i not in taken and at:
            rest.setdefault(at, []).append(i)
    return found + [Group("", at, tuple(rest[at])) for at in sorted(rest, key=lambda at: (len(at) > 1, at))]


def sent_of(groups: Sequence[Group]) -> list[Group]:
    """The groups in the order their gradients are complete in a backward: stages, and blocks within them, from the last."""
    backward = list(reversed(groups))
    return sorted(backward, key=lambda g: (len(g.stages) > 1, [-s for s in g.stages], not g.path))


def say_stages(
    program: Program, axis: str, size: int, *, name: str, reshard: bool, replicate: tuple[str, int] | None
) -> Program:
    """The role of a rank that holds rows of its stages.

    Args:
        program: Of a pipeline's rank, under the axes inside.
        axis, size: Over which rows are shared out.
        name: Of the strategy, for notes.
        reshard: Whole parameters are let go of within and after each pass.
        replicate: A further data axis and its size, on which ranks hold the same rows.
    """
    axes = [replicate, (axis, size)] if replicate is not None and replicate[1] > 1 else [(axis, size)]
    for a, n in axes:
        program = rewrite_batch(program, a, n, name)
    program = replace(program, axes={**program.axes, axis: size, **({} if replicate is None else {replicate[0]: replicate[1]})})
    groups, tensors = groups_of(program), program.tensors
    buckets = [[tensors[i].name for i in g.parameters if i in program.gradients] for g in sent_of(groups)]
    gathering = (_gathering if reshard else _unsharding)(program, groups, axis, size)
    found = of_buckets(gathering, entries_of(program), [b for b in buckets if b])
    said = launched_in_passes(found, scattering(found, axis, size, once=False))
    if len(axes) > 1:
        said = before_optimizer(said, tuple(_again(found, names, axes[0][0]) for names in found.buckets))
    said = share_rows(said, axis, size, parameters={i for g in groups for i in g.parameters})
    for a, _ in axes:
        said = say_loss(said, a)
    return said


def _again(found: Bucketed, names: Sequence[str], axis: str) -> Collective:
    """Over a second data axis the rows of the sums are summed, once a step."""
    gradient, sent = gradients_by_name(found.program), sum(found.sizes[n] for n in names)
    tensors = tuple(gradient[n] for n in names)
    return Collective("all_reduce", axis, tensors, sent, found.dtypes[names[0]], Phase.SYNC, names[-1], once=True)


def _gather(program: Program, group: Group, axis: str, size: int, phase: Phase) -> Collective:
    dtype = program.tensors[group.parameters[0]].dtype
    sent = WIDTH[dtype] * sum(padded(program.local_shape(i), size) for i in group.parameters)
    return Collective("all_gather", axis, group.parameters, sent, dtype, phase, group.path)


def _gathering(program: Program, groups: Sequence[Group], axis: str, size: int) -> Program:
    """Every pass gathers what it reads: the rest of its stage at once, blocks when they begin."""

    def passed(segment: Repeat) -> Repeat:
        stage, kind = stage_and_kind(segment.part)
        if kind not in ("F", *BACKWARD) or not segment.events:
            return segment
        phase = Phase.FORWARD if kind == "F" else Phase.BACKWARD
        own = [g for g in groups if stage in g.stages]
        first = [_gather(program, g, axis, size, phase) for g in own if not g.path or kind == "W"]
        if kind == "W":
            return replace(segment, events=(*first, *segment.events))
        begins: dict[int, Collective] = {}
        for g in (g for g in own if g.path):
            at = next((n for n, e in enumerate(segment.events) if isinstance(e, Compute) and inside(g.path, e.module)), None)
            if at is not None:
                begins[at] = _gather(program, g, axis, size, phase)
        events: list[Event] = [*first]
        for n, event in enumerate(segment.events):
            events += [begins[n], event] if n in begins else [event]
        return replace(segment, events=tuple(events))

    return replace(program, segments=tuple(map(passed, program.segments)))


def _unsharding(program: Program, groups: Sequence[Group], axis: str, size: int) -> Program:
    """A round begins with all gathers and ends with letting go."""
    assert program.pipeline is not None, "a role has turns"
    stages = program.pipeline.stages
    parts = [
        Repeat(1, tuple(_gather(program, g, axis, size, Phase.FORWARD) for g in groups if g.stages[0] == s), part=f"{s}UNSHARD")
        for s in stages
    ]
    ends = [Repeat(1, (), part=f"{s}RESHARD") for s in stages]
    turns = (*(Turn(p.part, 0) for p in parts), *program.pipeline.turns, *(Turn(p.part, 0) for p in ends))
    return replace(program, segments=(*parts, *ends, *program.segments), pipeline=replace(program.pipeline, turns=turns))
