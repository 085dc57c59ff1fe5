"""What relaxed data axes share: one flat buffer of what learns, and where in a step it is exchanged.

    flat      registration order, padded at its end to a multiple of the ranks    shard s: [s * width, (s + 1) * width)
    lanes     parameters that are whole under the axes inside | those that are cut    each a flat buffer of its own

Ranks of an inner tensor axis hold the same first lane; what is chosen or drawn there is chosen alike, so copies stay copies.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from partita.errors import Fault
from partita.program.data import batch_faults, rewrite_batch, say_loss
from partita.program.events import WIDTH, Collective, Kind, Phase, Repeat, Rows, Split, Tensor
from partita.program.program import Program, before_optimizer

FLOATS = ("float32", "float64")


@dataclass(frozen=True)
class Lane:
    """A flat buffer: its elements, without padding, and their dtype."""

    size: int
    dtype: str

    def width(self, ranks: int) -> int:
        """Elements of a shard."""
        return -(-self.size // ranks)

    @property
    def bytes(self) -> int:
        """Of an element."""
        return WIDTH[self.dtype]


@dataclass(frozen=True)
class Said:
    """Calls of some steps.

    Args:
        calls: In order.
        when: Numbers of the steps of the period; empty: all.
        phase: SYNC: gradients, after the loss; OPTIMIZER: parameters, after the optimizer; FORWARD: at the beginning.
    """

    calls: tuple[Collective, ...]
    when: tuple[int, ...] = ()
    phase: Phase = Phase.SYNC


def lanes_of(program: Program) -> list[Lane]:
    """The flat buffers of a program, under the axes inside."""
    copies = program.copies()
    sizes = {False: 0, True: 0}
    learned = [t for t in program.parameters() if t.id in program.gradients]
    for t in learned:
        sizes[is_cut(t)] += copies.get(t.id, 1) * math.prod(program.local_shape(t.id))
    return [Lane(size, learned[0].dtype) for size in sizes.values() if size]


def is_cut(t: Tensor) -> bool:
    """Whether ranks of some axis inside hold different parts."""
    return any(isinstance(x, Split) for x in t.layouts.values())


def call(op: str, axis: str, elements: int, dtype: str, phase: Phase, name: str, *, overlapped: bool = False) -> Collective:
    """One exchange of a flat buffer, or of some of it."""
    return Collective(op, axis, (), elements * WIDTH[dtype], dtype, phase, name, overlapped=overlapped, once=True)


def say_relaxed(program: Program, axis: str, size: int, name: str, said: Iterable[Said], period: int = 1) -> Program:
    """The program of one rank whose gradients are not simply summed.

    Args:
        program: Under the axes inside.
        axis, size: The data axis.
        name: Of the strategy, for notes.
        said: What it exchanges, in order.
        period: In optimizer steps.
    """
    found = say_loss(rewrite_batch(program, axis, size, name), axis)
    if not program.gradients:
        return found.with_notes(f"{name}: nothing is learned, so nothing is exchanged over {axis} = {size}")
    for one in said:
        segment = Repeat(1, one.calls, when=one.when)
        if one.phase == Phase.SYNC:
            found = _placed(found, segment)
        elif one.phase == Phase.OPTIMIZER:
            found = replace(found, segments=(*found.segments, segment))
        else:
            found = replace(found, segments=(segment, *found.segments))
    return replace(found, period=period, relaxed=axis)


def _placed(program: Program, segment: Repeat) -> Program:
    """The program with a segment as the last before the optimizer."""
    made = before_optimizer(program, segment.events)
    at = next(k for k, (new, old) in enumerate(zip(made.segments, (*program.segments, None), strict=True)) if new != old)
    return replace(made, segments=(*made.segments[:at], segment, *made.segments[at + 1 :]))


def beside(program: Program, what: str, axis: str = "") -> Program:
    """The program with one more copy of everything that learns, kept from step to step; over `axis`, each rank its share."""
    tensors = list(program.tensors)
    for t in program.parameters():
        if t.id in program.gradients:
            layouts = {**t.layouts, axis: Rows()} if axis and t.shape else t.layouts
            at = len(tensors)
            tensors.append(replace(t, id=at, kind=Kind.OPTIMIZER, name=f"{t.name}.{what}", root=at, layouts=layouts))
    return replace(program, tensors=tuple(tensors))


def served(program: Program, axis: str) -> Program:
    """The program with optimizer state shared out: a rank steps on its shard of the flat buffer, and has its gradients."""
    gradients = set(program.gradients.values())
    learned = {program.tensors[p].name for p in program.gradients}

    def layout(t: Tensor) -> Rows | None:
        if not t.shape:
            return None
        if t.id in gradients:
            return Rows(held=False)
        return Rows() if t.kind == Kind.OPTIMIZER and t.name.rpartition(".")[0] in learned else None

    tensors = tuple(
        replace(t, layouts={**t.layouts, axis: rows}) if (rows := layout(t)) is not None else t for t in program.tensors
    )
    return replace(program, tensors=tensors)


# ---------------------------------------------------------------- what is refused
def relaxed_faults(program: Program, axis: str, size: int, who: str) -> list[Fault]:
    """Why a relaxed axis cannot stand here; empty if it can."""
    if size == 1:
        return []
    if found := batch_faults(program, axis, size, who):
        return found
    reasons = [*_kinds(program), *_places(program)]
    return [Fault("P116", f"{who} {what}", have, law, cure, f"mesh.{axis}") for what, have, law, cure in reasons]


def _kinds(program: Program) -> Iterable[tuple[str, str, str, str]]:
    learned = [t for t in program.parameters() if t.id in program.gradients]
    dtypes = {t.dtype: t.name for t in reversed(learned)}
    law = "all that learns is exchanged as one flat buffer, in the dtype it is stepped in"
    if len(dtypes) > 1 or any(d not in FLOATS for d in dtypes):
        have = ", ".join(f"{name!r} is {d}" for d, name in dtypes.items())
        yield "cannot exchange these parameters", have, law, "dtype = 'float32'"
    if program.dynamic:
        why = "control flow depends on data"
        yield "cannot tell which parameters a step changes", why, law, "a module whose path is fixed, or ddp"


def _places(program: Program) -> Iterable[tuple[str, str, str, str]]:
    if program.pipeline is not None:
        have = f"{program.pipeline.count} stages on axis {program.pipeline.axis!r}"
        yield (
            "cannot exchange the parameters of pipeline stages",
            have,
            "the flat buffer is of the whole model",
            "ddp, or no pipeline",
        )
    shared = [axis for axis in program.axes if any(isinstance(t.layouts.get(axis), Rows) for t in program.tensors)]
    if shared:
        have = f"rows are shared out over axis {shared[0]!r}"
        law = "the flat buffer is of parameters, gradients and state that a rank has whole"
        yield "cannot exchange what ranks hold by rows", have, law, f"ddp over {shared[0]!r}"


# ---------------------------------------------------------------- settings
def choice_fault(key: str, value: object, names: Sequence[str]) -> list[Fault]:
    """P107 unless a setting is one of some names."""
    if value in names:
        return []
    law = f"{key} is one of {len(names)} names"
    return [Fault("P107", f"unknown {key} {value!r}", f"{key} = {value!r}", law, ", ".join(names), key)]


def range_fault(key: str, value: float, law: str, cure: str, *, holds: bool) -> list[Fault]:
    """P112 unless a setting is in its range."""
    if holds:
        return []
    return [Fault("P112", f"{key} = {value!r} is out of range", f"{key} = {value!r}", law, cure, key)]
