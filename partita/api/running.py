"""train: predicts, runs on ranks, and says predicted | measured | error.

The prediction is computed and written before the first rank starts; nothing measured in the run enters it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from partita.api.folder import Opening, folder_faults, folders, held, put, steps_left
from partita.api.own import Batches, Loss, Model, OptimizerFactory, subject_from
from partita.api.planning import Estimate, estimate, probed, with_workload
from partita.api.planning import plan as search_plans
from partita.api.probing import probe
from partita.api.restarting import Policy, Ran, Restart, policy_faults, run_on
from partita.api.run import Run
from partita.cluster import Testbed, Where, cores
from partita.errors import Fault, RankLost, Refused, RunFailed, refuse
from partita.pages.json import dumps
from partita.plans import Plan
from partita.program import Program
from partita.runtime import testbed
from partita.runtime.batch import Feed, divides
from partita.runtime.capture import capture
from partita.runtime.checkpoint import steps as steps_of
from partita.runtime.launch import ranks_from_environment
from partita.runtime.outcome import Outcome
from partita.runtime.programs import dressed
from partita.runtime.sample import sample
from partita.runtime.subject import Subject
from partita.runtime.task import subject_of
from partita.runtime.training import Training
from partita.runtime.weights import open_weights
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
    start: str | Path | None = None,
    restarts: int = 0,
    shrink: bool = False,
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
        start: A model file (model.safetensors, or its folder) to start from, with a fresh optimizer.
        restarts: How often to go on by itself after a lost rank, from the newest good checkpoint.
        shrink: Go on with a smaller data axis after the first lost rank; else when the same rank is lost again.
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
    policy = Policy(restarts, shrink, _sayer(progress))
    beginning = _started(start, source)
    refuse([*steps_left(source, training.steps), *folder_faults(folder, source), *policy_faults(policy)])
    if not dry_run:
        refuse(testbed.faults(plan.cluster))
        _measured(plan.cluster)
    program, subject = _captured(plan, subject, training, own=own)
    predicted = estimate(plan, program)
    refuse(_room(predicted))
    if dry_run:
        return Run(plan, predicted, notes=("a dry run: no rank was started",))
    training = replace(training, folder=folder, resume=source, start=beginning)
    with _opened(folder, plan, predicted):
        try:
            ran = run_on(plan, subject, program, training, policy, _teller(progress, training))
        except RunFailed as failed:
            raise _with_a_way_on(failed, folder, training.steps) from failed
        return _told(ran, subject, predicted, program, folder, own=own)


@contextmanager
def _opened(folder: Path | None, plan: Plan, predicted: Estimate) -> Iterator[None]:
    """The run folder, for this run alone; left as it was found if the ranks refuse the input."""
    if folder is None:
        yield
        return
    opening = Opening(folder)
    try:
        with held(opening.make()):
            opening.write(plan, predicted)
            yield
    except Refused:
        opening.undo()
        raise


def _told(ran: Ran, subject: Subject, predicted: Estimate, program: Program, folder: Path | None, *, own: bool) -> Run:
    """What the run came to, with its summary written."""
    outcome = ran.outcome
    text = _sample(ran.plan, subject, outcome) if not own and not outcome.interrupted else None
    said = predicted if ran.plan.mesh == predicted.plan.mesh else estimate(ran.plan, program)
    how = [note for note in (testbed.note(ran.plan.cluster), outcome.note) if note]
    notes = (*said.figures.notes, *how, *(str(restart) for restart in ran.restarts))
    done = Run(ran.plan, said, outcome, outcome.figures(), folder, text, notes, ran.before, ran.restarts)
    if folder is not None and done.speaks:
        try:
            put(folder / "summary.json", dumps(_movable(done.json())) + "\n")
            timelines = {str(r["rank"]): r["timeline"] for r in outcome.results}
            put(folder / "timeline.json", dumps(timelines) + "\n")
        except OSError as error:
            failed = RunFailed(f"cannot write the summary of {str(folder)!r}: {error.strerror}")
            raise _with_a_way_on(failed, folder, done.json()["steps"]) from None
    if outcome.interrupted:
        at = f"; go on with: partita train --resume {folder}" if folder else ""
        raise KeyboardInterrupt(f"stopped after step {done.json()['steps']}{at}")
    return done


# ---- what is trained
def _measured(cluster: Where) -> None:
    """This machine, measured if it has not been and the plan runs on it."""
    if (cluster == "here" or isinstance(cluster, Testbed)) and not probed() and ranks_from_environment() is None:
        probe(quick=True)


def main_plan(workload: Workload = MAIN) -> Plan:
    """The small GPT, split as is best on this machine."""
    _measured("here")
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


def _started(start: str | Path | None, source: Path | None) -> Path | None:
    """The model file to start from, once it can be opened."""
    if start is None:
        return None
    if source is not None:
        law = "a resumed run has its parameters from its checkpoint"
        cure = "one of the two: --resume goes on, --from starts anew"
        refuse(
            [Fault("P112", "a run cannot both start from a model file and go on from a checkpoint", "", law, cure, "--from")]
        )
    open_weights(Path(start))
    return Path(start).resolve()


def _room(predicted: Estimate) -> list[Fault]:
    figures = predicted.figures
    if figures.fits:
        return []
    room = predicted.cluster.room(predicted.plan.mesh.ranks)
    have = f"peak {format_bytes(figures.peak)} at {figures.peak_at}, room {format_bytes(room)}"
    law = "the fullest rank must fit its device"
    return [Fault("P111", "the plan does not fit", have, law, "a smaller batch, accumulate, more ranks", "workload.batch")]


def _with_a_way_on(failed: RunFailed, folder: Path | None, steps: int) -> RunFailed:
    """The failure with what to do next: from the last checkpoint, if there is one."""
    kept = steps_of(folder / "checkpoints") if folder is not None else []
    if kept and kept[-1] >= steps:
        cure = (
            f"all {steps} steps are done and saved: partita show {folder} --export FILE, or --resume {folder} with more --steps"
        )
    elif kept:
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


def _sayer(progress: Told | None) -> Callable[[Restart], None]:
    return lambda restart: progress({"step": restart.step, "notice": str(restart)}) if progress else None


def _sample(plan: Plan, subject: Subject, outcome: Outcome) -> str | None:
    """Text from a byte-level model, if that is what was trained."""
    spec = with_workload(plan).spec
    if not isinstance(spec, GPT | Llama) or with_workload(plan).model.startswith("hf:") or "state" not in outcome.tensors:
        return None
    return sample(subject.make, outcome.tensors["state"], spec.sequence)
