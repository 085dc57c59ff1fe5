"""What all pipelines share: the model is cut by depth, and ranks pass microbatches on in the order of a schedule.

rank 0   stage 0    F0 F1 . . B0 F2 B1 F3 ...     a strategy file gives the schedule; the cut, the messages and
rank 1   stage 1    .  F0 B0 F1 B1 F2 ...         what happens once a step are the same for all
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from partita.errors import Fault, Refused, refuse
from partita.mesh import Mesh
from partita.program import Phase, Program
from partita.program.alike import runs_of_blocks, shortened
from partita.program.fold import unfold
from partita.program.roles import alike_roles, roles
from partita.program.schedules import Schedule, laws_of
from partita.program.stages import Stages, cut, even
from partita.strategy.contract import Place, Promise, Strategy

if TYPE_CHECKING:
    from partita.runtime.site import Site

CUTS = ("auto", "memory")


@dataclass(frozen=True)
class Pipelined(Strategy):
    """A pipeline over one axis.

    Args:
        axis: The mesh axis of the stages.
        microbatches: The batch of a data rank (of each round of accumulation) is passed on in so many parts.
        cut: Where stages begin: "auto" shares time out evenly, "memory" parameters, or the module paths at which the stages
            after the first begin.
    """

    place: ClassVar[Place] = Place.PIPELINE
    promise: ClassVar[Promise] = Promise.REORDERED

    axis: str = "pp"
    microbatches: int = field(kw_only=True)
    cut: str | tuple[str, ...] = field(default="auto", kw_only=True)

    def __post_init__(self) -> None:
        refuse([*self._settings_faults(), *self.own_faults()])

    @abstractmethod
    def schedule(self, ranks: int) -> Schedule:
        """Who runs what when, in one round."""

    def laws(self, ranks: int) -> Sequence[Fault]:
        """Why there is no schedule for so many ranks; what is known of the published method unless it says otherwise."""
        return laws_of(self.name, ranks, self.microbatches, getattr(self, "virtual", None), at=f"strategy.{self.name}")

    @classmethod
    def parted(cls, microbatches: int) -> "Sequence[Pipelined]":
        """Settings a search tries with so many microbatches; its defaults unless it says otherwise."""
        return (cls(microbatches=microbatches),)

    def own_faults(self) -> Sequence[Fault]:
        """What is wrong with settings of its own; nothing unless it says otherwise."""
        return ()

    # ---- the contract
    def check(self, program: Program, mesh: Mesh) -> Sequence[Fault]:
        size = mesh.size(self.axis)
        if size == 1:
            return []
        if faults := [*self.laws(size), *self._path_faults(program)] or self._halves_faults(program, size):
            return faults
        try:
            starts = self.starts(program, self.schedule(size).stages)
            if len(runs_of_blocks(program, starts)[1]) == 1:  # runs of blocks, first to last, are stages
                cut(unfold(program), starts)
        except Refused as refused:
            return [replace(f, at=f"strategy.{self.name}.{f.at}") for f in refused.faults]
        return []

    def rewrite(self, program: Program, mesh: Mesh) -> Program:
        """The program with its axis; `cast` has the roles, which are what ranks do."""
        return replace(program, axes={**program.axes, self.axis: mesh.size(self.axis)})

    def cast(self, program: Program, mesh: Mesh, *, alike: bool = False) -> tuple[Program, ...]:
        """The role of every coordinate on the axis; `alike`: those of one kind are said once and share what they say."""
        size = mesh.size(self.axis)
        if size == 1:
            return (replace(program, axes={**program.axes, self.axis: 1}),)
        schedule = self.schedule(size)
        starts = self.starts(program, schedule.stages)
        noted = program.with_notes(f"{self.name}: {schedule.stages} stages begin with the first module, {', '.join(starts)}")
        if alike and (short := shortened(noted, starts, schedule)) is not None:
            return alike_roles(short, schedule, self.axis)
        flat = unfold(noted)
        return roles(flat, cut(flat, starts), schedule, self.axis)

    def apply(self, site: "Site") -> None:
        if site.mesh.size(self.axis) > 1:
            site.cut_stages(self)

    # ---- the cut
    def stages(self, program: Program, size: int) -> Stages:
        """The program cut into as many stages as the schedule has.

        Raises:
            Refused: P121, when it cannot be cut so.
        """
        return cut(unfold(program), self.starts(program, self.schedule(size).stages))

    def starts(self, program: Program, count: int) -> tuple[str, ...]:
        """Module paths at which stages after the first begin."""
        if isinstance(self.cut, str):
            return even(program, count, "memory" if self.cut == "memory" else "time")
        if len(self.cut) != count - 1:
            have = f"{len(self.cut)} cut points, {count} stages"
            law, cure = "every stage after the first begins with a module", f"{count - 1} module paths, or cut = 'auto'"
            raise Refused(Fault("P121", f"cut has {len(self.cut)} paths", have, law, cure, "cut"))
        return self.cut

    # ---- refusals
    def _path_faults(self, program: Program) -> list[Fault]:
        if not program.dynamic:
            return []
        have = next((n for n in program.notes if n.startswith("control flow depends on data")), "")
        law = "a stage runs a fixed run of the calls of a module"
        cure = f"a module whose path is fixed, or the size of axis {self.axis!r} = 1"
        what = f"{type(self).__name__}(axis={self.axis!r}) cannot cut a module whose path depends on data"
        return [Fault("P116", what, have, law, cure, f"mesh.{self.axis}")]

    def _halves_faults(self, program: Program, size: int) -> list[Fault]:
        """A backward in two halves would compute a block again in each."""
        again = sorted({e.module for e in program.events() if e.phase == Phase.RECOMPUTE})
        if not again or not self.schedule(size).splits_backward:
            return []
        what = f"{type(self).__name__}(axis={self.axis!r}) cannot split the backward pass of modules that are computed again"
        law = "each half of a split backward would compute a module again, its messages too"
        cure = "one_f_one_b, interleaved or gpipe, whose backward is whole; or no recompute"
        have = f"{again[0]!r} and {len(again) - 1} more" if len(again) > 1 else repr(again[0])
        return [Fault("P116", what, have, law, cure, f"strategy.{self.name}")]

    def _settings_faults(self) -> list[Fault]:
        faults = []
        if self.microbatches < 1:
            law = "the batch is passed on in one part or more"
            cure = "microbatches = 2 x the ranks of the axis, or more"
            faults.append(Fault("P112", f"microbatches = {self.microbatches} is out of range", "", law, cure, "microbatches"))
        if isinstance(self.cut, str) and self.cut not in CUTS:
            law = "stages are cut evenly by time or memory, or where the file says"
            cure = f"{' or '.join(map(repr, CUTS))}, or [module paths]"
            faults.append(Fault("P112", f"cut = {self.cut!r} is unknown", "", law, cure, "cut"))
        if tuple(self.modules) != ("*",):
            law = "a pipeline cuts the whole model by depth"
            faults.append(
                Fault("P112", f"{self.name} cannot be of some modules", str(self.modules), law, "modules = ['*']", "modules")
            )
        return faults
