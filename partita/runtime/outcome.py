"""A training run on ranks, and what came of it: losses, whole tensors, what was heard, and measured figures.

run(...) ── run_ranks ── train_ranks on every rank ── Outcome     figures(outcome) has the type of a prediction
"""

import statistics
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from torch import Tensor

from partita.cluster import Where
from partita.cost.collective import backend_bytes
from partita.cost.figures import Figures, Traffic, total
from partita.mesh import Mesh
from partita.program import Program
from partita.program.events import WIDTH
from partita.runtime.forked import Progress
from partita.runtime.loop import train_ranks
from partita.runtime.net import Net
from partita.runtime.ranks import run_ranks
from partita.runtime.subject import Subject
from partita.runtime.training import Training
from partita.runtime.wide import Wide

if TYPE_CHECKING:
    from partita.strategy import Strategy

WARM = 3  # first steps of a run, left out of the timing


@dataclass(frozen=True)
class Outcome:
    """What a run on ranks came to.

    Args:
        mesh: The ranks.
        results: What `train_ranks` returned, by rank.
        tensors: Kind ("state", "gradients", "optimizer") -> whole tensors by name.
    """

    mesh: Mesh
    results: tuple[dict[str, Any], ...]
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def losses(self) -> list[float]:
        return self.results[0]["losses"]

    @property
    def seconds(self) -> list[float]:
        """Per step, of the slowest rank."""
        return [max(step) for step in zip(*(r["seconds"] for r in self.results), strict=True)]

    @property
    def timed(self) -> list[float]:
        """Seconds of the steps that count: those after the first `WARM`, or all of a shorter run."""
        return self.seconds[WARM:] or self.seconds

    @property
    def interrupted(self) -> bool:
        return any(r["interrupted"] for r in self.results)

    @property
    def wire_bytes_per_rank(self) -> float | None:
        """Bytes a rank's sockets sent per optimizer step, mean over the ranks; None where sockets cannot be read."""
        found = [r["wire_bytes"] for r in self.results]
        return None if None in found else sum(found) / len(found)

    @property
    def peak(self) -> float:
        """Peak memory in bytes, of the fullest rank; NaN if it cannot be measured here."""
        return max((r["memory"]["peak"] for r in self.results if r["memory"]["peak"]), default=float("nan"))

    @property
    def resident(self) -> float:
        """Plain resident bytes, of the fullest rank."""
        return max((r["memory"]["resident"] for r in self.results if r["memory"]["resident"]), default=float("nan"))

    def ledgers(self, rank: int) -> list[list[Any]]:
        """A rank's ledger of every step."""
        found, changes = [], dict(map(tuple, self.results[rank]["ledger_changes"]))
        first = self.results[rank]["first"]
        for step in range(first, first + len(self.losses)):
            found.append(changes.get(step, found[-1] if found else []))
        return found

    def traffic(self, backend: str = "gloo", *, all_steps: bool = False) -> tuple[Traffic, ...]:
        """What the busiest rank sent in one step, as its ledger has it: the mean of the newest period, or of all steps.

        A run that was shorter than a period has the mean of the steps it ran.
        """
        busiest = max(range(len(self.results)), key=lambda r: sum(e[2] for e in self.results[r]["ledger"] if e[0] != "receive"))
        steps = self.ledgers(busiest)
        steps = steps if all_steps else steps[-self.results[0]["period"] :]
        rows = [
            (Traffic(axis, op, 1, nbytes, backend_bytes(backend, op, nbytes, self.mesh.size(axis), WIDTH[dtype])), 1)
            for ledger in steps
            for op, axis, nbytes, dtype, *_ in ledger
            if op != "receive"
        ]
        return total(rows, len(steps))

    def figures(self, backend: str = "gloo") -> Figures:
        """Measured figures; `step_seconds` is the 10th percentile of the timed steps."""
        timed = sorted(self.timed)
        return Figures(
            step_seconds=timed[len(timed) // 10] if timed else float("nan"),
            peak=self.peak,
            traffic=self.traffic(backend),
        )

    @property
    def note(self) -> str | None:
        """What a reader should know of how it ran."""
        return self.results[0].get("note")

    @property
    def median(self) -> float:
        """Median seconds of the timed steps."""
        return statistics.median(self.timed) if self.timed else float("nan")


def switch_of(strategies: "Sequence[Strategy]") -> tuple[str, str] | None:
    """The axis ranks reduce over through a switch, and the data plane asked for."""
    return next((s.switch for s in strategies if s.switch), None)


def run(  # noqa: PLR0913 - the last four are keywords of a proof and of the door
    mesh: Mesh,
    subject: Subject,
    strategies: "Sequence[Strategy]",
    program: Program,
    training: Training,
    *,
    wide: bool = False,
    alone: bool = False,
    progress: Progress | None = None,
    cluster: Where = "here",
) -> Outcome:
    """Train on the ranks of a mesh.

    Args:
        mesh: The ranks; its product is their number.
        subject: What is trained.
        strategies: Innermost first.
        program: One global microbatch on one device, flat.
        training: What to do.
        wide: Compute the model's float32 islands in float64, for a proof.
        alone: One rank, whatever torchrun made.
        progress: Told of every step: steps done, loss.
        cluster: The plan's: on a testbed, forked ranks live on its hosts.
    """

    def work(net: Net) -> dict[str, Any]:
        at = net.share(str(training.folder)) if training.folder else None  # torchrun's ranks may each have named their own
        what = replace(training, folder=Path(at)) if at else training
        with Wide() if wide else nullcontext():
            return train_ranks(net, subject, strategies, program, what)

    with tempfile.TemporaryDirectory(prefix="partita-") as exchange:
        folder = Path(exchange)
        results = run_ranks(
            mesh, work, folder=folder, progress=progress, alone=alone, cluster=cluster, switch=switch_of(strategies)
        )
        tensors = {kind: load_file(folder / name) for kind, name in results[0]["files"].items()}
    return Outcome(mesh, tuple(results), tensors)
