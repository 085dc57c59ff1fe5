"""The optimizer on the host: its state lives there, gradients come, it steps, parameters go back.

    device   p ───────────────────────────────────────────▶ p        p, g: this rank's part
               └─ p, g ─▶                          └─ p ─▶
    host               twin ── the optimizer steps ── twin           state: host memory, step after step

Where the device is the host (CPU) nothing is copied: the parameter is its own twin. Parameters are read from the device anew in
every step, so that whatever else writes to them is heeded, unless the optimizer keeps master copies, which rule as ever.
"""

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from partita.runtime.master import Mastered

HOST = torch.device("cpu")
Group = dict[str, Any]


class Offloaded(torch.optim.Optimizer):
    """An optimizer that steps in host memory.

    Args:
        inner: Built over the parameters of the device; its settings and state are this one's.
        parameters: Those whose state lives on the host; None: all.
        apart: Host and device memory are two; None: as the parameters' device says.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, parameters: Collection[Tensor] | None = None, *, apart: bool | None = None
    ) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], dict(inner.defaults))
        self.inner, self.apart = inner, apart
        self.param_groups, self.state = inner.param_groups, inner.state
        # what goes before and after a step goes before and after it here
        vars(self).update({name: vars(inner)[name] for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")})
        self._chosen = None if parameters is None else {id(p) for p in parameters}
        self._plain_step = inspect.unwrap(type(inner).step)  # without hooks: they run once, around both
        self._twins: dict[int, Tensor] = {}  # by id of the parameter
        self._reads = not isinstance(inner, Mastered)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step: gradients to the host, the optimizer's own step there, parameters back."""
        assert closure is None, "an optimizer on the host takes no closure"
        groups = self.param_groups
        moved = [p for group in groups for p in group["params"] if p.grad is not None and self._away(p)]
        twins = {id(p): self._twin(p) for p in moved}
        self._wait(moved)
        for p in moved:
            if kept := self.state.pop(p, None):
                self.state[twins[id(p)]] = {key: _on_host(value) for key, value in kept.items()}
        try:
            self.inner.param_groups = [{**g, "params": [twins.get(id(p), p) for p in g["params"]]} for g in groups]
            self._plain_step(self.inner)
        finally:
            self.inner.param_groups = groups
            self._back(moved, twins)

    def _away(self, p: Tensor) -> bool:
        """Whether a parameter is stepped on elsewhere than where it lives."""
        chosen = self._chosen is None or id(p) in self._chosen
        return chosen and (p.device.type != HOST.type if self.apart is None else self.apart)

    def _twin(self, p: Tensor) -> Tensor:
        """The parameter and its gradient on the host, on their way."""
        twin = self._twins.get(id(p))
        fresh = twin is None
        if twin is None:
            twin = self._twins[id(p)] = torch.empty_like(p, device=HOST, pin_memory=p.is_cuda)
        if fresh or self._reads:
            twin.copy_(p, non_blocking=True)
        assert p.grad is not None, "the caller looked"
        twin.grad = torch.empty_like(p.grad, device=HOST, pin_memory=p.is_cuda).copy_(p.grad, non_blocking=True)
        return twin

    def _back(self, moved: Iterable[Tensor], twins: dict[int, Tensor]) -> None:
        for p in moved:
            twin = twins[id(p)]
            twin.grad = None
            if twin in self.state:
                self.state[p] = self.state.pop(twin)
            p.copy_(twin, non_blocking=True)
        self._wait(moved)

    def _wait(self, moved: Iterable[Tensor]) -> None:
        for device in {p.device for p in moved if p.is_cuda}:
            torch.cuda.synchronize(device)


def _on_host(value: Any) -> Any:
    return value.to(HOST) if isinstance(value, Tensor) else value
