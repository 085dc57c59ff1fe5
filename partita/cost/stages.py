"""Memory of one rank of a pipeline: what each microbatch in flight keeps, turn by turn.

    turn        2F0            2F1            2B0            2B1
    alive       0              0 1            0 1            1
    bytes       kept(0) + ...  what a forward leaves for its backward, and within a turn what the pass itself takes

A microbatch of a stage keeps what was received, what backward will read, and what was sent, until its backward is done.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from partita.cost.holding import gather_in_pass, holding
from partita.cost.memory import (
    OTHER,
    Occupancy,
    gradient_buffers,
    half_products,
    held_after,
    last_uses,
    place_of,
    roots,
    static_bytes,
)
from partita.program.blocks import block_number
from partita.program.events import RECEIVED, Collective, Compute, Event
from partita.program.program import Pipeline, Program, stage_and_kind


@dataclass(frozen=True)
class Pass:
    """One pass of one microbatch on one stage, in bytes.

    Args:
        peak: Of that microbatch and of what calls hold.
        left: What the microbatch keeps when it ends.
        flying: What is on its way when it ends.
        parts: Of the peak, by what it is.
        at: The op at the peak.
    """

    peak: int
    left: int
    flying: int
    parts: Mapping[str, int]
    at: str


Passes = tuple[Mapping[str, Pass], Mapping[str, Pass]]  # of a stage: of any microbatch, and with what happens once a step


def stage_passes(program: Program, backend: str) -> tuple[Passes, ...]:
    """What one microbatch holds during and after each pass of each stage of a role."""
    assert program.pipeline is not None, "only a role has turns"
    stages = program.pipeline.stages
    return tuple((_profile(program, s, backend, last=False), _profile(program, s, backend, last=True)) for s in stages)


def role_occupancy(
    program: Program, backend: str = "nccl", kernel: float = 0.0, passes: Sequence[Passes] | None = None
) -> Occupancy:
    """Peak memory of a rank of a pipeline.

    Args:
        program: Of a role.
        backend, kernel: As of `occupancy`.
        passes: What `stage_passes` finds, of this role or of one of its kind.
    """
    pipeline = program.pipeline
    assert pipeline is not None, "only a role has turns"
    stages = dict(zip(pipeline.stages, passes or stage_passes(program, backend), strict=True))
    final = {turn.part: at for at, turn in enumerate(pipeline.turns)}
    calls = {s.part: _ids(s.events) for s in program.segments if s.part}
    alive: dict[tuple[int, int], int] = {}
    rooms: dict[tuple[str, int], int] = {}  # for messages, from the turn that asks for them
    peak, best, parts, flying, gathered = -1, "", dict[str, int](), 0, 0
    for at, turn in enumerate(pipeline.turns):
        stage, kind = stage_and_kind(turn.part)
        if kind == "UNSHARD":
            gathered += sum(program.local_bytes(i) for i in calls[turn.part])
        elif kind.startswith("RECV"):
            rooms[f"{stage}{kind[-1]}", turn.microbatch] = sum(program.local_bytes(i) for i in calls[turn.part])
        if len(kind) > 1:
            continue
        rooms.pop((f"{stage}{'F' if kind == 'F' else 'B'}", turn.microbatch), 0)
        one = stages[stage][at == final[turn.part]][kind]
        flying = one.flying or flying
        others = sum(rooms.values()) + sum(size for key, size in alive.items() if key != (stage, turn.microbatch))
        now = others + one.peak + gathered + (0 if one.flying else flying)
        if now > peak:
            peak, best = now, _own_path(pipeline, stage, one.at)
            parts = {**one.parts, "activations": one.parts["activations"] + others}
            parts["gathered"] += gathered
            parts["communication"] += 0 if one.flying else flying
        alive[stage, turn.microbatch] = one.left
        if not one.left:
            del alive[stage, turn.microbatch]
    after = held_after(program, backend)
    if after.peak > peak:
        peak, best, parts = after.peak, after.at, {name: int(size) for name, size in after.parts.items()}
    static = static_bytes(program, apart=backend != "gloo")
    buffers = gradient_buffers(program)
    other = {name: static[name] for name in OTHER if name in static}
    other |= {name: parts[name] for name in ("communication", "gathered") if name == "communication" or parts[name]}
    if kernels := round(kernel * half_products(program)):
        other["kernels"] = kernels
    shares = {
        "parameters": static["parameters"],
        "gradients": buffers + parts["gradients"],
        "optimizer": static["optimizer"],
        "activations": parts["activations"],
        "other": sum(other.values()),
    }
    return Occupancy(sum(static.values()) + buffers + peak + kernels, best, shares, other)


def _own_path(pipeline: Pipeline, stage: int, at: str) -> str:
    """A place in a stage with the module path of its own rank, where its kind is said once."""
    behind, prefix = dict(zip(pipeline.stages, pipeline.behind, strict=False)).get(stage, (0, ""))
    phase, _, rest = at.partition(" ")
    module, _, op = rest.partition(": ")
    number = block_number(prefix, module) if behind else None
    if number is None:
        return at
    return f"{phase} {prefix}{number + behind}{module[len(f'{prefix}{number}') :]}: {op}"


def _profile(program: Program, stage: int, backend: str, *, last: bool) -> dict[str, Pass]:
    """What one microbatch holds during and after each pass of a stage; `last`: with what happens once a step."""
    parts = {s.part: s.events for s in program.segments if s.part}

    def events(kind: str) -> Sequence[Event]:
        found = parts.get(f"{stage}{kind}", ())
        return [e for e in found if last or not (isinstance(e, Collective) and e.once)]

    arriving, leaving, returning = _ids(events("RECV_F")), _ids(events("SEND_F")), _ids(events("RECV_B"))
    found: dict[str, Pass] = {}
    for backward in (kinds for kinds in ("B", "IW") if f"{stage}{kinds[0]}" in parts):  # a schedule may have both
        passes = [("F", arriving), *zip(backward, (returning, ()), strict=False)]
        walk = _Walk(program, {kind: events(kind) for kind, _ in passes}, backend, held=(*arriving, *leaving))
        found |= {kind: walk.run(kind, made) for kind, made in passes}
    return found


def _ids(events: Iterable[Event]) -> tuple[int, ...]:
    return tuple(i for e in events if isinstance(e, Collective) for i in e.tensors)


class _Walk:
    """Lifetimes of one microbatch over the passes of a stage.

    Args:
        program: Of the role.
        runs: Pass -> its events, in order.
        backend: Whose calls make copies.
        held: Tensors that live until the last pass ends.
    """

    def __init__(self, program: Program, runs: Mapping[str, Sequence[Event]], backend: str, held: Sequence[int]) -> None:
        self.program, self.runs = program, runs
        self.root = [t.root if t.root >= 0 else t.id for t in program.tensors]
        self.gradients = set(roots(program, program.gradients.values()))
        flat = [e for run in runs.values() for e in run]
        self.dying: dict[int, list[int]] = {}
        end, first = len(flat) - 1, len(runs["F"])
        kept, graph = {self.root[i] for i in held}, set[int]()
        self.split = len(runs) > len("FB")
        if self.split:  # torch keeps the whole graph between a backward of the input and that of the weights
            graph = {self.root[o] for e in runs["F"] if isinstance(e, Compute) for o in e.outs}
            kept |= self._run_again(runs["I"], graph)
        for storage, at in last_uses(flat, self.root, self.gradients).items():
            stays = storage in kept or (storage in graph and at >= first)
            self.dying.setdefault(end if stays else at, []).append(storage)
        self.held = holding(program, flat, backend)
        start = 0
        for kind, run in runs.items():
            gather_in_pass(program, flat[: start + len(run)], start, kind, backend, self.held)
            start += len(run)
        self.live: dict[int, int] = {}
        self.calls: dict[str, int] = dict.fromkeys(("communication", "gathered", "gradients"), 0)
        self.at, self.returned = 0, 0

    def _run_again(self, inputs: Sequence[Event], graph: set[int]) -> set[int]:
        """Gradients that flow into ops with gradients of both kinds, e.g. a norm's: those ops run again with the weights."""
        both = (e for e in inputs if isinstance(e, Compute) and any(self.root[o] in self.gradients for o in e.outs))
        return {self.root[i] for e in both for i in e.ins} - graph

    def run(self, kind: str, made: Sequence[int]) -> Pass:
        """One pass; `made`: what is there before it begins."""
        if kind == "F":
            for i in made:
                self._make(i)
        elif made:  # gradients that came back, one as large as each value; the weights of the last op need them too
            self.returned = sum(self.program.local_bytes(i) for i in made)
        extra = self.returned
        peak, best = Pass(extra, 0, 0, {**self.calls, "activations": extra}, ""), -1
        for event in self.runs[kind]:
            self._add(self.held.given, -1)
            self._add(self.held.taken, 1)
            if isinstance(event, Compute):
                for i in event.outs:
                    self._make(self.root[i])
            copies = self.held.while_running.get(self.at, 0)
            now = sum(self.live.values()) + sum(self.calls.values()) + copies + extra
            if now > best:
                best = now
                own = sum(n for i, n in self.live.items() if i in self.gradients)
                parts = {**self.calls, "activations": sum(self.live.values()) - own + extra}
                parts["communication"] += copies
                parts["gradients"] += own
                peak = Pass(now, 0, 0, parts, place_of(event))
            for storage in self.dying.get(self.at, ()):
                self.live.pop(storage, None)
            self._add(self.held.spent, -1)
            self.at += 1
        flying, self.calls["communication"] = self.calls["communication"], 0  # it is counted with the turns that follow
        last = kind == list(self.runs)[-1]
        left = 0 if last else sum(self.live.values()) + (self.returned if self.split else 0)
        return replace(peak, left=left, flying=flying)

    def _add(self, amounts: Mapping[int, Mapping[str, int]], sign: int) -> None:
        for name, size in amounts.get(self.at, {}).items():
            self.calls[name] += sign * size

    def _make(self, storage: int) -> None:
        tensor = self.program.tensors[storage]
        received = tensor.name.startswith(RECEIVED)
        if (received or tensor.kind.value in ("activation", "gradient")) and storage not in self.live:
            self.live[storage] = self.program.local_bytes(storage)
