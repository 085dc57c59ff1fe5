"""Learning rate over steps: linear warm-up, then constant or a half cosine down to nothing at the horizon.

warmup 2, horizon 8    step  0    1    2 ...         7
                       rate  1/2  1    cos 0 ...     cos(5/6 π)
"""

import math

import torch


def factor(step: int, schedule: str = "constant", warmup: int = 0, horizon: int | None = None) -> float:
    """What the learning rate of step number `step` (from 0) is multiplied with."""
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant" or horizon is None:
        return 1.0
    done = min((step - warmup) / max(horizon - warmup, 1), 1.0)
    return 0.5 * (1.0 + math.cos(math.pi * done))


class Rate:
    """Sets the learning rates of an optimizer, each group from its own base rate."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: str, warmup: int, horizon: int | None) -> None:
        self.optimizer, self.schedule, self.warmup, self.horizon = optimizer, schedule, warmup, horizon
        self.bases = [group.get("initial_lr", group.get("lr", 0.0)) for group in optimizer.param_groups]
        self.plain = schedule == "constant" and not warmup

    def set(self, step: int) -> None:
        """The rates of step number `step`."""
        if not self.plain:
            by = factor(step, self.schedule, self.warmup, self.horizon)
            for group, base in zip(self.optimizer.param_groups, self.bases, strict=True):
                group["lr"] = base * by
