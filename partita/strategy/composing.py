"""Strategies of a plan together: Program′ of every role, and what they refuse.

tensor · sequence · memory      rewrite the whole program
pipeline                        cuts it into roles, one for each coordinate on its axis
data                            rewrite each role: buckets are of the parameters a rank holds
close                           what the step itself does across ranks
"""

from collections.abc import Callable, Sequence

from partita.errors import Fault
from partita.mesh import Mesh
from partita.program import Collective, Phase, Program, Rows, Split
from partita.program.alike import standing_for
from partita.program.program import before_optimizer
from partita.strategy.contract import Place, Strategy
from partita.strategy.pipelined import Pipelined

NORM_BYTES = 8  # one float64: the sum of squares of this rank's blocks


def compose(program: Program, strategies: Sequence[Strategy], mesh: Mesh) -> Program:
    """Program′ of the first role: of every rank, where the plan has no pipeline."""
    return compose_roles(program, strategies, mesh)[0]


Rewriting = Callable[[Strategy, Program, Mesh], Program]


def rewriting(strategy: Strategy, program: Program, mesh: Mesh) -> Program:
    """What the strategy says."""
    return strategy.rewrite(program, mesh)


class Remembered:
    """What strategies said, each once: for plans that begin alike."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[Program, Program]] = {}

    def __call__(self, strategy: Strategy, program: Program, mesh: Mesh) -> Program:
        key = id(program), strategy, mesh.axes
        if key not in self._known:
            self._known[key] = program, strategy.rewrite(program, mesh)  # the program is kept too, and so is its id
        return self._known[key][1]


def compose_roles(
    program: Program, strategies: Sequence[Strategy], mesh: Mesh, *, alike: bool = False, rewrite: Rewriting = rewriting
) -> tuple[Program, ...]:
    """Program′ of each role, by its coordinate on the pipeline axis.

    Args:
        program: Of one device.
        strategies: Innermost first.
        mesh: The ranks.
        alike: Roles that are equal but for their position are said once: they share their tensors and events, module paths
            included (`Pipeline.behind`). For whoever only reads figures.
        rewrite: Has a strategy say something.
    """
    pipeline = pipeline_of(strategies, mesh)
    if pipeline is None:
        for strategy in strategies:
            program = rewrite(strategy, program, mesh)
        return (close(program),)
    for strategy in inside(strategies):
        program = rewrite(strategy, program, mesh)
    data = [s for s in strategies if s.place == Place.DATA]
    said: dict[int, Program] = {}  # by the tensors that roles share
    roles = pipeline.cast(program, mesh, alike=alike)
    for role in roles:
        if id(role.tensors) not in said:
            first = role
            for strategy in data:
                first = strategy.rewrite(first, mesh)
            said[id(role.tensors)] = close(first)
    pairs = ((said[id(role.tensors)], role.pipeline) for role in roles)
    return tuple(standing_for(first, own) if own and first.pipeline != own else first for first, own in pairs)


def pipeline_of(strategies: Sequence[Strategy], mesh: Mesh) -> Pipelined | None:
    """The strategy that cuts the model into stages, if one does."""
    return next((s for s in strategies if isinstance(s, Pipelined) and mesh.size(s.axis) > 1), None)


def inside(strategies: Sequence[Strategy]) -> list[Strategy]:
    """Those that rewrite the program before it is cut by depth."""
    return [s for s in strategies if s.place < Place.DATA]


def microbatches(strategies: Sequence[Strategy], accumulate: int) -> int:
    """Microbatches of a step on a data rank: rounds of accumulation times those of a pipeline."""
    for strategy in strategies:
        accumulate *= strategy.microbatches if isinstance(strategy, Pipelined) else 1
    return accumulate


def check(program: Program, strategies: Sequence[Strategy], mesh: Mesh, *, rewrite: Rewriting = rewriting) -> list[Fault]:
    """What the strategies of a plan refuse, each seeing the Program as those inside it left it.

    A pipeline cuts what it is given before any data strategy: those rewrite its roles.
    """
    for number, strategy in enumerate(strategies):
        faults = list(strategy.check(program, mesh))
        if faults:
            return faults
        later = strategies[number + 1 :]
        if later and (strategy.place < Place.DATA or later[0].place == Place.DATA):
            program = rewrite(strategy, program, mesh)
    return []


def close(program: Program) -> Program:
    """Adds the global norm: 8 bytes on every axis along which some gradient is split, innermost axis first."""
    if not program.clip:
        return program
    tensors = (program.tensors[g] for g in program.gradients.values())
    split = {axis for t in tensors for axis, layout in t.layouts.items() if isinstance(layout, Split | Rows)}
    split |= {program.pipeline.axis} if program.pipeline else set()
    calls = tuple(
        Collective("all_reduce", axis, (), NORM_BYTES, "float64", Phase.SYNC, "norm", once=True)
        for axis, size in program.axes.items()
        if axis in split and size > 1
    )
    return before_optimizer(program, calls)
