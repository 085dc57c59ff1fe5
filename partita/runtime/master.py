"""A float32 copy of half-precision parameters for the optimizer to work on.

    gradient (half) -> float32 -> the optimizer steps on the master copy -> parameter = master, rounded

Small updates add up in the master where a half parameter would round each one away. The copy is part of the optimizer's state
under the key "master", so checkpoints cut it like the parameter.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

KEY = "master"


class Mastered(torch.optim.Optimizer):
    """An optimizer that steps on wider copies of half-precision parameters.

    Args:
        inner: Built over the parameters themselves; its settings and state are this one's.
        dtype: Of the copies.
    """

    def __init__(self, inner: torch.optim.Optimizer, dtype: torch.dtype = torch.float32) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], dict(inner.defaults))
        self.inner, self.dtype = inner, dtype
        self.param_groups, self.state = inner.param_groups, inner.state
        self._plain_step = inspect.unwrap(type(inner).step)  # without hooks: they run once, around both

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step on the copies, rounded into the parameters."""
        assert closure is None, "an optimizer with a master copy takes no closure"
        halves: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]] = []
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None and p.dtype in (torch.float16, torch.bfloat16):
                halves.append((p, p.data, p.grad))
                master = self.state[p].pop(KEY, None)
                p.grad = None
                p.data = p.data.to(self.dtype) if master is None else master
                p.grad = halves[-1][2].to(self.dtype)
        self._plain_step(self.inner)
        for p, half, grad in halves:
            master = p.data
            p.grad = None
            p.data = half.copy_(master)
            p.grad = grad
            self.state[p][KEY] = master
