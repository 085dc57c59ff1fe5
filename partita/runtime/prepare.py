"""From a whole module to a step of this rank: the set-up that `train` and a user's own loop share."""

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from partita.errors import refuse
from partita.program import Program
from partita.program.data import microbatch_mixing
from partita.runtime.agree import agreed, decide, same_batch, same_weights
from partita.runtime.batch import Batch, divides, samples_of
from partita.runtime.batch_norm import microbatch_faults, own_no_ranks
from partita.runtime.look import copied
from partita.runtime.net import Net
from partita.runtime.norm import clip_faults
from partita.runtime.optimizers import element_faults, foreign_faults, hook_faults, server_fault, treats_elements_alone
from partita.runtime.random import faults as drawing_faults
from partita.runtime.random import rows
from partita.runtime.site import Site
from partita.runtime.step import Step
from partita.runtime.subject import Subject
from partita.runtime.training import Training
from partita.strategy import Strategy


def prepare(
    net: Net,
    subject: Subject,
    module: nn.Module,
    batch: Batch,
    strategies: Sequence[Strategy],
    program: Program,
    training: Training,
) -> Step:
    """Agree with the other ranks, apply the strategies, and return this rank's step.

    Args:
        net: This rank's network.
        subject: What is trained.
        module: Whole, on its device; it is changed in place.
        batch: The first global batch.
        strategies: Innermost first.
        program: One global microbatch of the step on one device, flat.
        training: How.

    Raises:
        Refused: On every rank alike, before step 1.
    """
    samples = samples_of(batch) or 1
    own_no_ranks(module)
    optimizer = subject.optimizer(module)
    several = net.ranks * training.microbatches > 1
    refuse(
        [
            *(hook_faults(module) + foreign_faults(optimizer, module) if several else []),
            *divides(samples, 1, training.microbatches),
            *microbatch_faults(module, training.microbatches, training.batch_norm),
            *microbatch_mixing(program, training.microbatches),
            *clip_faults(training.clip),
            *(drawing_faults(program) if several else []),
        ]
    )
    same_weights(net, module)
    same_batch(net, batch)
    decision = decide(net, subject, module, batch, samples, rows(program))
    site = Site(module, net, subject, program, samples // training.microbatches, seed=training.seed)
    whole = copied(module) if net.ranks > 1 and not treats_elements_alone(optimizer) else None
    site.apply(strategies)
    if site.exchange is not None and site.exchange.pieces and not treats_elements_alone(optimizer):
        refuse([server_fault(type(optimizer).__name__, site.exchange.axis)])
    if whole is not None and site.placements:
        axis = next(axis for cuts in site.placements.values() for axis, _, _ in cuts)
        refuse(agreed(net, element_faults(subject, whole, site.placements, axis)))
    refuse(divides(samples, site.data_ranks, training.microbatches))
    rule = decision.rule_for(site.data_ranks, training.microbatches)
    torch.manual_seed(training.seed)
    random.seed(training.seed)
    np.random.seed(training.seed % (1 << 32))
    return Step(site, rule, samples, training.microbatches, clip=training.clip, buffers=decision.buffers)
