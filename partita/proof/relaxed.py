"""What is proved of a relaxed method, whose numbers are not those of one device.

exact setting     each relaxed strategy where it is exact, against one device: up to the order of sums
agreement         after steps of which it says so, all ranks of the axis hold the same parameters, bit by bit
band              it learns at least the share it states of what its exact setting learns, over several batches
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from partita.mesh import Mesh
from partita.program import Program
from partita.runtime.batch import Feed
from partita.runtime.outcome import Outcome, run
from partita.runtime.subject import Subject
from partita.runtime.training import Training
from partita.strategy import Relaxed, Strategy

RATE = 0.1  # of plain SGD
SEEDS = 3
STEPS = 24  # of the optimizer, in the runs whose losses are compared
MOST = 240  # batches


def exact_setting(
    strategies: Sequence[Strategy], subject: Subject, training: Training
) -> tuple[Sequence[Strategy], Subject, Training]:
    """The same with relaxed strategies where they are exact; if their workers step alone, by plain SGD and without clipping."""
    exact = [s.exactly() if isinstance(s, Relaxed) else s for s in strategies]
    if any(isinstance(s, Relaxed) and s.alone for s in strategies):
        subject = replace(subject, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=RATE))
        training = replace(training, clip=None)
    return exact, subject, training


def agreements(strategies: Sequence[Strategy], mesh: Mesh, real: Outcome) -> list[dict[str, Any]]:
    """Where ranks were to hold the same parameters: whether they did."""
    digests = {r["rank"]: dict(map(tuple, r["digests"])) for r in real.results}
    return [
        {
            "name": f"after step {step + 1} all ranks of {s.axis!r} hold the same parameters",
            "held": all(len({digests[rank][step] for rank in group}) == 1 for group in mesh.groups(s.axis)),
        }
        for s in strategies
        if isinstance(s, Relaxed) and mesh.size(s.axis) > 1
        for step in sorted(digests[0])
        if s.agrees(step)
    ]


def learning(
    subject: Subject, strategies: Sequence[Strategy], mesh: Mesh, program: Program, training: Training
) -> list[dict[str, Any]]:
    """The invariant of the band; none where a period is so long that too few of its steps would be run.

    A seed is a batch, learned again and again, so that there is something to learn.
    """
    feed = subject.batches if isinstance(subject.batches, Feed) else Feed(subject.batches)
    working = [s for s in strategies if isinstance(s, Relaxed) and mesh.size(s.axis) > 1]
    pace, least = math.prod(s.batches() for s in working), min(s.learns for s in working)
    plain = replace(training, steps=STEPS * pace, audit=False, keep=frozenset(), record=frozenset())
    if plain.steps > MOST:
        return []
    shares = []
    for seed in range(SEEDS):
        batch = feed(seed)
        one = replace(subject, batches=lambda _, batch=batch: batch)
        exact = [s.exactly() if isinstance(s, Relaxed) else s for s in strategies]
        relaxed = run(mesh, one, strategies, program, plain).losses
        whole = run(mesh, one, exact, program, replace(plain, steps=STEPS)).losses
        shares.append((relaxed[0] - relaxed[-1]) / (whole[0] - whole[-1]))
    mean, spread = statistics.fmean(shares), f"{min(shares):.2f} to {max(shares):.2f}"
    name = f"over {SEEDS} batches it learned {mean:.2f} ({spread}) of what it learns in its exact setting"
    return [{"name": name, "held": mean >= least}]
