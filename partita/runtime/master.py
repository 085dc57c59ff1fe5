"""A float32 copy of half-precision parameters for the optimizer to work on.

    gradient (half) -> float32 -> the optimizer steps on the master copy -> parameter = master, rounded

Small updates add up in the master where a half parameter would round each one away. The copy is part of the optimizer's state
under the key "master", so checkpoints cut it like the parameter.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

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
        """One step on the copies, rounded into the parameters, one parameter after another."""
        assert closure is None, "an optimizer with a master copy takes no closure"
        groups = self.param_groups
        try:
            for group in groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self._one(p, group)
        finally:
            self.inner.param_groups = groups

    def _one(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        """Step one parameter, or its master in its place."""
        if p.dtype not in (torch.float16, torch.bfloat16):
            self.inner.param_groups = [{**group, "params": [p]}]
            self._plain_step(self.inner)
            return
        assert p.grad is not None, "the caller looked"
        kept = self.state.pop(p, {})
        master = kept.pop(KEY) if KEY in kept else p.detach().to(self.dtype)
        master.grad = p.grad.to(self.dtype)
        if kept:
            self.state[master] = kept
        self.inner.param_groups = [{**group, "params": [master]}]
        self._plain_step(self.inner)
        master.grad = None
        p.copy_(master)
        self.state[p] = {**self.state.pop(master, {}), KEY: master}
