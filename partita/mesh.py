"""A mesh: named axes with sizes, outermost (slowest link) first."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """Ranks laid out along named axes.

    Rank r of a mesh dp=2, tp=2 sits at dp = r // 2, tp = r % 2: the last axis varies fastest.

    Args:
        axes: (name, size) pairs, outermost first.
    """

    axes: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def of(sizes: Mapping[str, int]) -> "Mesh":
        """A mesh from a mapping whose order is outermost first."""
        return Mesh(tuple((str(name), int(size)) for name, size in sizes.items()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def ranks(self) -> int:
        return math.prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """Ranks along `axis`; 1 for an axis the mesh does not have."""
        return dict(self.axes).get(axis, 1)

    def stride(self, axis: str) -> int:
        """Distance in rank numbers between neighbours along `axis`."""
        at = self.names.index(axis)
        return math.prod(size for _, size in self.axes[at + 1 :])

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where `rank` sits: {axis: index}."""
        return {name: rank // self.stride(name) % size for name, size in self.axes}

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axis` only, in axis order."""
        step = self.stride(axis)
        first = rank - self.coordinate(rank)[axis] * step
        return tuple(first + i * step for i in range(self.size(axis)))

    def groups(self, axis: str) -> Iterator[tuple[int, ...]]:
        """Every group of ranks along `axis`."""
        seen: set[tuple[int, ...]] = set()
        for rank in range(self.ranks):
            group = self.group(axis, rank)
            if group not in seen:
                seen.add(group)
                yield group
