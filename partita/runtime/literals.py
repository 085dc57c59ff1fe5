"""Calls whose arguments or answers are sizes, or draws: what they become on a shard.

User code sees whole sizes (`shape` of a split tensor is scaled up), so every literal it writes down is a whole one and is
scaled down here. Nothing is stored but the place of the split dim: another batch needs no other plan.

    q.view(4, 16, heads, 8)     q: (4, 16, [d]) split over n    ->    q.view(4, 16, heads / n, 8)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from partita.runtime.calls import SHAPE, SIZES, Call

Run = Callable[[Any, Any, Any], Any]  # run(func, args, kwargs)
VIEWS = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.expand, torch.broadcast_to, Tensor.broadcast_to}
UNFLATTENS = {Tensor.unflatten, torch.unflatten}
CUTS = {Tensor.split, torch.split, Tensor.split_with_sizes, torch.split_with_sizes}
LIKE = {Tensor.view_as, Tensor.expand_as, Tensor.reshape_as}
REPEATS = {Tensor.repeat, Tensor.tile, torch.tile, Tensor.repeat_interleave, torch.repeat_interleave}
NARROWS = {Tensor.narrow, torch.narrow}
# Sizes, strides or draws that have no rule on a split dim.
UNRULED = {
    "unfold", "fold", "as_strided", "resize_", "resize_as_", "set_", "stride", "tensor_split", "hsplit", "vsplit", "dsplit",
    "group_norm", "interpolate", "pixel_shuffle", "rrelu", "rrelu_", "multinomial", "roll", "item", "tolist", "take", "put_",
    "index_put_", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_", "masked_select", "bincount",
    "nonzero", "unique",
}  # fmt: skip


class NoRule(Exception):
    """This call has no form on a shard; the message says why."""


def literal(call: Call, split_in: int | None, split_out: int | None, rank: int, ranks: int) -> Run | None:
    """How a call over split tensors runs on a shard, None if just as it is.

    Args:
        call: As captured.
        split_in, split_out: The split dim of its first tensor, and of its first result.
        rank: Number of dims of its first tensor.
        ranks: Ranks of the axis.

    Raises:
        NoRule: If it has no such form.
    """
    if split_in is None and split_out is None:
        return None
    if call.func in SIZES:
        return None if split_in is None else _sizes(call, split_in, rank, ranks)
    if call.func in VIEWS:
        return None if split_out is None else _shape(split_out, ranks, 1)
    if call.func in UNFLATTENS:
        first = call.argument(1, "dim") % rank
        return None if split_out is None else _shape(split_out - first, ranks, 2)
    if call.func in CUTS:
        return _pieces(split_in, ranks) if split_in is not None and call.argument(2, "dim", 0) % rank == split_in else None
    if call.func is Tensor.__getitem__:
        return None if split_in is None else _key(call.args[1], split_in, rank, ranks)
    return _unchanged(call, split_in, split_out, rank)


def _unchanged(call: Call, split_in: int | None, split_out: int | None, rank: int) -> None:
    if call.func in NARROWS and call.argument(1, "dim") % rank == split_in:
        raise NoRule("narrow of a split dim")
    if call.func in REPEATS and (split_in is None or isinstance(call.argument(1, "repeats"), Tensor)):
        raise NoRule(f"{call.name} makes a split dim")
    if call.name in UNRULED or (call.name == "__setitem__"):
        raise NoRule(f"{call.name} of a split tensor has no rule")


def _sizes(call: Call, dim: int, rank: int, ranks: int) -> Run:
    if call.func == SHAPE or (call.func is Tensor.size and call.argument(1, "dim") is None):

        def whole(func: Any, args: Any, kwargs: Any) -> Any:
            return torch.Size([n * ranks if d == dim else n for d, n in enumerate(func(*args, **kwargs))])

        return whole
    if call.func is Tensor.size or call.func is Tensor.__len__:

        def one(func: Any, args: Any, kwargs: Any) -> Any:
            asked = 0 if call.func is Tensor.__len__ else [*args, *kwargs.values()][1] % rank
            return func(*args, **kwargs) * (ranks if asked == dim else 1)

        return one
    return lambda func, args, kwargs: func(*args, **kwargs) * ranks


def less(size: int, ranks: int) -> int:
    """A whole size on a rank."""
    if size == -1:
        return size
    if size % ranks:
        raise ValueError(f"size {size} of a split dim does not divide over {ranks} ranks")
    return size // ranks


def _shape(dim: int, ranks: int, fixed: int) -> Run:
    """view(x, *shape), reshape(x, shape), unflatten(x, dim, shape): `fixed` arguments stand before the shape."""

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        given: Any = args[fixed:] or [v for v in kwargs.values() if isinstance(v, tuple | list)]
        if given and isinstance(given[0], torch.dtype):
            return func(*args, **kwargs)
        shape: list[int] = list(given[0] if isinstance(given[0], tuple | list) else given)
        if 0 <= dim < len(shape):
            shape[dim] = less(shape[dim], ranks)
        before = args[:fixed] if len(args) >= fixed else [*args, kwargs["dim"]]
        return func(*before, shape)

    return run


def _pieces(dim: int, ranks: int) -> Run:
    def run(func: Any, args: Any, kwargs: Any) -> Any:
        size = args[1] if len(args) > 1 else next(v for k, v in kwargs.items() if k != "dim")
        local: Any = [less(k, ranks) for k in size] if isinstance(size, list | tuple) else less(size, ranks)
        return torch.split(args[0], local, dim)

    return run


def _key(key: Any, dim: int, rank: int, ranks: int) -> Run | None:
    """x[key]: only the entry that stands at the split dim is scaled."""
    entries = list(key) if isinstance(key, tuple) else [key]
    if any(isinstance(e, Tensor) and e.dtype == torch.bool for e in entries):
        raise NoRule("a boolean index of a split tensor")
    taken = sum(e is not None and e is not Ellipsis for e in entries)
    where, seen = None, 0
    for n, entry in enumerate(entries):
        if entry is Ellipsis:
            seen += rank - taken
        elif entry is not None:
            where = n if seen == dim else where
            seen += 1
    if where is None or (isinstance(entries[where], slice) and entries[where] == slice(None)):
        return None
    entry = entries[where]
    if not isinstance(entry, slice) or entry.step not in (None, 1):
        raise NoRule(f"index {entry} of a split dim")

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        now = list(args[1]) if isinstance(args[1], tuple) else [args[1]]
        now[where] = slice(*(n and less(n, ranks) for n in (now[where].start, now[where].stop)))
        return func(args[0], tuple(now))

    return run
