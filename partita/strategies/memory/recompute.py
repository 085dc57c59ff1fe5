"""Keeps the input of each block alone, and computes its inside once more just before its backward pass.

    memory of n blocks of A bytes of activations, x bytes of input      n A  ->  n x + A
    time                                                                forward once more, but for what a block ends with

`block` is one region per repeated block, `full` the whole model as one (for a pipeline's microbatches in flight), `selective`
one per block that keeps the results of some ops, by default products and attention, which cost the most time a byte.

What is recomputed is bitwise what was computed: the same ops on the same input, with the same dropout masks, on the same part
of each tensor; buffers and counters are put back. The sums over a tensor axis inside a block are repeated, except those behind
the last tensor that backward reads.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174, section 3; selective: Korthikanti
et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198, section 5.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from partita.errors import Fault, refuse
from partita.mesh import Mesh
from partita.program import Program
from partita.program.fold import unfold
from partita.program.recompute import blocks_of, modules_of, say_recompute, unclear_calls
from partita.strategy import Case, Place, Promise, Strategy

if TYPE_CHECKING:
    from partita.runtime.site import Site

POLICIES = ("block", "full", "selective")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "*attention*")


@dataclass(frozen=True)
class Recompute(Strategy):
    """Activation recomputation. It uses no axis of the mesh.

    Args:
        policy: What is one region: each "block", the "full" model, or each block but for the ops of `keep` ("selective").
        keep: Globs of op names whose results are kept; of the policy "selective" only.

    With `modules` other than all, the regions are the outermost modules that fit, whatever the policy calls a block.

    Example:
        >>> Recompute().policy
        'block'
    """

    name: ClassVar[str] = "recompute"
    place: ClassVar[Place] = Place.MEMORY
    promise: ClassVar[Promise] = Promise.EXACT

    policy: Literal["block", "full", "selective"] = "block"
    keep: tuple[str, ...] = PRODUCTS

    def __post_init__(self) -> None:
        refuse(_faults(self.policy, self.keep))

    @property
    def axes(self) -> tuple[str, ...]:
        return ()

    def check(self, program: Program, mesh: Mesh) -> Sequence[Fault]:
        regions = self._regions(program)
        if regions:
            return [_unclear(path, program.calls[path]) for path in unclear_calls(program, regions)]
        return [
            Fault(
                "P116",
                f"Recompute(policy={self.policy!r}) finds no module to recompute",
                f"modules = {list(self.modules)!r}; repeated blocks: {len(blocks_of(program))}",
                "a region is a module of a numbered list, or one that modules names",
                "modules = [...] with paths of the model, or policy = 'full'",
                "modules",
            )
        ]

    def rewrite(self, program: Program, mesh: Mesh) -> Program:
        if self.policy == "full" or self.modules != ("*",):  # no copy of a block is like the next
            program = unfold(program)
        return say_recompute(program, self._regions(program), self._kept)

    def apply(self, site: "Site") -> None:
        site.recompute(self._regions(site.program), self._kept)

    @classmethod
    def offers(cls) -> Sequence["Recompute"]:
        return cls(policy="selective"), cls()

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"dp": 2}, {}),
            Case({"tp": 2}, {}),
            Case({"dp": 2}, {"policy": "selective"}, workload="llama"),
            Case({"dp": 2}, {}, workload="resnet"),
            Case({"tp": 2}, {"policy": "full"}),
            Case({"dp": 2, "tp": 2}, {}),
            Case({"tp": 2, "dp": 2}, {"policy": "selective"}),
        )

    # ---- what is repeated
    @property
    def _kept(self) -> tuple[str, ...]:
        return self.keep if self.policy == "selective" else ()

    def _regions(self, program: Program) -> list[str]:
        """Paths of the modules that are recomputed, each as a whole; "" is the model."""
        if self.modules != ("*",):
            return modules_of(program, self.modules)
        return [""] if self.policy == "full" else blocks_of(program)


def _unclear(path: str, calls: int) -> Fault:
    return Fault(
        "P116",
        f"Recompute() cannot tell the calls of module {path!r} apart",
        f"it is called {calls} times in a forward pass, and the calls are not alike",
        "each call of a module is a region of its own, computed again just before its own backward pass",
        "leave it out with modules = [...] of recompute, or policy = 'full'",
        "modules",
    )


def _faults(policy: str, keep: Sequence[str]) -> list[Fault]:
    if policy not in POLICIES:
        law = "a policy says what is computed again as one"
        return [Fault("P107", f"unknown policy {policy!r}", f"policy = {policy!r}", law, ", ".join(POLICIES), "policy")]
    if policy != "selective" and tuple(keep) != PRODUCTS:
        law = "only the policy 'selective' keeps the results of some ops"
        cure = "policy = 'selective', or no such key"
        return [Fault("P112", f"keep has no meaning under policy {policy!r}", f"keep = {list(keep)!r}", law, cure, "keep")]
    return []
