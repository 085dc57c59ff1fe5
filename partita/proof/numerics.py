"""The split run against the whole one, tensor by tensor, by the promise.

    error of a tensor = max|split - whole| / max(max|whole|, 0.01 M),   M = largest |value| over all tensors of its kind

The floor 0.01 M keeps a tensor that is zero but for rounding (the bias of a key) from reading as all error. What is no number
in the same places of both is equal there, and said: it is what one device ends in, though hardly what was meant.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from partita.strategy import Promise

BOUND = {Promise.EXACT: 0.0, Promise.REORDERED: 1e-10, Promise.RELAXED: 1e-10}  # of a relaxed method: where it is exact
FLOOR = 0.01

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Numerics:
    """How far the split run is from the whole one, at worst.

    Args:
        max_relative_error, worst_tensor: The largest error, and where it is.
        bound: What the promise allows.
        unnumbered: What is NaN or infinite in the same places on both sides.
    """

    max_relative_error: float
    bound: float
    worst_tensor: str
    unnumbered: tuple[str, ...] = ()

    @property
    def held(self) -> bool:
        return self.max_relative_error <= self.bound

    def __str__(self) -> str:
        return f"{self.worst_tensor} is off by {self.max_relative_error:.3g}, bound {self.bound:.3g}"

    def json(self) -> dict[str, Any]:
        return {"max_relative_error": self.max_relative_error, "bound": self.bound, "worst_tensor": self.worst_tensor}


def errors(split: Tensors, whole: Tensors, kind: str) -> dict[str, float]:
    """Error of each tensor of one kind; a tensor that only one side has counts as infinite."""
    top = max((_size(t) for t in whole.values()), default=0.0)
    found = {f"{kind} {name}": math.inf for name in split.keys() ^ whole.keys()}
    for name in split.keys() & whole.keys():
        a, b = _widest(split[name]), _widest(whole[name])
        if a.shape != b.shape:
            found[f"{kind} {name}"] = math.inf
        elif a.numel():
            a, b = a.masked_fill(same := _alike(a, b), 0), b.masked_fill(same, 0)
            scale = max(_size(b), FLOOR * top)
            gap = (a - b).abs().max().item()
            found[f"{kind} {name}"] = gap / scale if scale and gap == gap else (0.0 if gap == 0 else math.inf)
    return found


def _alike(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where both are no number, or the same infinity."""
    return (a.isnan() & b.isnan()) | (a.isinf() & (a == b))


def _size(t: torch.Tensor) -> float:
    """The largest number."""
    return t[t.isfinite()].abs().max().item() if t.isfinite().any() else 0.0


def _unnumbered(
    losses: tuple[Sequence[float], Sequence[float]], kinds: Mapping[str, tuple[Tensors, Tensors]]
) -> tuple[str, ...]:
    found = [f"loss of step {k}" for k, (a, b) in enumerate(zip(*losses, strict=False), 1) if math.isnan(a) and math.isnan(b)]
    for kind, (split, whole) in kinds.items():
        both = (name for name in whole if name in split and split[name].shape == whole[name].shape)
        found += [f"{kind} {name}" for name in both if _alike(_widest(split[name]), _widest(whole[name])).any()]
    return tuple(found)


def _widest(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.complex128) if t.is_complex() else t.double()


def compare(
    promise: Promise,
    losses: tuple[Sequence[float], Sequence[float]],
    kinds: Mapping[str, tuple[Tensors, Tensors]],
) -> Numerics:
    """Worst error over the losses and every kind of tensor.

    Args:
        promise: The weakest promise of the plan's strategies.
        losses: Per step, split and whole; judged by plain relative error.
        kinds: kind -> (split, whole) tensors by name.
    """
    found: dict[str, float] = {}
    if len(losses[0]) != len(losses[1]):
        found["number of losses"] = math.inf
    for step, (a, b) in enumerate(zip(*losses, strict=False), 1):
        gap = abs(a - b)
        same = gap == 0 or (math.isnan(a) and math.isnan(b))
        found[f"loss of step {step}"] = 0.0 if same else (gap / abs(b) if b and gap == gap else math.inf)
    for kind, (split, whole) in kinds.items():
        found |= errors(split, whole, kind)
    worst = max(found, key=lambda name: found[name], default="")
    return Numerics(found.get(worst, 0.0), BOUND[promise], worst, _unnumbered(losses, kinds))
