"""model.safetensors: the whole model of one device in one file, to start from or to take elsewhere.

    start     FILE, or a folder with model.safetensors or with the shards of model.safetensors.index.json
    export    the newest checkpoint of a run, or any one, as one file

Names are those of the module's state dict; a rank reads only the rows it holds. A file whose names, shapes or dtypes are others
is refused with all that differs. Nothing in a file is ever executed: one that holds a pickle is no safetensors file.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from partita.errors import Fault, Refused, RunFailed, refuse
from partita.runtime.boxes import Placement
from partita.runtime.checkpoint import peek
from partita.runtime.differing import Kind, differences, lines, tensors, word
from partita.runtime.index import DTYPES, cured, file_faults, older, open_shards
from partita.runtime.net import Net
from partita.runtime.saving import slow
from partita.runtime.shards import Malformed, Shard, sync, write
from partita.runtime.sharing import held_of

FILE = "model.safetensors"
PARTS = f"{FILE}.index.json"
LAW = "a file to start from holds the parameters and buffers of the model's state dict, with their shapes and dtypes"


@dataclass(frozen=True)
class Weights:
    """An opened model file.

    Args:
        path: Of it.
        shards: Name of a tensor -> the mapped file that holds it.
    """

    path: Path
    shards: Mapping[str, Shard]

    def fault(self, what: str, have: str = "", cure: str = "") -> Fault:
        return Fault("P117", f"{self.path.name!r}: {what}", have, LAW, cure, str(self.path))


# ---------------------------------------------------------------- reading
def open_weights(path: Path) -> Weights:
    """Open a model file; only headers are read.

    Raises:
        Refused: P108, if there is none; P117, naming the file that is no safetensors file.
    """
    if path.is_dir():
        path = next((path / name for name in (FILE, PARTS) if (path / name).is_file()), path)
    if not path.is_file():
        have = f"no {FILE} and no {PARTS} in the folder" if path.is_dir() else ""
        cure = "partita show RUN --export FILE writes one from a run folder"
        raise Refused(Fault("P108", f"no model file at {str(path)!r}", have, LAW, cure, str(path)))
    if path.name.endswith(".json"):
        return _parts(path)
    shard = _shard(path)
    return Weights(path, dict.fromkeys(shard.entries, shard))


def _shard(path: Path) -> Shard:
    try:
        return Shard(path)
    except OSError as error:
        have, cure = error.strerror or type(error).__name__, "bring the file back from a copy"
    except Malformed as error:
        have, cure = str(error), "bring the file back from a copy"
        with path.open("rb") as file:
            if file.read(2)[:1] in (b"\x80", b"P"):  # of a pickle, or of the archive torch.save writes
                have, cure = "it begins as a pickle does", "save the state dict with safetensors.torch.save_file"
    law = "a model file is a safetensors file; a pickle is never executed"
    raise Refused(Fault("P117", f"{path.name!r} is no safetensors file, or a damaged one", have, law, cure, str(path)))


def _parts(path: Path) -> Weights:
    """The files of an index {"weight_map": {name: file}}."""
    try:
        named = {str(name): str(file) for name, file in json.loads(path.read_bytes())["weight_map"].items()}
    except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError):
        law = f'{PARTS} is a JSON object {{"weight_map": {{name: file}}}}'
        raise Refused(Fault("P117", f"{path.name!r} cannot be read", law=law, at=str(path))) from None
    outside = sorted({f for f in named.values() if Path(f).name != f or f in ("", ".", "..") or "\0" in f})
    if outside:
        law = "an index names files of its own folder by bare names"
        raise Refused(
            *(Fault("P117", f"{path.name!r}: file {f!r} is not in its folder", law=law, at=str(path)) for f in outside)
        )
    files = {file: _shard(path.parent / file) for file in sorted(set(named.values()))}
    lost = [name for name, file in named.items() if name not in files[file].entries]
    if lost:
        what = f"{path.name!r}: {tensors(lost)} not in the file that is named for it"
        raise Refused(Fault("P117", what, law=LAW, at=str(path)))
    return Weights(path, {name: files[file] for name, file in named.items()})


def faults(weights: Weights, model: Mapping[str, Kind], tied: Mapping[str, str]) -> list[Fault]:
    """Where the file and the model disagree: one fault a kind, with the tensors' names.

    Args:
        weights: The file.
        model: First name -> (dtype, whole shape) of what the model has.
        tied: Other name -> first name.
    """
    have: dict[str, Kind] = {name: shard.entries[name][:2] for name, shard in weights.shards.items()}
    return [weights.fault(d.what, d.have, d.cure) for d in differences(have, model, tied)]


def _differing(weights: Weights, tied: Mapping[str, str]) -> list[Fault]:
    """Names that are one tensor in the model and two different ones in the file."""
    pairs = [(other, first) for other, first in tied.items() if {other, first} <= weights.shards.keys()]
    wrong = [
        f"{other!r} and {first!r}"
        for other, first in pairs
        if not torch.equal(*(weights.shards[name].tensor(name) for name in (other, first)))
    ]
    if not wrong:
        return []
    return [weights.fault("tensors differ that the model ties", lines(wrong), "a model whose tensors are not tied")]


def fill(
    path: Path,
    wanted: Mapping[str, tuple[Tensor, Placement]],
    shapes: Mapping[str, Sequence[int]],
    tied: Mapping[str, str],
    net: Net,
) -> None:
    """Fill this rank's parts from a model file; all ranks call it. Nothing is filled if anything differs.

    Args:
        path: A file or folder, see above.
        wanted: First name -> (tensor to fill, how it is cut).
        shapes: Of the whole tensors.
        tied: Other name -> first name.
        net: All ranks.

    Raises:
        Refused: P117, P108.
    """
    with slow(net, f"reading {path.name}"):
        weights = open_weights(path)
        mine = {name: [word(t.dtype), list(shapes[name])] for name, (t, _) in wanted.items()}
        told = net.gather({"model": mine, "tied": dict(tied)})
        model = {n: (DTYPES[dtype], tuple(shape)) for t in told for n, (dtype, shape) in t["model"].items()}
        ties = {other: first for t in told for other, first in t["tied"].items()}
        refuse([*faults(weights, model, ties), *_differing(weights, ties)])
        for name, (t, placement) in wanted.items():
            names = (name, *(other for other, first in ties.items() if first == name))
            source = next(n for n in names if n in weights.shards)
            stored = weights.shards[source].tensor(source)
            for box, local in held_of(t, placement).blocks:
                t.detach()[local.index].copy_(stored[box.index])


# ---------------------------------------------------------------- writing
def export(source: Path, file: Path, *, once: bool = False) -> Path:
    """Write the model of a checkpoint as one file.

    Args:
        source: A run folder, a folder of checkpoints (the newest is meant), or one checkpoint.
        file: To write; never over another.
        once: Leave the other names of tied tensors out, as transformers does; else each name has its tensor, as in a state
            dict.

    Raises:
        Refused: P108, if there is no checkpoint; P117, if it is damaged, with the newest good one; P113, if the file exists.
        RunFailed: If it cannot be written.
    """
    found = peek(source)
    checkpoint = found.folder
    kept = {n: found.find(n) for n in found.names if n.startswith("model/")}
    dropped = {f"model/{name}" for name in found.extra.get("transient", ())}
    pieces = {n: s for n, s in kept.items() if s is not None and n not in dropped}
    used = sorted({piece.file for stored in pieces.values() for piece in stored.pieces})
    if wrong := file_faults(found, used):
        raise Refused(*cured(wrong, older(checkpoint)))
    shards = open_shards(found)
    made: dict[str, Tensor] = {}
    for name, stored in pieces.items():
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        for piece in stored.pieces:
            whole[piece.box.index] = shards[piece.file].tensor(piece.key)
        made[name.removeprefix("model/")] = whole
    return write_model(made, found.extra.get("tied", {}), file, once=once)


def write_model(state: Mapping[str, Tensor], tied: Mapping[str, str], file: Path, *, once: bool = False) -> Path:
    """Write whole tensors as a model file: complete under its name, or not at all.

    Raises:
        Refused: P113, if the file exists.
        RunFailed: If it cannot be written.
    """
    if file.exists():
        law = "a model file is never written over another"
        raise Refused(Fault("P113", f"{str(file)!r} is there already", law=law, cure="another name", at=str(file)))
    others = {other: first for other, first in tied.items() if first in state}
    named = {name: t for name, t in state.items() if name not in others}
    if not once:
        named |= {other: state[first] for other, first in others.items()}
    part = file.with_name(f"{file.name}.partial")
    try:
        part.unlink(missing_ok=True)
        write(part, named)
        part.rename(file)
        sync(file.parent)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise RunFailed(f"cannot write {str(file)!r}: {error.strerror or error}") from None
    return file
