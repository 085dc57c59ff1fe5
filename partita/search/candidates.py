"""What can be tried: strategies of every place on every mesh.

strategies ─▶ families (at most one of each place) ─▶ meshes (factors of the ranks, every order)
pipelines  ─▶ layouts: a family inside, and how deep; the axis of stages is outermost, for it sends least
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product

from partita.mesh import Mesh
from partita.strategy import Pipelined, Place, Promise, Strategy


def candidates(ranks: int, strategies: Sequence[type[Strategy]]) -> Iterator[tuple[Mesh, tuple[Strategy, ...]]]:
    """Every mesh and strategies of `ranks` ranks: at most one of each place, axes of 2 or more, in every order.

    The axes of one strategy stand together, in the order it names them, and have sizes that suit it.
    """
    if ranks == 1:
        yield Mesh(), ()
        return
    for chosen in _families(strategies):
        axes = [axis for strategy in chosen for axis in strategy.axes]
        for numbers in factors(ranks, len(axes)):
            sizes = dict(zip(axes, numbers, strict=True))
            for order in permutations(strategy.axes for strategy in chosen if strategy.axes):
                mesh = Mesh(tuple((axis, sizes[axis]) for group in order for axis in group))
                if all(strategy.suits(mesh) for strategy in chosen):
                    yield mesh, chosen


@dataclass(frozen=True)
class Layout:
    """A pipeline of some depth with a family of strategies inside each stage.

    Args:
        depth: Ranks of the axis of stages.
        inside: Innermost first.
        axes: (axis, size) of those, outermost first.
    """

    depth: int
    inside: tuple[Strategy, ...]
    axes: tuple[tuple[str, int], ...]

    def data_ranks(self) -> int:
        """Parts the batch is cut into."""
        sizes, ranks = dict(self.axes), 1
        for axis in (a for s in self.inside for a in s.batch_axes):
            ranks *= sizes[axis]
        return ranks

    def with_pipeline(self, pipeline: Pipelined) -> tuple[Mesh, tuple[Strategy, ...]]:
        return Mesh(((pipeline.axis, self.depth), *self.axes)), (*self.inside, pipeline)

    def named(self) -> str:
        """As `pipeline(pp=4) x ddp(dp=2)`, whatever its schedule."""
        owner = {axis: strategy.name for strategy in self.inside for axis in strategy.axes}
        return " x ".join([f"pipeline({self.depth} deep)", *(f"{owner[axis]}({axis}={size})" for axis, size in self.axes)])


def layouts(ranks: int, strategies: Sequence[type[Strategy]]) -> Iterator[Layout]:
    """Every depth of 2 or more with every family inside; of its axes, those of data outside those of tensors."""
    for depth in (n for n in range(2, ranks + 1) if ranks % n == 0):
        for chosen in _families(strategies):
            axes = [axis for strategy in reversed(chosen) for axis in strategy.axes]
            for sizes in factors(ranks // depth, len(axes)):
                mesh = Mesh(tuple(zip(axes, sizes, strict=True)))
                if all(strategy.suits(mesh) for strategy in chosen):
                    yield Layout(depth, chosen, mesh.axes)


def _families(strategies: Sequence[type[Strategy]]) -> Iterator[tuple[Strategy, ...]]:
    """At most one of each place, innermost first, as places are, those of few axes first; pipelines apart."""
    # whether to train by another algorithm is the user's to choose
    strategies = [cls for cls in strategies if cls.place != Place.PIPELINE and cls.promise != Promise.RELAXED]
    places = sorted({cls.place for cls in strategies})
    options = [[None, *(cls for cls in strategies if cls.place == place)] for place in places]
    families = [tuple(cls() for cls in combination if cls is not None) for combination in product(*options)]
    return iter(sorted(families, key=lambda chosen: sum(len(s.axes) for s in chosen)))


def factors(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """The ways to write n as an ordered product of `parts` factors of at least 2.

    Example:
        >>> list(factors(8, 2))
        [(2, 4), (4, 2)]
    """
    if parts == 0:
        if n == 1:
            yield ()
        return
    for first in range(2, n + 1):
        if n % first == 0:
            yield from ((first, *rest) for rest in factors(n // first, parts - 1))


def family_of(mesh: Mesh, strategies: Sequence[Strategy]) -> str:
    """A plan in one line, axes outermost first."""
    owner = {axis: strategy for strategy in strategies for axis in strategy.axes}
    split = [f"{owner[axis].name}({axis}={size}{_parts(owner[axis])})" for axis, size in mesh.axes] or ["one device"]
    return " + ".join([" x ".join(split), *(_named(s) for s in strategies if not s.axes)])


def _parts(strategy: Strategy) -> str:
    return f", microbatches={strategy.microbatches}" if isinstance(strategy, Pipelined) else ""


def _named(strategy: Strategy) -> str:
    """A strategy without an axis, with the settings that are not its defaults."""
    default = type(strategy)().settings()
    other = [f"{k}={v}" for k, v in strategy.settings().items() if v != default[k]]
    return f"{strategy.name}({', '.join(other)})" if other else strategy.name
