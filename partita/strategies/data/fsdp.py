"""Shares out everything: a rank holds its rows of parameters, gradients and optimizer state, and gathers a block to run it.

    forward     all_gather a block, run it, let go of it
    backward    all_gather it again (the one before it comes meanwhile), reduce_scatter its gradients
    optimizer   on a rank's own rows; nothing is gathered after it

A block is a numbered module that alone reads its parameters; what no block holds belongs to the root, which stays gathered from
forward to the end of backward. Every microbatch gathers and scatters: whole gradients are never kept.

A stage of a pipeline does so in each of its passes, block by block, with calls of our own: a `fully_shard` knows of no stages.

Source: Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, section 5.3; Zhao et al. 2023, "PyTorch FSDP", VLDB 16(12), on whose
successor, torch's `fully_shard`, it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from partita.errors import Fault, refuse
from partita.mesh import Mesh
from partita.program import Program
from partita.program.data import batch_faults, loose_norms, module_faults, rewrite_batch
from partita.program.gathering import say_sharded, unit_faults
from partita.program.sharding import sharding_faults
from partita.program.staging import groups_of, say_stages
from partita.program.units import units_of
from partita.strategy import Case, Place, Promise, Strategy

if TYPE_CHECKING:
    from partita.runtime.site import Site


@dataclass(frozen=True)
class FSDP(Strategy):
    """Fully sharded data parallelism on torch's `fully_shard`. It is of the whole model.

    Args:
        axis: The mesh axis that carries the batch and shares out the rows.
        reshard: Blocks let go of whole parameters after forward; else they keep them until their backward has run, those of a
            pipeline's stages to the end of a round.
        replicate: A second data axis, whose ranks hold the same rows (hybrid sharding); none by default.

    Example:
        >>> FSDP(axis="inner", replicate="outer").axes
        ('outer', 'inner')
    """

    name: ClassVar[str] = "fsdp"
    place: ClassVar[Place] = Place.DATA
    promise: ClassVar[Promise] = Promise.REORDERED

    axis: str = "dp"
    reshard: bool = True
    replicate: str | None = None

    def __post_init__(self) -> None:
        refuse([*module_faults(self.name, self.modules), *_axis_faults(self.axis, self.replicate)])

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,) if self.replicate is None else (self.replicate, self.axis)

    def check(self, program: Program, mesh: Mesh) -> Sequence[Fault]:
        size = mesh.size(self.axis)
        if self.replicate is not None and (copies := mesh.size(self.replicate)) > 1:
            if size == 1:
                return [_nothing_shared(self._who, self.axis, self.replicate, copies)]
            if faults := batch_faults(program, self.replicate, copies, self._who):
                return faults
            program = rewrite_batch(program, self.replicate, copies, self.name)
        return [*sharding_faults(program, self.axis, size, self._who), *unit_faults(program, self.axis, size, self._who)]

    def rewrite(self, program: Program, mesh: Mesh) -> Program:
        replicate = None if self.replicate is None else (self.replicate, mesh.size(self.replicate))
        size = mesh.size(self.axis)
        say = say_sharded if program.pipeline is None or size == 1 else say_stages
        return say(program, self.axis, size, name=self.name, reshard=self.reshard, replicate=replicate)

    def apply(self, site: "Site") -> None:
        for axis in self.axes:
            site.share_batch(axis)
            if site.mesh.size(axis) > 1:
                refuse(loose_norms(site.program, site.batch_norms(), axis, self._who))
                site.synchronise_batch_norm(axis)
        dtype = site.program.reduce_dtype
        if site.program.pipeline is not None:
            site.shard_stages(self.axis, groups_of(site.program), dtype, reshard=self.reshard, replicate=self.replicate)
            return
        units = [(u.path, [site.program.tensors[i].name for i in u.parameters]) for u in units_of(site.program)]
        site.shard_parameters(self.axis, units, dtype, reshard=self.reshard, replicate=self.replicate)

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"dp": 2}, {}),
            Case({"dp": 4}, {"reshard": False}),
            Case({"dp": 4}, {}, workload="llama"),
            Case({"dp": 2}, {}, workload="resnet"),
            Case({"dp": 4}, {}, workload="mlp"),
            Case({"outer": 2, "dp": 2}, {"replicate": "outer"}),
            Case({"dp": 2, "tp": 2}, {}),
            Case({"tp": 2, "dp": 2}, {}),
            Case({"dp": 2, "pp": 2}, {}),
        )

    @property
    def _who(self) -> str:
        return f"FSDP(axis={self.axis!r})"


def _nothing_shared(who: str, axis: str, replicate: str, copies: int) -> Fault:
    return Fault(
        "P112",
        f"{who} shares out nothing",
        f"{axis} = 1, {replicate} = {copies}",
        "hybrid sharding shares rows out over one axis and keeps copies of them over the other",
        f"ddp over {replicate!r}, or {axis} = 2 or more",
        f"mesh.{axis}",
    )


def _axis_faults(axis: str, replicate: str | None) -> list[Fault]:
    if axis != replicate:
        return []
    law = "ranks along the one axis hold different rows, along the other the same"
    return [
        Fault("P112", f"replicate = {replicate!r} is the axis itself", f"axis = {axis!r}", law, "another axis", "replicate")
    ]
