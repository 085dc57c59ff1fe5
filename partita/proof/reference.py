"""The single device a split run is compared with: a process of its own, where no strategy takes part.

plain torch        the user's module on whole batches (`runtime/whole.py`)
with dropout       the same on one rank, whose masks come from partita's stream

The process is a fork. Our strategies import no torch and do nothing when they are imported; of an outsider's nobody knows that,
so for a plan that names one the single device runs in a new interpreter, which imports none:

    python -m partita.proof.reference < job.json
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from partita.errors import RunFailed
from partita.mesh import Mesh
from partita.program import Program
from partita.runtime.batch import Feed
from partita.runtime.batch_norm import own_no_ranks
from partita.runtime.capture import capture
from partita.runtime.net import Net
from partita.runtime.outcome import run
from partita.runtime.random import draws
from partita.runtime.ranks import run_ranks
from partita.runtime.subject import Subject
from partita.runtime.task import subject_of
from partita.runtime.training import Training
from partita.runtime.whole import train_whole
from partita.runtime.wide import Wide
from partita.workload import MODELS, Workload

KEPT = ("state", "gradients")
LOSSES = "losses.json"


@dataclass(frozen=True)
class Reference:
    """What one device ends with."""

    losses: list[float]
    state: dict[str, Tensor]
    gradients: dict[str, Tensor]


Alone = Callable[[Subject, Program, Training], Reference]


def in_double(subject: Subject) -> Subject:
    """The same subject in float64: parameters, buffers and floating batches."""

    def make() -> nn.Module:
        module = subject.make().double()
        own_no_ranks(module)
        return module

    def widened(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    def batches(step: int) -> dict[str, Any]:
        return tree_map(widened, subject.batches(step))

    return replace(subject, make=make, batches=batches)


def wide_program(subject: Subject, samples: int) -> Program:
    """A subject in double, captured with its float32 islands as wide as a proof runs them."""
    with Wide():
        return capture(subject, samples)


def alone(subject: Subject, program: Program, training: Training) -> Reference:
    """Train on one device, in a fork.

    Args:
        subject: In double.
        program: Of one microbatch of it.
        training: Of the split run.
    """
    if not draws(program):
        return _plain(subject, training)
    one = replace(training, microbatches=1, keep=frozenset(KEPT), audit=False)
    whole = run(Mesh(), subject, (), replace(program, microbatches=1), one, wide=True, alone=True)
    return Reference(whole.losses, whole.tensors["state"], whole.tensors["gradients"])


def _plain(subject: Subject, training: Training) -> Reference:
    schedule = training.schedule, training.warmup, training.horizon

    def work(net: Net) -> None:
        torch.manual_seed(training.seed)
        with Wide():
            whole = train_whole(subject, training.steps, clip=training.clip, schedule=schedule)
        assert net.folder is not None
        _write(Reference(whole.losses, whole.state, whole.gradients), net.folder)

    with tempfile.TemporaryDirectory(prefix="partita-") as folder:
        run_ranks(Mesh(), work, folder=Path(folder), alone=True)
        return _read(Path(folder))


def _write(found: Reference, folder: Path) -> None:
    for name in KEPT:
        tensors = {k: t.detach().clone().contiguous() for k, t in getattr(found, name).items()}
        save_file(tensors, folder / f"{name}.safetensors")
    (folder / LOSSES).write_text(json.dumps(found.losses))


def _read(folder: Path) -> Reference:
    state, gradients = (load_file(folder / f"{name}.safetensors") for name in KEPT)
    return Reference(json.loads((folder / LOSSES).read_text()), state, gradients)


# ---------------------------------------------------------------- in a new interpreter
def fresh(workload: Workload) -> Alone:
    """`alone`, for the subject a workload describes, in a process that imports no strategy."""

    def reference(subject: Subject, program: Program, training: Training) -> Reference:
        with tempfile.TemporaryDirectory(prefix="partita-") as folder:
            job = {"workload": _plain_data(workload), "training": _settings(training), "folder": folder, "path": sys.path}
            command = [sys.executable, "-m", "partita.proof.reference"]
            done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=False)
            if done.returncode:
                raise RunFailed(f"the single device failed: {done.stderr.strip().splitlines()[-1:] or 'without a word'}")
            return _read(Path(folder))

    return reference


def _plain_data(workload: Workload) -> dict[str, Any]:
    spec = None if workload.spec is None else [workload.spec.kind, asdict(workload.spec)]
    return {**asdict(workload), "spec": spec}


def _settings(training: Training) -> dict[str, Any]:
    names = ("steps", "microbatches", "clip", "schedule", "warmup", "horizon", "seed")
    return {name: getattr(training, name) for name in names}


def main(job: Mapping[str, Any]) -> None:
    """Run a job that `fresh` wrote."""
    sys.path[:] = job["path"]
    kind = job["workload"]["spec"]
    workload = Workload(**{**job["workload"], "spec": MODELS[kind[0]](**kind[1]) if kind else None})
    clip = job["training"]["clip"]
    training = Training(**{**job["training"], "clip": tuple(clip) if clip else None})
    subject = in_double(subject_of(workload, synthetic=True))
    feed = Feed(subject.batches)
    feed(0)
    subject = replace(subject, batches=feed)
    program = wide_program(subject, (feed.samples or 1) // training.microbatches)
    _write(alone(subject, program, training), Path(job["folder"]))


if __name__ == "__main__":
    main(json.load(sys.stdin))
