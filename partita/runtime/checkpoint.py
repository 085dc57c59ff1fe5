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

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partita.errors import Fault, Refused, RunFailed
from partita.runtime.boxes import Box, Placement, crossing, extent, gap, parts, spans
from partita.runtime.index import (
    DTYPES,
    FORMAT,
    INDEX,
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
    sealed,
    steps,
)
from partita.runtime.net import Net
from partita.runtime.shards import NAMES, Shard, sync, write

__all__ = ["Placement", "check", "latest", "load", "opened", "peek", "read_whole", "save", "steps"]

LEFT = re.compile(r"step-[0-9]{1,18}\.(partial|removed)")  # of a save or a removal that was cut short
Wanted = Mapping[str, tuple[Tensor, Placement]]


@dataclass(frozen=True)
class _Held:
    """A rank's part: how far it reaches in the whole, and its blocks (in the whole, in the local tensor)."""

    extent: tuple[int, ...]
    blocks: list[tuple[Box, Box]]


def _held(t: Tensor, placement: Placement) -> _Held:
    found = spans(t.shape, placement)
    return _Held(extent(found), list(parts(found)))


@contextmanager
def _slow(net: Net, what: str) -> Iterator[None]:
    """A part that may be silent for long."""
    net.notes.doing(what, slow=True)
    yield
    net.notes.doing(f"after {what}")


# ---------------------------------------------------------------- saving
def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    placements: Mapping[str, Placement],
    net: Net,
    extra: Any = None,
    *,
    keep: int = 2,
) -> Path:
    """Write the checkpoint of a step; returns its folder once it is complete. All ranks call it.

    Args:
        folder: Of all checkpoints of the run; made if it is not there.
        step: Optimizer steps done.
        tensors: This rank's parts, by their single-device names; names that share a tensor are stored once. A rank may have
            names that others have not.
        placements: How the cut ones are cut; a name that is absent is whole on every rank that has it.
        net: All ranks.
        extra: A JSON value; rank 0's is kept.
        keep: How many of the newest checkpoints stay.

    Raises:
        Refused: P113, if this step has a complete checkpoint: none is ever overwritten.
        RunFailed: If the disk is full or the folder cannot be written; the message names what to resume from.
    """
    final, partial = folder / f"step-{step}", folder / f"step-{step}.partial"
    with _slow(net, f"saving {final.name}"):
        mine, aliases = _apart(tensors)
        held = {name: _held(t, placements.get(name, ())) for name, t in mine.items()}
        listing = {n: [_dtype(n, mine[n]), h.extent, [[b.offset, b.shape] for b, _ in h.blocks]] for n, h in held.items()}
        _, problem = _attempt(lambda: _prepare(final, partial)) if net.rank == 0 else (None, "")
        told = net.gather({"listing": listing, "aliases": aliases, "problem": problem, "exists": final.exists()})
        if told[0]["exists"]:
            raise Refused(_in_use(final))
        _stop([t["problem"] for t in told], final, partial, net)
        writers = _writers([t["listing"] for t in told])
        wrote, problem = _attempt(lambda: _write(partial, net.rank, mine, held, writers))
        files = net.gather({"file": wrote, "problem": problem})
        _stop([t["problem"] for t in files], final, partial, net)
        if net.rank == 0:
            table = _table(step, told, writers, dict(f["file"] for f in files if f["file"]), extra)
            _, problem = _attempt(lambda: _finish(partial, final, table, keep))
        _stop([net.share(problem)], final, partial, net)
    return final


def _dtype(name: str, t: Tensor) -> str:
    assert t.dtype in NAMES, f"{name} is {t.dtype}, which a checkpoint has no name for"
    return str(t.dtype).removeprefix("torch.")


def _apart(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
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


def _writers(listings: Sequence[Mapping[str, Any]]) -> dict[str, dict[Box, int]]:
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


def _file(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _keys(blocks: Mapping[Box, int]) -> dict[Box, str]:
    """The suffix of each block's key in its file: none where a rank writes one block of the tensor."""
    count: dict[int, int] = {}
    for rank in blocks.values():
        count[rank] = count.get(rank, 0) + 1
    return {box: "" if count[rank] == 1 else f":{at}" for at, (box, rank) in enumerate(blocks.items())}


def _write(
    partial: Path, rank: int, mine: Mapping[str, Tensor], held: Mapping[str, _Held], writers: Mapping[str, Mapping[Box, int]]
) -> tuple[str, tuple[int, str]] | None:
    """Write this rank's file: (name, (bytes, sha256)); None if it has nothing to write."""
    blocks: dict[str, Tensor] = {}
    for name, h in held.items():
        keys = _keys(writers[name])
        blocks |= {name + keys[box]: mine[name].detach()[at.index] for box, at in h.blocks if writers[name][box] == rank}
    if not blocks:
        return None
    written = write(partial / _file(rank), blocks)
    return _file(rank), (written.bytes, written.sha256)


def _table(
    step: int, told: list[Any], writers: Mapping[str, Mapping[Box, int]], files: Mapping[str, Any], extra: Any
) -> dict[str, Any]:
    """The index."""
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
        keys = _keys(blocks)
        pieces = [
            {"offset": b.offset, "shape": b.shape, "file": _file(rank), "key": name + keys[b]} for b, rank in blocks.items()
        ]
        tensors[name] = {"dtype": dtypes[name], "shape": shapes[name], "pieces": pieces}
    table = {"format": FORMAT, "step": step, "files": files, "tensors": tensors, "aliases": aliases, "extra": extra}
    table = json.loads(json.dumps(table))
    return {**table, "sha256": sealed(table)}


def _prepare(final: Path, partial: Path) -> None:
    if final.exists():
        return
    final.parent.mkdir(parents=True, exist_ok=True)
    for d in final.parent.iterdir():
        if LEFT.fullmatch(d.name) and d.is_dir() and not d.is_symlink():
            shutil.rmtree(d)
    partial.mkdir()


def _finish(partial: Path, final: Path, table: Mapping[str, Any], keep: int) -> None:
    write_index(partial, table)
    commit(partial, final)
    prune(final, keep)


def write_index(partial: Path, table: Mapping[str, Any]) -> None:
    """Write the index and force it, and the folder's entries, to disk."""
    for name, (size, _) in table["files"].items():
        if (have := (partial / name).stat().st_size) != size:
            raise OSError(f"{name} has {have} bytes here and {size} where it was written: the ranks do not share this folder")
    with (partial / INDEX).open("x") as file:
        json.dump(table, file)
        file.flush()
        os.fsync(file.fileno())
    sync(partial)


def commit(partial: Path, final: Path) -> None:
    """Give a finished checkpoint its name."""
    partial.rename(final)
    sync(final.parent)


def prune(final: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and never the one just written."""
    for step in steps(final.parent)[:-keep]:
        old = final.parent / f"step-{step}"
        if old != final:
            gone = old.rename(old.with_name(f"{old.name}.removed"))  # so that half of one is never taken for a checkpoint
            shutil.rmtree(gone)


# ---------------------------------------------------------------- failing
def _attempt(work: Callable[[], Any]) -> tuple[Any, str]:
    """What the work returns, and why the disk refused it."""
    try:
        return work(), ""
    except OSError as error:
        return None, f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")


def _stop(problems: Sequence[str], final: Path, partial: Path, net: Net) -> None:
    """Raise, on every rank, if any rank could not write."""
    found = {rank: problem for rank, problem in enumerate(problems) if problem}
    if not found:
        return
    if net.rank == 0 and not final.exists():
        shutil.rmtree(partial, ignore_errors=True)
    net.barrier()
    rank, problem = next(iter(found.items()))
    kept = steps(final.parent)
    onward = (
        f"resume from {str(final.parent / f'step-{kept[-1]}')!r}" if kept else "no earlier checkpoint is there to resume from"
    )
    raise RunFailed(f"cannot write checkpoint {final.name} into {str(final.parent)!r}: rank {rank}: {problem}; {onward}")


def _in_use(final: Path) -> Fault:
    return Fault(
        "P113",
        f"checkpoint {final.name!r} is there already",
        law="a complete checkpoint is never overwritten",
        cure="another folder, or a step that was not saved",
        at=str(final),
    )


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
    with _slow(net, f"loading {checkpoint.name}"):
        index, shards, faults = _examined(checkpoint, net)
        held = {name: _held(t, placement) for name, (t, placement) in wanted.items()}
        told = net.gather({"faults": list(map(asdict, faults)), "reach": {name: h.extent for name, h in held.items()}})
        _refuse([Fault(**f) for t in told for f in t["faults"]], checkpoint, net)
        assert index is not None
        reach: dict[str, list[int]] = {}
        for t in told:
            for name, far in t["reach"].items():
                reach[name] = list(map(max, reach[name], far)) if name in reach and len(reach[name]) == len(far) else far
        _refuse(_misfits(index, wanted, reach, spare), checkpoint, net)
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


def _misfits(index: Index, wanted: Wanted, reach: Mapping[str, list[int]], spare: Sequence[str]) -> list[Fault]:
    """Where the checkpoint and the model disagree."""
    law = "a checkpoint belongs to the model, dtype and optimizer it was saved from; only the split may change"
    found = []
    for name, (t, _) in wanted.items():
        stored = index.find(name)
        if stored is None:
            found.append(bad(index.folder, f"it has no tensor {name!r}", have=f"{len(index.names)} tensors", law=law))
        elif list(stored.shape) != reach[name]:
            have = f"{list(stored.shape)} in the checkpoint, {reach[name]} in the model"
            found.append(bad(index.folder, f"tensor {name!r} has another shape", have=have, law=law))
        elif stored.dtype != t.dtype:
            have = f"{stored.dtype} in the checkpoint, {t.dtype} in the model"
            found.append(bad(index.folder, f"tensor {name!r} has another dtype", have=have, law=law))
    known = {index.aliases.get(name, name) for name in reach}
    unread = [name for name in index.tensors if name not in known and not name.startswith(tuple(spare))]
    if unread:
        have = ", ".join(unread[:5]) + (f" and {len(unread) - 5} more" if len(unread) > 5 else "")
        found.append(bad(index.folder, f"tensor {unread[0]!r} is not in the model", have=have, law=law))
    return found


def _fill(t: Tensor, held: _Held, stored: Stored, shards: Mapping[str, Shard]) -> None:
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
