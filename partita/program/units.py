"""Units of a fully sharded model: what is gathered together, and when.

    forward     root | 0 | 1 | 2 |                    the root has what no block holds; it stays gathered to the end of backward
    backward         gather 2, gather 1 | 2, scatter 2 | gather 0 | 1, scatter 1 | 0, scatter 0 | scatter root

A unit is a block: a numbered module whose forward runs once and that alone reads its parameters. A block asks for the one below
it when its own backward begins. What a unit gets back is scattered when its backward has ended; where nothing it was given has
a gradient, at the very end, after the root.

Source: the closed list of torch's `fully_shard` (Zhao et al. 2023, "PyTorch FSDP", VLDB 16(12), section 3), as it runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from partita.program.events import Compute, Event, Phase
from partita.program.program import Program


@dataclass(frozen=True)
class Unit:
    """What is gathered together.

    Args:
        path: Of the module; "" is the root.
        parameters: Ids, in registration order.
        used: Its forward runs an op.
        backward: Its backward does.
        late: Nothing its forward is given has a gradient.
    """

    path: str
    parameters: tuple[int, ...]
    used: bool = True
    backward: bool = True
    late: bool = False


def units_of(program: Program) -> list[Unit]:
    """The blocks in the order they run, those that do not run, and last the root with what they do not hold."""
    home = _homes(program)
    seen = list(_seen(program, set(home.values())))
    ran = list(dict.fromkeys(path for path, _, _ in seen))
    back = {path for path, phase, _ in seen if phase == Phase.BACKWARD}
    fed = {path for path, phase, graded in seen if phase == Phase.FORWARD and graded}
    blocks = [path for path in dict.fromkeys([*ran, *home.values()]) if path]
    return [
        Unit(
            path,
            tuple(i for i, at in home.items() if at == path),
            used=path in ran or not path,
            backward=path in back or not path,
            late=not path or path not in fed,
        )
        for path in (*blocks, "")
    ]


def _homes(program: Program) -> dict[int, str]:
    """Parameter -> path of the block that holds it alone; "" for what belongs to the root."""
    runs = set(program.runs)
    home = {p.id: _outermost(p.name, runs) for p in program.parameters()}
    blocks = {path for path in home.values() if path}
    for event in program.events():
        if isinstance(event, Compute) and event.phase == Phase.FORWARD:
            here = _within(event.module, blocks)
            for w in (i for i in event.ins if i in home):
                if home[w] != here:  # read from outside, or tied to what is outside: neither block keeps to itself
                    blocks -= {home[w], here}
    return {i: path if path in blocks else "" for i, path in home.items()}


def _outermost(name: str, runs: set[str]) -> str:
    parts = name.split(".")
    paths = (".".join(parts[:n]) for n in range(1, len(parts)))
    return next((path for path in paths if path in runs), "")


def _within(module: str, blocks: set[str]) -> str:
    """The block a module path is in."""
    parts = module.split(".")
    return next((path for n in range(1, len(parts) + 1) if (path := ".".join(parts[:n])) in blocks), "")


def _seen(program: Program, blocks: set[str]) -> Iterator[tuple[str, Phase, bool]]:
    """Per event of forward and backward: (block, phase, whether it reads from outside the block what has a gradient)."""
    graded = set(program.gradients)
    owner: dict[int, str] = {}  # value -> the block that made it
    learned = {t.id for t in program.parameters()}
    for event in program.events():
        if not isinstance(event, Compute) or event.phase not in (Phase.FORWARD, Phase.BACKWARD):
            continue
        here = _within(event.module, blocks)
        outside = any(i in graded and i not in learned and owner.get(i) != here for i in event.ins)
        if event.phase == Phase.FORWARD:
            for o in event.outs:
                owner[o] = here
                if any(i in graded for i in event.ins):
                    graded.add(o)
        yield here, event.phase, outside


# ---------------------------------------------------------------- when
@dataclass(frozen=True)
class Moment:
    """A call of a unit: before or after event number `event`.

    Args:
        event: Index among `Program.events()`.
        before: Of the two places.
        op: "gather" or "scatter".
        unit: Whose parameters or gradients.
        asked: Path of the unit at whose place it happens.
        phase: Forward or backward.
    """

    event: int
    before: bool
    op: str
    unit: Unit
    asked: str
    phase: Phase


def moments(program: Program, units: Sequence[Unit], *, reshard: bool) -> list[Moment]:
    """Every call of a microbatch, in order.

    Args:
        program: Whose events are meant; of a folded one the body stands for all its copies.
        units: Of `units_of`.
        reshard: Blocks give their parameters back after forward and gather them again for backward.
    """
    return _Walk(program, units, reshard=reshard).run()


class _Walk:
    def __init__(self, program: Program, units: Sequence[Unit], *, reshard: bool) -> None:
        self.units = {u.path: u for u in units if u.parameters}
        self.order = [u for u in units if u.used and u.parameters]  # as forwards end: the root's last
        self.reshard = reshard
        blocks = {u.path for u in units if u.path}
        events = list(enumerate(program.events()))
        self.places = [(n, e.phase, _within(e.module, blocks), e.module) for n, e in events if _runs(e)]
        self.here = {"" for _ in ()}  # paths of units that are gathered or on their way
        self.found: list[Moment] = []

    def run(self) -> list[Moment]:
        forward = [p for p in self.places if p[1] == Phase.FORWARD]
        backward = [p for p in self.places if p[1] in (Phase.BACKWARD, Phase.RECOMPUTE)]
        root = self.units.get("")
        if root and forward:
            self._gather(root, forward[0][0], "", Phase.FORWARD)
        seen: set[str] = set()
        for n, _, path, _ in forward:
            if path and path not in seen and path in self.units:
                seen.add(path)
                self._gather(self.units[path], n, path, Phase.FORWARD)
        if self.reshard:
            self.here -= {path for path in self.here if path}
        self._backward(backward)
        return self.found

    def _backward(self, places: Sequence[tuple[int, Phase, str, str]]) -> None:
        last = {path: n for n, _, path, _ in places}
        begun: set[str] = set()
        for n, _, path, module in places:
            if path not in begun and (path or module) and path in self.units:
                if path and "" in self.units and "" not in begun:
                    begun.add("")
                    self._ask("", n)
                begun.add(path)
                self._ask(path, n)
            if path and n == last[path] and path in self.units and not self.units[path].late:
                self._scatter(self.units[path], n)
        if places:
            end = places[-1][0]
            ends = [u for u in self.units.values() if u.late or not u.path]
            for unit in sorted(ends, key=lambda u: u.path != ""):
                self._scatter(unit, end)

    def _ask(self, path: str, event: int) -> None:
        """Backward of a unit begins: it needs its own parameters, and asks for those of the unit before it in forward."""
        unit = self.units[path]
        if path not in self.here:
            self._gather(unit, event, path, Phase.BACKWARD)
        at = self.order.index(unit) if unit in self.order else 0
        if at and self.order[at - 1].path not in self.here:
            self._gather(self.order[at - 1], event, path, Phase.BACKWARD)

    def _gather(self, unit: Unit, event: int, asked: str, phase: Phase) -> None:
        self.here.add(unit.path)
        self.found.append(Moment(event, before=True, op="gather", unit=unit, asked=asked, phase=phase))

    def _scatter(self, unit: Unit, event: int) -> None:
        self.found.append(Moment(event, before=False, op="scatter", unit=unit, asked=unit.path, phase=Phase.BACKWARD))


def _runs(event: Event) -> bool:
    return isinstance(event, Compute) and event.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE) and event.op != "drop"
