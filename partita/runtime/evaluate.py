"""The held-out loss: each data rank evaluates its part of each batch, and sums and weights are added up, as in training."""

from collections.abc import Callable
from typing import Any

import torch

from partita.runtime.batch import Batch, Share, divides, samples_of, shares, taken
from partita.runtime.loss import READ, Rule, heard, joined, part_of
from partita.runtime.loss_terms import Counts
from partita.runtime.site import Site


def evaluate(site: Site, rule: Rule, batches: Callable[[int], Batch], count: int, microbatches: int) -> float:
    """Mean loss of `count` batches, as one device computes it in eval mode. Quiet; changes no buffer.

    Args:
        site: With its strategies applied.
        rule: Of the loss.
        batches: By number.
        count: How many.
        microbatches: Each data rank cuts its part into, as in training.
    """
    net, module = site.net, site.module
    kept = [b.detach().clone() for b in module.buffers()]
    sums, read = torch.zeros(2, dtype=torch.float64, device=net.device), None
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        reads = rule.kind in READ or rule.watches  # weights are read off the graph of the loss
        with torch.set_grad_enabled(reads), net.quiet(), site.joined():
            for number in range(count):
                batch = batches(number)
                samples = samples_of(batch) or 1
                assert not divides(samples, site.data_ranks, microbatches), (
                    f"held-out batch {number} of {samples} samples does not divide"
                )
                for share in shares(samples, site.data_rank, site.data_ranks, microbatches):
                    part = taken(batch, share, samples, net.device)
                    found = _value(site, rule, part, share)
                    if found is None:  # a stage without the loss
                        continue
                    one = part_of(rule, found[0], share.samples, found[1])
                    read = one.read or read
                    if one.adds:
                        sums += torch.tensor(one.numbers, dtype=torch.float64, device=net.device)
            for axis in site.data_axes:
                net.all_reduce(sums, axis, label="held-out")
            total, weight = sums.tolist()
            loss = joined(rule, total, weight, read) / (count if rule.kind == "sum" else 1)
            return site.pipe.share_loss(loss) if site.pipe is not None else loss
    finally:
        site.rest()
        for m, training in modes:
            m.training = training
        with torch.no_grad():
            for buffer, value in zip(module.buffers(), kept, strict=True):
                buffer.copy_(value)


def _value(site: Site, rule: Rule, part: Batch, share: Share) -> tuple[Any, Counts | None] | None:
    """The loss of a part and what was counted under it; None on a rank of a pipeline that has no loss."""

    def run() -> tuple[Any, Counts | None]:
        with site.running(0, share), heard(rule, part) as counts:
            return site.subject.evaluate(site.module, part), counts

    if site.pipe is None:
        return run()
    found = site.pipe.evaluate(part, run)
    return found if site.pipe.has_loss else None
