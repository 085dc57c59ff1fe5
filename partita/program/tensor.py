"""Tensor parallelism as the split rule, bent to what calls replayed on shards can do.

Replayed calls keep one invariant: whole and Partial values have whole gradients, split values split ones (`runtime/steps.py`).
Some ops would let a Partial value travel further than that, or be summed more than once, so here they do not carry one:

    gradient of an embedding   its rows are summed before they are scattered, never the whole table
    Partial x learned scalar   summed first: the scalar's gradient needs the whole value
    cut into pieces            summed once, not each piece
    wider dtype                summed before it is widened
    copy of a value            the same value: what is whole in one is whole in the other

What would take more than sums is an obstacle: the dim stays whole.
"""

import collections
from collections.abc import Iterable
from dataclasses import replace

from partita.errors import Fault
from partita.program.dims import Cell, Signature
from partita.program.events import WIDTH, Compute, Event, Kind, Phase, Repeat
from partita.program.program import Program
from partita.program.split import Derivation, derive

# Ops that may contract a split dim: their local value is a summand of the whole one, or a kernel makes it so.
CONTRACT = {"mean", "mm", "addmm", "bmm", "baddbmm", "mv", "dot", "sum", "convolution", "embedding", "nll_loss_forward"}


NORMS = {"native_layer_norm", "_fused_rms_norm"}  # with a kernel that exchanges their statistics
BLOCKWISE = ("broadcast", "send", "receive")  # calls of a product in blocks

RECOMPUTED = "it is computed again in the backward pass (checkpointing), where calls are not replayed"
PIECES = {"unbind", "split", "split_with_sizes", "unsafe_split", "chunk"}


def derive_tensor(program: Program, axis: str, size: int, atoms: Iterable[int]) -> Derivation:
    """The split of `atoms` over an axis as replayed calls do it.

    Raises:
        Refused: P104, when a dim does not divide.
    """
    return derive(anchored(program), axis, size, atoms)


def anchored(program: Program) -> Program:
    """The same program, with the two ops that may not carry a Partial value."""
    learned = {t.id for t in program.tensors if t.kind == Kind.PARAMETER}

    def change(event: Event) -> Event:
        if not isinstance(event, Compute) or event.signature is None:
            return event
        reads = [v in learned for v in event.ins]
        if event.phase == Phase.FORWARD and any(reads):
            learned.update(event.outs)
        forward = event.phase == Phase.FORWARD
        scaled = forward and event.signature.linear == "mul" and sum(reads) > 1
        cut = event.op in PIECES or (event.op in ("select", "slice") and not forward)
        if event.op == "clone":
            return replace(event, op="alias")
        if scaled or cut or _widens(program, event) or event.op == "embedding_dense_backward":
            return replace(event, signature=replace(event.signature, linear="no"))
        return event

    return replace(program, segments=tuple(Repeat(s.count, tuple(map(change, s.events))) for s in program.segments))


def _widens(program: Program, event: Compute) -> bool:
    if event.op != "_to_copy":
        return False
    before, after = (program.tensors[v] for v in (event.ins[0], event.outs[0]))
    return WIDTH[after.dtype] > WIDTH[before.dtype]


def obstacles(program: Program, derivation: Derivation) -> dict[int, str]:
    """Atoms whose split would take more than sums, and why."""
    found: dict[int, str] = {}
    events = list(program.events())
    readers = _readers(events)
    logs = {o for e in events if isinstance(e, Compute) and e.op == "_log_softmax" for o in e.outs}
    for event, taken in zip(events, derivation.labels, strict=True):
        if isinstance(event, Compute) and event.signature and taken.label and event.phase == Phase.FORWARD:
            label, at = taken.label
            if why := _along(readers, logs, event, label):
                found[event.signature.dims[label][at]] = why
    born = _born(events, derivation)
    for move in derivation.moves:
        event = events[move.event] if move.event < len(events) else None
        op = event.op if isinstance(event, Compute) else "the step"
        where = f"{op} in {move.module or 'the model'!r} would need"
        if move.phase == Phase.BACKWARD and move.tensor in born:
            found.setdefault(born[move.tensor], f"{where} a summand of the forward pass again")
        elif move.op in BLOCKWISE:
            continue
        elif move.op != "all_reduce" or (move.inner and op.removesuffix("_backward") not in {"_log_softmax", *NORMS}):
            carried = [a for d in program.tensors[move.tensor].dims for a in d if a in derivation.atoms]
            for a in carried or sorted(derivation.atoms):
                found.setdefault(a, f"{where} {move.op} of {move.nbytes} bytes")
    return found


def recomputed(program: Program, derivation: Derivation) -> list[str]:
    """Modules whose calls are changed by the split and computed again in the backward pass, outermost only."""
    changed, again = set(), set()
    for event, taken in zip(program.events(), derivation.labels, strict=True):
        if isinstance(event, Compute) and event.phase == Phase.FORWARD and (taken.label or taken.partial or taken.moved):
            changed.add((event.module, event.op))
        if isinstance(event, Compute) and event.phase == Phase.RECOMPUTE:
            again.add((event.module, event.op))
    modules = {module for module, _ in changed & again}
    inner = {m for m in modules for n in range(1, m.count(".") + 1) if m.rsplit(".", n)[0] in modules}
    return sorted(modules - inner)


def single_heads(program: Program) -> bool:
    """Whether some attention has one head, which no axis can split."""
    computes = (e for e in program.events() if isinstance(e, Compute) and e.phase == Phase.FORWARD)
    attends = (e.signature for e in computes if e.op.startswith("_scaled_dot_product") and e.signature)
    return any(not sig.dims.get("g") and not sig.dims.get("r") for sig in attends)


def _born(events: list[Event], derivation: Derivation) -> dict[int, int]:
    """Partial value of the forward pass -> the atom whose contraction made it."""
    found: dict[int, int] = {}
    for event, taken in zip(events, derivation.labels, strict=True):
        if not isinstance(event, Compute) or event.phase != Phase.FORWARD or event.signature is None:
            continue
        if taken.partial:
            source = next((found[event.ins[i]] for i in taken.partial if event.ins[i] in found), None)
            found.update(dict.fromkeys(event.outs, source) if source is not None else {})
        elif taken.label:
            sig, label = event.signature, taken.label[0]
            summed = [o for o, cells in zip(event.outs, sig.outs, strict=True) if not _carries(sig, cells, label)]
            found.update(dict.fromkeys(summed, sig.dims[label][taken.label[1]]))
    return found


def _readers(events: list[Event]) -> dict[int, list[Compute]]:
    """The forward events that read each tensor."""
    found: dict[int, list[Compute]] = collections.defaultdict(list)
    for e in events:
        if isinstance(e, Compute) and e.phase == Phase.FORWARD and e.op != "drop":
            for v in set(e.ins):
                found[v].append(e)
    return found


def _carries(sig: Signature, cells: list[Cell], label: str) -> bool:
    return any(label in (k, sig.parts.get(k)) for cell in cells for k in cell)


def _along(readers: dict[int, list[Compute]], logs: set[int], event: Compute, label: str) -> str:
    """Why an op cannot run along a split dim; empty if it can."""
    sig = event.signature
    assert sig is not None
    where = f"{event.op} in {event.module or 'the loss'!r}"
    if event.op == "convolution" and label == "g":
        return f"{where} has groups along it"
    if any(_carries(sig, cells, label) for cells in sig.outs) and label not in sig.inner:
        return ""
    if event.op == "_log_softmax":
        saved = [e for e in readers[event.outs[0]] if e.op == "detach" and not readers[e.outs[0]]]  # for the backward pass
        rest = [e for e in readers[event.outs[0]] if e not in saved]
        plain = len(rest) == 1 and rest[0].op == "nll_loss_forward" and len(rest[0].ins) == 2
        return "" if plain else f"{where} is read by more than a plain cross-entropy"
    if event.op in NORMS and len(sig.inner) == 1:
        return ""
    if event.op == "nll_loss_forward" and event.ins[0] not in logs:
        return f"{where} picks from something else than a log-softmax"
    return "" if event.op in CONTRACT and label not in sig.inner else f"{where} runs along it"


def cannot_split(module: str, why: str, axis: str) -> Fault:
    """P116 for one module."""
    return Fault(
        "P116",
        f"module {module or '(the model)'!r} cannot run on shards along axis {axis!r}",
        why,
        "a split run must make the calls of one device on its part of their tensors",
        f"leave it whole with modules = [...] of tensor_parallel, or set the size of axis {axis!r} to 1",
        f"mesh.{axis}",
    )
