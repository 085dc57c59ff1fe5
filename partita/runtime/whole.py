"""The single device a split run is compared with: the user's module under plain torch, the whole batch at once.

Nothing of partita's parallel machinery takes part: no shards, no buckets, no network, no strategy.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from partita.runtime.schedule import Rate
from partita.runtime.subject import Subject


@dataclass(frozen=True)
class Whole:
    """What one device ends with."""

    losses: list[float]
    state: dict[str, Tensor]
    gradients: dict[str, Tensor]


def train_whole(
    subject: Subject,
    steps: int,
    *,
    clip: tuple[float, float] | None = None,
    schedule: tuple[str, int, int | None] = ("constant", 0, None),
) -> Whole:
    """Train on whole batches.

    Args:
        subject: What is trained.
        steps: Optimizer steps.
        clip: (largest norm, p) as `torch.nn.utils.clip_grad_norm_` takes them.
        schedule: (name, warmup, horizon) of the learning rate.
    """
    module = subject.make()
    optimizer = subject.optimizer(module)
    rate = Rate(optimizer, *schedule)
    losses: list[float] = []
    for step in range(steps):
        optimizer.zero_grad()
        value = subject.evaluate(module, subject.batches(step))
        loss = value[0] / value[1] if isinstance(value, tuple) else value
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([p for p in module.parameters() if p.grad is not None], *clip)
        rate.set(step)
        optimizer.step()
        losses.append(float(loss.detach()))
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    kept = dict(module.named_buffers()) | module.state_dict(keep_vars=True)  # tied names both, and buffers outside it
    state = {n: t.detach() for n, t in kept.items() if isinstance(t, Tensor)}
    return Whole(losses, state, gradients)
