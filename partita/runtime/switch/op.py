"""A sum in the network as an op of torch: who hears collectives hears its tensor, and the group that adds up."""

from collections.abc import Callable

import torch
from torch import Tensor

Summed = Callable[[Tensor], None]
_ENDS: dict[str, Summed] = {}  # name of a process group -> what adds a tensor up over it, in place


def connect(group: str, summed: Summed) -> None:
    """Have sums over a process group done by `summed`."""
    _ENDS[group] = summed


@torch.library.custom_op("partita::switch_reduce", mutates_args=("tensor",))
def switch_reduce(tensor: Tensor, group: str) -> None:
    """Sum a flat tensor over a group, through a switch, in place."""
    _ENDS[group](tensor)


@torch.library.custom_op("partita::block_reduce", mutates_args=("tensor",))
def block_reduce(tensor: Tensor, group: str) -> None:
    """The same sum through the backend's all_reduce."""
    _ENDS[group](tensor)
