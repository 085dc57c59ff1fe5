"""Proves a plan on a small copy, in child processes.

numerics   float64: split run against the user's module under plain torch; gradients, parameters, losses after some steps
square     the plan's dtype: what was said against what each rank's recorder heard, and its ledger
traffic    bytes as a consequence, and the wire within 1 % of the backend's model for payloads of 1 MB and more
memory     the fold's peak against the measured one, on plans of 100 MiB and more
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from torch.utils._pytree import tree_leaves

from partita.cluster import Where
from partita.errors import RunFailed, refuse
from partita.mesh import Mesh
from partita.plans import Plan
from partita.program import Program
from partita.program.rounds import rounds_of
from partita.proof.figures import Memory, memory_of, wire_of
from partita.proof.numerics import BOUND, Numerics, compare
from partita.proof.reference import KEPT, Alone, alone, fresh, in_double, wide_program
from partita.proof.relaxed import agreements, exact_setting, learning
from partita.proof.shrink import BLOCKS, shrink_mesh, shrink_workload, ways
from partita.proof.square import Call, Difference, first_difference, said_calls
from partita.proof.verdict import Proof
from partita.runtime.batch import Feed
from partita.runtime.capture import capture
from partita.runtime.launch import cache_folder
from partita.runtime.outcome import Outcome, run
from partita.runtime.programs import dressed, program_of
from partita.runtime.subject import Subject
from partita.runtime.task import subject_of
from partita.runtime.training import Training
from partita.strategy import Promise, Strategy, check, compose_roles, microbatches, pipeline_of
from partita.workload import Workload

__all__ = ["STEPS", "Proof", "prove_plan", "prove_subject"]

STEPS = 3
NEAR = 4  # steps: so short a period is run through twice


def prove_plan(plan: Plan, *, ranks: int | None = None, shrink: bool = True, band: bool = True) -> Proof:
    """Prove a plan that names its workload.

    Args:
        plan: Any legal plan.
        ranks: Ranks the copy may use; None means the fewest.
        shrink: False proves the plan at its own size.
        band: Train with a relaxed strategy and with its exact setting, and compare what they learn.

    Raises:
        Refused: What the plan itself is refused for; P118, when `ranks` is below the smallest copy.
    """
    workload, mesh, lines = plan.workload, plan.mesh, []
    assert workload is not None, "the door refuses a plan without a workload"
    with tempfile.TemporaryDirectory(prefix="partita-") as folder:
        if shrink:
            fixed = [axis for s in plan.strategies for axis in s.fixed]
            mesh = shrink_mesh(plan.mesh, ranks, whole=_own_size(workload), fixed=fixed)
            whole = replace(workload, accumulate=plan.microbatches)
            refuse(check(program_of(whole, cache_folder()), plan.strategies, plan.mesh))
            cuts = ways(plan.strategies, plan.mesh), ways(plan.strategies, mesh)
            workload, lines = shrink_workload(
                workload,
                cuts,
                data_ranks(plan.strategies, mesh),
                Path(folder),
                rounds=microbatches(plan.strategies, 1),
                blocks=BLOCKS * stages_of(plan.strategies, mesh),
            )
            lines = [f"mesh {a}: {n} -> {mesh.size(a)}" for a, n in plan.mesh.axes if n != mesh.size(a)] + lines
        return prove_subject(
            subject_of(workload, synthetic=True),
            plan.strategies,
            mesh,
            training_of(workload, STEPS, plan.strategies),
            like=workload,
            shrunk=tuple(lines),
            reference=fresh(workload) if shrink and _outsiders(plan.strategies) else alone,
            band=band,
            cluster=plan.cluster,
        )


def _own_size(workload: Workload) -> bool:
    """A user's own code cannot be shrunk."""
    return workload.spec is None and not workload.model.startswith("hf:")


def _outsiders(strategies: Sequence[Strategy]) -> bool:
    return any(type(s).__module__.partition(".")[0] != "partita" for s in strategies)


def training_of(workload: Workload, steps: int, strategies: Sequence[Strategy] = ()) -> Training:
    """The loop's settings that a workload and the strategies fix."""
    return Training(
        steps=steps,
        microbatches=microbatches(strategies, workload.accumulate),
        clip=None if workload.clip is None else (workload.clip, 2.0),
        schedule=workload.schedule,
        warmup=workload.warmup,
        horizon=workload.horizon,
        seed=workload.seed,
    )


def stages_of(strategies: Sequence[Strategy], mesh: Mesh) -> int:
    """Stages the model is cut into."""
    pipeline = pipeline_of(strategies, mesh)
    return pipeline.schedule(mesh.size(pipeline.axis)).stages if pipeline else 1


def data_ranks(strategies: Sequence[Strategy], mesh: Mesh) -> int:
    """Parts the batch is cut into."""
    ranks = 1
    for axis in (a for s in strategies for a in s.batch_axes):
        ranks *= mesh.size(axis)
    return ranks


def prove_subject(  # noqa: PLR0913 - the subject, and how it is proved
    subject: Subject,
    strategies: Sequence[Strategy],
    mesh: Mesh,
    training: Training,
    *,
    like: Workload | None = None,
    shrunk: tuple[str, ...] = (),
    reference: Alone = alone,
    band: bool = True,
    cluster: Where = "here",
) -> Proof:
    """Prove strategies on a subject as it is.

    Args:
        subject: What is trained; its batches are global.
        strategies: Innermost first.
        mesh: The ranks.
        training: Steps, microbatches, clipping; nothing is written.
        like: The workload it came from: master copies and reduction dtype.
        shrunk: Lines to print.
        reference: Runs the single device.
        band: As of `prove_plan`.
        cluster: On a testbed, the ranks whose calls and bytes are recorded live on its hosts.

    Raises:
        Refused: What the strategies refuse.
    """
    feed = Feed(subject.batches)
    refuse(feed.ahead(training.steps))
    feed(0)
    samples = (feed.samples or 1) // training.microbatches
    subject = replace(subject, batches=feed)
    training = replace(training, folder=None, resume=None, held_out=None, keep=frozenset())
    program = _said(capture(subject, samples), training, like)
    refuse(check(program, strategies, mesh))
    steps = recorded_steps(compose_roles(program, strategies, mesh), training.steps)
    training = replace(training, steps=max(training.steps, steps[-1] + 1), record=frozenset(steps))
    refuse(feed.ahead(training.steps))
    roles = {
        step: tuple(
            r.step(step)
            for r in compose_roles(_of_step(program, subject, feed, step, samples, training, like), strategies, mesh)
        )
        for step in steps
    }
    calls = {step: [said_calls(role.collectives()) for role in some] for step, some in roles.items()}
    notes, said = roles[steps[0]][0].notes, sum(len(some[0]) for some in calls.values())
    promise = promise_of(strategies, mesh, training.microbatches)
    try:
        real = _ended(run(mesh, subject, strategies, program, training, cluster=cluster))
        numerics = _numerics(in_double(subject), samples, strategies, mesh, training, reference)
        relaxed = band and promise == Promise.RELAXED
        learned = learning(subject, strategies, mesh, program, training) if relaxed else []
    except RunFailed as failed:  # a rank that dies, hangs or raises is what a wrong strategy may come to
        none = Numerics(math.inf, BOUND[promise], "the run did not end")
        return Proof(promise, none, said, 0, notes=notes, shrunk=shrunk, failure=str(failed))
    heard = {
        step: {
            r["rank"]: [Call(*entry[:4]) for s, entries in r["recorded"] if s == step for entry in entries]
            for r in real.results
        }
        for step in steps
    }
    found = (_difference(calls[step], heard[step], coordinates_of(strategies, mesh)) for step in steps)
    return Proof(
        promise=promise,
        numerics=numerics,
        said=said,
        heard=sum(len(some[0]) for some in heard.values()),
        difference=next((d for d in found if d is not None), None),
        ledger_equal=all(_same_ledgers(real, step) for step in steps),
        wire=wire_of([c for some in roles.values() for role in some for c in role.collectives()], real),
        memory=_fullest([memory_of(some, real) for some in roles.values()]),
        notes=notes,
        shrunk=shrunk,
        invariants=(*agreements(strategies, mesh, real), *learned),
    )


def recorded_steps(roles: Sequence[Program], steps: int) -> list[int]:
    """Which steps a proof records: one, or the first of each kind; the very first step of all only if it is far to the next."""
    rounds = rounds_of(roles)
    if len(rounds) == 1:
        return [max(min(3, steps) - 2, 0)]
    period = roles[0].period
    return sorted(r.first or (period if period <= NEAR else 0) for r in rounds)


def _fullest(found: Sequence[Memory]) -> Memory:
    """That of the kind of step that needs most."""
    return max(found, key=lambda one: one.predicted or 0.0)


def _ended(real: Outcome) -> Outcome:
    """The outcome, unless Ctrl-C cut it short: half a run proves nothing."""
    if real.interrupted:
        raise KeyboardInterrupt("interrupted: nothing was proved")
    return real


def _said(program: Program, training: Training, like: Workload | None) -> Program:
    """A captured program with what the step around it does."""
    said = program if like is None else dressed(program, like)
    return replace(said, microbatches=training.microbatches, clip=training.clip is not None)


def coordinates_of(strategies: Sequence[Strategy], mesh: Mesh) -> dict[int, int]:
    """Rank -> which role it has."""
    pipeline = pipeline_of(strategies, mesh)
    return {r: mesh.coordinate(r)[pipeline.axis] if pipeline else 0 for r in range(mesh.ranks)}


def _difference(
    said: Sequence[Sequence[Call]], heard: Mapping[int, Sequence[Call]], roles: Mapping[int, int]
) -> Difference | None:
    """The first difference of any rank from its own role."""
    found = (first_difference(said[roles[rank]], {rank: calls}) for rank, calls in sorted(heard.items()))
    return next((d for d in found if d is not None), None)


def _of_step(
    program: Program, subject: Subject, feed: Feed, step: int, samples: int, training: Training, like: Workload | None
) -> Program:
    """The program of a step: another one than of the first if its batch has other sizes."""
    if step == 0 or not _differs(feed, step):
        return program
    return _said(capture(replace(subject, batches=lambda _: feed(step)), samples), training, like)


def _differs(feed: Feed, step: int) -> bool:
    """Whether the batch of a step has other sizes than the first one."""
    sizes = [[t.shape for t in tree_leaves(feed(k)) if isinstance(t, Tensor)] for k in (0, step)]
    return sizes[0] != sizes[1]


def _same_ledgers(real: Outcome, audited: int) -> bool:
    """Whether every rank's ledger of the recorded step is what its recorder heard."""
    for r in real.results:
        sent = [ledger for step, ledger in r["ledger_changes"] if step <= audited]
        heard = next((entries for step, entries in r["recorded"] if step == audited), [])
        if sent and [e[:4] for e in sent[-1]] != [h[:4] for h in heard]:
            return False
    return True


def _numerics(
    subject: Subject, samples: int, strategies: Sequence[Strategy], mesh: Mesh, training: Training, reference: Alone
) -> Numerics:
    """The split run of a subject in double against one device."""
    strategies, subject, training = exact_setting(strategies, subject, training)
    program = _said(wide_program(subject, samples), training, None)
    kept = replace(training, keep=frozenset(KEPT), audit=False, record=frozenset())
    split = _ended(run(mesh, subject, strategies, program, kept, wide=True))
    whole = reference(subject, program, training)
    pairs = {"parameter": (split.tensors["state"], whole.state), "gradient": (split.tensors["gradients"], whole.gradients)}
    return compare(promise_of(strategies, mesh, training.microbatches), (split.losses, whole.losses), pairs)


def promise_of(strategies: Sequence[Strategy], mesh: Mesh, microbatches: int) -> Promise:
    """The weakest promise of strategies that do something; accumulation reorders sums as well."""
    working = {s.promise for s in strategies if not s.axes or any(mesh.size(a) > 1 for a in s.axes)}
    if Promise.RELAXED in working:
        return Promise.RELAXED
    return Promise.REORDERED if Promise.REORDERED in working or microbatches > 1 else Promise.EXACT
