"""Proves a plan on a small copy, in child processes.

numerics   float64: split run against the user's module under plain torch; gradients, parameters, losses after some steps
square     the plan's dtype: what was said against what each rank's recorder heard, and its ledger
traffic    bytes as a consequence, and the wire within 1 % of the backend's model for payloads of 1 MB and more
memory     the fold's peak against the measured one, on plans of 100 MiB and more
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from partita.cost.memory import occupancy
from partita.errors import refuse
from partita.mesh import Mesh
from partita.plans import Plan
from partita.program import Collective, Program
from partita.proof.numerics import Numerics, compare
from partita.proof.shrink import shrink_mesh, shrink_workload
from partita.proof.square import Call, Difference, first_difference, said_calls
from partita.runtime.batch import Feed
from partita.runtime.capture import capture
from partita.runtime.launch import run_ranks
from partita.runtime.net import Net
from partita.runtime.outcome import Outcome, run
from partita.runtime.programs import dressed
from partita.runtime.random import draws
from partita.runtime.subject import Subject, subject_of
from partita.runtime.training import Training
from partita.runtime.whole import train_whole
from partita.runtime.wide import Wide
from partita.strategy import Place, Promise, Strategy, check, compose
from partita.workload import Workload

STEPS = 3
MEGABYTE = 10**6  # payload from which on the wire is judged
WIRE_BOUND = 0.01
JUDGED = 100 << 20  # bytes: below, memory is measured but not judged
MEMORY_BOUND, MEMORY_SLACK = 0.05, 2 << 20


@dataclass(frozen=True)
class Proof:
    """What a proof found; `proved` only if everything held.

    Args:
        promise: Of the plan: the weakest of its strategies.
        numerics: The split run against the whole one.
        said, heard: Events in the said list and in the first rank's.
        difference: The first place where a rank did not do what was said.
        ledger_equal: Whether every rank's ledger and recorder agree.
        wire_error: Counted bytes / the backend's model - 1; None when no payload is large enough, or sockets cannot be read.
        memory_error: Predicted / measured - 1; None when the copy is too small to judge.
        notes: What was shrunk, and what the Program says of itself.
    """

    promise: Promise
    numerics: Numerics
    said: int
    heard: int
    difference: Difference | None
    ledger_equal: bool
    wire_error: float | None
    memory_error: float | None
    memory_held: bool
    notes: tuple[str, ...] = ()
    shrunk: tuple[str, ...] = ()
    invariants: tuple[dict[str, Any], ...] = field(default=())

    @property
    def proved(self) -> bool:
        return not self.reasons

    @property
    def reasons(self) -> list[str]:
        """Everything that did not hold."""
        found = []
        if not self.numerics.held:
            n = self.numerics
            found.append(f"numerics: {n.worst_tensor} differs by {n.max_relative_error:.3g}, more than {n.bound:.3g}")
        if self.difference is not None:
            d = self.difference
            where = f"square: rank {d.rank}, call {d.index} on {d.axis} differs in {', '.join(d.fields)}"
            found.append(f"{where}: said {d.said}, heard {d.heard}")
        if not self.ledger_equal:
            found.append("traffic: a rank's ledger and its recorder disagree")
        if self.wire_error is not None and abs(self.wire_error) > WIRE_BOUND:
            found.append(f"traffic: the wire carried {self.wire_error:+.2%} against the backend's model")
        if not self.memory_held:
            found.append(f"memory: predicted {self.memory_error:+.1%} against measured")
        return found

    def json(self) -> dict[str, Any]:
        """The keys of the contract."""
        square = {"equal": self.difference is None, "said": self.said, "heard": self.heard}
        return {
            "proved": self.proved,
            "promise": str(self.promise),
            "square": {**square, "first_difference": self.difference.json() if self.difference else None},
            "numerics": self.numerics.json(),
            "traffic": {"algorithmic_equal": self.difference is None and self.ledger_equal, "wire_error": self.wire_error},
            "memory": {"error": self.memory_error},
            "invariants": list(self.invariants),
            "reasons": self.reasons,
            "shrunk": list(self.shrunk),
            "notes": list(self.notes),
        }


def prove_plan(plan: Plan, *, ranks: int | None = None, shrink: bool = True) -> Proof:
    """Prove a plan that names its workload.

    Args:
        plan: Any legal plan.
        ranks: Ranks the copy may use; None means the fewest.
        shrink: False proves the plan at its own size.

    Raises:
        Refused: P118, when `ranks` is below the smallest copy; or what the copy is refused for.
    """
    assert plan.workload is not None, "the door refuses a plan without a workload"
    mesh = shrink_mesh(plan.mesh, ranks) if shrink else plan.mesh
    with tempfile.TemporaryDirectory(prefix="partita-") as folder:
        workload, lines = plan.workload, []
        if shrink:
            workload, lines = shrink_workload(workload, mesh, data_ranks(plan.strategies, mesh), Path(folder))
            lines = [f"mesh {a}: {n} -> {mesh.size(a)}" for a, n in plan.mesh.axes if n != mesh.size(a)] + lines
        return prove_subject(
            subject_of(workload, synthetic=True),
            plan.strategies,
            mesh,
            training_of(workload, STEPS),
            like=workload,
            shrunk=tuple(lines),
        )


def training_of(workload: Workload, steps: int) -> Training:
    """The loop's settings that a workload fixes."""
    return Training(
        steps=steps,
        microbatches=workload.accumulate,
        clip=None if workload.clip is None else (workload.clip, 2.0),
        schedule=workload.schedule,
        warmup=workload.warmup,
        horizon=workload.horizon,
        seed=workload.seed,
    )


def data_ranks(strategies: Sequence[Strategy], mesh: Mesh) -> int:
    """Parts the batch is cut into."""
    ranks = 1
    for axis in (a for s in strategies if s.place == Place.DATA for a in s.axes):
        ranks *= mesh.size(axis)
    return ranks


def prove_subject(
    subject: Subject,
    strategies: Sequence[Strategy],
    mesh: Mesh,
    training: Training,
    *,
    like: Workload | None = None,
    shrunk: tuple[str, ...] = (),
) -> Proof:
    """Prove strategies on a subject as it is.

    Args:
        subject: What is trained; its batches are global.
        strategies: Innermost first.
        mesh: The ranks.
        training: Steps, microbatches, clipping; nothing is written.
        like: The workload it came from: master copies and reduction dtype.
        shrunk: Lines to print.
    """
    feed = Feed(subject.batches)
    feed(0)
    samples = feed.samples or 1
    subject = replace(subject, batches=feed)
    training = replace(training, folder=None, resume=None, held_out=None)
    program = _program(subject, samples, training, like)
    refuse(check(program, strategies, mesh))
    said = compose(program, strategies, mesh)
    exact = in_double(subject)
    numerics, promise = _numerics(exact, strategies, mesh, training, samples)
    real = run(mesh, subject, strategies, program, replace(training, keep=frozenset()))
    heard = {r["rank"]: [Call(*entry[:4]) for entry in r["heard"]] for r in real.results}
    calls = said_calls(said.collectives())
    ledgers = all([tuple(e[:4]) for e in r["ledger"]] == [tuple(h[:4]) for h in r["heard"]] for r in real.results)
    memory_error, memory_held = _memory(said, real)
    return Proof(
        promise, numerics, len(calls), len(heard[0]), first_difference(calls, heard), ledgers,
        _wire(said.collectives(), real), memory_error, memory_held, said.notes, shrunk,
    )  # fmt: skip


def _program(subject: Subject, samples: int, training: Training, like: Workload | None) -> Program:
    program = capture(subject, samples // training.microbatches)
    workload = like or Workload("python", batch=samples, accumulate=training.microbatches)
    said = dressed(program, workload)
    return replace(said, microbatches=training.microbatches, clip=training.clip is not None)


# ---- numerics
def in_double(subject: Subject) -> Subject:
    """The same subject in float64: parameters, buffers and floating batches."""

    def make() -> nn.Module:
        return subject.make().double()

    def widened(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    def batches(step: int) -> dict[str, Any]:
        return tree_map(widened, subject.batches(step))

    return replace(subject, make=make, batches=batches)


def _numerics(
    subject: Subject, strategies: Sequence[Strategy], mesh: Mesh, training: Training, samples: int
) -> tuple[Numerics, Promise]:
    promise = promise_of(strategies, mesh, training.microbatches)
    with Wide():
        program = _program(subject, samples, training, None)
    kept = replace(training, keep=frozenset({"state", "gradients"}), audit=False)
    split = run(mesh, subject, strategies, program, kept, wide=True)
    if draws(program):
        one = replace(kept, microbatches=1)
        whole = run(Mesh(), subject, (), replace(program, microbatches=1), one, wide=True)
        losses, state, gradients = whole.losses, whole.tensors["state"], whole.tensors["gradients"]
    else:
        losses, state, gradients = _alone(subject, training)
    kinds = {"parameter": (split.tensors["state"], state), "gradient": (split.tensors["gradients"], gradients)}
    return compare(promise, (split.losses, losses), kinds), promise


def _alone(subject: Subject, training: Training) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """The single device, in a child process of its own."""

    def work(net: Net) -> list[float]:
        torch.manual_seed(training.seed)
        with Wide():
            whole = train_whole(
                subject, training.steps, clip=training.clip, schedule=(training.schedule, training.warmup, training.horizon)
            )
        assert net.folder is not None
        for name, tensors in (("state", whole.state), ("gradients", whole.gradients)):
            save_file({k: t.detach().clone().contiguous() for k, t in tensors.items()}, net.folder / f"{name}.safetensors")
        return whole.losses

    with tempfile.TemporaryDirectory(prefix="partita-") as exchange:
        folder = Path(exchange)
        (losses,) = run_ranks(Mesh(), work, folder=folder)
        return losses, load_file(folder / "state.safetensors"), load_file(folder / "gradients.safetensors")


def promise_of(strategies: Sequence[Strategy], mesh: Mesh, microbatches: int) -> Promise:
    """The weakest promise of strategies that do something; accumulation reorders sums as well."""
    working = {s.promise for s in strategies if any(mesh.size(a) > 1 for a in s.axes)}
    if Promise.RELAXED in working:
        return Promise.RELAXED
    return Promise.REORDERED if working or microbatches > 1 else Promise.EXACT


# ---- bytes and memory
def _wire(calls: Sequence[Collective], real: Outcome) -> float | None:
    counted = real.wire_bytes_per_rank
    if counted is None or max((c.nbytes for c in calls), default=0) < MEGABYTE:
        return None
    modelled = sum(t.backend_bytes for t in real.traffic())
    return counted / modelled - 1


def _memory(said: Program, real: Outcome) -> tuple[float | None, bool]:
    predicted = occupancy(said, "gloo").peak
    measured = real.peak
    if measured != measured or measured < JUDGED:
        return None, True
    return predicted / measured - 1, abs(predicted - measured) <= MEMORY_BOUND * measured + MEMORY_SLACK
