"""The sequence of torch calls a module makes, with the events of a Program under each.

Only calls that *descend* from a parameter count: masks and positions may take another path than in capture, and a frozen
parameter, or evaluation under `no_grad`, changes nothing. Descent is a mark on the tensor object itself, so capture and run
decide it by the same rule and at the price of one attribute.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from partita.runtime.tape import Tape
from partita.runtime.through import Through

MARK = "_descends"
SHAPE = vars(torch._C.TensorBase)["shape"].__get__
SIZES = {SHAPE, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__}
# Reads of a property that are part of the sequence; the others (dtype, device, requires_grad, ...) are free.
READS = SIZES | {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data", "real", "imag")}
# Functions of a tensor that neither compute nor tell a size; `prim.device` is asked of fake tensors only.
FREE = {
    Tensor.dim, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.is_complex,
    torch.ops.prim.device.default,
}  # fmt: skip
APPLY = torch.autograd.Function.apply.__func__.__code__  # Python code of every custom function's apply
Path = tuple[int, Any] | tuple[int, Any, int]  # (0, position) or (1, name), and the place in a list


def mark(value: Any) -> Any:
    """Say that a tensor, or every tensor of a flat sequence, descends from a parameter."""
    if isinstance(value, Tensor):
        setattr(value, MARK, True)
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, Tensor):
                setattr(item, MARK, True)
    return value


def counts(func: Any, args: tuple, kwargs: dict | None) -> bool:
    """Whether a call is part of the sequence: it reads something that descends from a parameter."""
    if func in FREE or (func.__name__ == "__get__" and func not in READS):
        return False
    for a in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(a, Tensor):
            if getattr(a, MARK, False):
                return True
        elif isinstance(a, list | tuple):
            for item in a:
                if isinstance(item, Tensor) and getattr(item, MARK, False):
                    return True
    return False


def writes(func: Any) -> bool:
    """Whether a call changes its first argument."""
    name = func.__name__
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__"))


def paths(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Path]:
    """Where the tensors stand among the arguments; one level of lists (cat)."""
    found: list[Path] = []
    for side, items in ((0, enumerate(args)), (1, kwargs.items())):
        for k, a in items:
            if isinstance(a, Tensor):
                found.append((side, k))
            elif isinstance(a, list | tuple):
                found += [(side, k, n) for n, t in enumerate(a) if isinstance(t, Tensor)]
    return found


def at(args: Sequence[Any], kwargs: Mapping[str, Any], path: Path) -> Tensor:
    """The tensor that stands there."""
    a = args[path[1]] if path[0] == 0 else kwargs[path[1]]
    return a[path[2]] if len(path) == 3 else a


def put(args: list[Any], kwargs: dict[str, Any], path: Path, value: Tensor) -> None:
    """Replace the tensor that stands there."""
    side: Any = args if path[0] == 0 else kwargs
    if len(path) == 2:
        side[path[1]] = value
    else:
        old = side[path[1]]
        items = [value if n == path[2] else item for n, item in enumerate(old)]
        side[path[1]] = items if isinstance(old, list) else tuple(items)


@dataclass(frozen=True)
class Call:
    """One call that counts.

    Args:
        func: What was called.
        paths: Where its tensors stand.
        ins: Tensor ids of those, -1 for one no event has made or read.
        needs: Which of them require a gradient.
        outs: Tensor ids of the results.
        events: Range of the events under it.
        module: Path of the module that called.
        args, kwargs: Its arguments, tensors replaced by None.
        graded: Gradients were enabled.
        hidden: It ran inside a custom autograd function, whose backward pass is not replayed.
    """

    func: Callable[..., Any]
    paths: tuple[Path, ...]
    ins: tuple[int, ...]
    needs: tuple[bool, ...]
    outs: tuple[int, ...]
    events: range
    module: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    graded: bool = True
    hidden: bool = False

    @property
    def name(self) -> str:
        return self.func.__name__

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """A plain argument, however it was passed."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


@dataclass
class Heard:
    """What a `Listener` heard: the calls in order, and the events outside them that read nothing that counts."""

    calls: list[Call] = field(default_factory=list)
    free: set[int] = field(default_factory=set)


def _hidden() -> bool:
    """Whether we are inside the forward of a custom autograd function."""
    frame = None if torch.is_grad_enabled() else sys._getframe(1)
    while frame is not None:
        if frame.f_code is APPLY:
            return True
        frame = frame.f_back
    return False


class Listener(Through):
    """Writes down the calls while a `Tape` writes down the events."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape, self.heard = tape, Heard()
        for module in tape.where.names:
            for parameter in module.parameters(recurse=False):
                mark(parameter)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, first = kwargs or {}, len(self.tape.events)
        if not counts(func, args, kwargs):
            out = func(*args, **kwargs)
            self.heard.free.update(range(first, len(self.tape.events)))
            return out
        where, now = paths(args, kwargs), self.tape.now
        tensors = [at(args, kwargs, p) for p in where]
        ins, needs = tuple(now.get(id(t), -1) for t in tensors), tuple(t.requires_grad for t in tensors)
        out = func(*args, **kwargs)
        if writes(func) and isinstance(args[0], Tensor):
            mark(args[0])
        outs = tuple(now.get(id(t), -1) for t in tree_leaves(out) if isinstance(t, Tensor))
        plain = tuple(None if isinstance(a, Tensor) else a for a in args)
        named = {k: None if isinstance(a, Tensor) else a for k, a in kwargs.items()}
        events, module = range(first, len(self.tape.events)), self.tape.where.stack[-1]
        modes = {"graded": torch.is_grad_enabled(), "hidden": _hidden()}
        self.heard.calls.append(Call(func, tuple(where), ins, needs, outs, events, module, plain, named, **modes))
        return mark(out)
