"""How the buckets of a data axis are said: which gradients go together, and where in backward each bucket is launched.

backward    ... grad 7  grad 6 | grad 5  grad 4 | ...
axis                           └ bucket 0 ──────┘└ bucket 1 ...        after the op that makes its last gradient
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from partita.program.buckets import Entry, cut_apart, cut_buckets
from partita.program.events import WIDTH, Collective, Compute, Event, Phase, Repeat, Split
from partita.program.fold import unfold
from partita.program.program import Program, before_optimizer, insert, stage_and_kind, with_segments
from partita.program.switched import OPS

Call = Callable[[Sequence[str]], Collective]  # the collective of a bucket, from the names of its parameters


@dataclass(frozen=True)
class Bucketed:
    """A program and the buckets of its gradients.

    Args:
        program: Written out where a bucket holds more than one copy of a repeated block.
        buckets: Names of parameters, in launch order.
        sizes: Name -> bytes as it is reduced, under the axes rewritten so far.
        dtypes: Name -> dtype it is reduced in.
    """

    program: Program
    buckets: list[list[str]]
    sizes: dict[str, int]
    dtypes: dict[str, str]


def bucketed(program: Program, limit: int, *, flat: bool = False, apart: bool = False) -> Bucketed:
    """The buckets of a program.

    Args:
        program: Under the axes inside.
        limit: Bytes at which a bucket closes.
        flat: Write repeated blocks out whatever the buckets are.
        apart: Of a pipeline's role, the buckets of each stage by themselves.
    """
    entries = entries_of(program)
    if apart and program.pipeline is not None:  # a role is written out
        return of_buckets(program, entries, cut_apart(entries, stages_of(program), limit=limit))
    buckets = cut_buckets(entries, limit=limit)
    if flat or _spans(program, buckets):  # blocks are small: buckets hold several, and no copy of the body is like the next
        program = unfold(program)
        entries = entries_of(program)
        buckets = cut_buckets(entries, limit=limit)
    return of_buckets(program, entries, buckets)


def of_buckets(program: Program, entries: Sequence[Entry], buckets: list[list[str]]) -> Bucketed:
    """A program with buckets that are known."""
    return Bucketed(program, buckets, {n: size for n, size, _ in entries}, {n: dtype for n, _, dtype in entries})


def launched(found: Bucketed, call: Call) -> Program:
    """The program with each bucket's call after the op that makes its last gradient, in launch order."""
    program, gradient = found.program, gradients_by_name(found.program)
    made = {o: at for at, e in enumerate(program.events()) if isinstance(e, Compute) for o in e.outs}
    after: dict[int, list[Event]] = {}
    at = -1
    for names in found.buckets:
        at = max([at, *(made[gradient[n]] for n in names)])
        after.setdefault(at, []).append(call(names))
    return insert(program, after)


def launched_in_passes(found: Bucketed, call: Call) -> Program:
    """The role of a pipeline's rank with the calls of each stage in every pass that makes its gradients.

    A backward of the weights alone hands over all of them at its end. What several stages of the rank add to goes once a step,
    after the last pass.
    """
    program, gradient, stages = found.program, gradients_by_name(found.program), stages_of(found.program)
    once = [names for names in found.buckets if len(stages[names[0]]) > 1]
    split = {s.part for s in program.segments if s.part.endswith("I") and s.events}
    segments = []
    for segment in program.segments:
        stage, kind = stage_and_kind(segment.part)
        own = [names for names in found.buckets if kind in ("B", "W") and stages[names[0]] == (stage,)]
        end = len(segment.events) - 1
        made = {o: at for at, e in enumerate(segment.events) if isinstance(e, Compute) for o in e.outs}
        after: dict[int, list[Event]] = defaultdict(list)
        at = end if kind == "W" and f"{stage}I" in split else -1
        for names in own:
            at = max([at, *(made.get(gradient[n], end) for n in names)])
            after[at].append(call(names))
        events = [x for at, e in enumerate(segment.events) for x in (e, *after.pop(at, ()))]
        segments.append(replace(segment, events=(*(x for some in after.values() for x in some), *events)))
    said = replace(program, segments=tuple(segments))
    return before_optimizer(said, tuple(replace(call(names), once=True) for names in once))


def stages_of(program: Program) -> dict[str, tuple[int, ...]]:
    """Parameter -> the stages of a pipeline's rank that read it; empty without a pipeline."""
    if program.pipeline is None:
        return {}
    found: dict[int, set[int]] = {t.id: set() for t in program.parameters()}
    for segment in program.segments:
        stage, kind = stage_and_kind(segment.part)
        for event in segment.events if kind == "F" else ():
            for i in event.ins if isinstance(event, Compute) else ():
                if i in found:
                    found[i].add(stage)
    return {program.tensors[i].name: tuple(sorted(at)) for i, at in found.items()}


def late(found: Bucketed, call: Call) -> Program:
    """The program with the buckets' calls after backward."""
    return before_optimizer(found.program, tuple(map(call, found.buckets)))


def sum_late(program: Program, axis: str) -> Program:
    """The program with the gradients of what is not cut along a data axis summed over it, one by one, after backward."""
    counts = {s.block: s.count for s in program.segments if s.block}
    calls: list[tuple[str, Collective]] = []
    for t in program.parameters():
        if t.id in program.gradients and not isinstance(t.layouts.get(axis), Split):
            g = program.gradients[t.id]
            size, dtype = program.local_bytes(g), program.tensors[g].dtype
            block = next((b for b in counts if t.name.startswith(f"{b}.")), "")
            calls.append((block, Collective("all_reduce", axis, (g,), size, dtype, Phase.SYNC, t.name, once=True)))
    groups = itertools.groupby(calls, key=lambda c: c[0])
    late = tuple(Repeat(counts.get(block, 1), tuple(call for _, call in group), block) for block, group in groups)
    return with_segments(program, late)


def afterwards(program: Program, calls: Sequence[Collective]) -> Program:
    """The program with calls after the optimizer; one for a repeated block happens as often as the block."""
    counts = {f"{s.block}.": (s.count, s.block) for s in program.segments if s.block}

    def of_block(call: Collective) -> tuple[int, str]:
        return next((found for block, found in counts.items() if call.module.startswith(block)), (1, ""))

    segments = []
    for call in calls:
        count, block = of_block(call)
        segments.append(Repeat(count, (call,), block))
    return replace(program, segments=(*program.segments, *segments))


def gradients_by_name(program: Program) -> dict[str, int]:
    """Name of a parameter -> id of its final gradient."""
    return {program.tensors[p].name: g for p, g in program.gradients.items()}


def entries_of(program: Program) -> list[Entry]:
    """(name, bytes this rank reduces, dtype) of every parameter with a gradient, in registration order."""
    found = []
    for p in program.parameters():
        if p.id in program.gradients:
            dtype = program.reduce_dtype or p.dtype
            found.append((p.name, program.owned_bytes(p.id) // WIDTH[p.dtype] * WIDTH[dtype], dtype))
    return found


def has_buckets(program: Program) -> bool:
    """Whether a data axis inside reduces gradients in buckets already."""
    calls = (e for e in program.events() if isinstance(e, Collective))
    return any((e.overlapped and e.phase == Phase.BACKWARD) or e.op in OPS for e in calls)


def _spans(program: Program, buckets: Sequence[Sequence[str]]) -> bool:
    """Whether a bucket holds gradients of a repeated block beside others."""
    repeated = {f"{s.block}." for s in program.segments if s.block}
    inside = [[any(name.startswith(block) for block in repeated) for name in names] for names in buckets]
    return any(any(found) and not all(found) for found in inside)
