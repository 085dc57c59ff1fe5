"""One flat buffer of parameters: they are views of it, so that what is exchanged needs no packing."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from partita.errors import RunFailed


class Lane:
    """Parameters side by side, in registration order, padded to a multiple of the ranks.

    Args:
        parameters: By name; they become views of the buffer.
        ranks: On the axis.
        number: Of the lane among those of the model.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], ranks: int, number: int) -> None:
        self.parameters, self.ranks, self.number = dict(parameters), ranks, number
        first = next(iter(parameters.values()))
        self.size = sum(p.numel() for p in parameters.values())
        self.width = -(-self.size // ranks)
        self.flat = first.new_zeros(ranks * self.width, requires_grad=False)
        self.starts: dict[str, int] = {}
        at = 0
        for name, p in self.parameters.items():
            self.starts[name] = at
            room = self.flat[at : at + p.numel()].view(p.shape)
            room.copy_(p.detach())
            p.data = room
            at += p.numel()

    def like(self) -> Tensor:
        """A buffer of zeros of the same form."""
        return torch.zeros_like(self.flat)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """A buffer's part of each parameter, by name."""
        return {
            n: buffer[a : a + p.numel()].view(p.shape)
            for (n, p), a in zip(self.parameters.items(), self.starts.values(), strict=True)
        }

    def span(self, name: str, shard: int) -> tuple[int, int]:
        """(first element, number of elements) of a flattened parameter that stand in a shard."""
        start, size = self.starts[name], self.parameters[name].numel()
        first = min(max(shard * self.width - start, 0), size)
        return first, min(max((shard + 1) * self.width - start, 0), size) - first

    def pieces(self, shard: Tensor, number: int) -> dict[str, Tensor]:
        """What a shard holds of each parameter, one-dimensional views by name."""
        found = {}
        for name, start in self.starts.items():
            first, size = self.span(name, number)
            at = start + first - number * self.width if size else 0
            found[name] = shard[at : at + size]
        return found

    def add_gradients(self, buffer: Tensor) -> None:
        """Add the parameters' gradients to a buffer, and forget them."""
        rooms = self.views(buffer)
        for name, p in self.parameters.items():
            if p.grad is not None and p.grad.layout != torch.strided:
                raise RunFailed(f"the gradient of {name!r} is {p.grad.layout}: a relaxed data axis exchanges dense ones only")
        found = [(rooms[n], p.grad) for n, p in self.parameters.items() if p.grad is not None]
        if found:
            torch._foreach_add_([room for room, _ in found], [grad for _, grad in found])
        for p in self.parameters.values():
            p.grad = None
