"""How a flat buffer goes from workers to servers and back: everything."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from partita.runtime.net import Net
from partita.runtime.relaxed.lane import Lane

Take = Callable[[Tensor | None], Tensor]  # elements of the flat buffer -> what is pushed of them; None: all
Pushed = tuple[Tensor | None, Tensor]  # (which elements of what this rank serves, their mean over workers); None: all


class Channel(ABC):
    """The way of one lane.

    Args:
        net, axis: Where it talks.
        lane: The worker's flat buffer.
    """

    def __init__(self, net: Net, axis: str, lane: Lane) -> None:
        self.net, self.axis, self.lane = net, axis, lane
        self.ranks, self.rank = net.size(axis), net.coordinate[axis]
        self.served = self._own(lane.flat).clone()
        self.number, self.full = 0, True
        self.rate = 1.0  # what an update is pushed as, over the gradient it comes from
        self.update = torch.zeros(0)  # what a full exchange last changed of it, as it was pushed

    @abstractmethod
    def _own(self, flat: Tensor) -> Tensor:
        """What this rank serves of a flat buffer."""

    def begin(self, number: int, *, full: bool) -> None:
        """Before an exchange, by its number; `full`: everything goes."""
        self.number, self.full = number, full

    @abstractmethod
    def push(self, take: Take) -> Pushed:
        """Send what was taken; returns the mean of what all workers sent."""

    @abstractmethod
    def pull(self, flat: Tensor, base: Tensor | None) -> None:
        """Fill `flat`, and `base` beside it, with what is served."""

    @abstractmethod
    def model(self) -> Tensor:
        """What all servers serve."""

    def state(self) -> dict[str, Tensor]:
        """What the next exchange needs."""
        return {"served": self.served}

    @abstractmethod
    def filled(self) -> None:
        """Its state has been filled from a checkpoint."""

    def restart(self) -> None:
        """Serve what the workers have."""
        self.served.copy_(self._own(self.lane.flat))


class Shards(Channel):
    """Every rank serves one shard."""

    def _own(self, flat: Tensor) -> Tensor:
        return flat.view(self.ranks, -1)[self.rank]

    def push(self, take: Take) -> Pushed:
        return None, mean(self.exchanged(take(None), "push"))

    def pull(self, flat: Tensor, base: Tensor | None) -> None:
        self.net.all_gather_into(flat, self.served, self.axis, label="pull")
        if base is not None:
            base.copy_(flat)

    def model(self) -> Tensor:
        whole = torch.empty_like(self.lane.flat)
        self.net.all_gather_into(whole, self.served, self.axis, label="model")
        return whole

    def filled(self) -> None:
        """Nothing follows from it."""

    def exchanged(self, sent: Tensor, label: str) -> Tensor:
        """(ranks, ...): what each rank sent to this one, of as many equal parts."""
        got = torch.empty_like(sent)
        self.net.all_to_all_into(got, sent, self.axis, label=label)
        return got.view(self.ranks, -1)


class Everywhere(Channel):
    """Every rank serves everything, and has the same."""

    def _own(self, flat: Tensor) -> Tensor:
        return flat

    def push(self, take: Take) -> Pushed:
        return None, self.summed(take(None)).div_(self.ranks)

    def filled(self) -> None:
        """Nothing follows from it."""

    def summed(self, values: Tensor) -> Tensor:
        """The sum over workers; padding stays at home."""
        size = self.lane.size if values.numel() == self.lane.flat.numel() else values.numel()
        self.net.all_reduce(values[:size], self.axis, label="push")
        return values

    def pull(self, flat: Tensor, base: Tensor | None) -> None:
        if base is not None:
            flat.copy_(self.served)
            base.copy_(flat)

    def model(self) -> Tensor:
        return self.served


def mean(rows: Tensor) -> Tensor:
    """The mean of rows, added up in their order."""
    total = rows[0].clone()
    for row in rows[1:]:
        total.add_(row)
    return total.div_(len(rows))
