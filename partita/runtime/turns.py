"""What a step does around the passes of a pipeline's stages: the loss of the last one, and gradients on their way."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from partita.runtime.batch import Batch
from partita.runtime.gradients import Gradients
from partita.runtime.loss import heard
from partita.runtime.loss_terms import Counts
from partita.runtime.pipeline import Values

if TYPE_CHECKING:
    from partita.runtime.step import Step


class Turns:
    """What a step does around the passes of this rank's stages."""

    def __init__(self, step: "Step", parts: Sequence[Batch], number: int, sums: torch.Tensor) -> None:
        self.step, self.parts, self.number, self.sums = step, parts, number, sums
        self.idle, self.began, self.marks = True, False, step.marks
        self.silent: set[tuple[int, int]] = set()  # (stage, microbatch) whose loss counts nothing

    def stage_forward(self, stage: int, microbatch: int, received: Values) -> tuple[torch.Tensor | None, Values]:
        """As `pipeline.Around` has it."""
        step, part, share = self.step, self.parts[microbatch], self.step.shares[microbatch]
        site = step.site
        assert site.pipe is not None, "there are stages"

        def run() -> tuple[Any, Counts | None]:
            with site.running(self.number, share), heard(step.rule, part) as counts:
                return site.subject.evaluate(site.module, part), counts

        with site.statistics():
            step.keeper.starting(1 if self.began else 0)
            out, sent = site.pipe.staged.run(stage, part, received, run)
            self.began = True
            step.keeper.ran(microbatch)
        if stage < site.pipe.last:
            self.idle = False
            return None, sent
        one = step.weigh(out[0], share.samples, out[1], self.sums)
        self.idle &= one is None
        if one is not None:
            return one.contribution(step.rule), sent
        loss, step.silent = step.silent, None
        self.silent.add((stage, microbatch))
        return loss, sent

    @contextmanager
    def adding(self, stage: int, microbatch: int, *, last: bool, idle: bool) -> Iterator[None]:
        """As `pipeline.Around` has it."""
        for b in self.step.buckets:
            b.start(stage, last=last, silent=self.nothing(stage, microbatch))
        yield
        for b in self.step.buckets:
            b.end(idle=idle)

    def nothing(self, stage: int, microbatch: int) -> bool:
        """As `pipeline.Around` has it."""
        return (stage, microbatch) in self.silent

    def accumulated(self, parameters: Sequence[nn.Parameter]) -> None:
        """As `pipeline.Around` has it."""
        for b in (b for b in self.step.buckets if isinstance(b, Gradients)):
            for p in parameters:
                if p.grad is not None and id(p) in b.where:
                    b.ready(p)
