"""The Program: ordered events of one period on one rank, with named dims."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from partita.program.dims import Dim
from partita.program.events import WIDTH, Collective, Compute, Event, Kind, Phase, Repeat, Rows, Split, Tensor


class Turn(NamedTuple):
    """One entry of a role's list: which part of the program runs, for which microbatch of the round.

    A part is a stage with a pass (`2F`, `2B`, `2I`, `2W`) or with a message (`2RECV_F`, `2SEND_F`, `2RECV_B`, `2SEND_B`).
    """

    part: str
    microbatch: int


def stage_and_kind(part: str) -> tuple[int, str]:
    """The stage of a part, and which pass or message it is; (-1, "") of what is no part.

    Example:
        >>> stage_and_kind("12SEND_F"), stage_and_kind("")
        ((12, 'SEND_F'), (-1, ''))
    """
    kind = part.lstrip("0123456789")
    return (int(part[: -len(kind)]), kind) if kind else (-1, "")


@dataclass(frozen=True)
class Pipeline:
    """What makes a program the role of one rank of a pipeline.

    Args:
        axis: The mesh axis of the stages.
        rank: Coordinate on it.
        stages: Held by this rank, from the first.
        count: Stages of the whole pipeline.
        turns: What the rank does in one round, messages included, in order.
        microbatches: Of a round; a step has `Program.microbatches / microbatches` rounds.
        behind: Per stage, by how many blocks the module paths of a program said for several ranks are behind its own, and
            the path before their number; empty where they are its own.
    """

    axis: str
    rank: int
    stages: tuple[int, ...]
    count: int
    turns: tuple[Turn, ...]
    microbatches: int
    behind: tuple[tuple[int, str], ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Program:
    """One period of one role: a step, or several that differ in what they send.

    Args:
        atoms: Size of each atom (leaves of the union-find, after settling), by atom number.
        sums: atom -> the summand dims it is a direct sum of (a fused, unequal qkv is q + k + v).
        classes: Dim name -> atoms of that name: batch, sequence, hidden, heads, ffn, vocab, ...
        tensors: By id.
        segments: The events, in order; a folded model has counts above 1.
        gradients: Parameter id -> id of its final gradient.
        loss: Id of the scalar loss, -1 if there is none.
        microbatches: Times forward and backward run in the period (gradient accumulation).
        axes: Axis -> size, for every axis already rewritten.
        reduce_dtype: dtype gradients are summed in; None means their own.
        clip: The step clips the global gradient norm.
        dynamic: Control flow depends on data: which parameters get a gradient may differ per rank and step.
        calls: Path of a module that is called more than once in a forward pass -> how often.
        notes: Things a report should say: opaque ops, modules left whole.
        pipeline: Of the role of a pipeline's rank: how its parts take turns; None where microbatches run one after another.
        runs: Paths of the numbered modules whose forward runs exactly once, in that order: blocks, and parts of them.
        period: Optimizer steps it covers. They differ in what `Repeat.when` says: see `rounds.py`.
        relaxed: The data axis over which ranks exchange less than every gradient, or later; empty if there is none.
    """

    atoms: Mapping[int, int]
    tensors: tuple[Tensor, ...]
    segments: tuple[Repeat, ...]
    gradients: Mapping[int, int] = field(default_factory=dict)
    classes: Mapping[str, frozenset[int]] = field(default_factory=dict)
    sums: Mapping[int, tuple[Dim, ...]] = field(default_factory=dict)
    loss: int = -1
    microbatches: int = 1
    axes: Mapping[str, int] = field(default_factory=dict)
    reduce_dtype: str | None = None
    clip: bool = False
    dynamic: bool = False
    calls: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    pipeline: Pipeline | None = None
    runs: tuple[str, ...] = ()
    period: int = 1
    relaxed: str = ""

    # ---- steps of a period
    def step(self, number: int) -> "Program":
        """The program of one step, by its number from the start of training."""
        if self.period == 1:
            return self
        kept = (replace(s, when=()) for s, there in zip(self.segments, self.kind(number), strict=True) if there)
        return replace(self, segments=tuple(kept), period=1)

    def kind(self, number: int) -> tuple[bool, ...]:
        """Which segments happen in a step; steps of one kind do the same."""
        return tuple(not s.when or number % self.period in s.when for s in self.segments)

    # ---- reading
    def events(self) -> Iterator[Event]:
        """Every event once, repeated bodies once."""
        for segment in self.segments:
            yield from segment.events

    def counted(self) -> Iterator[tuple[Event, int]]:
        """Every event with how often it happens in a step (repeats x microbatches)."""
        assert self.period == 1, "steps of a period differ: ask for its rounds"
        turns = Counter(turn.part for turn in self.pipeline.turns) if self.pipeline else {}
        for segment in self.segments:
            for event in segment.events:
                times = self.times(event)
                if self.pipeline and segment.part and times > 1:
                    times = turns[segment.part] * (self.microbatches // self.pipeline.microbatches)
                yield event, segment.count * times

    def times(self, event: Event) -> int:
        """How often an event happens in the period because of microbatches alone."""
        if event.phase in (Phase.SYNC, Phase.OPTIMIZER) or (isinstance(event, Collective) and event.once):
            return 1
        return self.microbatches

    def collectives(self) -> list[Collective]:
        """The said list of a step, in order, microbatches and repeats unrolled."""
        return [e for e in self.unrolled() if isinstance(e, Collective)]

    def unrolled(self) -> Iterator[Event]:
        """Every event of a step as often as it happens, in order."""
        assert self.period == 1, "steps of a period differ: ask for its rounds"
        if self.pipeline is not None:
            yield from self._in_turns(self.pipeline)
            return
        inner = [s for s in self.segments if any(e.phase not in (Phase.SYNC, Phase.OPTIMIZER) for e in s.events)]
        outer = [s for s in self.segments if s not in inner]
        for k in range(self.microbatches):
            last = k == self.microbatches - 1
            for segment in inner:
                for _ in range(segment.count):
                    yield from (e for e in segment.events if last or not (isinstance(e, Collective) and e.once))
        for segment in outer:
            for _ in range(segment.count):
                yield from segment.events

    def _in_turns(self, pipeline: Pipeline) -> Iterator[Event]:
        """`unrolled`, of a role."""
        parts = {s.part: s.events for s in self.segments if s.part}
        final = {turn.part: at for at, turn in enumerate(pipeline.turns)}
        rounds = self.microbatches // pipeline.microbatches
        for k in range(rounds):
            for at, turn in enumerate(pipeline.turns):
                last = k == rounds - 1 and at == final[turn.part]
                yield from (e for e in parts[turn.part] if last or not (isinstance(e, Collective) and e.once))
        for segment in (s for s in self.segments if not s.part):
            for _ in range(segment.count):
                yield from segment.events

    def copies(self) -> dict[int, int]:
        """Tensor id -> how many copies of it exist because its block is repeated; absent means one."""
        blocks = {s.block + "." for s in self.segments if s.block}
        found: dict[int, int] = {}
        for segment in self.segments:
            for event in segment.events if segment.count > 1 else ():
                if isinstance(event, Compute):
                    own = [i for i in event.ins if blocks and self.tensors[i].name.startswith(tuple(blocks))]
                    found.update(dict.fromkeys((*event.outs, *own), segment.count))
        return found

    def parameters(self) -> list[Tensor]:
        """Parameters, in registration order."""
        return [t for t in self.tensors if t.kind == Kind.PARAMETER]

    # ---- sizes
    def local_shape(self, tensor: int) -> tuple[int, ...]:
        """Shape of this rank's part as ops of forward and backward see it, under every axis rewritten so far."""
        t = self.tensors[tensor]
        shape = list(t.shape)
        for axis, layout in t.layouts.items():
            if isinstance(layout, Split):
                shape[layout.dim] //= self.axes[axis]
        return tuple(shape)

    def local_bytes(self, tensor: int) -> int:
        """Bytes of the part that ops of forward and backward see."""
        return math.prod(self.local_shape(tensor)) * WIDTH[self.tensors[tensor].dtype]

    def held_bytes(self, tensor: int) -> int:
        """Bytes that stay on this rank; of rows shared out, what the rank with the most of them holds."""
        return self._rows_bytes(tensor, lambda rows: rows.held)

    def owned_bytes(self, tensor: int) -> int:
        """Bytes that the optimizer of this rank steps on; of rows shared out, those of the rank with the most of them."""
        return self._rows_bytes(tensor, lambda rows: True)

    def _rows_bytes(self, tensor: int, wanted: Callable[[Rows], bool]) -> int:
        t, shape = self.tensors[tensor], self.local_shape(tensor)
        if shape:
            rows = shape[0]
            for axis, layout in t.layouts.items():
                if isinstance(layout, Rows) and wanted(layout):
                    rows = -(-rows // self.axes[axis])
            shape = (rows, *shape[1:])
        return math.prod(shape) * WIDTH[t.dtype]

    def flop(self) -> int:
        """Flop of this rank in a step."""
        return sum(e.flop * n for e, n in self.counted() if isinstance(e, Compute))

    def opaque_share(self) -> float:
        """Share of the bytes and of the flop (the larger) in ops without a signature."""
        flop = opaque_flop = size = opaque_size = 0
        for event, n in self.counted():
            if isinstance(event, Compute) and not event.view:
                moved = n * sum(self.tensors[i].nbytes for i in (*event.ins, *event.outs))
                flop, size = flop + n * event.flop, size + moved
                if event.signature is None:
                    opaque_flop, opaque_size = opaque_flop + n * event.flop, opaque_size + moved
        return max(opaque_flop / max(flop, 1), opaque_size / max(size, 1))

    # ---- changing
    def with_notes(self, *notes: str) -> "Program":
        return replace(self, notes=(*self.notes, *notes))


def before_optimizer(program: Program, events: tuple[Event, ...]) -> Program:
    """The program with `events` after everything else that happens before the optimizer."""
    return with_segments(program, (Repeat(1, events),)) if events else program


def with_segments(program: Program, segments: tuple[Repeat, ...]) -> Program:
    """The program with `segments` after everything else that happens before the optimizer."""
    steps = [any(e.phase == Phase.OPTIMIZER for e in s.events) for s in program.segments]
    at = steps.index(True) if True in steps else len(steps)
    return replace(program, segments=(*program.segments[:at], *segments, *program.segments[at:]))


def insert(program: Program, after: Mapping[int, list[Event]]) -> Program:
    """The program with events added after those at the given indices of `Program.events()`."""
    segments, index = [], 0
    for segment in program.segments:
        events: list[Event] = []
        for event in segment.events:
            events += [event, *after.get(index, ())]
            index += 1
        segments.append(replace(segment, events=tuple(events)))
    return replace(program, segments=tuple(segments))
