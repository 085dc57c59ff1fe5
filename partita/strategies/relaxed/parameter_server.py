"""A parameter server, shared out over the ranks of an axis: workers push what they learned and pull the model.

    every p batches      push: each server gets its shard from every worker, and takes the mean         all_to_all n v
                         pull: each worker gets all shards                                              all_gather n v

    optimizer at the worker    it steps by itself, p times, and pushes what that changed: w += mean(w_k - base)
    optimizer at the server    workers push the mean gradient of p batches; each server steps on its shard, and keeps its state

Every rank is worker and server; rounds are synchronous. In collective form every rank serves everything: pushing is one
all_reduce and nothing is pulled. Exact (up to the order of sums) with the optimizer at the server and p = 1.

Source: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server", OSDI; it is the baseline of Sun et
al. 2017, "Slim-DP", arXiv:1709.09393.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from partita.errors import Fault
from partita.program import Program
from partita.program.pushing import PushPull, say_push_pull
from partita.program.relaxing import choice_fault, range_fault
from partita.strategy import Case, Relaxed

if TYPE_CHECKING:
    from partita.runtime.site import Site


@dataclass(frozen=True)
class ParameterServer(Relaxed):
    """A synchronous parameter server whose shards the workers' own ranks serve.

    Args:
        axis: The mesh axis that carries the batch and the shards.
        every: Batches from one exchange to the next.
        optimizer_at: "worker" or "server".
        form: "server" or "collective".

    Example:
        >>> ParameterServer(every=4, optimizer_at="server").axis
        'dp'
    """

    name: ClassVar[str] = "parameter_server"

    every: int = 1
    optimizer_at: str = "worker"
    form: str = "server"

    def setting_faults(self) -> Sequence[Fault]:
        return [
            *range_fault("every", self.every, "workers exchange after whole batches", "every = 1", holds=self.every >= 1),
            *choice_fault("optimizer_at", self.optimizer_at, ("worker", "server")),
            *choice_fault("form", self.form, ("server", "collective")),
        ]

    def exactly(self) -> "ParameterServer":
        return replace(self, every=1, optimizer_at="server")

    def agrees(self, step: int) -> bool:
        return self.plan.at == "server" or self.plan.full(step) is not None

    def batches(self) -> int:
        return self.every if self.optimizer_at == "server" else 1

    def say(self, program: Program, size: int) -> Program:
        return say_push_pull(program, self.axis, size, self.name, self.plan)

    def send(self, site: "Site") -> None:
        site.push_and_pull(self.axis, self.plan)

    @property
    def plan(self) -> PushPull:
        """What is exchanged, and when."""
        return PushPull(self.every, self.optimizer_at, self.form)

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"dp": 2}, {}),
            Case({"dp": 4}, {"optimizer_at": "server"}),
            Case({"dp": 2}, {"every": 3}, workload="resnet"),
            Case({"dp": 3}, {"every": 2, "optimizer_at": "server"}, workload="mlp"),
            Case({"dp": 2}, {"form": "collective"}, workload="mlp"),
            Case({"dp": 2}, {"form": "collective", "optimizer_at": "server"}, workload="llama"),
            Case({"dp": 2, "tp": 2}, {"optimizer_at": "server"}),
            Case({"tp": 2, "dp": 2}, {"every": 2}),
        )
