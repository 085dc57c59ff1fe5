"""Names for dim classes: from hints, or read off the contractions of the forward.

A hint is an einops-like string by parameter glob: {"*.qkv.weight": "(three heads e) hidden", "*.up.weight": "ffn hidden"};
"_" leaves a dim unnamed, "..." the rest of a product. Inputs name `batch` and `sequence`.
"""

import collections
import fnmatch
import re
from collections.abc import Mapping

from partita.errors import Fault, Refused
from partita.program.dims import Dim
from partita.program.events import Compute, Kind, Phase, Tensor
from partita.program.program import Program

Classes = dict[str, frozenset[int]]
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv")


def classes_of(program: Program, hints: Mapping[str, str]) -> Classes:
    """Dim name -> atoms: what inputs say, then hints; without hints what contractions say.

    Raises:
        Refused: P112, for a hint that fits no parameter.
    """
    found = _inputs(program)
    for name, atoms in (_hinted(program, hints) if hints else _read(program, found)).items():
        found[name] |= atoms
    if found["group"]:  # grouped attention: one key head serves a group of query heads
        found["kv"] = set(found["heads"])
    return {name: frozenset(atoms) for name, atoms in sorted(found.items()) if atoms}


def _inputs(program: Program) -> dict[str, set[int]]:
    found: dict[str, set[int]] = collections.defaultdict(set)
    for t in program.tensors:
        if t.kind == Kind.INPUT and t.dims:
            found["batch"].update(t.dims[0][:1])
            tokens = len(t.dims) == 2 and t.dtype.startswith("int")
            vectors = len(t.dims) == 3 and not t.dtype.startswith("int")
            if tokens or vectors:
                found["sequence"].update(t.dims[1][:1])
    return found


def _hinted(program: Program, hints: Mapping[str, str]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = collections.defaultdict(set)
    for glob, text in hints.items():
        cells = [group.split() if group else [word] for group, word in re.findall(r"\(([^)]*)\)|(\S+)", text)]
        hits = [
            t
            for t in program.tensors
            if t.name and t.kind in (Kind.PARAMETER, Kind.INPUT) and fnmatch.fnmatchcase(t.name, glob)
        ]
        if not hits or not all(_fits(cells, t) for t in hits):
            have = [(t.name, [[program.atoms[a] for a in d] for d in t.dims]) for t in hits][:3]
            raise Refused(
                Fault(
                    "P112",
                    f"the hint {glob!r} = {text!r} fits no parameter",
                    f"dims found: {have}",
                    "a hint names each dim, outermost first",
                    "write one name per dim, (a b) for a product",
                )
            )
        for t in hits:
            for cell, dim in zip(cells, t.dims, strict=True):
                for name, atom in zip(cell, dim, strict=False):
                    if name not in ("_", "..."):
                        found[name].add(atom)
    return found


def _fits(cells: list[list[str]], t: Tensor) -> bool:
    def fits(cell: list[str], dim: Dim) -> bool:
        return len(cell) == 1 or len(cell) == len(dim) or (cell[-1] == "..." and len(cell) - 1 <= len(dim))

    return len(cells) == len(t.dims) and all(map(fits, cells, t.dims))


def _read(program: Program, found: dict[str, set[int]]) -> dict[str, set[int]]:
    """Embeddings and scale vectors name `hidden` and `vocab`; what a weight contracts that is not hidden is heads or ffn."""
    more: dict[str, set[int]] = collections.defaultdict(set)
    tensors, forward = (
        program.tensors,
        [e for e in program.events() if isinstance(e, Compute) and e.phase == Phase.FORWARD and e.signature],
    )
    roots = {t.id: t for t in tensors if t.kind == Kind.PARAMETER}
    for e in forward:
        if (
            e.op == "embedding"
            and tensors[e.ins[1]].dtype.startswith("int")
            and tensors[tensors[e.ins[1]].root].kind == Kind.INPUT
        ):
            more["vocab"].update(*tensors[e.ins[0]].dims[:1])
            more["hidden"].update(*tensors[e.ins[0]].dims[1:2])
        if e.op == "nll_loss_forward" and more["vocab"]:
            more["vocab"].update(*tensors[e.ins[0]].dims[1:2])
        if e.op in ("mul", "native_layer_norm", "native_batch_norm", "_fused_rms_norm"):
            more["hidden"].update(a for i in e.ins[:2] if i in roots and len(tensors[i].shape) == 1 for a in tensors[i].dims[0])
    taken = more["hidden"] | more["vocab"] | {a for t in tensors if t.kind == Kind.INPUT for d in t.dims for a in d}
    chosen: set[int] = set()
    for e in forward:
        assert e.signature is not None
        if e.op not in PRODUCTS or not any(tensors[i].root in roots for i in e.ins):
            continue
        k: Dim = e.signature.dims.get("k", ())
        first = next(iter(k), -1)
        if first >= 0 and not set(k) & taken and first not in chosen and not _beside(roots, first, chosen):
            chosen.add(first)
            more["heads" if len(k) > 1 else "ffn"].add(first)
            if len(k) > 2 and _grouped(program, roots, k):
                more["group"].add(k[1])
    return more


def _beside(parameters: Mapping[int, Tensor], atom: int, chosen: set[int]) -> bool:
    """Does a weight with this atom have a chosen one in another dim? Then only one of the two can be split."""
    return any(
        any(atom in d for d in t.dims) and any(set(d) & chosen for d in t.dims if atom not in d) for t in parameters.values()
    )


def _grouped(program: Program, parameters: Mapping[int, Tensor], k: tuple[int, ...]) -> bool:
    """Is there a weight, or a part of a fused one, with the key heads k[0] but without the group k[1]?"""
    dims = [d for t in parameters.values() for d in t.dims] + [d for parts in program.sums.values() for d in parts]
    return any(k[0] in d and k[1] not in d for d in dims)
