"""Memory of one rank over one step: every storage from the op that makes it to the last op that reads it.

    parameters, optimizer state, buffers, inputs   live all along
    gradients                                      from backward until the optimizer has read them
      in buffers (`gradient_buffers`)              all along; what backward makes is added to them and freed at once
      scattered as they are made                   until they are packed; a rank's rows of the sums all along
    activations                                    from the op that makes them to their last reader, mostly in backward
    what calls hold (`holding`)                    packed gradients, gathered parameters, a backend's copies

What lives in the host's memory is left out, unless it is the device's own (`gloo`, on CPU).

Views share the storage of their root. An op's inputs and outputs exist together. Of what kernels take inside themselves one
thing is said: a CPU's library compiles a product of half types anew for every shape, and keeps that. The rest is unseen: what a
product packs its operands in (a few MiB), and the float32 tiles of half-type kernels.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from partita.cost.holding import holding
from partita.program.blocks import block_number
from partita.program.events import RECEIVED, WIDTH, Collective, Compute, Event, Kind, Phase
from partita.program.fold import stretch, unfold
from partita.program.gathering import is_sharded
from partita.program.host import COPIES
from partita.program.program import Program

STATIC = {
    Kind.PARAMETER: "parameters",
    Kind.OPTIMIZER: "optimizer",
    Kind.BUFFER: "buffers",
    Kind.INPUT: "inputs",
    Kind.CONSTANT: "constants",
}
HALF = ("float16", "bfloat16")
FEW = 3  # copies of a folded block that are written out: a first, a middle and a last one
MOVING: tuple[str, ...] = ("activations", "gradients", "communication", "gathered")
OTHER = ("buffers", "inputs", "constants")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


@dataclass(frozen=True)
class Occupancy:
    """Bytes at the peak.

    Args:
        peak: Of the whole rank.
        at: The op at the peak: phase, module and name.
        parts: parameters, gradients, optimizer, activations, other; their sum is the peak.
        other: What `other` is made of.
    """

    peak: int
    at: str
    parts: Mapping[str, float]
    other: Mapping[str, int]


def occupancy(program: Program, backend: str = "nccl", kernel: float = 0.0) -> Occupancy:
    """Peak memory of the rank that runs `program`; of a pipeline's role, see `cost/stages.py`.

    Args:
        program: Program′.
        backend: What copies its collectives make.
        kernel: Bytes that stay for every shape of a product of half types.

    A folded program is not written out: what stands for its middle copies is walked once and counted for all of them.
    """
    copies = max((s.count for s in program.segments if s.block), default=0)
    few = [unfold(program)] if copies <= FEW else [unfold(stretch(program, n + 2)) for n in (FEW - 1, FEW)]
    flat, left = few[-1], max(copies - FEW, 0)

    def grown(amounts: Iterable[int]) -> int:
        """What an amount that each copy adds to is with all copies."""
        found = list(amounts)
        return found[-1] + left * (found[-1] - found[0])

    fixed = [static_bytes(one, apart=backend != "gloo") for one in few]
    static = {name: grown(one[name] for one in fixed) for name in fixed[-1]}
    buffers = grown(map(gradient_buffers, few))
    kept = frozenset() if _added_up(flat) else frozenset(roots(flat, flat.gradients.values()))
    prefix = next((s.block[:-1] for s in program.segments if s.block), "")
    walk = _Walk(flat, kept, backend, _middle(program) if left else {}, left, prefix)
    walk.run()
    other = {name: static[name] for name in OTHER} | {"communication": walk.parts["communication"]}
    if walk.parts["gathered"]:
        other["gathered"] = walk.parts["gathered"]
    if kernels := round(kernel * half_products(program)):
        other["kernels"] = kernels
    parts = {
        "parameters": static["parameters"],
        "gradients": buffers + walk.parts["gradients"],
        "optimizer": static["optimizer"],
        "activations": walk.parts["activations"],
        "other": sum(other.values()),
    }
    return Occupancy(sum(static.values()) + buffers + walk.peak + kernels, walk.place, parts, other)


def held_after(program: Program, backend: str) -> Occupancy:
    """What comes and goes at the peak of what a role does once a step, after its last turn."""
    once = replace(program, segments=tuple(s for s in program.segments if not s.part))
    walk = _Walk(once, frozenset(), backend, {}, 0, "")
    walk.run()
    return Occupancy(walk.peak, walk.place, walk.parts, {})


def half_products(program: Program) -> int:
    """Shapes of products of half types, one for each way their operands lie."""
    turned: set[int] = set()
    found = set()
    for e in program.events():
        if isinstance(e, Compute) and e.op in ("t", "transpose"):
            turned |= set(e.outs) if e.ins[0] not in turned else set()
        elif isinstance(e, Compute) and e.op in PRODUCTS and program.tensors[e.outs[0]].dtype in HALF:
            found.add((e.op, *((program.local_shape(i), i in turned) for i in e.ins)))
    return len(found)


def _middle(program: Program) -> dict[int, int]:
    """Start -> end of the events of the middle copies in the same program with `FEW` copies, written out."""
    spans, at = {}, 0
    for s in program.segments:
        if s.block:
            spans[at + len(s.events)] = at + 2 * len(s.events)
        at += len(s.events) * (FEW if s.block else 1)
    return spans


def gradient_buffers(program: Program) -> int:
    """Bytes of the buffers that gradients are accumulated in as they are made; 0 where each gradient is a tensor of its own.

    There are buffers under a data axis (its buckets) and with several microbatches. Half types are accumulated over
    microbatches in float32, beside the buffer they end in. Where a rank gets rows of the sums, it has room for those.
    """
    buckets = list({e.tensors: e for e in _buckets(program)}.values())  # a role may say one in several passes
    wide = program.microbatches > 1
    if not buckets:
        sizes = [(program.local_bytes(g), program.tensors[g].dtype) for g in program.gradients.values() if wide]
        return sum(size * (3 if wide and dtype in HALF else 1) for size, dtype in sizes)
    total = 0
    for e in buckets:
        half = wide and e.dtype in HALF  # added up in float32
        if e.op == "all_reduce":
            total += e.nbytes * (3 if half else 1)
            continue
        rows = e.nbytes // program.axes[e.axis]
        if e.once:
            whole = sum(program.local_bytes(g) // WIDTH[program.tensors[g].dtype] for g in e.tensors) * WIDTH[e.dtype]
            total += rows + whole * (2 if half else 1)
        elif wide or not is_sharded(program):
            total += rows * (2 if half else 1)
    return total


def _buckets(program: Program) -> list[Collective]:
    return [
        e
        for e in program.events()
        if isinstance(e, Collective) and e.overlapped and e.tensors and e.op in ("all_reduce", "reduce_scatter")
    ]


def _added_up(program: Program) -> bool:
    """Whether gradients leave the tensors that backward makes."""
    return program.microbatches > 1 or bool(_buckets(program))


def roots(program: Program, ids: Iterable[int]) -> list[int]:
    return [program.tensors[i].root if program.tensors[i].root >= 0 else i for i in ids]


def static_bytes(program: Program, *, apart: bool = True) -> dict[str, int]:
    """Bytes of what lives all along on the device, by what it is; `apart`: the host's memory is another."""
    found = dict.fromkeys(STATIC.values(), 0)
    for tensor in program.tensors:
        own = tensor.root in (tensor.id, -1) and not tensor.name.startswith(RECEIVED)
        if tensor.kind in STATIC and own and not (tensor.host and apart):
            found[STATIC[tensor.kind]] += program.held_bytes(tensor.id)
    return found


class _Walk:
    """What comes and goes, event by event, and the parts at its peak.

    Args:
        program: Flat.
        kept: Storages that stay to the end of the step.
        spans: Start -> end of runs of events that stand for several copies.
        left: Copies that each such run stands for beside the one it is. What one copy adds, each adds; so within them the
            peak is in the first or in the last.
        prefix: Of the module paths of blocks, before their number.
    """

    def __init__(
        self, program: Program, kept: frozenset[int], backend: str, spans: Mapping[int, int], left: int, prefix: str
    ) -> None:
        self.program, self.kept, self.backend = program, kept, backend
        self.spans, self.left, self.prefix = spans, left, prefix
        tensors = program.tensors
        self.root = [t.root if t.root >= 0 else t.id for t in tensors]
        self.gradients = set(roots(program, program.gradients.values()))
        self.live: dict[int, int] = {}
        self.now = dict.fromkeys(MOVING, 0)  # missing copies included
        self.peak = 0
        self.parts = dict.fromkeys(MOVING, 0)
        self.place = ""

    def run(self) -> None:
        events = list(self.program.events())
        held = holding(self.program, events, self.backend)
        dying: dict[int, list[int]] = {}
        for storage, at in last_uses(events, self.root, self.gradients - self.kept).items():
            if storage not in self.kept:
                dying.setdefault(at, []).append(storage)
        end, entry, inside = -1, dict(self.now), []
        for at, event in enumerate(events):
            if at == end:
                self._rest(entry, inside)
                end = -1
            if at in self.spans:
                end, entry, inside = self.spans[at], dict(self.now), []
            self._add(held.given.get(at, {}), -1)
            self._add(held.taken.get(at, {}), 1)
            self._make(event)
            copies = held.while_running.get(at, 0)
            self._look(self.now, copies, event)
            if end >= 0:
                inside.append((dict(self.now), copies, event))
            for storage in dying.get(at, ()):
                self.now[self._kind(storage)] -= self.live.pop(storage, 0)
            self._add(held.spent.get(at, {}), -1)

    def _add(self, amounts: Mapping[str, int], sign: int) -> None:
        for kind, size in amounts.items():
            self.now[kind] += sign * size

    def _real(self, event: Event, *, last: bool) -> str:
        """The module's path with every copy counted; `last`: of the middle copies, the one that runs last."""
        number = block_number(self.prefix, event.module) if self.left else None
        if number is None or number < FEW - 1:
            return event.module
        descends = event.phase in (Phase.BACKWARD, Phase.RECOMPUTE)  # from the last block to the first
        missing = self.left if number >= FEW or last != descends else 0
        return f"{self.prefix}{number + missing}{event.module[len(f'{self.prefix}{number}') :]}"

    def _kind(self, storage: int) -> str:
        return "gradients" if storage in self.gradients else "activations"

    def _make(self, event: Event) -> None:
        for i in event.outs if isinstance(event, Compute) and event.op not in COPIES else ():
            storage = self.root[i]
            away = self.program.tensors[storage].host and self.backend != "gloo"
            if self.program.tensors[storage].kind not in STATIC and storage not in self.live and not away:
                self.live[storage] = self.program.held_bytes(storage)
                self.now[self._kind(storage)] += self.live[storage]

    def _look(self, now: Mapping[str, int], copies: int, event: Event, *, last: bool = False) -> None:
        total = sum(now.values()) + copies
        if total > self.peak:
            self.peak, self.place = total, place_of(replace(event, module=self._real(event, last=last)))
            self.parts = {**now, "communication": now["communication"] + copies}

    def _rest(self, entry: Mapping[str, int], inside: Iterable[tuple[Mapping[str, int], int, Event]]) -> None:
        """The copies that were left out: look at the last of them, and keep what all of them leave behind."""
        added = {kind: self.left * (self.now[kind] - entry[kind]) for kind in self.now}
        if sum(added.values()) > 0:
            for now, copies, event in inside:
                self._look({kind: now[kind] + added[kind] for kind in now}, copies, event, last=True)
        for kind, size in added.items():
            self.now[kind] += size


def last_uses(events: Iterable[Event], root: list[int], buffered: set[int]) -> dict[int, int]:
    """Storage -> index of the last event that touches it; gradients that go to buffers are free once backward made them."""
    last: dict[int, int] = {}
    for at, event in enumerate(events):
        if isinstance(event, Compute):
            done = event.phase == Phase.OPTIMIZER or event.op == "drop"
            for i in (*event.ins, *event.outs):
                if not (done and root[i] in buffered):
                    last[root[i]] = at
        else:
            packed = event.op == "reduce_scatter" and not event.once  # until then backward's own tensors hold the gradients
            last |= {root[i]: at for i in event.tensors if packed or root[i] not in buffered}
    return last


def place_of(event: Event) -> str:
    name = event.op if isinstance(event, Compute) else f"{event.op} over {event.axis}"
    return f"{event.phase.value} {event.module or '(step)'}: {name}"
