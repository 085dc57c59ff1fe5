"""train: predicts, runs on ranks, and says predicted | measured | error.

The prediction is computed and written before the first rank starts; nothing measured in the run enters it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from partita.api.folder import folder_faults, folders, opened, steps_left
from partita.api.own import Batches, Loss, Model, OptimizerFactory, subject_from
from partita.api.planning import Estimate, estimate, probed, with_workload
from partita.api.planning import plan as search_plans
from partita.api.probing import probe
from partita.cluster import cores
from partita.cost.figures import Figures
from partita.errors import Fault, RankLost, RunFailed, refuse
from partita.pages.json import dumps
from partita.plans import Plan
from partita.program import Program
from partita.runtime.batch import Feed, divides
from partita.runtime.capture import capture
from partita.runtime.checkpoint import steps as steps_of
from partita.runtime.launch import first_rank, ranks_from_environment
from partita.runtime.outcome import Outcome, run
from partita.runtime.programs import dressed
from partita.runtime.sample import sample
from partita.runtime.subject import Subject
from partita.runtime.task import subject_of
from partita.runtime.training import Training
from partita.units import format_bytes
from partita.workload import GPT, Llama, Workload

Told = Callable[[Mapping[str, Any]], None]

STEPS = 200  # of a run that does not say
# The main job: a byte-level model that a laptop trains in minutes. Rate and schedule as for small GPTs of this width.
MAIN = Workload(
    "gpt",
    GPT(layers=4, hidden=256, heads=4, vocab=256, sequence=128),
    batch=32,
    learning_rate=2e-3,
    schedule="cosine",
    warmup=20,
    horizon=STEPS,
)
MOST_RANKS = 4  # of the main job


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
    """

    plan: Plan
    predicted: Estimate
    outcome: Outcome | None = None
    figures: Figures | None = None
    run_dir: Path | None = None
    sample: str | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def speaks(self) -> bool:
        """Whether this process tells of the run: one of those torchrun made, or the only one."""
        return first_rank()

    @property
    def losses(self) -> list[float]:
        """The global loss of every step, as one device computes it."""
        return self.outcome.losses if self.outcome else []

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
            "losses": outcome.losses,
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
            "sample": self.sample,
            "notes": list(self.notes),
        }


def train(  # noqa: PLR0913 - the contract's keywords
    plan: Plan | None = None,
    *,
    model: Model | None = None,
    batches: Batches | None = None,
    loss: Loss | None = None,
    optimizer: OptimizerFactory | None = None,
    forward: tuple[str, ...] | None = None,
    steps: int | None = None,
    clip: tuple[float, float] | float | None = None,
    batch_norm: str | None = None,
    keep_gradients: bool = False,
    data: str | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    save_every: int | None = None,
    eval_every: int | None = None,
    dry_run: bool = False,
    progress: Told | None = None,
) -> Run:
    """Train a plan's workload, or a model of your own, on the ranks the plan needs.

    Args:
        plan: None trains a small GPT on this machine, with a planned split, on the standard library's own source text.
        model: A seeded factory, or a module; None trains the plan's workload.
        batches: batches(step) -> the global batch of a step as keyword arguments, or an iterable of them.
        loss: loss(output, batch) -> a scalar, or (sum, weight).
        optimizer: optimizer(module) -> an optimizer of its parameters [AdamW].
        forward: Batch keys passed to the module [those its forward accepts].
        steps: In all; a resumed run goes on to this number [200].
        clip: Largest gradient norm, or (norm, p) [the workload's].
        batch_norm: "microbatch" accepts batch statistics of microbatches.
        keep_gradients: Keep the last step's gradients.
        data: A text file or folder, for the main job.
        out: The run folder; must not exist or be empty.
        resume: A run folder to go on from.
        save_every, eval_every: Steps between checkpoints and held-out losses; None means at the end.
        dry_run: Predict, and start no rank.
        progress: Told of every step.

    Raises:
        Refused: Before anything starts, with every fault.
        RunFailed: When the ground gives way; the message names the cause and a way on.
        KeyboardInterrupt: After Ctrl-C, when the step is finished and saved.
    """
    plan = plan or main_plan(replace(MAIN, data=data))
    own = model is not None
    subject = subject_of(with_workload(plan)) if model is None else subject_from(model, batches, loss, optimizer, forward)
    asked = Training(
        steps or STEPS,
        clip=_pair(clip),
        batch_norm=batch_norm,
        save_every=save_every,
        evaluate_every=eval_every,
        keep=frozenset({"state", "gradients"} if keep_gradients else {"state"}),
    )
    training = _completed(asked, plan, subject, own=own)
    folder, source = folders(plan, out, resume, own=own)
    refuse([*steps_left(source, training.steps), *folder_faults(folder, source)])
    if plan.cluster == "here" and not dry_run and not probed() and ranks_from_environment() is None:
        probe(quick=True)
    program, subject = _captured(plan, subject, training, own=own)
    predicted = estimate(plan, program)
    refuse(_room(predicted))
    if dry_run:
        return Run(plan, predicted, notes=("a dry run: no rank was started",))
    if folder is not None:
        opened(folder, plan, predicted)
    training = replace(training, folder=folder, resume=source)
    try:
        outcome = run(plan.mesh, subject, plan.strategies, program, training, progress=_teller(progress, training))
    except RunFailed as failed:
        raise _with_a_way_on(failed, folder) from failed
    text = _sample(plan, subject, outcome) if not own else None
    done = Run(plan, predicted, outcome, outcome.figures(), folder, text, predicted.figures.notes)
    if folder is not None and done.speaks:
        (folder / "summary.json").write_text(dumps(_movable(done.json())) + "\n")
        timelines = {str(r["rank"]): r["timeline"] for r in outcome.results}
        (folder / "timeline.json").write_text(dumps(timelines) + "\n")
    if outcome.interrupted:
        at = f"; go on with: partita train --resume {folder}" if folder else ""
        raise KeyboardInterrupt(f"stopped after step {done.json()['steps']}{at}")
    return done


# ---- what is trained
def main_plan(workload: Workload = MAIN) -> Plan:
    """The small GPT, split as is best on this machine."""
    if not probed() and ranks_from_environment() is None:
        probe(quick=True)
    counts = [n for n in (1, 2, 4) if n <= min(cores(), MOST_RANKS)]
    found = [search_plans(workload, on="here", ranks=n).plans[0] for n in counts]
    return min(found, key=lambda choice: choice.figures.step_seconds).plan


def _pair(clip: tuple[float, float] | float | None) -> tuple[float, float] | None:
    """(largest norm, p)."""
    return (float(clip), 2.0) if isinstance(clip, int | float) else clip


def _completed(asked: Training, plan: Plan, subject: Subject, *, own: bool) -> Training:
    """What was asked for, and the rest from the plan's workload."""
    if own:
        return replace(asked, microbatches=plan.microbatches)
    workload = with_workload(plan)
    return replace(
        asked,
        microbatches=plan.microbatches,
        clip=asked.clip or _pair(workload.clip),
        schedule=workload.schedule,
        warmup=workload.warmup,
        horizon=workload.horizon,
        seed=workload.seed,
        held_out=subject.held_out,
    )


def _captured(plan: Plan, subject: Subject, training: Training, *, own: bool) -> tuple[Program, Subject]:
    """The single-device Program of one global microbatch, and the subject with its batches checked as they come."""
    feed = subject.batches if isinstance(subject.batches, Feed) else Feed(subject.batches)
    refuse(feed.ahead(training.steps))
    feed(0)
    samples = feed.samples or 1
    refuse(divides(samples, 1, training.microbatches))
    subject = replace(subject, batches=feed)
    program = capture(subject, samples // training.microbatches)
    like = Workload("python", batch=samples, accumulate=training.microbatches) if own else with_workload(plan)
    return replace(dressed(program, like), microbatches=training.microbatches, clip=training.clip is not None), subject


def _room(predicted: Estimate) -> list[Fault]:
    figures = predicted.figures
    if figures.fits:
        return []
    room = predicted.cluster.room(predicted.plan.mesh.ranks)
    have = f"peak {format_bytes(figures.peak)} at {figures.peak_at}, room {format_bytes(room)}"
    law = "the fullest rank must fit its device"
    return [Fault("P111", "the plan does not fit", have, law, "a smaller batch, accumulate, more ranks", "workload.batch")]


def _with_a_way_on(failed: RunFailed, folder: Path | None) -> RunFailed:
    """The failure with what to do next: from the last checkpoint, if there is one."""
    kept = steps_of(folder / "checkpoints") if folder is not None else []
    if kept:
        cure = f"partita train --resume {folder} goes on from step {kept[-1]}"
    else:
        cure = "no checkpoint was written yet; --save-every K writes one every K steps"
    text = f"{failed}\n  try    {cure}"
    return RankLost(text, failed.rank) if isinstance(failed, RankLost) else RunFailed(text)


def _movable(said: dict[str, Any]) -> dict[str, Any]:
    """A summary without absolute paths."""
    return {**said, "run_dir": "."}


def _teller(progress: Told | None, training: Training) -> Callable[[int, float], None] | None:
    if progress is None:
        return None
    return lambda step, loss: progress({"step": step, "steps": training.steps, "loss": loss})


def _sample(plan: Plan, subject: Subject, outcome: Outcome) -> str | None:
    """Text from a byte-level model, if that is what was trained."""
    spec = with_workload(plan).spec
    if not isinstance(spec, GPT | Llama) or with_workload(plan).model.startswith("hf:") or "state" not in outcome.tensors:
        return None
    return sample(subject.make, outcome.tensors["state"], spec.sequence)
