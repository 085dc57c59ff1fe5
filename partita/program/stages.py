"""Cuts a program by depth into the stages of a pipeline.

    forward     embed 0 1 | 2 3 | 4 5 norm head loss          a stage is a run of the forward pass
    backward    loss head norm 5 4 | 3 2 | 1 0 embed           and of the backward pass, from the last to the first
    crossing    what a later stage reads of an earlier one; what a stage does not need itself it passes on

What does not descend from a parameter (masks, positions) is computed on every stage and never sent.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from partita.errors import Fault, Refused
from partita.program.buckets import block_of
from partita.program.events import Compute, Event, Kind, Phase
from partita.program.program import Program

EVERYWHERE = -1  # the stage of an event that runs on all of them
AFTER = (Phase.SYNC, Phase.OPTIMIZER)
FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


@dataclass(frozen=True)
class Crossing:
    """What goes over one cut with each microbatch.

    Args:
        forward: Tensors sent on, in the order they are made.
        backward: Those of them whose gradients come back.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True)
class Stages:
    """A program that has been cut.

    Args:
        starts: Module path each stage begins with; "" for the first.
        of: Per event of `program.events()`, its stage or `EVERYWHERE`; of what happens once a step, `EVERYWHERE`.
        crossings: Between stage s and s + 1.
        holders: Parameter name -> the stages that read it, from the first.
    """

    starts: tuple[str, ...]
    of: tuple[int, ...]
    crossings: tuple[Crossing, ...]
    holders: Mapping[str, tuple[int, ...]]

    @property
    def count(self) -> int:
        return len(self.starts)


def cut(program: Program, starts: Sequence[str]) -> Stages:
    """The stages that begin with these modules.

    Args:
        program: Flat.
        starts: One module path per stage after the first, in the order they run.

    Raises:
        Refused: P121, for every path that no stage can begin with.
    """
    return _Cutter(program, starts).stages()


def under(path: str, start: str) -> bool:
    """Whether a module path is `start` or inside it."""
    return path == start or path.startswith(f"{start}.")


def descends(program: Program) -> list[bool]:
    """Per tensor, whether it was computed from a parameter."""
    found = [t.kind == Kind.PARAMETER for t in program.tensors]
    for event in program.events():
        if isinstance(event, Compute) and event.phase not in AFTER and any(found[i] for i in event.ins):
            for o in event.outs:
                found[o] = True
    return found


def learns(program: Program) -> list[bool]:
    """Per tensor of the forward pass, whether a gradient flows into it."""
    found = [t.id in program.gradients for t in program.tensors]
    for event in program.events():
        if isinstance(event, Compute) and event.phase == Phase.FORWARD and event.op != "detach":
            flows = any(found[i] for i in event.ins)
            for o in event.outs if flows else ():
                found[o] = program.tensors[o].dtype in FLOATS
    return found


class _Cutter:
    def __init__(self, program: Program, starts: Sequence[str]) -> None:
        self.program, self.starts = program, tuple(starts)
        self.events = list(program.events())
        self.descending = descends(program)

    def stages(self) -> Stages:
        of = self._forward()
        self._backward(of)
        holders = self._holders(of)
        self._expect_parameters(holders)
        crossings = tuple(self._crossing(of, s) for s in range(1, len(self.starts) + 1))
        return Stages(("", *self.starts), tuple(of), crossings, holders)

    # ---- which stage runs what
    def _forward(self) -> list[int]:
        """Stages of the forward pass, by where the modules begin."""
        first = self._begins()
        of, stage = [EVERYWHERE] * len(self.events), 0
        for at, event in enumerate(self.events):
            if event.phase != Phase.FORWARD:
                continue
            while stage < len(first) and first[stage] <= at:
                stage += 1
            if self._counts(event):
                of[at] = stage
        return of

    def _counts(self, event: Event) -> bool:
        tensors = (*event.ins, *event.outs) if isinstance(event, Compute) else event.tensors
        return any(self.descending[i] for i in tensors)

    def _begins(self) -> list[int]:
        """Where each start is first at work."""
        forward = [(at, e.module) for at, e in enumerate(self.events) if e.phase == Phase.FORWARD and self._counts(e)]
        found, faults = [], []
        for start in self.starts:
            at = next((at for at, module in forward if under(module, start)), None)
            found.append(-1 if at is None else at)
            if at is None:
                faults.append(_no_module(self.program, start))
        if not faults:
            pairs = itertools.pairwise(zip(self.starts, found, strict=True))
            faults = [_out_of_order(a, b) for (a, x), (b, y) in pairs if y <= x]
        if faults:
            raise Refused(*faults)
        return found

    def _backward(self, of: list[int]) -> None:
        """Stages of the backward pass: it goes from the last to the first, and a module's backward is where its forward is.

        A gradient that must be summed before it crosses a cut is summed by the stage that made it.
        """
        homes: dict[str, set[int]] = defaultdict(set)
        for at, event in enumerate(self.events):
            if event.phase == Phase.FORWARD and of[at] != EVERYWHERE:
                homes[event.module].add(of[at])
        stage, makers = len(self.starts), dict[int, int]()
        for at, event in enumerate(self.events):
            if event.phase in (Phase.BACKWARD, Phase.RECOMPUTE):
                home = homes.get(event.module, ())
                if isinstance(event, Compute):
                    if event.phase == Phase.RECOMPUTE and home and min(home) > stage:
                        raise Refused(_region_of_stages(event, stage, min(home)))
                    stage = min(stage, *home) if len(home) == 1 else stage
                    makers.update(dict.fromkeys(event.outs, stage))
                made = [makers[i] for i in event.tensors if i in makers] if not isinstance(event, Compute) else []
                of[at] = max([stage, *made])

    def _holders(self, of: Sequence[int]) -> dict[str, tuple[int, ...]]:
        found: dict[str, set[int]] = {t.name: set() for t in self.program.parameters()}
        for at, event in enumerate(self.events):
            if isinstance(event, Compute) and event.phase == Phase.FORWARD and of[at] != EVERYWHERE:
                for i in event.ins:
                    if self.program.tensors[i].kind == Kind.PARAMETER:
                        found[self.program.tensors[i].name].add(of[at])
        return {name: tuple(sorted(stages)) or (0,) for name, stages in found.items()}  # unused: with the first stage

    def _expect_parameters(self, holders: Mapping[str, tuple[int, ...]]) -> None:
        held = set(itertools.chain.from_iterable(holders.values()))
        empty = [s for s in range(len(self.starts) + 1) if s not in held]
        if empty:
            raise Refused(*(_no_parameters(("", *self.starts), s) for s in empty))

    # ---- what goes over a cut
    def _crossing(self, of: Sequence[int], stage: int) -> Crossing:
        """What stages from `stage` on read of those before it."""
        made: dict[int, None] = {}
        read: set[int] = set()
        for at, event in enumerate(self.events):
            if event.phase != Phase.FORWARD or of[at] == EVERYWHERE or not isinstance(event, Compute) or event.op == "drop":
                continue
            if of[at] < stage:
                made.update(dict.fromkeys(o for o in event.outs if self.descending[o]))
            else:
                read.update(event.ins)
        forward = tuple(i for i in made if i in read)
        flows = learns(self.program)
        return Crossing(forward, tuple(i for i in forward if flows[i]))


# ---------------------------------------------------------------- even stages
def even(program: Program, count: int, by: str = "time") -> tuple[str, ...]:
    """Where `count` stages begin so that the fullest has as little as can be.

    Args:
        program: Folded or flat.
        count: Stages.
        by: "time": flop of forward and backward. "memory": bytes of parameters.

    Raises:
        Refused: P121, when there are fewer blocks than stages.
    """
    names, weights = _units(program, by, _block)
    if len(names) < count and not any(s.block for s in program.segments):  # no list of blocks: any module with parameters
        names, weights = _units(program, by, str)
    if len(names) < count:
        raise Refused(_too_few(names, count))
    return tuple(names[k] for k in _balanced(weights, count))


def _block(path: str) -> str:
    """The block a module belongs to; "" outside blocks."""
    return block_of(f"{path}.")


def _units(program: Program, by: str, unit: Callable[[str], str]) -> tuple[list[str], list[int]]:
    """Units a stage can begin with, in order, and what each weighs; what runs outside them goes with the one before.

    `unit`: of a module's path.
    """
    amounts: dict[str, int] = {}
    owner, last = "", ""
    paths: dict[str, str] = {}
    for segment in program.segments:
        for event in segment.events:
            if not isinstance(event, Compute) or event.phase in AFTER:
                continue
            if event.phase == Phase.FORWARD:
                name = unit(event.module)
                reads = any(program.tensors[i].kind == Kind.PARAMETER for i in event.ins)
                if name and (name in amounts or reads):
                    owner = name
                paths.setdefault(event.module, owner)
            last = paths.get(event.module, last)
            amounts[last] = amounts.get(last, 0) + (event.flop if by == "time" else 0)
    if by == "memory":
        for t in program.parameters():
            name = unit(t.name.rpartition(".")[0])
            amounts[name if name in amounts else ""] = amounts.get(name if name in amounts else "", 0) + t.nbytes
    before = amounts.pop("", 0)
    names = _written_out(program, list(amounts))
    weights = [amounts[name] for name in names[0]]
    if weights:
        weights[0] += before
    return names[1], weights


def _written_out(program: Program, names: list[str]) -> tuple[list[str], list[str]]:
    """(block that stands for it, name) of every block, copies of a folded one included, in order."""
    body = next((s for s in program.segments if s.block), None)
    if body is None:
        return names, names
    prefix, number = body.block[:-1], int(body.block[-1:])
    stands, real = [], []
    for name in names:
        if name == body.block:
            stands += [name] * body.count
            real += [f"{prefix}{number + k}" for k in range(body.count)]
        else:
            stands.append(name)
            real.append(name)
    return stands, real


def _balanced(weights: Sequence[int], count: int) -> list[int]:
    """Numbers of the blocks that begin the stages after the first: the heaviest stage is as light as can be.

    Among equals the lighter stages come first: the last stage also has the head and the loss.
    """
    sums = [0, *itertools.accumulate(w + 1 for w in weights)]  # + 1: blocks that weigh nothing are shared out evenly
    size = len(weights)
    best = [sums[k] for k in range(size + 1)]
    cuts: list[list[int]] = []
    for stages in range(2, count + 1):
        now, where = [sums[-1]] * (size + 1), [0] * (size + 1)
        for end in range(stages, size + 1):
            for start in range(stages - 1, end):
                heaviest = max(best[start], sums[end] - sums[start])
                if heaviest < now[end] or (heaviest == now[end] and start == stages - 1):
                    now[end], where[end] = heaviest, start
        best = now
        cuts.append(where)
    found, end = [], size
    for where in reversed(cuts):
        end = where[end]
        found.append(end)
    return found[::-1]


# ---------------------------------------------------------------- refusals
LAW = "a stage is a run of the forward pass that begins with a module and has parameters"


def _no_module(program: Program, start: str) -> Fault:
    paths = dict.fromkeys(block_of(f"{e.module}.") or e.module for e in program.events() if e.phase == Phase.FORWARD)
    known = [p for p in paths if p]
    near = ", ".join(known[:6]) + (" and so on" if len(known) > 6 else "")
    return Fault("P121", f"no stage can begin with {start!r}: no such module runs", near, LAW, "the path of a module", "cut")


def _out_of_order(first: str, second: str) -> Fault:
    have = f"{second!r} begins where {first!r} does, or before it"
    return Fault("P121", f"cut points {first!r} and {second!r} are out of order", have, LAW, "the order they run in", "cut")


def _no_parameters(starts: Sequence[str], stage: int) -> Fault:
    begins = repr(starts[stage]) if stage else "the model"
    cure = "fewer stages, or cut points further apart"
    return Fault("P121", f"stage {stage}, which begins with {begins}, has no parameters", "", LAW, cure, "cut")


def _region_of_stages(event: Event, first: int, other: int) -> Fault:
    law = "a region is computed again on one rank, just before its backward pass, and a stage holds a part of the model"
    cure = "recompute with policy = 'block' or 'selective', which make a region of each block; or fewer stages"
    what = "a region that is computed again is cut into stages"
    return Fault("P116", what, f"{event.module!r} on stage {other}, what comes before on stage {first}", law, cure, "cut")


def _too_few(names: Sequence[str], count: int) -> Fault:
    have = f"{len(names)} blocks: {', '.join(names[:4])}{' and so on' if len(names) > 4 else ''}"
    cure = f"{len(names)} stages or fewer, or cut = [...] with the modules stages begin with"
    return Fault("P121", f"{count} stages cannot be cut from {len(names)} blocks", have, LAW, cure, "cut")
