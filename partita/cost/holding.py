"""What the calls of a sharded strategy hold beside the tensors of the program, event by event.

    reduce_scatter    the lines packed for it stay until the next one is packed; a rank's rows of the sum while it runs
    all_gather        of rows that are held alone: a unit's parameters, from the call to their last reader (`gathered`);
                      in forward its flat result as well, until the next unit's is there
                      else (after the optimizer): its line and its result, while it runs
    gloo              copies the large side of both while a call runs

Source: torch 2.13's `fully_shard` and `runtime/scatter.py`, as they allocate; storages were counted, op by op, in both.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from partita.program.blocks import inside
from partita.program.events import Collective, Compute, Event, Phase
from partita.program.gathering import is_sharded
from partita.program.program import Program

Amounts = Counter[str]  # "communication", "gathered", "gradients" -> bytes


@dataclass
class Holding:
    """Bytes by event number.

    Args:
        taken: Taken before the event, after `given`.
        given: Given back before the event.
        spent: Given back after it.
        while_running: Of communication, during the event alone.
    """

    taken: dict[int, Amounts] = field(default_factory=lambda: defaultdict(Counter))
    given: dict[int, Amounts] = field(default_factory=lambda: defaultdict(Counter))
    spent: dict[int, Amounts] = field(default_factory=lambda: defaultdict(Counter))
    while_running: dict[int, int] = field(default_factory=dict)


def holding(program: Program, events: Sequence[Event], backend: str) -> Holding:
    """What the calls of a flat program hold, or those of some passes of a role."""
    found = Holding()
    copied = 2 if backend == "gloo" else 1
    sharded = is_sharded(program) and program.pipeline is None  # by `fully_shard`
    for at, e in enumerate(events):
        if isinstance(e, Collective) and e.op in ("all_gather", "reduce_scatter"):
            found.while_running[at] = (copied - 1) * e.nbytes
            if e.op == "all_gather" and e.phase == Phase.OPTIMIZER:
                found.while_running[at] += e.nbytes + e.nbytes // program.axes[e.axis]
    _scatters(program, events, found, copies=copied - 1, sharded=sharded)
    if sharded:
        _gathers(program, events, found)
    return found


def _scatters(program: Program, events: Sequence[Event], found: Holding, *, copies: int, sharded: bool) -> None:
    """Packed gradients and rows of their sums.

    While a bucket is packed its whole gradients are there, and while it is sent they are gone, but for those that stay. Our
    own buckets are on their way, the backend's copy with them, until the next one is packed; `fully_shard` waits for each,
    and the rows it gets are tensors of their own: with several microbatches they are added to buffers after each of them.
    """
    calls = [(at, e) for at, e in enumerate(events) if isinstance(e, Collective) and e.op == "reduce_scatter" and e.overlapped]
    last = _end(events)
    for number, (at, e) in enumerate(calls):
        end = calls[number + 1][0] if number + 1 < len(calls) else last
        rows = e.nbytes // program.axes[e.axis]
        copy = copies * e.nbytes
        several = program.microbatches > 1
        made = rows if sharded or (several and not e.once) else 0
        flying = e.nbytes + (0 if sharded else copy + made)
        found.taken[at]["communication"] += flying
        found.given[end]["communication"] += flying
        whole = 0 if e.once else sum(program.local_bytes(g) for g in e.tensors)
        counted = flying + whole
        if sharded:
            found.taken[at]["gradients"] += rows
            counted += rows
            if several:  # added to the buffers after each backward pass
                found.given[last]["gradients"] += rows
        found.while_running[at] = max(e.nbytes + whole, e.nbytes + copy + made + (whole if e.once else 0)) - counted


def _end(events: Sequence[Event]) -> int:
    """The first event after backward."""
    after = (Phase.SYNC, Phase.OPTIMIZER)
    return next((at for at, e in enumerate(events) if e.phase in after), len(events))


def _gathers(program: Program, events: Sequence[Event], found: Holding) -> None:
    calls = [
        (at, e)
        for at, e in enumerate(events)
        if isinstance(e, Collective) and e.op == "all_gather" and e.phase in (Phase.FORWARD, Phase.BACKWARD)
    ]
    reads = _reads(program, events)
    last = max((at for at, e in enumerate(events) if e.phase == Phase.FORWARD and e.module), default=0)
    forward = [at for at, e in calls if e.phase == Phase.FORWARD]
    for at, e in calls:
        again = next((b for b, other in calls if b > at and other.tensors == e.tensors), len(events))
        found.taken[at]["gathered"] += e.nbytes
        end = max((r for t in e.tensors for r in reads[t] if at <= r < again), default=at)
        scattered = isinstance(events[end], Collective) and end > at  # the unit lets go before it packs
        (found.given if scattered else found.spent)[end]["gathered"] += e.nbytes
        if e.phase == Phase.FORWARD:  # its flat result waits for the next one
            found.taken[at]["gathered"] += e.nbytes
            after = next((b for b in forward if b > at), None)
            if after is None:
                found.spent[max(last, at)]["gathered"] += e.nbytes
            else:
                found.given[after]["gathered"] += e.nbytes


def gather_in_pass(program: Program, events: Sequence[Event], start: int, kind: str, backend: str, found: Holding) -> None:
    """What a pass of a role gathers: blocks until they have run or the next one comes, the rest of a stage to its end.

    Args:
        program: The role.
        events: Of the passes of a microbatch on a stage, of which this one is the last.
        start: Where it begins.
        kind: Which pass; one of the weights alone lets go of nothing before its end.
        backend, found: As of `holding`.
    """
    calls = [(at, e) for at, e in enumerate(events) if at >= start and isinstance(e, Collective) and e.op == "all_gather"]
    blocks = [at for at, e in calls if e.module and kind != "W"]
    for at, e in calls:
        whole = sum(program.local_bytes(i) for i in e.tensors)
        line = e.nbytes + e.nbytes // program.axes[e.axis]
        found.taken[at]["gathered"] += whole
        found.while_running[at] = max(line, line - whole + (e.nbytes if backend == "gloo" else 0))
        after = next((b for b in blocks if b > at), None)
        if at not in blocks:
            found.spent[len(events) - 1]["gathered"] += whole
        elif kind == "F":
            ran = [n for n in range(at, len(events)) if inside(e.module, events[n].module)]
            found.spent[ran[-1]]["gathered"] += whole
        elif after is not None:
            found.given[after]["gathered"] += whole
        else:
            found.spent[len(events) - 1]["gathered"] += whole


def _reads(program: Program, events: Sequence[Event]) -> dict[int, list[int]]:
    """Parameter -> events before the optimizer that read it or scatter its gradient."""
    owner = {g: w for w, g in program.gradients.items()}
    found: dict[int, list[int]] = defaultdict(list)
    for at, e in enumerate(events):
        if isinstance(e, Compute) and e.phase != Phase.OPTIMIZER:
            for i in e.ins:
                root = program.tensors[i].root
                found[root if root >= 0 else i].append(at)
        elif isinstance(e, Collective) and e.op == "reduce_scatter":
            for g in e.tensors:
                found[owner.get(g, -1)].append(at)
    return found
