"""Memory of one rank of a pipeline: what each microbatch in flight keeps, turn by turn.

    turn        2F0            2F1            2B0            2B1
    alive       0              0 1            0 1            1
    bytes       kept(0) + ...  what a forward leaves for its backward, and within a turn what the pass itself takes

A microbatch of a stage keeps what was received, what backward will read, and what was sent, until its backward is done.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from partita.cost.memory import (
    OTHER,
    Occupancy,
    copies_of,
    gradient_buffers,
    half_products,
    last_uses,
    place_of,
    roots,
    static_bytes,
)
from partita.program.events import RECEIVED, Collective, Compute, Event
from partita.program.program import Program, stage_and_kind


@dataclass(frozen=True)
class Pass:
    """One pass of one microbatch on one stage: bytes of that microbatch at the pass's peak, and left when it ends."""

    peak: int
    left: int
    gradients: int
    copies: int
    at: str


def role_occupancy(program: Program, backend: str = "nccl", kernel: float = 0.0) -> Occupancy:
    """Peak memory of a rank of a pipeline.

    Args:
        program: Of a role.
        backend, kernel: As of `occupancy`.
    """
    pipeline = program.pipeline
    assert pipeline is not None, "only a role has turns"
    stages = {s: _profile(program, s, backend) for s in pipeline.stages}
    alive: dict[tuple[int, int], int] = {}
    peak, best, gradients, copies = -1, "", 0, 0
    for turn in pipeline.turns:
        stage, kind = stage_and_kind(turn.part)
        if len(kind) > 1:
            continue
        one = stages[stage][kind]
        others = sum(size for key, size in alive.items() if key != (stage, turn.microbatch))
        if others + one.peak > peak:
            peak, best, gradients, copies = others + one.peak, one.at, one.gradients, one.copies
        alive[stage, turn.microbatch] = one.left
        if not one.left:
            del alive[stage, turn.microbatch]
    static = static_bytes(program, apart=backend != "gloo")
    buffers = gradient_buffers(program)
    other = {name: static[name] for name in OTHER if name in static} | {"communication": copies}
    if kernels := round(kernel * half_products(program)):
        other["kernels"] = kernels
    parts = {
        "parameters": static["parameters"],
        "gradients": buffers + gradients,
        "optimizer": static["optimizer"],
        "activations": peak - gradients - copies,
        "other": sum(other.values()),
    }
    return Occupancy(sum(static.values()) + buffers + peak + kernels, best, parts, other)


def _profile(program: Program, stage: int, backend: str) -> dict[str, Pass]:
    """What one microbatch holds during and after each pass of a stage."""
    parts = {s.part: s.events for s in program.segments if s.part}

    def events(kind: str) -> Sequence[Event]:
        return parts.get(f"{stage}{kind}", ())

    arriving, leaving, returning = _ids(events("RECV_F")), _ids(events("SEND_F")), _ids(events("RECV_B"))
    found: dict[str, Pass] = {}
    for backward in (kinds for kinds in ("B", "IW") if f"{stage}{kinds[0]}" in parts):  # a schedule may have both
        passes = [("F", arriving), *zip(backward, (returning, ()), strict=False)]
        walk = _Walk(program, [events(kind) for kind, _ in passes], held=(*arriving, *leaving))
        found |= {kind: walk.run(k, made, backend) for k, (kind, made) in enumerate(passes)}
    return found


def _ids(events: Iterable[Event]) -> tuple[int, ...]:
    return tuple(i for e in events if isinstance(e, Collective) for i in e.tensors)


class _Walk:
    """Lifetimes of one microbatch over the passes of a stage.

    Args:
        program: Of the role.
        runs: Events of each pass.
        held: Tensors that live until the last pass ends.
    """

    def __init__(self, program: Program, runs: Sequence[Sequence[Event]], held: Sequence[int]) -> None:
        self.program, self.runs = program, runs
        self.root = [t.root if t.root >= 0 else t.id for t in program.tensors]
        self.gradients = set(roots(program, program.gradients.values()))
        flat = [e for run in runs for e in run]
        self.dying: dict[int, list[int]] = {}
        end = len(flat) - 1
        kept, graph = {self.root[i] for i in held}, set[int]()
        if len(runs) > len("FB"):  # torch keeps the whole graph between a backward of the input and that of the weights
            graph = {self.root[o] for e in runs[0] if isinstance(e, Compute) for o in e.outs}
        for storage, at in last_uses(flat, self.root, self.gradients).items():
            stays = storage in kept or (storage in graph and at >= len(runs[0]))
            self.dying.setdefault(end if stays else at, []).append(storage)
        self.live: dict[int, int] = {}
        self.at = 0

    def run(self, number: int, made: Sequence[int], backend: str) -> Pass:
        """One pass; `made`: what is there before it begins."""
        extra = 0
        if number == 0:
            for i in made:
                self._make(i)
        elif made:
            extra = sum(self.program.local_bytes(i) for i in made)  # gradients that came back, one as large as each value
        peak, best = Pass(extra, 0, 0, 0, ""), -1
        for event in self.runs[number]:
            if isinstance(event, Compute):
                for i in event.outs:
                    self._make(self.root[i])
            copies = copies_of(event, backend)
            now = sum(self.live.values()) + copies + extra
            if now > best:
                best = now
                own = sum(n for i, n in self.live.items() if i in self.gradients)
                peak = Pass(now, 0, own, copies, place_of(event))
            for storage in self.dying.get(self.at, ()):
                self.live.pop(storage, None)
            self.at += 1
        last = number == len(self.runs) - 1
        return Pass(peak.peak, 0 if last else sum(self.live.values()), peak.gradients, peak.copies, peak.at)

    def _make(self, storage: int) -> None:
        tensor = self.program.tensors[storage]
        received = tensor.name.startswith(RECEIVED)
        if (received or tensor.kind.value in ("activation", "gradient")) and storage not in self.live:
            self.live[storage] = self.program.local_bytes(storage)
