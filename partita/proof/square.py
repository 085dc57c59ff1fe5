"""The square: what a strategy said against what a recorder heard, call by call, on every rank.

Calls on one axis are ordered, calls on different axes are not: a bucket on `dp` may start before or after a repair on `tp`,
as the autograd engine likes. So the lists are compared axis by axis, and every field of every call must be equal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class Difference:
    """The first place where the two lists part; None stands for a call that is missing on that side."""

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
        for axis in dict.fromkeys(c.axis for c in (*said, *calls)):
            pairs = zip_longest((c for c in said if c.axis == axis), (c for c in calls if c.axis == axis))
            for index, (want, have) in enumerate(pairs):
                if want != have:
                    return Difference(rank, axis, index, want, have)
    return None
