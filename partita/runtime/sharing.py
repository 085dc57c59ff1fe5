"""Which rank writes which block of a checkpoint, and the index that says so.  Nothing here sends or writes.

Every rank tells what it holds; then each knows the same: a block that several ranks hold is written by the one of them that has
the fewest bytes to write so far.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from partita.runtime.boxes import Box, Placement, extent, gap, parts, spans
from partita.runtime.index import DTYPES, FORMAT
from partita.runtime.shards import NAMES


@dataclass(frozen=True)
class Held:
    """A rank's part: how far it reaches in the whole, and its blocks (in the whole, in the local tensor)."""

    extent: tuple[int, ...]
    blocks: list[tuple[Box, Box]]


def held_of(t: Tensor, placement: Placement) -> Held:
    """What a rank holds of a tensor that is cut as `placement` says."""
    found = spans(t.shape, placement)
    return Held(extent(found), list(parts(found)))


def listing_of(mine: Mapping[str, Tensor], held: Mapping[str, Held]) -> dict[str, Any]:
    """What a rank tells the others: name -> [dtype, how far its part reaches, [[offset, shape] of each block]]."""
    return {n: [dtype_of(n, mine[n]), h.extent, [[b.offset, b.shape] for b, _ in h.blocks]] for n, h in held.items()}


def dtype_of(name: str, t: Tensor) -> str:
    assert t.dtype in NAMES, f"{name} is {t.dtype}, which a checkpoint has no name for"
    return str(t.dtype).removeprefix("torch.")


def apart(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The distinct tensors, and {other name: the name a tied one is stored under}."""
    seen: dict[Any, str] = {}
    mine: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, t in tensors.items():
        place = (
            (t.untyped_storage().data_ptr(), t.storage_offset(), t.shape, t.stride(), t.dtype, t.device) if t.numel() else name
        )
        first = seen.setdefault(place, name)
        if first == name:
            mine[name] = t
        else:
            aliases[name] = first
    return mine, aliases


def writers_of(listings: Sequence[Mapping[str, Any]]) -> dict[str, dict[Box, int]]:
    """Which rank writes each block: of those that hold it, the one with the fewest bytes so far. The same on every rank."""
    holders: dict[str, dict[Box, list[int]]] = {}
    width: dict[str, int] = {}
    for rank, listing in enumerate(listings):
        for name, (dtype, _, blocks) in listing.items():
            assert width.setdefault(name, DTYPES[dtype].itemsize) == DTYPES[dtype].itemsize, (
                f"{name} differs in dtype between ranks"
            )
            known = holders.setdefault(name, {})
            for offset, shape in blocks:
                known.setdefault(Box(tuple(offset), tuple(shape)), []).append(rank)
    load = [0] * len(listings)
    chosen: dict[str, dict[Box, int]] = {}
    for name, blocks in holders.items():
        chosen[name] = {}
        for box, ranks in blocks.items():
            rank = min(ranks, key=lambda r: (load[r], r))
            load[rank] += box.size * width[name]
            chosen[name][box] = rank
    return chosen


def blocks_of(
    rank: int, mine: Mapping[str, Tensor], held: Mapping[str, Held], writers: Mapping[str, Mapping[Box, int]]
) -> dict[str, Tensor]:
    """The blocks this rank writes, by their key in its file; views of its tensors."""
    blocks: dict[str, Tensor] = {}
    for name, h in held.items():
        keys = keys_of(writers[name])
        blocks |= {name + keys[box]: mine[name].detach()[at.index] for box, at in h.blocks if writers[name][box] == rank}
    return blocks


def file_of(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def keys_of(blocks: Mapping[Box, int]) -> dict[Box, str]:
    """The suffix of each block's key in its file: none where a rank writes one block of the tensor."""
    count: dict[int, int] = {}
    for rank in blocks.values():
        count[rank] = count.get(rank, 0) + 1
    return {box: "" if count[rank] == 1 else f":{at}" for at, (box, rank) in enumerate(blocks.items())}


def table_of(step: int, told: list[Any], writers: Mapping[str, Mapping[Box, int]], extra: Any) -> dict[str, Any]:
    """The index, but for the files, which are not written yet."""
    aliases: dict[str, str] = {}
    shapes: dict[str, list[int]] = {}
    dtypes: dict[str, str] = {}
    for t in told:
        aliases |= t["aliases"]
        for name, (dtype, reach, _) in t["listing"].items():
            shapes[name] = list(map(max, shapes[name], reach)) if name in shapes else reach
            dtypes[name] = dtype
    assert not aliases.keys() & shapes.keys(), f"tied on some ranks only: {sorted(aliases.keys() & shapes.keys())}"
    tensors = {}
    for name, blocks in writers.items():
        assert not (why := gap(list(blocks), shapes[name])), f"{name}: {why}"
        keys = keys_of(blocks)
        pieces = [
            {"offset": b.offset, "shape": b.shape, "file": file_of(rank), "key": name + keys[b]} for b, rank in blocks.items()
        ]
        tensors[name] = {"dtype": dtypes[name], "shape": shapes[name], "pieces": pieces}
    return {"format": FORMAT, "step": step, "tensors": tensors, "aliases": aliases, "extra": extra}
