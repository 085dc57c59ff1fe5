"""The square: what a strategy said against what a recorder heard, call by call, on every rank.

Calls on one axis are ordered, calls on different axes are not: a bucket on `dp` may start before or after a repair on `tp`,
as the autograd engine likes. So the lists are compared axis by axis, and every field of every call must be equal.

    said    dp: 1024 float32, 16 float64        one list shorter: aligned first, so that a forgotten call is named as one
    heard   dp:               16 float64        and not as a call of the wrong size
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any

from partita.program import Collective

FIELDS = ("op", "axis", "nbytes", "dtype")


@dataclass(frozen=True)
class Call:
    """One collective call as both sides know it: bytes of the large side, dtype of the payload."""

    op: str
    axis: str
    nbytes: int
    dtype: str

    def json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.op} on {self.axis} of {self.nbytes} bytes {self.dtype}"


@dataclass(frozen=True)
class Difference:
    """The first place where the two lists part; None stands for a call that is missing on that side.

    Args:
        rank: Who did otherwise than was said.
        axis: Of the said call, or of the heard one where none was said.
        index: Number of the call among those on the axis.
    """

    rank: int
    axis: str
    index: int
    said: Call | None
    heard: Call | None

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that differ; ("call",) if one side has no call there."""
        if self.said is None or self.heard is None:
            return ("call",)
        return tuple(f for f in FIELDS if getattr(self.said, f) != getattr(self.heard, f))

    def __str__(self) -> str:
        at = f"rank {self.rank}, call {self.index} on {self.axis} differs in {', '.join(self.fields)}"
        return f"{at}: said {self.said or 'nothing'}, heard {self.heard or 'nothing'}"

    def json(self) -> dict[str, Any]:
        said, heard = (c.json() if c else None for c in (self.said, self.heard))
        return {
            "rank": self.rank,
            "index": self.index,
            "axis": self.axis,
            "said": said,
            "heard": heard,
            "fields": list(self.fields),
        }


def said_calls(collectives: Sequence[Collective]) -> list[Call]:
    """The said list of a period."""
    return [Call(c.op, c.axis, c.nbytes, c.dtype) for c in collectives]


def first_difference(said: Sequence[Call], heard: Mapping[int, Sequence[Call]]) -> Difference | None:
    """Compare the said list with every rank's heard list.

    Args:
        said: What each rank of the role should do.
        heard: rank -> what its recorder heard in one period.
    """
    for rank, calls in sorted(heard.items()):
        axes = dict.fromkeys(c.axis for c in (*said, *calls))
        found = [d for axis in axes for d in _differences(rank, axis, said, calls)]
        if found:
            return _moved(found) or found[0]
    return None


def _differences(rank: int, axis: str, said: Sequence[Call], heard: Sequence[Call]) -> Iterator[Difference]:
    """Where the two lists of one axis part."""
    want, have = ([c for c in calls if c.axis == axis] for calls in (said, heard))
    if len(want) == len(have):
        pairs = zip(range(len(want)), want, have, strict=True)
        yield from (Difference(rank, axis, at, a, b) for at, a, b in pairs if a != b)
        return
    for _, i, i_end, j, j_end in SequenceMatcher(None, want, have, autojunk=False).get_opcodes():
        for k, (a, b) in enumerate(zip_longest(want[i:i_end], have[j:j_end])):
            if a != b:
                yield Difference(rank, axis, i + k, a, b)


def _moved(found: Sequence[Difference]) -> Difference | None:
    """A call that was said on one axis and heard on another, if the first difference is that."""
    first, pairs = found[0], []
    for other in found[1:]:
        one, two = (first, other) if first.heard is None else (other, first)
        if one.said and two.heard and one.heard is None and two.said is None:
            pairs.append(replace(one, heard=two.heard))
    alike = [d for d in pairs if d.fields in (("axis",), ("axis", "nbytes"))]
    return min(alike, key=lambda d: len(d.fields), default=None)
