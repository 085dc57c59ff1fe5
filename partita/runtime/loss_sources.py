"""Counts a loss takes off its batch, and what becomes of them: found by giving it other counts.

A loss may divide by a count in many ways: a tensor, kept away from zero or not, or a plain number after `item()`, `float()`,
`len()` of what a mask selects. All of them begin with a *source*: a sum over a tensor of the batch, or the size of something
whose size the data decides. While a loss runs, a source can be given another value; what the loss divides by is then a function
of it, of which two forms add up over parts:

    floor   by = κ · max(v, number)          plus   by = κ · (v + number)

The sources add up; the form is applied to their sum.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from partita.runtime.calls import SHAPE
from partita.runtime.through import Through

ORIGIN = "_origin"  # attribute of a tensor: the sum of what follows
BATCH, SOURCED, RAGGED = 1, 2, 4  # made of the batch; made of a source; of a size that the data decides
RESIZING = {"nonzero", "masked_select", "argwhere", "unique", "unique_consecutive", "_unique2"}
TAKING = {  # results without dims that are an element, or the same again
    "__getitem__", "select", "squeeze", "reshape", "view", "flatten", "index_select", "take", "detach", "clone", "to",
}  # fmt: skip
EMPTY = {"zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"}
LENGTHS = {Tensor.__len__, Tensor.numel, Tensor.nelement}
POINTS = (0, 1, 2, 3, 7, 50, 1000, 2000)  # counts that are tried
CLOSE = 1e-6  # relative, between what a form says and what was read

Number = Tensor | float
Finish = tuple[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]], ...]  # calls that turn a count into a divisor
Fit = tuple[int, str, float, float, str]  # source, form, number, κ, and the reading it is of: "count" or "by"


def origin(value: Any) -> int:
    """What a tensor, or any of a list of them, is made of."""
    if isinstance(value, Tensor):
        return getattr(value, ORIGIN, 0)
    if isinstance(value, list | tuple):
        found = 0
        for item in value:
            found |= origin(item)
        return found
    return 0


class Sources(Through):
    """Hears the sources of a loss, in order, and gives some of them other values.

    Args:
        batch: What the loss is given: its tensors with dims are where sources come from.
        given: Other values, by the number of the source.
    """

    def __init__(self, batch: Any, given: Mapping[int, float] | None = None) -> None:
        super().__init__()
        self.values: list[Number] = []
        self.given = given or {}
        self.called: set[str] = set()  # functions of what is made of the batch
        for t in tree_leaves(batch):
            if isinstance(t, Tensor) and t.dim():
                setattr(t, ORIGIN, BATCH)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        found = origin(args) | (origin(tuple(kwargs.values())) if kwargs else 0)
        if not found or func.__name__ in EMPTY:
            return func(*args, **kwargs)
        if found & RAGGED and (func in LENGTHS or func is Tensor.size or func == SHAPE) and len(args) == 1:
            return self._size(func, args[0])
        if found & RAGGED and func is Tensor.size:
            size = self._size(SHAPE, args[0])
            return size[args[1]]
        out = func(*args, **kwargs)
        self.called.add(func.__name__)
        with torch._C.DisableTorchFunction():
            if isinstance(out, Tensor):
                return self._made(func.__name__, out, args, found)
            if isinstance(out, list | tuple):
                for t in out:
                    if isinstance(t, Tensor):
                        self._made(func.__name__, t, args, found | (SOURCED if not t.dim() else 0))
        return out

    def _made(self, name: str, out: Tensor, args: tuple, found: int) -> Tensor:
        first = args[0][0] if args and isinstance(args[0], list | tuple) and args[0] else (args[0] if args else None)
        if not out.dim():
            summed = isinstance(first, Tensor) and first.dim() > 0 and name not in TAKING
            if summed and not found & SOURCED and not out.requires_grad and out.dtype != torch.bool:
                k = len(self.values)
                self.values.append(out.clone())  # which may be written to
                out = torch.full_like(out, self.given[k]) if k in self.given else out
                found |= SOURCED
            setattr(out, ORIGIN, found & ~RAGGED)
            return out
        ragged = name in RESIZING or (name == "__getitem__" and _selects(args[1]))
        if found & RAGGED and not ragged:
            ragged = any(
                origin(t) & RAGGED and t.shape[:1] == out.shape[:1] for t in tree_leaves(args) if isinstance(t, Tensor)
            )
        setattr(out, ORIGIN, found & ~RAGGED | (RAGGED if ragged else 0))
        return out

    def _size(self, func: Any, t: Tensor) -> Any:
        """The size of something ragged, of which dim 0 is a source."""
        shape = list(func(t)) if func not in LENGTHS else list(t.shape)
        k = len(self.values)
        self.values.append(float(shape[0]))
        shape[0] = int(self.given.get(k, shape[0]))
        size = torch.Size(shape)
        return size if func not in LENGTHS else size[0] if func is Tensor.__len__ else size.numel()

    @property
    def numbers(self) -> list[float]:
        """The sources' own values."""
        return [float(v) for v in self.values]


def _selects(index: Any) -> bool:
    tensors = [t for t in tree_leaves(index) if isinstance(t, Tensor)]
    return any(t.dim() and (t.dtype == torch.bool or origin(t) & RAGGED) for t in tensors)


# ---------------------------------------------------------------- forms
def finish_of(fit: Fit) -> Finish:
    """The calls that turn a count into a divisor, as a form has them."""
    _, form, number, _, _ = fit
    if form == "floor":
        return ((torch.clamp, (), {"min": number}),) if number > 0 else ()
    return ((torch.add, (number,), {}),)


def due(fit: Fit, v: Number) -> Number:
    """What is divided by at a count, as the form has it."""
    _, form, number, scale, _ = fit
    if form == "plus":
        return (v + number) * scale
    return (v.clamp(min=number) if isinstance(v, Tensor) else max(v, number)) * scale


def form_of(at: Callable[[float], float], points: Sequence[float]) -> tuple[str, float, float] | None:
    """(form, number, κ) of a function of a count, None if it has neither form.

    Example:
        >>> form_of(lambda v: 2 * max(v, 1), POINTS)
        ('floor', 1.0, 2.0)
        >>> form_of(lambda v: v + 0.5, POINTS)
        ('plus', 0.5, 1.0)
        >>> form_of(lambda v: v * v, POINTS)
    """
    low, high = points[-2], points[-1]
    scale = (at(high) - at(low)) / (high - low)
    if not scale or scale != scale:
        return None
    more = round(at(high) / scale - high, 9)
    if abs(more) <= CLOSE:
        zero = at(0.0)
        form, number = "floor", round(zero / scale, 9) if zero == zero else 0.0
    else:
        form, number = "plus", more
    for v in points:
        said, read = float(due((0, form, number, scale, ""), v)), at(v)
        if abs(said - read) > CLOSE * abs(said) + 1e-12:
            return None
    return form, number, scale
