"""What a checkpoint says of itself: found, read and checked before a byte of it is believed.

    index.json   {"format": 1, "step": 100,
                  "files":   {"rank-0.safetensors": [bytes, sha256]},
                  "tensors": {"head.weight": {"dtype": "float32", "shape": [256, 64],
                                              "pieces": [{"offset": [0, 0], "shape": [128, 64], "file": .., "key": ..}]}},
                  "aliases": {"tokens.weight": "head.weight"},
                  "extra":   any JSON value,
                  "sha256":  of all of the above}

Files are named by bare names, and none may lie outside the folder.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from partita.errors import Fault, Refused
from partita.runtime.boxes import Box, gap
from partita.runtime.shards import NAMES, Malformed, Shard, digest_of

INDEX = "index.json"
FORMAT = 1
STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in NAMES}


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a tensor: entry `key` of `file`."""

    box: Box
    file: str
    key: str


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds.

    Args:
        folder: Of the checkpoint.
        step: Optimizer steps done.
        tensors: By name.
        aliases: Other name -> the name a tied tensor is stored under.
        files: Name -> (bytes, sha256).
        extra: The JSON value given to `save`.
    """

    folder: Path
    step: int
    tensors: Mapping[str, Stored]
    aliases: Mapping[str, str]
    files: Mapping[str, tuple[int, str]]
    extra: Any

    def find(self, name: str) -> Stored | None:
        """The tensor of that name, tied names included."""
        return self.tensors.get(self.aliases.get(name, name))

    @property
    def names(self) -> list[str]:
        return sorted([*self.tensors, *self.aliases])


# ---------------------------------------------------------------- finding
def steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(m[1]) for d in folder.iterdir() if (m := STEP.fullmatch(d.name)) and (d / INDEX).is_file())


def latest(folder: Path) -> Path:
    """The newest complete checkpoint in a folder of checkpoints.

    Raises:
        Refused: P108, if there is none.
    """
    found = steps(folder)
    if found:
        return folder / f"step-{found[-1]}"
    have = ", ".join(sorted(d.name for d in folder.iterdir())) or "an empty folder" if folder.is_dir() else "no such folder"
    raise Refused(
        Fault(
            "P108",
            f"no complete checkpoint in {str(folder)!r}",
            have=have,
            law=f"a checkpoint is complete once it is named step-N and has an {INDEX}",
            cure="the folder of a run that has saved, or a new run",
            at=str(folder),
        )
    )


def opened(path: Path) -> Path:
    """The checkpoint a path means: itself, or the newest one in it or in its folder ``checkpoints``."""
    if STEP.fullmatch(path.name) and path.is_dir():
        return path
    inside = path / "checkpoints"
    return latest(inside if inside.is_dir() else path)


def older(checkpoint: Path) -> str:
    """What to resume from when this checkpoint is bad, in words."""
    number = STEP.fullmatch(checkpoint.name)
    below = [s for s in steps(checkpoint.parent) if number is None or s < int(number[1])]
    good = next((s for s in reversed(below) if not check(checkpoint.parent / f"step-{s}")), None)
    if good is None:
        return "no older checkpoint here is good: start again, or bring the files back from a copy"
    return f"resume from step-{good}, which is good, once this one is set aside: mv {checkpoint} {checkpoint}.bad"


# ---------------------------------------------------------------- reading
def bad(
    folder: Path, what: str, have: str = "", law: str = "a checkpoint is read only if it is exactly what was written"
) -> Fault:
    """The fault of a checkpoint."""
    return Fault("P117", f"checkpoint {folder.name!r}: {what}", have=have, law=law, at=str(folder))


def read_index(folder: Path) -> Index:
    """The index of a checkpoint; its files are not opened.

    Raises:
        Refused: P117, with everything wrong with it.
    """
    try:
        table = json.loads((folder / INDEX).read_bytes())
        digest = table.pop("sha256")
    except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError):
        raise Refused(bad(folder, f"its {INDEX} cannot be read", law=f"{INDEX} is a JSON object with a checksum")) from None
    if table.get("format") != FORMAT:
        law = f"this version reads format {FORMAT}"
        raise Refused(bad(folder, f"its {INDEX} has an unknown format", have=f"format = {table.get('format')!r}", law=law))
    if sealed(table) != digest:
        raise Refused(bad(folder, f"its {INDEX} was altered", have=f"sha256 = {digest!r} and should be {sealed(table)}"))
    try:
        index = _index(folder, table)
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise Refused(bad(folder, f"its {INDEX} is malformed", have=f"{type(error).__name__}: {error}")) from None
    if faults := [*_lies_outside(index), *_untiled(index)]:
        raise Refused(*faults)
    return index


def sealed(table: Mapping[str, Any]) -> str:
    """The checksum of an index without its checksum."""
    return hashlib.sha256(json.dumps(table, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _index(folder: Path, table: Mapping[str, Any]) -> Index:
    files = {str(name): (_count(size), str(digest)) for name, (size, digest) in table["files"].items()}
    tensors = {name: _stored(name, entry, files) for name, entry in table["tensors"].items()}
    aliases = {str(a): str(b) for a, b in table["aliases"].items()}
    for alias, name in aliases.items():
        assert name in tensors, f"{alias!r} stands for {name!r}, which is not there"
        assert alias not in tensors, f"{alias!r} is there twice"
    return Index(folder, _count(table["step"]), tensors, aliases, files, table["extra"])


def _stored(name: str, entry: Mapping[str, Any], files: Mapping[str, Any]) -> Stored:
    shape = tuple(map(_count, entry["shape"]))
    pieces = []
    for piece in entry["pieces"]:
        box = Box(tuple(map(_count, piece["offset"])), tuple(map(_count, piece["shape"])))
        assert len(box.offset) == len(box.shape) == len(shape), f"a piece of {name!r} has other dims than the tensor"
        assert piece["file"] in files, f"{name!r} is in {piece['file']!r}, which is not listed"
        pieces.append(Piece(box, piece["file"], str(piece["key"])))
    return Stored(DTYPES[entry["dtype"]], shape, tuple(pieces))


def _count(n: Any) -> int:
    if type(n) is not int or n < 0:
        raise ValueError(f"{n!r} is no count")
    return n


def _lies_outside(index: Index) -> Iterator[Fault]:
    home = index.folder.resolve()
    law = "a checkpoint names its own files by bare names"
    for name in (INDEX, *index.files):
        bare = name not in ("", ".", "..") and not any(c in name for c in "/\\:\0")
        if not bare or (index.folder / name).resolve().parent != home:
            yield bad(index.folder, f"file {name!r} is not in its folder", law=law)


def _untiled(index: Index) -> Iterator[Fault]:
    for name, stored in index.tensors.items():
        if why := gap([p.box for p in stored.pieces], stored.shape):
            law = "the pieces of a tensor hold each element once"
            yield bad(index.folder, f"tensor {name!r} is not whole", have=f"{why}; shape {list(stored.shape)}", law=law)


# ---------------------------------------------------------------- its files
def file_faults(index: Index, names: list[str]) -> list[Fault]:
    """What is wrong with these files: missing, of another length, altered."""
    found = []
    for name in names:
        size, digest = index.files[name]
        path = index.folder / name
        try:
            have = path.stat().st_size
            if not path.is_file():
                found.append(bad(index.folder, f"{name!r} is no file"))
            elif have != size:
                what = "is truncated" if have < size else "is longer than what was written"
                found.append(bad(index.folder, f"file {name!r} {what}", have=f"{have} bytes of {size}"))
            elif digest_of(path) != digest:
                found.append(
                    bad(index.folder, f"file {name!r} was altered", have="its sha256 differs from the one in the index")
                )
        except OSError as error:
            found.append(bad(index.folder, f"file {name!r} cannot be read", have=error.strerror or type(error).__name__))
    return found


def open_shards(index: Index) -> dict[str, Shard]:
    """The files, mapped, once their headers agree with the index.

    Raises:
        Refused: P117, naming the file or the tensor.
    """
    shards: dict[str, Shard] = {}
    faults: list[Fault] = []
    for name in index.files:
        try:
            shards[name] = Shard(index.folder / name)
        except (OSError, Malformed) as error:
            faults.append(bad(index.folder, f"file {name!r} cannot be read", have=str(error)))
    for name, stored in index.tensors.items():
        for piece in stored.pieces:
            if piece.file in shards and shards[piece.file].kind(piece.key) != (stored.dtype, piece.box.shape):
                have = f"the index says {stored.dtype} {list(piece.box.shape)} under {piece.key!r} in {piece.file!r}"
                faults.append(bad(index.folder, f"tensor {name!r} is not what its index says", have=have))
    if faults:
        raise Refused(*faults)
    return shards


def check(folder: Path) -> list[Fault]:
    """Everything wrong with a checkpoint; every byte of it is read."""
    try:
        index = read_index(folder)
        if faults := file_faults(index, list(index.files)):
            return faults
        open_shards(index)
    except Refused as refused:
        return list(refused.faults)
    return []


def cured(faults: list[Fault], cure: str) -> list[Fault]:
    """The faults with a way on."""
    return [fault if fault.cure else replace(fault, cure=cure) for fault in faults]
