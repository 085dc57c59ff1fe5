"""Whole tensors from this rank's blocks, and blocks from whole tensors.

A rank holds, of each dim of a cut tensor, ascending ranges of its indices; of a dim cut along several axes, their
intersection. Putting blocks together moves bits, never adds numbers: blocks are summed as bytes beside zeros.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from partita.runtime.cuts import Cut, Ranges, Spans, spans_of
from partita.runtime.net import Net


def indices(spans: Ranges) -> Tensor:
    """The indices of ranges, one after another."""
    return torch.cat([torch.arange(s, s + n) for s, n in spans]) if spans else torch.zeros(0, dtype=torch.int64)


def place(whole: Tensor, block: Tensor, spans: Spans) -> None:
    """Write a block into its place."""
    cut = [d for d, s in enumerate(spans) if s != ((0, whole.shape[d]),)]
    if not cut:
        whole.copy_(block)
        return
    if len(cut) == 1:
        at = 0
        for start, length in spans[cut[0]]:
            whole.narrow(cut[0], start, length).copy_(block.narrow(cut[0], at, length))
            at += length
        return
    grid = torch.meshgrid(*(indices(s) for s in spans), indexing="ij")
    whole[grid] = block.to(whole.dtype)


def part(whole: Tensor, spans: Spans) -> Tensor:
    """A rank's block of a whole tensor."""
    block = whole
    for dim, some in enumerate(spans):
        if some != ((0, whole.shape[dim]),):
            pieces = [block.narrow(dim, s, n) for s, n in some]
            block = torch.cat(pieces, dim) if len(pieces) != 1 else pieces[0]
    return block


def gather(net: Net, block: Tensor, shape: Sequence[int], cuts: Sequence[Cut]) -> Tensor:
    """The whole of a cut tensor, on every rank, bit for bit. Quiet."""
    block = block.detach()
    if not cuts:
        return block
    whole = torch.zeros(tuple(shape), dtype=block.dtype, device=block.device)
    place(whole, block, spans_of(shape, cuts))
    raw = whole.reshape(-1).view(torch.uint8)
    with net.quiet():
        for axis in dict.fromkeys(axis for axis, _, _ in cuts):
            net.all_reduce(raw, axis, label="gather")
    return whole


def gather_held(
    net: Net, block: Tensor | None, shape: Sequence[int], cuts: Sequence[Cut], apart: Sequence[str], dtype: torch.dtype
) -> Tensor:
    """The whole of a tensor that only some ranks along the axes `apart` hold, on every rank, bit for bit. Quiet.

    Args:
        block: This rank's, if it is the one that counts.
        shape, cuts: Of the whole, and how it is cut.
        apart: Axes along which one rank holds it.
        dtype: Of the tensor.
    """
    whole = torch.zeros(tuple(shape), dtype=dtype, device=net.device)
    if block is not None:
        place(whole, block.detach(), spans_of(shape, cuts))
    raw = whole.reshape(-1).view(torch.uint8)
    with net.quiet():
        for axis in (*dict.fromkeys(axis for axis, _, _ in cuts), *apart):
            net.all_reduce(raw, axis, label="gather")
    return whole


def optimizer_state(pieces: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[tuple[str, str], Any]:
    """(parameter name, key) -> what the optimizer keeps of this rank's pieces."""
    names = {id(p): n for n, p in pieces.items()}
    return {(names[id(p)], key): value for p, kept in optimizer.state.items() if id(p) in names for key, value in kept.items()}


def cuts_of(placements: Mapping[str, Sequence[Cut]], name: str, block: Tensor, parameter: Tensor) -> Sequence[Cut]:
    """How a tensor kept beside a parameter is cut: like it, if it has its shape."""
    return placements.get(name, ()) if block.shape == parameter.shape else ()
