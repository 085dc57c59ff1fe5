"""A parameter server that exchanges a part of the model: the significant elements, and others explored at random.

    significance      |w| + c |g| of the served model and the update it just took
    core              the beta n most significant elements, every server of its own shard; one core for all workers
    explorer          (alpha - beta) n of the others, drawn by every worker for every round
    regular round     worker -> server  core values, explorer keys and values    server -> worker  the same elements, no keys
    every q-th        everything goes, both ways, and a new core is chosen and told

An element that is not exchanged keeps what the worker made of it; what it has changed since it was last pulled goes when its
turn comes. In collective form all workers explore the same elements, drawn by one seed, and both ways are one all_reduce.

Source: Sun et al. 2017, "Slim-DP: A Light Communication Data Parallelism for DNN", arXiv:1709.09393 (AAMAS 2018, pp. 721-729).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from partita.errors import Fault
from partita.program import Program
from partita.program.pushing import PushPull, Slim, say_push_pull
from partita.program.relaxing import choice_fault, range_fault
from partita.strategy import Case, Relaxed

if TYPE_CHECKING:
    from partita.runtime.site import Site


@dataclass(frozen=True)
class SlimDP(Relaxed):
    """A parameter server that exchanges a core and an explorer.

    Args:
        axis: The mesh axis that carries the batch and the shards.
        alpha: Share of the elements that a round exchanges.
        beta: Share that is core.
        q: Exchanges from one full one to the next.
        c: Weight of the gradient in the significance: a number, "auto" or "gradient".
        every: Batches from one exchange to the next.
        optimizer_at: "worker" or "server".
        merge: "mean" over those who pushed an element, or "sum", over all workers.
        form: "server" or "collective".
        explorer: Its "keys" are sent, or both ends draw them from a "seed".
        keys: A new core is told as a "list", a "bitmap", or the shorter: "auto".

    Example:
        >>> SlimDP(alpha=0.2, beta=0.1).q
        20
    """

    name: ClassVar[str] = "slim_dp"

    alpha: float = 0.3
    beta: float = 0.15
    q: int = 20
    c: float | str = "auto"
    every: int = 1
    optimizer_at: str = "worker"
    merge: str = "mean"
    form: str = "server"
    explorer: str = "keys"
    keys: str = "auto"

    def setting_faults(self) -> Sequence[Fault]:
        share, more = "the core is a part of what is exchanged, that a part of everything", "alpha = 0.3, beta = 0.15"
        found = [
            *range_fault("alpha", self.alpha, share, more, holds=0 < self.alpha <= 1),
            *range_fault("beta", self.beta, share, more, holds=0 <= self.beta <= self.alpha),
            *range_fault("q", self.q, "a full exchange comes after whole rounds", "q = 1 or more", holds=self.q >= 1),
            *range_fault("every", self.every, "workers exchange after whole batches", "every = 1", holds=self.every >= 1),
            *choice_fault("optimizer_at", self.optimizer_at, ("worker", "server")),
            *choice_fault("merge", self.merge, ("mean", "sum")),
            *choice_fault("form", self.form, ("server", "collective")),
            *choice_fault("explorer", self.explorer, ("keys", "seed")),
            *choice_fault("keys", self.keys, ("auto", "list", "bitmap")),
        ]
        if isinstance(self.c, str):
            return [*found, *choice_fault("c", self.c, ("auto", "gradient"))]
        return [*found, *range_fault("c", self.c, "significance grows with the gradient", 'c = "auto"', holds=self.c >= 0)]

    def exactly(self) -> "SlimDP":
        return replace(self, alpha=1.0, beta=1.0, every=1, optimizer_at="server")

    def agrees(self, step: int) -> bool:
        return self.plan.full(step) is True

    def batches(self) -> int:
        return self.every if self.optimizer_at == "server" else 1

    def say(self, program: Program, size: int) -> Program:
        return say_push_pull(program, self.axis, size, self.name, self.plan)

    def send(self, site: "Site") -> None:
        site.push_and_pull(self.axis, self.plan)

    @property
    def plan(self) -> PushPull:
        """What is exchanged, and when."""
        slim = Slim(self.alpha, self.beta, self.q, self.c, self.merge, self.explorer, self.keys)
        return PushPull(self.every, self.optimizer_at, self.form, slim)

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"dp": 2}, {}),
            Case({"dp": 4}, {"optimizer_at": "server", "q": 3}),
            Case({"dp": 3}, {"every": 2, "q": 2, "explorer": "seed", "keys": "list"}, workload="mlp"),
            Case({"dp": 2}, {"merge": "sum", "keys": "bitmap", "q": 4, "c": 0.0}, workload="resnet"),
            Case({"dp": 2}, {"form": "collective", "q": 3, "c": "gradient"}, workload="llama"),
            Case({"dp": 2, "tp": 2}, {"q": 3, "optimizer_at": "server"}),
            Case({"tp": 2, "dp": 2}, {"q": 2}),
        )
