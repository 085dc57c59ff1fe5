"""Where a file and a model disagree, one fault a kind: missing tensors, foreign ones, other shapes, other dtypes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

SHOWN = 5  # names a fault lists
Kind = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Difference:
    """One kind of disagreement, in the words of a fault."""

    what: str
    have: str
    cure: str


def differences(
    have: Mapping[str, Kind], model: Mapping[str, Kind], tied: Mapping[str, str], spare: Sequence[str] = ()
) -> list[Difference]:
    """Everything that differs.

    Args:
        have: Name -> (dtype, whole shape) in the file.
        model: First name -> the same in the model.
        tied: Other name -> first name of the model's.
        spare: Beginnings of names that may be in the file without being in the model.
    """
    known = {name: name for name in model} | {other: first for other, first in tied.items() if first in model}
    both = [(name, known[name]) for name in have if name in known]
    found = {first for _, first in both}
    missing = [name for name in model if name not in found]
    foreign = [name for name in have if name not in known and not name.startswith(tuple(spare))]
    out = []
    if missing:
        said = f"{len(missing)} of the model's {len(model)} tensors"
        out.append(Difference(f"it has no {tensors(missing)}", said, _other(foreign)))
    if foreign:
        is_in = "is not in the model" if len(foreign) == 1 else "are not in the model"
        out.append(Difference(f"{tensors(foreign)} {is_in}", f"{len(foreign)} of its {len(have)} tensors", _other(missing)))
    if pairs := [(n, m) for n, m in both if have[n][1] != model[m][1]]:
        rows = [f"{n!r} {list(have[n][1])}, in the model {list(model[m][1])}" for n, m in pairs]
        out.append(Difference(_have(pairs, "another shape"), lines(rows), "a model of those sizes"))
    if pairs := [(n, m) for n, m in both if have[n][0] != model[m][0]]:
        rows = [f"{n!r} {word(have[n][0])}, in the model {word(model[m][0])}" for n, m in pairs]
        kinds = sorted({word(have[n][0]) for n, _ in pairs})
        cure = f"--set dtype={kinds[0]}" if len(kinds) == 1 else "a model of those dtypes"
        out.append(Difference(_have(pairs, "another dtype"), lines(rows), cure))
    return out


def _other(names: Sequence[str]) -> str:
    return f"the same names on both sides: the other has {_some(names)}" if names else "the model it was written from"


def _have(pairs: Sequence[tuple[str, str]], what: str) -> str:
    return f"{tensors([name for name, _ in pairs])} {'has' if len(pairs) == 1 else 'have'} {what}"


def tensors(names: Sequence[str]) -> str:
    """A list of tensors in words, cut short."""
    return f"tensor{'s' * (len(names) > 1)} {_some(names)}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def lines(rows: Sequence[str]) -> str:
    """Rows below each other, cut short."""
    return "\n".join([*rows[:SHOWN], *([f"and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else [])])


def word(dtype: torch.dtype) -> str:
    """The name of a dtype."""
    return str(dtype).removeprefix("torch.")
