"""Checkpoints: written whole or not at all, never unpickled, and readable under any other plan.

    checkpoints/
      step-100/                   complete: the rename that gave it this name is the commit
        index.json                where every tensor is, see `index`
        rank-0.safetensors        the blocks that rank 0 wrote; a block that several ranks hold is written by one of them
        rank-1.safetensors
      step-120.partial/           a save that was cut short; the next save removes it

Every rank writes its own file and forces it to disk; then rank 0 writes the index and renames the folder. Dying at any moment
leaves the checkpoints before it as they were. A reader maps the files and takes the rows that cross its own boxes, whatever the
ranks were that wrote them. All ranks share one filesystem.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partita.errors import Fault, Refused, refuse
from partita.runtime.boxes import Placement, crossing
from partita.runtime.differing import Kind, differences, word
from partita.runtime.index import (
    DTYPES,
    Index,
    Stored,
    bad,
    check,
    cured,
    file_faults,
    latest,
    older,
    open_shards,
    opened,
    read_index,
    steps,
)
from partita.runtime.net import Net
from partita.runtime.saving import Saver, save, slow
from partita.runtime.shards import Shard
from partita.runtime.sharing import Held, held_of

__all__ = ["Placement", "Saver", "check", "latest", "load", "opened", "peek", "read_whole", "save", "steps"]

Wanted = Mapping[str, tuple[Tensor, Placement]]


# ---------------------------------------------------------------- loading
def load(folder: Path, wanted: Wanted, net: Net, *, spare: Sequence[str] = ()) -> Any:
    """Fill this rank's parts from a checkpoint, whatever ranks wrote it. All ranks call it.

    Every file is verified by one of the ranks first; nothing is filled unless all is good everywhere.

    Args:
        folder: A checkpoint, or a folder of checkpoints, whose newest is meant.
        wanted: Name -> (tensor to fill, how it is cut). Every tensor of the checkpoint must be wanted by some rank.
        net: All ranks.
        spare: Beginnings of names that may be in the checkpoint without being wanted.

    Returns:
        The `extra` that was saved.

    Raises:
        Refused: P117, naming file or tensor, with the newest older checkpoint that is good; P108, if there is none at all.
    """
    checkpoint = opened(folder)
    with slow(net, f"loading {checkpoint.name}"):
        index, shards, faults = _examined(checkpoint, net)
        held = {name: held_of(t, placement) for name, (t, placement) in wanted.items()}
        reach = {name: [word(wanted[name][0].dtype), h.extent] for name, h in held.items()}
        told = net.gather({"faults": list(map(asdict, faults)), "reach": reach})
        _refuse([Fault(**f) for t in told for f in t["faults"]], checkpoint, net)
        assert index is not None
        refuse(_misfits(index, [t["reach"] for t in told], spare))
        for name, (t, _) in wanted.items():
            stored = index.find(name)
            assert stored is not None
            _fill(t.detach(), held[name], stored, shards)
    return index.extra


def _examined(checkpoint: Path, net: Net) -> tuple[Index | None, dict[str, Shard], list[Fault]]:
    """The index and the mapped files; each rank verifies its share of the files."""
    try:
        index = read_index(checkpoint)
        if faults := file_faults(index, list(index.files)[net.rank :: net.ranks]):
            return index, {}, faults
        return index, open_shards(index), []
    except Refused as refused:
        return None, {}, list(refused.faults)


def _refuse(faults: Sequence[Fault], checkpoint: Path, net: Net) -> None:
    found = list(dict.fromkeys(faults))
    if any(net.gather(bool(found))):
        cure = net.share(older(checkpoint) if net.rank == 0 else None)
        found = list(dict.fromkeys(Fault(**f) for told in net.gather(list(map(asdict, found))) for f in told))
        raise Refused(*cured(found, cure))


def _misfits(index: Index, told: Sequence[Mapping[str, Any]], spare: Sequence[str]) -> list[Fault]:
    """Where the checkpoint and the model, of which each rank told its part, disagree. The same on every rank."""
    model: dict[str, Kind] = {}
    for reach in told:
        for name, (dtype, far) in reach.items():
            known = model[name][1] if name in model and len(model[name][1]) == len(far) else far
            model[name] = DTYPES[dtype], tuple(map(max, known, far))
    law = "a checkpoint belongs to the model, dtype and optimizer it was saved from; only the split may change"
    stored = {name: s for name in index.names if (s := index.find(name)) is not None}
    read = {index.aliases.get(name, name) for name in model}
    have = {n: (s.dtype, s.shape) for n, s in stored.items() if n in model or index.aliases.get(n, n) not in read}
    found = differences(have, model, {}, spare)
    return [replace(bad(index.folder, d.what, d.have, law), cure=d.cure) for d in found]


def _fill(t: Tensor, held: Held, stored: Stored, shards: Mapping[str, Shard]) -> None:
    exact = {piece.box: piece for piece in stored.pieces}
    for box, local in held.blocks:
        for piece in (exact[box],) if box in exact else stored.pieces:
            both = crossing(box, piece.box)
            if both is not None:
                source = shards[piece.file].tensor(piece.key)[both.within(piece.box)]
                t[local.index][both.within(box)].copy_(source)


# ---------------------------------------------------------------- without ranks
def peek(folder: Path) -> Index:
    """What a checkpoint holds, without its tensors: names, shapes, dtypes, step, `extra`.

    Raises:
        Refused: P117 or P108.
    """
    checkpoint = opened(folder)
    try:
        return read_index(checkpoint)
    except Refused as refused:
        raise Refused(*cured(list(refused.faults), older(checkpoint))) from None


def read_whole(folder: Path) -> tuple[dict[str, Tensor], Any]:
    """Every tensor whole, and the `extra`; tied names share one tensor.

    Raises:
        Refused: P117 or P108.
    """
    checkpoint = opened(folder)
    try:
        index = read_index(checkpoint)
        if faults := file_faults(index, list(index.files)):
            raise Refused(*faults)
        shards = open_shards(index)
    except Refused as refused:
        raise Refused(*cured(list(refused.faults), older(checkpoint))) from None
    found: dict[str, Tensor] = {}
    for name, stored in index.tensors.items():
        found[name] = torch.empty(stored.shape, dtype=stored.dtype)
        for piece in stored.pieces:
            found[name][piece.box.index] = shards[piece.file].tensor(piece.key)
    return found | {alias: found[name] for alias, name in index.aliases.items()}, index.extra
