"""A plane of ranks, rows by columns, and the turns in which panels of operands and of results travel on it.

    turn s    rank (i, j) works on panel  n = j L/c + i L/r + s  (mod L)

Along a row, and along a column, neighbours are one block apart. So in every turn the ranks of a row need panels of all blocks,
each once: every rank sends one panel and receives one, `distance` further on and as far before, and no rank serves several.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from partita.program.panels import panel_count
from partita.runtime.grid.workspace import Workspace, alike, dense, memory
from partita.runtime.net import Net, Work


class Place(Protocol):
    """Where products are made: a plane or a cube."""

    net: Net
    silent: bool
    overlapped: bool

    @property
    def space(self) -> Workspace: ...


@dataclass
class Plane:
    """Rank (i, j) of a plane: i along axis `row`, j along axis `col`.

    Args:
        row, col: Axes of the mesh; one of size 1 moves nothing.
        silent: A rehearsal on fake tensors: results have their shapes, nothing is sent.
        overlapped: Panels travel while the ones before them are multiplied; else each is waited for at once. The same sums.
    """

    net: Net
    row: str
    col: str
    silent: bool = False
    overlapped: bool = True
    kept: Workspace = field(init=False, default_factory=Workspace)

    @property
    def space(self) -> Workspace:
        """Work buffers; a rehearsal has its own, which nothing keeps."""
        return Workspace(keeps=False) if self.silent else self.kept

    @property
    def rows(self) -> int:
        return self.net.size(self.row)

    @property
    def columns(self) -> int:
        return self.net.size(self.col)

    @property
    def i(self) -> int:
        return self.net.coordinate.get(self.row, 0)

    @property
    def j(self) -> int:
        return self.net.coordinate.get(self.col, 0)

    def turns(self, axis: str) -> list[tuple[int, int]]:
        """(distance to the panel's owner along the axis, number of the panel in its block), turn by turn."""
        count = panel_count(self.rows, self.columns)
        each = count // self.net.size(axis)
        other = self.i * count // self.rows if axis == self.col else self.j * count // self.columns
        return [divmod((other + turn) % count, each) for turn in range(count)]


class Feed:
    """Panels of one operand, in the order of the turns; the next is on its way while the one at hand is used.

    A rank's own panels are read where they lie; the others come into two buffers in turn.

    Args:
        place: Where.
        axis: Over which they travel.
        block: This rank's block, dense.
        turns: As of `Plane.turns`.
        dim: Of the block that is cut in panels.
        name: Of its buffers.
        label: For whom.
    """

    def __init__(
        self, place: Place, axis: str, block: Tensor, turns: list[tuple[int, int]], *, dim: int, name: str, label: str
    ) -> None:
        self.place, self.axis, self.block, self.dim, self.name, self.label = place, axis, block, dim, name, label
        self.size = block.shape[dim] // (len({number for _, number in turns}))
        self._left, self._begun = deque(enumerate(turns)), deque[tuple[Tensor, Work | None]]()
        if place.overlapped:
            self._begin()

    def next(self) -> Tensor:
        """The next panel; it stands until the one after the next is asked for."""
        if not self._begun:
            self._begin()
        panel, work = self._begun.popleft()
        if self.place.overlapped and self._left:
            self._begin()
        if work is not None:
            work.wait()
        return panel

    def _begin(self) -> None:
        turn, (distance, number) = self._left.popleft()
        mine = self.block.narrow(self.dim, number * self.size, self.size)
        if not distance:
            self._begun.append((mine, None))
            return
        out = mine
        if dense(mine) is not mine:
            out = alike(self.place.space, f"{self.name} sent {turn % 2}", mine, self.block).copy_(mine)
        into = alike(self.place.space, f"{self.name} {turn % 2}", mine, self.block)
        self._begun.append((into, pass_on(self.place, self.axis, out, into, -distance, self.label)))


class Sum:
    """This rank's block of a sum over an axis, whose summands arrive in turns.

    Args:
        place: Where.
        axis: Over which they travel.
        out: Filled; dense. Whatever it holds is lost.
        dim: Of the block that is cut in panels.
        parts: Panels of a block.
        label: For whom.
    """

    def __init__(self, place: Place, axis: str, out: Tensor, *, dim: int = 0, parts: int = 1, label: str) -> None:
        self.place, self.axis, self.out, self.dim, self.label = place, axis, out, dim, label
        self.size = out.shape[dim] // parts
        self._slot, self._met = 0, set[int]()
        self._under = deque[tuple[Work | None, Tensor, Tensor, bool]]()  # waited for, brings, where to, is it the first

    def turn(self, distance: int, number: int, compute: Callable[[Tensor], object]) -> None:
        """Make the summand of the owner that far on, send it there, and receive one for the same panel of the own block."""
        panel, first = self.out.narrow(self.dim, number * self.size, self.size), number not in self._met
        self._met.add(number)
        if not distance and first:
            compute(panel)
            return
        self.settle(1)  # the summand before the last has left its buffer
        space, self._slot = self.place.space, 1 - self._slot
        summand = alike(space, f"summand {self._slot}", panel, self.out)
        compute(summand)
        if not distance:
            self._under.append((None, summand, panel, False))
            return
        straight = first and dense(panel) is panel
        into = panel if straight else alike(space, f"received {self._slot}", panel, self.out)
        self._under.append((pass_on(self.place, self.axis, summand, into, distance, self.label), into, panel, first))
        if not self.place.overlapped:
            self.settle(0)

    def settle(self, left: int) -> Tensor:
        """Wait until at most `left` summands are under way, and add up in the order of the turns."""
        while len(self._under) > left:
            work, got, panel, first = self._under.popleft()
            if work is not None:
                work.wait()
            if got is not panel:
                panel.copy_(got) if first else panel.add_(got)
        return self.out


def pass_on(place: Place, axis: str, out: Tensor, into: Tensor, distance: int, label: str) -> Work | None:
    """Send to the rank that far on along the axis, and begin to receive from the one as far before."""
    if place.silent:
        return None
    me, ranks = place.net.coordinate[axis], place.net.size(axis)
    to, source = (me + distance) % ranks, (me - distance) % ranks
    return place.net.exchange(memory(out), to, memory(into), source, axis, label=label)


def own_last(ranks: int) -> list[int]:
    """Distances of a sum's owners: what is sent travels while the own summand is made."""
    return [*range(1, ranks), 0]
