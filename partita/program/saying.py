"""Says a derivation: the program of one rank, and which part of each tensor that rank holds."""

import collections
import itertools
import math
from dataclasses import replace

from partita.program.derivation import Derivation, Move, Taken
from partita.program.events import WIDTH, Collective, Compute, Event, Phase, Repeat, Split, Tensor
from partita.program.program import Program


def rewrite(program: Program, derivation: Derivation) -> Program:
    """The program of one rank once the derivation holds: layouts set, flop divided, collectives inserted."""
    axis, after = derivation.axis, placed(program, derivation)
    moves: dict[int, list[Move]] = collections.defaultdict(list)
    spoken = [m for m in derivation.moves if after.axes[m.axis or axis] > 1]
    for m in spoken:
        moves[m.event].append(m)
    count = itertools.count()
    segments: list[Repeat] = []
    synced = False
    for segment in program.segments:
        events: list[Event] = []
        if not synced and any(e.phase == Phase.OPTIMIZER for e in segment.events):
            synced = True
            segments += _late(program, [m for m in spoken if m.phase == Phase.SYNC], axis)
        for event in segment.events:
            n = next(count)
            events += [_collective(m, axis) for m in moves.pop(n, ()) if m.phase != Phase.SYNC]
            events.append(_shrunk(program, after, event, derivation.labels[n]))
        segments.append(replace(segment, events=tuple(events)))
    ends = [m for found in moves.values() for m in found if not (synced and m.phase == Phase.SYNC)]
    segments += _late(program, ends, axis)
    return replace(after, segments=tuple(segments))


def placed(program: Program, derivation: Derivation) -> Program:
    """The program with the layouts of a derivation set, and its events as they were."""
    layouts, blocks = derivation.layouts, derivation.blocks

    def place(t: Tensor) -> Tensor:
        along = {derivation.axis: layouts[t.id]} if t.id in layouts else {}
        across = {derivation.across: blocks[t.id]} if t.id in blocks else {}
        return replace(t, layouts={**t.layouts, **along, **across}) if along or across else t

    across = {derivation.across: derivation.ranks} if derivation.across else {}
    axes = {**across, **program.axes, derivation.axis: derivation.size}
    return replace(program, tensors=tuple(map(place, program.tensors)), axes=axes)


def _late(program: Program, moves: list[Move], axis: str) -> list[Repeat]:
    """Segments of what happens once, after backward: those of a repeated block as often as the block."""
    counts = {s.block: s.count for s in program.segments if s.block}

    def block(m: Move) -> str:
        return next((b for b in counts if m.module == b or m.module.startswith(b + ".")), "")

    groups = itertools.groupby(moves, key=block)
    return [Repeat(counts.get(b, 1), tuple(_collective(m, axis) for m in group), b) for b, group in groups]


def _collective(m: Move, axis: str) -> Collective:
    once = m.phase == Phase.SYNC
    return Collective(
        m.op, m.axis or axis, (m.tensor,), m.nbytes, m.dtype, m.phase, m.module, once=once, keeps=m.keeps, values=m.values
    )


def _shrunk(before: Program, after: Program, event: Event, taken: Taken) -> Event:
    """An event as it is once its tensors are split: less work, smaller payloads."""
    if isinstance(event, Compute):
        size = math.prod(after.axes.values()) // math.prod(before.axes.values())
        return replace(event, flop=event.flop // size) if taken.label is not None and event.flop else event
    was, now = payload(before, event), payload(after, event)
    return replace(event, nbytes=event.nbytes * now // was) if was != now else event


def payload(program: Program, event: Collective) -> int:
    """Bytes of the tensors of a collective on this rank: the large side, under the layouts of the other axes."""
    total = 0
    for v in event.tensors:
        t = program.tensors[v]
        shape = list(t.shape)
        for axis, layout in t.layouts.items():
            if isinstance(layout, Split) and (axis != event.axis or event.op == "all_to_all"):
                shape[layout.dim] //= program.axes[axis]
        kept = shape if event.keeps is None else [shape[d] for d in event.keeps]
        total += event.values * math.prod(kept) * WIDTH[event.dtype]
    return total


def ranges(program: Program, tensor: int, axis: str, coordinate: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Which part of a whole tensor the rank at `coordinate` of an axis holds.

    Returns:
        (dim, ((start, length), ...)): the indices along that dim, in order; strided when the split atom is not the outermost
        (fused qkv), one range per summand for a direct sum. With several axes on one dim, intersect.

    Raises:
        KeyError: If the tensor is not split along the axis.
    """
    t = program.tensors[tensor]
    layout = t.layouts[axis]
    assert isinstance(layout, Split), f"{t.name or t.id} is not split along {axis}"
    dim, size = t.dims[layout.dim], [program.atoms[a] for a in t.dims[layout.dim]]
    outer, inner = math.prod(size[: layout.atom]), math.prod(size[layout.atom + 1 :])
    atom, ranks = dim[layout.atom], program.axes[axis]
    blocks = [math.prod(program.atoms[a] for a in d) for d in program.sums.get(atom, ())] or [size[layout.atom]]
    earlier = 1  # an axis rewritten before this one on the same atom: this one divides its blocks
    for other, at in t.layouts.items():
        if other == axis:
            break
        earlier *= program.axes[other] if at == layout else 1
    found: list[tuple[int, int]] = []
    start = 0
    for _ in range(outer):
        for block in blocks:
            length = block * inner // (ranks * earlier)
            found += [(start + (j * ranks + coordinate) * length, length) for j in range(earlier)]
            start += block * inner
    return layout.dim, tuple(found)
