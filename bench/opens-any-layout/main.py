"""Saves under every layout and loads under every other: parameters and optimizer state, bit for bit.

A layout whose strategies are not in the garden yet is told of, and joins by itself once they are.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import row, write

from partita.mesh import Mesh
from partita.runtime.capture import capture
from partita.runtime.outcome import Outcome, run
from partita.runtime.subject import Subject
from partita.runtime.task import subject_of
from partita.runtime.training import Training
from partita.strategies import GARDEN
from partita.workload import GPT, Workload

STEPS, SAMPLES, MICROBATCHES = 2, 8, 2
SETTINGS = {"one_f_one_b": {"microbatches": MICROBATCHES}}  # what a strategy has no default for
LAYOUTS: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {  # mesh, strategies innermost first
    "one": ({}, ()),
    "dp2": ({"dp": 2}, ("ddp",)),
    "tp2": ({"tp": 2}, ("tensor_parallel",)),
    "dp2xtp2": ({"dp": 2, "tp": 2}, ("tensor_parallel", "ddp")),
    "pp2": ({"pp": 2}, ("one_f_one_b",)),
    "fsdp2": ({"dp": 2}, ("fsdp",)),
    "tp2xpp2": ({"pp": 2, "tp": 2}, ("tensor_parallel", "one_f_one_b")),
    "zero1_2xpp2": ({"dp": 2, "pp": 2}, ("zero1", "one_f_one_b")),
    "fsdp2xpp2": ({"dp": 2, "pp": 2}, ("fsdp", "one_f_one_b")),
}
HERE = {name: layout for name, layout in LAYOUTS.items() if all(s in GARDEN for s in layout[1])}


def subject() -> Subject:
    """A small GPT with tied embeddings, AdamW."""
    spec = GPT(layers=2, hidden=32, heads=4, vocab=64, sequence=16, tie_embeddings=True)
    return subject_of(Workload("gpt", spec, batch=SAMPLES), synthetic=True)


def trained(task: Subject, name: str, **settings: Path) -> Outcome:
    """A run to step `STEPS` under a layout, with whole tensors kept; one that resumes there trains no step."""
    mesh, names = HERE[name]
    program = replace(capture(task, SAMPLES // MICROBATCHES), microbatches=MICROBATCHES)
    keep = frozenset({"state", "optimizer"})
    training = Training(STEPS, MICROBATCHES, keep=keep, audit=False, **settings)
    return run(Mesh.of(mesh), task, [GARDEN[s](**SETTINGS.get(s, {})) for s in names], program, training)


def differing(before: Outcome, after: Outcome) -> list[str]:
    """Names of tensors that are not the same bits in both."""
    return [
        f"{kind}/{name}"
        for kind in ("state", "optimizer")
        for name in before.tensors[kind].keys() | after.tensors[kind].keys()
        if name not in after.tensors[kind]
        or name not in before.tensors[kind]
        or not torch.equal(before.tensors[kind][name], after.tensors[kind][name])
    ]


def main() -> int:
    task, rows = subject(), []
    with tempfile.TemporaryDirectory() as root:
        for source in HERE:
            folder = Path(root) / source
            before = trained(task, source, folder=folder)
            wrong = {target: differing(before, trained(task, target, resume=folder)) for target in HERE}
            count = sum(map(len, before.tensors.values()))
            good = [target for target, names in wrong.items() if not names]
            told = ", ".join(f"{target}: {names[:3]}" for target, names in wrong.items() if names)
            what = f"saved under {source}, loaded under {', '.join(HERE)}: {count} tensors"
            rows.append(
                row(what, f"bit for bit, {len(HERE)} of {len(HERE)}", told or f"{len(good)} of {len(HERE)}", held=not told)
            )
    return write(__file__, rows, pairs=len(rows) * len(HERE), absent=[name for name in LAYOUTS if name not in HERE])


if __name__ == "__main__":
    sys.exit(main())
