"""Workers that train by themselves and meet now and then.

meeting      base += rate (u + m v), v <- m v + u,  u the mean over workers of flat - base       all workers go on from base
late         s is taken after some step and averaged while training goes on; d steps later
             w <- keep w + (1 - keep) (mean(s) + w - s)                                          what was done meanwhile stays
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from partita.runtime.cuts import Cut
from partita.runtime.net import Net, Work
from partita.runtime.relaxed.exchange import Exchange


@dataclass(frozen=True)
class Outer:
    """The step that is taken when workers meet.

    Args:
        period: Steps from one meeting to the next.
        rate, momentum: Of it; rate 1 without momentum goes on from the mean.
        nesterov: Momentum looks ahead.
    """

    period: int
    rate: float
    momentum: float
    nesterov: bool


class Meeting(Exchange):
    """All workers go on from one model every `period` steps."""

    def __init__(
        self,
        net: Net,
        axis: str,
        parameters: Mapping[str, nn.Parameter],
        placements: Mapping[str, list[Cut]],
        outer: Outer,
    ) -> None:
        super().__init__(net, axis, parameters, placements)
        self.outer = outer
        self.base = [lane.flat.clone() for lane in self.lanes]
        self.velocity = [lane.like() for lane in self.lanes] if outer.momentum else []

    @property
    def mark(self) -> str:
        return repr(self.outer)

    @property
    def differs(self) -> bool:
        return True

    def gradients(self) -> None:
        self.own_gradients()

    @torch.no_grad()
    def parameters(self) -> None:
        if (self.step + 1) % self.outer.period:
            return
        for lane, base in zip(self.lanes, self.base, strict=True):
            change = lane.flat - base
            self.net.all_reduce(change[: lane.size], self.axis, label="average")
            base.add_(self._outer(change.div_(self.ranks), lane.number), alpha=self.outer.rate)
            lane.flat.copy_(base)

    def _outer(self, change: Tensor, number: int) -> Tensor:
        """Where momentum takes the mean change."""
        if not self.velocity:
            return change
        velocity = self.velocity[number].mul_(self.outer.momentum).add_(change)
        return change.add_(velocity, alpha=self.outer.momentum) if self.outer.nesterov else velocity

    def state(self) -> dict[str, Tensor]:
        found = {f"base/{k}": t for k, t in enumerate(self.base)}
        return found | {f"velocity/{k}": t for k, t in enumerate(self.velocity)}

    def filled(self) -> None:
        """Nothing follows from it."""

    @torch.no_grad()
    def restart(self, step: int) -> None:
        for lane, base in zip(self.lanes, self.base, strict=True):
            base.copy_(lane.flat)
        for velocity in self.velocity:
            velocity.zero_()


@dataclass(frozen=True)
class Late:
    """When averages are begun, and when they are taken in.

    Args:
        every: Steps from one average to the next.
        delay: Steps that are done while it is on its way, at most `every`; 0: none.
        keep: Share of a worker's own model that is kept.
    """

    every: int
    delay: int
    keep: float

    def begins(self, step: int) -> bool:
        """Whether an average of the models before this step is begun with it."""
        return self.delay > 0 and step % self.every == 0

    def ends(self, step: int) -> bool:
        """Whether an average is taken in after this step."""
        return step % self.every == (self.delay - 1 if self.delay else self.every - 1)


class Averaging(Exchange):
    """Averages of older models, taken in while training goes on."""

    def __init__(
        self,
        net: Net,
        axis: str,
        parameters: Mapping[str, nn.Parameter],
        placements: Mapping[str, list[Cut]],
        late: Late,
    ) -> None:
        super().__init__(net, axis, parameters, placements)
        self.late = late
        self.taken = [lane.flat.clone() for lane in self.lanes]
        self.total = [lane.like() for lane in self.lanes]  # of what all workers had taken
        self.works: list[Work] = []

    @property
    def mark(self) -> str:
        return repr(self.late)

    @property
    def differs(self) -> bool:
        return True

    @torch.no_grad()
    def begin(self, step: int) -> None:
        super().begin(step)
        if self.late.begins(step):
            self._send()

    def gradients(self) -> None:
        self.own_gradients()

    @torch.no_grad()
    def parameters(self) -> None:
        if not self.late.ends(self.step):
            return
        if not self.late.delay:
            self._send()
        self._arrive()
        for lane, taken, total in zip(self.lanes, self.taken, self.total, strict=True):
            moved = (lane.flat - taken).add_(total.div_(self.ranks))  # exactly the mean where nothing was done meanwhile
            lane.flat.lerp_(moved, 1 - self.late.keep) if self.late.keep else lane.flat.copy_(moved)

    def _send(self) -> None:
        """Take the models as they are, and begin to add them up."""
        for lane, taken, total in zip(self.lanes, self.taken, self.total, strict=True):
            taken.copy_(lane.flat)
            total.copy_(taken)
            work = self.net.all_reduce(total[: lane.size], self.axis, label="average", overlapped=self.late.delay > 0)
            self.works += [work] if work is not None else []

    def _arrive(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []

    def state(self) -> dict[str, Tensor]:
        self._arrive()
        found = {f"taken/{k}": t for k, t in enumerate(self.taken)}
        return found | {f"total/{k}": t for k, t in enumerate(self.total)}

    def filled(self) -> None:
        """An average that had been begun is there."""

    @torch.no_grad()
    def restart(self, step: int) -> None:
        """All workers have one model: an average that had been begun is that."""
        for lane, taken, total in zip(self.lanes, self.taken, self.total, strict=True):
            taken.copy_(lane.flat)
            torch.mul(taken, self.ranks, out=total)
