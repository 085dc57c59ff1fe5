"""Strategies of a plan together: Program′ of every role, and what they refuse.

tensor · sequence · memory      rewrite the whole program
pipeline                        cuts it into roles, one for each coordinate on its axis
data                            rewrite each role: buckets are of the parameters a rank holds
close                           what the step itself does across ranks
"""

from collections.abc import Sequence

from partita.errors import Fault
from partita.mesh import Mesh
from partita.program import Collective, Phase, Program, Rows, Split
from partita.program.program import before_optimizer
from partita.strategy.contract import Place, Strategy
from partita.strategy.pipelined import Pipelined

NORM_BYTES = 8  # one float64: the sum of squares of this rank's blocks


def compose(program: Program, strategies: Sequence[Strategy], mesh: Mesh) -> Program:
    """Program′ of the first role: of every rank, where the plan has no pipeline."""
    return compose_roles(program, strategies, mesh)[0]


def compose_roles(program: Program, strategies: Sequence[Strategy], mesh: Mesh) -> tuple[Program, ...]:
    """Program′ of each role, by its coordinate on the pipeline axis."""
    pipeline = pipeline_of(strategies, mesh)
    if pipeline is None:
        for strategy in strategies:
            program = strategy.rewrite(program, mesh)
        return (close(program),)
    for strategy in inside(strategies):
        program = strategy.rewrite(program, mesh)
    roles = pipeline.cast(program, mesh)
    for strategy in (s for s in strategies if s.place == Place.DATA):
        roles = tuple(strategy.rewrite(role, mesh) for role in roles)
    return tuple(map(close, roles))


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


def check(program: Program, strategies: Sequence[Strategy], mesh: Mesh) -> list[Fault]:
    """What the strategies of a plan refuse, each seeing the Program as those inside it left it."""
    for strategy in strategies:
        faults = list(strategy.check(program, mesh))
        if faults:
            return faults
        program = strategy.rewrite(program, mesh)
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
