"""Memory of one rank over one step: every storage from the op that makes it to the last op that reads it.

    parameters, optimizer state, buffers, inputs   live all along
    gradients                                      from backward until the optimizer has read them
      in buffers (`gradient_buffers`)              all along; what backward makes is added to them and freed at once
    activations                                    from the op that makes them to their last reader, mostly in backward

Views share the storage of their root. An op's inputs and outputs exist together; what kernels take inside themselves is unseen.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from partita.program.events import Collective, Compute, Event, Kind, Phase
from partita.program.fold import unfold
from partita.program.program import Program

STATIC = {
    Kind.PARAMETER: "parameters",
    Kind.OPTIMIZER: "optimizer",
    Kind.BUFFER: "buffers",
    Kind.INPUT: "inputs",
    Kind.CONSTANT: "constants",
}
HALF = ("float16", "bfloat16")
OTHER = ("buffers", "inputs", "constants", "communication")


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


def occupancy(program: Program, backend: str = "nccl") -> Occupancy:
    """Peak memory of the rank that runs `program`."""
    flat = unfold(program)
    static, buffers = _static(flat), gradient_buffers(flat)
    kept = frozenset() if buffers else frozenset(_roots(flat, flat.gradients.values()))
    live, at, held = _walk(flat, kept, backend)
    other = {name: static[name] for name in OTHER if name in static} | {"communication": live["communication"]}
    parts = {
        "parameters": static["parameters"],
        "gradients": buffers + live["gradients"],
        "optimizer": static["optimizer"],
        "activations": live["activations"],
        "other": sum(other.values()),
    }
    return Occupancy(sum(static.values()) + buffers + held, at, parts, other)


def gradient_buffers(program: Program) -> int:
    """Bytes of the buffers that gradients are accumulated in as they are made; 0 where each gradient is a tensor of its own.

    There are buffers under a data axis (its buckets) and with several microbatches. Half types are accumulated over
    microbatches in float32, beside the buffer they end in.
    """
    buckets = [e for e in program.events() if isinstance(e, Collective) and e.overlapped and e.once]
    if not buckets and program.microbatches == 1:
        return 0
    if buckets:
        sizes = [(e.nbytes, e.dtype) for e in buckets]
    else:
        sizes = [(program.local_bytes(g), program.tensors[g].dtype) for g in program.gradients.values()]
    wide = program.microbatches > 1
    return sum(size * (3 if wide and dtype in HALF else 1) for size, dtype in sizes)


def _roots(program: Program, ids: Iterable[int]) -> list[int]:
    return [program.tensors[i].root if program.tensors[i].root >= 0 else i for i in ids]


def _static(program: Program) -> dict[str, int]:
    """Bytes of what lives all along, by what it is."""
    found = dict.fromkeys(STATIC.values(), 0)
    for tensor in program.tensors:
        if tensor.kind in STATIC and tensor.root in (tensor.id, -1):
            found[STATIC[tensor.kind]] += program.local_bytes(tensor.id)
    return found


def _walk(program: Program, kept: frozenset[int], backend: str) -> tuple[dict[str, int], str, int]:
    """Parts at the peak of what comes and goes, the op there, and their sum. Storages `kept` stay to the end of the step."""
    tensors, events = program.tensors, list(program.events())
    root = [t.root if t.root >= 0 else t.id for t in tensors]
    gradients = set(_roots(program, program.gradients.values()))
    dying: dict[int, list[int]] = {}
    for storage, at in _last_uses(events, root, gradients - kept).items():
        if storage not in kept:
            dying.setdefault(at, []).append(storage)
    live: dict[int, int] = {}
    now = peak = 0
    best: tuple[dict[str, int], str] = ({"activations": 0, "gradients": 0, "communication": 0}, "")
    for at, event in enumerate(events):
        if isinstance(event, Compute):
            for i in event.outs:
                storage = root[i]
                if tensors[storage].kind not in STATIC and storage not in live:
                    live[storage] = program.local_bytes(storage)
                    now += live[storage]
        copies = _copies(event, backend)
        if now + copies > peak:
            peak, best = now + copies, (_parts(live, gradients, copies), _place(event))
        for storage in dying.get(at, ()):
            now -= live.pop(storage, 0)
    return best[0], best[1], peak


def _last_uses(events: Iterable[Event], root: list[int], buffered: set[int]) -> dict[int, int]:
    """Storage -> index of the last event that touches it; gradients that go to buffers are free once backward made them."""
    last: dict[int, int] = {}
    for at, event in enumerate(events):
        if isinstance(event, Compute):
            done = event.phase == Phase.OPTIMIZER or event.op == "drop"
            for i in (*event.ins, *event.outs):
                if not (done and root[i] in buffered):
                    last[root[i]] = at
        else:
            last |= {root[i]: at for i in event.tensors if root[i] not in buffered}
    return last


def _parts(live: Mapping[int, int], gradients: set[int], copies: int) -> dict[str, int]:
    held = sum(size for storage, size in live.items() if storage in gradients)
    return {"activations": sum(live.values()) - held, "gradients": held, "communication": copies}


def _copies(event: Event, backend: str) -> int:
    """Bytes a backend copies while a call is in flight: gloo's all-gather and reduce-scatter copy the large side."""
    if isinstance(event, Collective) and backend == "gloo" and event.op in ("all_gather", "reduce_scatter"):
        return event.nbytes
    return 0


def _place(event: Event) -> str:
    name = event.op if isinstance(event, Compute) else f"{event.op} over {event.axis}"
    return f"{event.phase.value} {event.module or '(step)'}: {name}"
