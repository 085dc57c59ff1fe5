"""What every relaxed data axis does around a step, and what of it a checkpoint keeps.

    begin(step)      before the first forward pass
    gradients()      after the loss is known: this rank's own gradients, as of a batch of its own
    parameters()     after the optimizer

A rank's gradients are those of the mean over workers: its own part counts as the whole batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from partita.runtime.cuts import Cut
from partita.runtime.net import Net
from partita.runtime.relaxed.lane import Lane
from partita.runtime.state import gather


class Exchange(ABC):
    """A relaxed data axis of one rank.

    Args:
        net, axis: Where it talks.
        parameters: What learns, by name, in registration order.
        placements: How parameters are cut along other axes.
    """

    def __init__(
        self, net: Net, axis: str, parameters: Mapping[str, nn.Parameter], placements: Mapping[str, list[Cut]]
    ) -> None:
        self.net, self.axis = net, axis
        self.ranks, self.rank = net.size(axis), net.coordinate[axis]
        whole = {n: p for n, p in parameters.items() if not placements.get(n)}
        cut = {n: p for n, p in parameters.items() if placements.get(n)}
        self.lanes = [Lane(some, self.ranks, k) for k, some in enumerate(s for s in (whole, cut) if s)]
        self.lane_of = {name: lane for lane in self.lanes for name in lane.parameters}
        self.step = 0
        self.optimizer: torch.optim.Optimizer | None = None  # this rank's

    # ---- around a step
    def begin(self, step: int) -> None:
        """Before the first forward pass of a step."""
        self.step = step

    def own_gradients(self) -> None:
        """Make gradients those of a batch of this rank's own."""
        grads = [p.grad for lane in self.lanes for p in lane.parameters.values() if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, float(self.ranks))

    @abstractmethod
    def gradients(self) -> None:
        """After backward: what the optimizer shall step with."""

    @abstractmethod
    def parameters(self) -> None:
        """After the optimizer."""

    # ---- what the rest of a run needs
    @property
    @abstractmethod
    def mark(self) -> str:
        """Its settings: what it kept is of use to one with the same alone."""

    @property
    def pieces(self) -> dict[str, Tensor]:
        """What the optimizer steps on instead of parameters, by name."""
        return {}

    @property
    @abstractmethod
    def differs(self) -> bool:
        """Whether ranks may hold different parameters between steps."""

    @property
    def alone(self) -> bool:
        """Whether each rank's optimizer keeps a state of its own."""
        return self.differs

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Buffers of this rank alone that the next step needs, beside parameters and optimizer."""

    @abstractmethod
    def restart(self, step: int) -> None:
        """Begin anew after `step` steps, from the parameters there are."""

    @abstractmethod
    def filled(self) -> None:
        """Parameters and `state` have been filled from a checkpoint."""

    def model(self, lane: Lane) -> Tensor:
        """The one model all ranks work on. Quiet."""
        whole = lane.flat.clone()
        self.net.all_reduce(whole, self.axis, label="model")
        return whole.div_(self.ranks)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Within it, parameters are those of the one model, on every rank."""
        if not self.differs:
            yield
            return
        kept = [lane.flat.clone() for lane in self.lanes]
        with self.net.quiet():
            for lane in self.lanes:
                lane.flat.copy_(self.model(lane))
        try:
            yield
        finally:
            for lane, flat in zip(self.lanes, kept, strict=True):
                lane.flat.copy_(flat)

    def gradient(self, name: str, grad: Tensor) -> Tensor:
        """The gradient of the whole batch from this rank's. Quiet."""
        if not self.alone:
            return grad
        whole = grad.detach().clone()
        with self.net.quiet():
            self.net.all_reduce(whole, self.axis, label="gradient")
        return whole.div_(self.ranks)

    def whole(self, name: str, piece: Tensor) -> Tensor:
        """A tensor of the form of a parameter, from the ranks' pieces of it. Quiet."""
        if name not in self.pieces or piece.shape != self.pieces[name].shape:
            return piece
        lane = self.lane_of[name]
        p = lane.parameters[name]
        cuts: list[Cut] = [(self.axis, 0, (lane.span(name, self.rank),))]
        return gather(self.net, piece, (p.numel(),), cuts).view(p.shape)

    def piece(self, name: str, whole: Tensor) -> Tensor:
        """This rank's piece of a tensor of the form of a parameter."""
        if name not in self.pieces or whole.shape != self.lane_of[name].parameters[name].shape:
            return whole
        first, size = self.lane_of[name].span(name, self.rank)
        return whole.reshape(-1)[first : first + size].clone()

    # ---- checkpoints
    def kept(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """What only this rank has, by name."""
        found = {f"exchange/{k}": t.clone() for k, t in self.state().items()}
        if self.differs:
            found |= {f"flat/{lane.number}": lane.flat.clone() for lane in self.lanes}
        if self.alone:
            found |= {f"optimizer/{n}/{k}": t for n, k, t in self._optimizer(optimizer)}
        return found

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str, Tensor]]:
        for lane in self.lanes:
            for name, p in lane.parameters.items():
                for key, value in optimizer.state.get(p, {}).items():
                    if isinstance(value, Tensor):
                        yield name, key, value

    def fill(self, optimizer: torch.optim.Optimizer, found: Mapping[str, Tensor], step: int) -> None:
        """Go on from what this rank kept; nothing kept begins anew."""
        self.step = step - 1
        if not found:
            self.restart(step)
            return
        mine = {f"exchange/{k}": t for k, t in self.state().items()} | {f"flat/{ln.number}": ln.flat for ln in self.lanes}
        for name, value in found.items():
            if name in mine:
                mine[name].copy_(value)
            else:
                _, _, rest = name.partition("/")
                parameter, _, key = rest.rpartition("/")
                optimizer.state[self.lane_of[parameter].parameters[parameter]][key] = value
        self.filled()
