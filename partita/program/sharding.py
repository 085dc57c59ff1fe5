"""Rows shared out over a data axis: what each rank owns of a parameter, and how the zero strategies say it.

    a parameter of 5 rows over 3 ranks     0 1 | 2 3 | 4 .        ceil(5 / 3) rows each; the last rank has fewer, or none
    sent                                   0 1   2 3   4 0        every parameter padded by itself, biases and norms too

Rows are those of the part a rank holds under the axes inside. A number without dims is no row: every rank owns it, and sends it
to each. Rules of `Rows` apply to what belongs to a parameter with a gradient; any other parameter stays whole on every rank.

Source: Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, section 5; the padding by parameter is that of torch's `fully_shard`.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from partita.errors import Fault
from partita.program.data import batch_faults, rewrite_batch, say_loss
from partita.program.events import WIDTH, Collective, Compute, Event, Kind, Phase, Rows, Split, Tensor
from partita.program.program import Program
from partita.program.reduction import (
    Bucketed,
    Call,
    afterwards,
    bucketed,
    gradients_by_name,
    has_buckets,
    launched,
    launched_in_passes,
)


def chunk(rows: int, ranks: int) -> int:
    """Rows of a rank; the last ranks may have fewer.

    Example:
        >>> chunk(5, 3), chunk(0, 3)
        (2, 0)
    """
    return -(-rows // ranks)


def own(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """(first row, number of rows) of one rank.

    Example:
        >>> [own(5, 4, rank) for rank in range(4)]
        [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    size = chunk(rows, ranks)
    first = min(rank * size, rows)
    return first, min(size, rows - first)


def padded(shape: Sequence[int], ranks: int) -> int:
    """Elements sent for a value of this shape: its rows padded to a multiple of the ranks.

    Example:
        >>> padded((5, 3), 4), padded((), 4)
        (24, 4)
    """
    return ranks * (chunk(shape[0], ranks) * math.prod(shape[1:]) if shape else 1)


# ---------------------------------------------------------------- what is refused
def sharding_faults(program: Program, axis: str, size: int, who: str) -> list[Fault]:
    """Why rows cannot be shared out over an axis; empty if they can."""
    if size == 1:
        return []
    if has_buckets(program) or any(isinstance(x, Rows) for t in program.tensors for x in t.layouts.values()):
        inner = next(iter(a for a in program.axes if _cuts_batch(program, a)), "another")
        return [
            Fault(
                "P116",
                f"{who} cannot share out gradients that are summed over axis {inner!r} already",
                f"{inner} = {program.axes.get(inner, '?')}, {axis} = {size}",
                "rows are cut from what a backward pass makes: a strategy that shards stands inside of any other data axis",
                f"the table of {axis!r} before that of {inner!r}",
                f"mesh.{axis}",
            )
        ]
    return batch_faults(program, axis, size, who)


def _cuts_batch(program: Program, axis: str) -> bool:
    batch = program.classes.get("batch", frozenset())
    layouts = ((t, t.layouts.get(axis)) for t in program.tensors)
    return any(isinstance(x, Split) and t.dims[x.dim][x.atom] in batch for t, x in layouts)


# ---------------------------------------------------------------- what is said
def say_zero(program: Program, axis: str, size: int, *, name: str, limit: int, every: bool) -> Program:
    """Data parallelism whose optimizer steps on rows: gradients end scattered, parameters are gathered after the step.

    Args:
        program: Under the axes inside.
        axis, size: The data axis.
        name: Of the strategy, for notes.
        limit: Bytes at which a bucket closes.
        every: Gradients are scattered with every pass that makes some, not with the last one.
    """
    said = rewrite_batch(program, axis, size, name)
    if not program.gradients:
        said = said.with_notes(f"{name}: nothing is learned, so no gradient is summed over {axis} = {size}")
    apart = every and said.pipeline is not None
    found = bucketed(said, limit, apart=apart)
    dtype, ids = ({t.name: getattr(t, what) for t in found.program.parameters()} for what in ("dtype", "id"))

    def gather(names: Sequence[str]) -> Collective:
        kind = dtype[names[0]]
        sent = sum(padded(found.program.local_shape(ids[n]), size) for n in names) * WIDTH[kind]
        return Collective("all_gather", axis, tuple(ids[n] for n in names), sent, kind, Phase.OPTIMIZER, names[-1])

    scatter = scattering(found, axis, size, once=not every)
    sent = launched_in_passes(found, scatter) if apart else launched(found, scatter)
    said = share_rows(sent, axis, size, parameters=())
    calls = [gather(names) for names in by_dtype(found.buckets, dtype.__getitem__)]
    return say_loss(afterwards(said, calls), axis)


def scattering(found: Bucketed, axis: str, size: int, *, once: bool) -> Call:
    """What sends a bucket and leaves each rank its rows of the sums.

    Args:
        found: The buckets.
        axis, size: Over which rows are shared out.
        once: With the last microbatch only.
    """
    shape = {t.name: found.program.local_shape(t.id) for t in found.program.parameters()}
    gradient = gradients_by_name(found.program)

    def scatter(names: Sequence[str]) -> Collective:
        kind = found.dtypes[names[0]]
        sent = sum(padded(shape[n], size) for n in names) * WIDTH[kind]
        tensors = tuple(gradient[n] for n in names)
        return Collective("reduce_scatter", axis, tensors, sent, kind, Phase.BACKWARD, names[-1], overlapped=True, once=once)

    return scatter


def by_dtype(buckets: Iterable[Sequence[str]], dtype: Callable[[str], object]) -> list[list[str]]:
    """The buckets, each divided into runs of one dtype: what is gathered together."""
    found: list[list[str]] = []
    for names in buckets:
        kinds: dict[object, list[str]] = {}
        for n in names:
            kinds.setdefault(dtype(n), []).append(n)
        found += kinds.values()
    return found


def share_rows(program: Program, axis: str, size: int, *, parameters: Collection[int]) -> Program:
    """The program with rows shared out: of gradients, of what the optimizer keeps and makes, and of the parameters.

    Args:
        program: As launched.
        axis, size: The data axis.
        parameters: Ids of those that are held by rows as well, and gathered where they are used.
    """
    gradients = set(program.gradients.values())
    made = {o for e in program.events() if isinstance(e, Compute) and e.phase == Phase.OPTIMIZER for o in e.outs}

    def layout(t: Tensor) -> Rows | None:
        if t.shape and t.kind == Kind.OPTIMIZER and _learns(t.name):
            return Rows()
        stepped = t.id in gradients or t.root in program.gradients or t.id in made
        if not t.shape or not (stepped or t.root in parameters):
            return None
        return Rows(held=t.id not in gradients and (t.root in parameters or t.root not in program.gradients))

    learned = {program.tensors[p].name for p in program.gradients}

    def _learns(state: str) -> bool:
        return state.rpartition(".")[0] in learned

    found = {t.id: rows for t in program.tensors if (rows := layout(t)) is not None}
    tensors = tuple(replace(t, layouts={**t.layouts, axis: found[t.id]}) if t.id in found else t for t in program.tensors)
    return _resaid(replace(program, tensors=tensors, axes={**program.axes, axis: size}), gradients)


def _resaid(program: Program, gradients: set[int]) -> Program:
    """Sums that other axes make of finished gradients are sums of rows."""

    def changed(event: Event) -> Event:
        if isinstance(event, Collective) and event.phase == Phase.SYNC and event.tensors and set(event.tensors) <= gradients:
            widths = [WIDTH[event.dtype] / WIDTH[program.tensors[g].dtype] for g in event.tensors]
            return replace(
                event, nbytes=int(sum(program.owned_bytes(g) * w for g, w in zip(event.tensors, widths, strict=True)))
            )
        return event

    segments = tuple(replace(s, events=tuple(map(changed, s.events))) for s in program.segments)
    return replace(program, segments=segments)
