"""What a training run came to, in the words of the contract."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from partita.api.exporting import export_run
from partita.api.folder import first_rank
from partita.api.planning import Estimate
from partita.api.restarting import Restart
from partita.cost.figures import Figures
from partita.plans import Plan
from partita.runtime.outcome import Outcome


@dataclass(frozen=True)
class Run:
    """What a training run came to.

    Args:
        plan: That was run.
        outcome: Of the ranks; None after a dry run.
        predicted: Before it started.
        figures: Measured; their step time is the 10th percentile of the timed steps.
        run_dir: Where it wrote; None if nowhere.
        sample: Of the text it learned.
        before: Losses of the steps that lost ranks ran for those that went on.
        restarts: After lost ranks, in order.
    """

    plan: Plan
    predicted: Estimate
    outcome: Outcome | None = None
    figures: Figures | None = None
    run_dir: Path | None = None
    sample: str | None = None
    notes: tuple[str, ...] = field(default=())
    before: tuple[float, ...] = ()
    restarts: tuple[Restart, ...] = ()

    @property
    def speaks(self) -> bool:
        """Whether this process tells of the run: one of those torchrun made, or the only one."""
        return first_rank()

    @property
    def losses(self) -> list[float]:
        """The global loss of every step, as one device computes it."""
        return [*self.before, *self.outcome.losses] if self.outcome else []

    @property
    def error(self) -> dict[str, float]:
        """Predicted / measured - 1: time, memory, traffic."""
        return self.predicted.figures.error(self.figures) if self.figures else {}

    def state_dict(self) -> dict[str, Tensor]:
        """Whole parameters and buffers, as on one device."""
        return self._kept("state")

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients of the last step; needs ``keep_gradients=True``."""
        return self._kept("gradients")

    def export(self, file: str | Path) -> Path:
        """Write the whole model as one safetensors file, as `partita show DIR --export FILE` does."""
        tied = self.outcome.results[0]["tied"] if self.outcome else {}
        return export_run(self.plan, self.state_dict(), tied, Path(file))

    def _kept(self, kind: str) -> dict[str, Tensor]:
        if self.outcome is None or kind not in self.outcome.tensors:
            raise LookupError(
                f"this run kept no {kind}: pass keep_gradients=True" if kind == "gradients" else "a dry run keeps nothing"
            )
        dropped = self.outcome.results[0]["transient"] if kind == "state" else ()  # buffers outside a state dict
        return {name: t for name, t in self.outcome.tensors[kind].items() if name not in dropped}

    def json(self) -> dict[str, Any]:
        """The keys of the contract."""
        if self.outcome is None or self.figures is None:
            return {"steps": 0, "losses": [], "predicted": self.predicted.json(), "run_dir": None, "notes": list(self.notes)}
        outcome, held = self.outcome, self.outcome.results[0]["held_out"]
        return {
            "steps": outcome.results[0]["first"] + len(outcome.losses),
            "losses": self.losses,
            "held_out_loss": held[-1][1] if held else None,
            "step_seconds": outcome.median,
            "step_seconds_p10": self.figures.step_seconds,
            "memory_bytes": {"peak": outcome.peak},
            "resident_bytes": outcome.resident,
            "traffic": [t.json() for t in self.figures.traffic],
            "wire_bytes_per_rank": outcome.wire_bytes_per_rank,
            "predicted": self.predicted.json(),
            "error": self.error,
            "run_dir": str(self.run_dir) if self.run_dir else None,
            "interrupted": outcome.interrupted,
            "checkpoints": outcome.results[0]["checkpoints"],
            "restarts": [restart.json() for restart in self.restarts],
            "sample": self.sample,
            "notes": list(self.notes),
        }
