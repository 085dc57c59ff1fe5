"""Work buffers of a grid's products: each is made once, for the largest need, and used again in every product and step."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Workspace:
    """Named buffers that are kept between products.

    Args:
        keeps: Without it every buffer is new: a rehearsal on fake tensors must leave nothing behind.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self.keeps = keeps
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """A buffer of this shape, with the dtype and device of `like`; whoever asks for the name next writes over it."""
        size = math.prod(shape)
        if not self.keeps:
            return like.new_empty(tuple(shape))
        held = self._held.get((name, like.dtype))
        if held is None or held.numel() < size:
            held = self._held[name, like.dtype] = like.new_empty(size)
        return held[:size].view(tuple(shape))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.nbytes for t in self._held.values())


def dense(t: Tensor) -> Tensor:
    """The matrix as one block of memory, row by row or column by column; a copy only if it is neither."""
    return t if t.is_contiguous() or t.t().is_contiguous() else t.contiguous()


def memory(t: Tensor) -> Tensor:
    """The block of memory of a dense matrix, as a contiguous tensor."""
    return t if t.is_contiguous() else t.t()


def alike(space: Workspace, name: str, like: Tensor, block: Tensor) -> Tensor:
    """A buffer of the shape of a part, in the order in memory of its block."""
    if block.is_contiguous():
        return space.take(name, like.shape, like)
    return space.take(name, like.shape[::-1], like).t()
