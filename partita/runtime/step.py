"""One optimizer step of a rank. What it sends, and in which order, is what strategies say:

1  per microbatch: forward, backward, with the tensor axes' own collectives
2  with the last one (or with each, where rows are added up): the buckets of the data axes, launched by hooks; then the late
   gradients of tensor axes
3  per data axis: who has a gradient (only if control flow depends on data), then 16 bytes of loss and weight
4  of a relaxed data axis: what it exchanges of gradients
5  with clipping: 8 bytes per axis that cuts a parameter
6  the optimizer; then, where it stepped on rows, the parameters are gathered; then what a relaxed axis exchanges of them
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from partita.errors import Fault, PartitaError, Refused, RunFailed
from partita.runtime.batch import Batch, shares, taken
from partita.runtime.buckets import HALF, Buckets, reduce_again
from partita.runtime.buffers import Keeper
from partita.runtime.fully import Rowed
from partita.runtime.loss import READ, Part, Rule, divisor, heard, joined, part_of
from partita.runtime.loss_terms import Counts, Term
from partita.runtime.marks import Marks
from partita.runtime.norm import clip, global_norm
from partita.runtime.scatter import Scattered
from partita.runtime.site import Site
from partita.runtime.turns import Turns


@dataclass(frozen=True)
class Done:
    """What a step reports: the global loss, and the gradient norm before clipping (None without clipping)."""

    loss: float
    norm: float | None = None


class Step:
    """Runs optimizer steps on a site.

    Args:
        site: With its strategies applied.
        rule: Of the loss; None when there is one part only.
        samples: Of the global batch.
        microbatches: Of a step, on every data rank.
        clip: (largest norm, p), or None.
        buffers: Kinds of the buffers that need care.
    """

    def __init__(
        self,
        site: Site,
        rule: Rule,
        samples: int,
        microbatches: int = 1,
        *,
        clip: tuple[float, float] | None = None,
        buffers: dict[str, str] | None = None,
    ) -> None:
        self.site, self.rule, self.samples, self.microbatches, self.clipping = site, rule, samples, microbatches, clip
        self.parameters = {n: p for n, p in site.module.named_parameters() if p.requires_grad}
        self.pieces = {n: site.pieces[n] for n in self.parameters}  # what this rank's optimizer steps on, gradients with it
        self.local = self.parameters if site.exchange is not None else self.pieces  # what backward's gradients are of
        self.shares = shares(samples, site.data_rank, site.data_ranks, microbatches)
        self.keeper = Keeper(site.module, buffers or {}, site.data_ranks, microbatches)
        self.buckets = self._buckets()
        self.marks = Marks()
        self.read: Term | None = None  # the term the weight is read off
        self.strays = ""
        self.blank = False  # whether the loss is no number where nothing counts
        self.silent: torch.Tensor | None = None  # a loss that counts nothing, to be differentiated all the same
        self.steps = 0
        self._stepped: set[int] | None = None  # ids of the optimizer's parameters
        self._bucketed = set().union(*(b.ids for b in self.buckets))

    def _buckets(self) -> list[Buckets | Scattered | Rowed]:
        made: list[Buckets | Scattered | Rowed] = []
        reductions, net = self.site.reductions, self.site.net
        settings: dict[str, Any] = {"microbatches": self.microbatches, "optional": self.site.program.dynamic}
        settings["later"] = self.site.pipe.shared_here if self.site.pipe is not None else ()
        for first in reductions[:1]:
            settings["dtype"] = first.dtype
            if self.site.fully is not None:
                (names,) = first.buckets or [[]]
                made.append(Rowed(self.site.fully, self.parameters, self.pieces, names, self.microbatches))
            elif first.scattered:
                every = first.scattered == "every"
                how = {"every": every, "stages": self.site.stages, **settings}
                made.append(Scattered(net, first.axis, self.parameters, self.pieces, first.buckets, **how))
            else:
                made.append(Buckets(net, first.axis, self.parameters, first.buckets, through=first.through, **settings))
        settings["dtype"] = None
        rest = {n for n, p in self.parameters.items() if p.dtype in HALF} - {
            n for first in reductions[:1] for b in first.buckets for n in b
        }
        if rest and self.microbatches > 1:  # half types without a data axis: accumulated in float32 all the same
            made.append(Buckets(net, None, self.parameters, [[n] for n in self.parameters if n in rest], **settings))
        return made

    def parts(self, batch: Batch) -> list[Batch]:
        """This rank's microbatches of a global batch."""
        return [taken(batch, share, self.samples, self.site.net.device) for share in self.shares]

    def gradients(self, parts: Sequence[Batch], step: int) -> float:
        """Forward and backward of this rank's microbatches: gradients are those of one device. Returns the global loss."""
        for b in self.buckets:
            b.begin()
        if self.site.exchange is not None:
            self.site.exchange.begin(step)
        self.keeper.begin()
        self.blank = False
        sums = torch.zeros(2, dtype=torch.float64, device=self.site.net.device)
        idle = True
        if self.site.pipe is not None:
            turns = Turns(self, parts, step, sums)
            self.site.pipe.run(parts, turns)
            idle = turns.idle
        else:
            for m, part in enumerate(parts):
                for b in self.buckets:
                    b.start(last=m == self.microbatches - 1)
                learned = self._microbatch(part, step, m, sums)
                for b in self.buckets:
                    b.end(idle=not learned)
                idle &= not learned
        self.keeper.finish()
        with self.marks("sync", "sync"):
            self._finish(idle=idle)
            return self._reduce(sums)

    def _microbatch(self, part: Batch, step: int, m: int, sums: torch.Tensor) -> bool:
        """One forward and backward; False when there was nothing to learn from."""
        site, share = self.site, self.shares[m]
        with site.statistics():
            self.keeper.starting(m)
            with self.marks(f"F{m}", "forward"), site.running(step, share), heard(self.rule, part) as counts:
                value = site.subject.evaluate(site.module, part)
            self.keeper.ran(m)
            one = self.weigh(value, share.samples, counts, sums)
            if one is None:
                return False  # no target counts here: the mean is 0 / 0
            with self.marks(f"B{m}", "backward"):
                one.contribution(self.rule).backward()
        return True

    def weigh(self, value: Any, samples: int, counts: Counts | None, sums: torch.Tensor) -> Part | None:
        """The loss of a microbatch as the rule reads it, added to the sums; None if no target counts."""
        one = part_of(self.rule, value, samples, counts)
        self.read, self.strays = one.read or self.read, self.strays or one.strays
        if self.rule.kind in (*READ, "pair") and not self.site.mixes and not one.adds and not one.strays:
            self.blank |= math.isnan(float(one.value.detach()))
            self._nothing(one.value)
            return None
        sums[0] += one.total
        sums[1] += math.nan if one.strays else one.weight
        return one

    def _nothing(self, value: torch.Tensor) -> None:
        """The backward pass of a loss that counts nothing, where ranks talk in it; what comes of it is dropped."""
        if self.site.stored is not None:
            self.silent = value
            return
        if self.site.fully is not None and value.requires_grad:
            with self.site.fully.silent():
                value.backward(torch.zeros_like(value))
            return
        learned = [p for p in self.parameters.values() if p.requires_grad]
        if self.site.talks and value.requires_grad and learned:
            torch.autograd.grad(value, learned, torch.zeros_like(value), allow_unused=True)

    def _finish(self, *, idle: bool) -> None:
        """Wait for the buckets; sum what else is a summand."""
        site = self.site
        for b in self.buckets:
            b.finish(idle=idle)
            b.settle()
        late = [(axis, n) for axis, names in site.late for n in names if n in self.local]  # of this rank's stages
        if idle:
            self._fill(name for _, name in late)
        for again in site.reductions[1:]:
            reduce_again(site.net, again.axis, self.local, again.buckets, again.dtype, site.room, again.through)
        for axis, name in late:
            assert self.local[name].grad is not None, f"{name} has no gradient to sum over {axis}"
            reduce_again(site.net, axis, self.local, [[name]], room=site.room)
        if site.pipe is not None:
            self._fill(site.pipe.tied())
            site.pipe.sum_tied({n: p.grad for n, p in self.pieces.items() if p.grad is not None}, site.room)

    def _fill(self, names: Iterable[str]) -> None:
        """Zeros where nothing counted, as one device has them."""
        for name in names:
            p = self.local[name]
            if p.grad is None and self.site.has_gradient(name):
                p.grad = torch.zeros_like(p)

    def _reduce(self, sums: torch.Tensor) -> float:
        """Sum loss and weight over the data axes, divide the gradients, and return the global loss."""
        site, first = self.site, self.buckets[0] if self.site.reductions else None
        for axis in site.data_axes:
            if first is not None:
                first.used(axis)
            site.net.all_reduce(sums, axis, label="loss")
        for b in self.buckets:
            b.drop()
        self._expect_none()
        total, weight = sums.tolist()
        by = 1.0 if self.rule.kind == "sum" and not math.isnan(weight) else divisor(weight, self.read)
        loss = joined(self.rule, total, weight, self.read, blank=self.blank)
        if site.pipe is not None:  # only the last stage has seen the loss
            loss, by = site.pipe.share_loss(loss, by)
            weight = by
        if math.isnan(by):
            raise self._strayed()
        self.steps += 1
        if not weight:
            self._fill(self.parameters)
        grads = [p.grad for p in self.local.values() if p.grad is not None]
        if by and by != self.rule.nominal and grads:
            torch._foreach_mul_(grads, self.rule.nominal / by)
        if site.exchange is not None:
            self._fill(self.parameters)
            site.exchange.gradients()
        return loss

    def _strayed(self) -> PartitaError:
        """A term of the loss left the proportion to the weight that the rule rests on."""
        what = "the terms of the loss divide by counts that are not in proportion, so no one weight adds up its parts"
        if "count" in self.strays and "proportion" not in self.strays:
            what = "a part of the batch does not divide as its count says, so its loss cannot be added up with the others"
        fault = Fault(
            "P114",
            what,
            have=self.strays or "the weight of a part is no number",
            law="the loss of a batch is a weighted mean of the losses of its parts only if all its terms count alike",
            cure="return the pair (sum, weight), or divide all terms by the same count",
            at="loss",
        )
        return RunFailed(f"in step {self.steps + 1} of this run:\n{fault}") if self.steps else Refused(fault)

    def _expect_none(self) -> None:
        """What is in no bucket of a data axis must have no gradient."""
        if self.site.reductions:
            for name, p in self.parameters.items():
                if p.grad is not None and id(p) not in self._bucketed:
                    if self.site.has_gradient(name):
                        axis = self.site.reductions[0].axis
                        raise RunFailed(f"rank {self.site.net.rank}: no strategy sums the gradient of {name!r} over {axis}")
                    raise RunFailed(
                        f"parameter {name!r} got a gradient on rank {self.site.net.rank}, though it had none when the module "
                        "was captured: its path through the module depends on the data\n"
                        "  try    a first batch that reaches every parameter"
                    )

    def counted(self) -> dict[str, torch.Tensor]:
        """What this rank steps on and counts in the norm: of what several stages hold, the first counts."""
        pipe = self.site.pipe
        return {n: p for n, p in self.pieces.items() if pipe is None or pipe.owns(n)}

    def clip(self) -> float | None:
        """Clip the global norm, if asked to; returns it as it was before."""
        if self.clipping is None:
            return None
        largest, p = self.clipping
        norm = global_norm(self.site.net, self.counted(), self.site.placements, p, apart=self.site.apart)
        clip(self.pieces.values(), norm, largest)
        return float(norm)

    def _left(self, optimizer: torch.optim.Optimizer) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Gradients an optimizer does not step on, and so does not clear: they add up from step to step, as on one device."""
        if self._stepped is None:
            self._stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        left = [(p, p.grad.clone()) for p in self.pieces.values() if p.grad is not None and id(p) not in self._stepped]
        for p, _ in left:
            p.grad = None
        return left

    def run(self, batch: Batch, step: int, optimizer: torch.optim.Optimizer) -> Done:
        """One whole optimizer step."""
        self.marks.begin()
        left = self._left(optimizer)
        loss = self.gradients(self.parts(batch), step)
        for p, before in left:
            p.grad = before if p.grad is None else p.grad.add_(before)
        with self.marks("optimizer", "optimizer"):
            norm = self.clip()
            optimizer.step()
        return Done(loss, norm)
