"""What the ranks make sure of together before step 1: the same weights, the same batch, one rule for the loss and the buffers.

Rank 0 decides on its whole copy of the module while the others wait; all refuse together. All of it is quiet traffic.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from partita.errors import Fault, Refused, refuse
from partita.runtime.batch import Batch, Share
from partita.runtime.buffers import find_buffers
from partita.runtime.carried import find_carried
from partita.runtime.look import Look
from partita.runtime.loss import Rule, formed
from partita.runtime.loss_rule import PROBE, find_rule
from partita.runtime.loss_terms import Counts
from partita.runtime.net import Net
from partita.runtime.random import Row
from partita.runtime.subject import Subject


def fingerprint(tensors: list[Tensor]) -> str:
    """A digest of the bits of tensors."""
    digest = hashlib.blake2b(digest_size=16)
    for t in tensors:
        digest.update(str((t.dtype, tuple(t.shape))).encode())
        digest.update(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def same_weights(net: Net, module: nn.Module) -> None:
    """Give every rank rank 0's weights, if a factory draws without a seed."""
    if net.ranks == 1:
        return
    tensors = [*module.parameters(), *module.buffers()]
    if len(set(net.gather(fingerprint(tensors)))) > 1:
        with torch.no_grad(), net.quiet():
            for t in tensors:
                for axis in reversed(net.mesh.names):
                    net.broadcast(t.detach(), axis)


def same_batch(net: Net, batch: Batch) -> None:
    """Refuse batches that differ between ranks: every rank takes its part of the same global batch."""
    tensors = [t for t in tree_leaves(batch) if isinstance(t, Tensor)]
    prints = net.gather(fingerprint(tensors))
    if len(set(prints)) > 1:
        other = next(r for r, p in enumerate(prints) if p != prints[0])
        raise Refused(
            Fault(
                "P112",
                f"the first batch differs between rank 0 and rank {other}",
                have=f"{len(set(prints))} different batches on {net.ranks} ranks",
                law="batches(step) returns the same global batch on every rank; partita cuts it",
                cure="draw batches from a generator seeded by the step",
                at="batches",
            )
        )


def agreed(net: Net, faults: list[Fault]) -> list[Fault]:
    """The faults of the first rank that has any, on every rank."""
    told = net.gather([asdict(f) for f in faults])
    return [Fault(**f) for f in next((some for some in told if some), [])]


@dataclass(frozen=True)
class Decision:
    """How the parts of a batch make up the whole.

    Args:
        rule: Of the loss; None if none fits.
        buffers: Kinds of the buffers that need care.
        faults: What is wrong if the batch is cut at all.
        always: What is wrong even with one part.
        microbatched: What is wrong if a rank runs several microbatches.
    """

    rule: Rule | None
    buffers: dict[str, str] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    always: tuple[Fault, ...] = ()
    microbatched: tuple[Fault, ...] = ()

    def rule_for(self, ranks: int, microbatches: int = 1) -> Rule:
        """The rule when a step has so many parts.

        Args:
            ranks: Data ranks.
            microbatches: Of each.

        Raises:
            Refused: If something stands against it.
        """
        refuse(list(self.always))
        parts = ranks * microbatches
        if parts > 1:
            refuse([*self.faults, *(self.microbatched if microbatches > 1 else ())])
        if self.rule is None or (parts == 1 and self.rule.kind != "pair"):
            return Rule("sum")  # one part: the loss as it is
        return self.rule


def decide(net: Net, subject: Subject, module: nn.Module, batch: Batch, samples: int, draws: Sequence[Row] = ()) -> Decision:
    """Find, on rank 0, how parts make up the whole; on a whole module that is not changed."""
    told = _decided(subject, module, batch, samples, draws) if net.rank == 0 else None
    told = net.share(told)
    rule = Rule(**told["rule"]) if told["rule"] else None
    kinds = ([Fault(**f) for f in told[kind]] for kind in ("faults", "always", "microbatched"))
    return Decision(rule, told["buffers"], *map(tuple, kinds))


def _decided(subject: Subject, module: nn.Module, batch: Batch, samples: int, draws: Sequence[Row]) -> dict[str, Any]:
    rule, buffers = None, {}
    faults, always, microbatched = [], [], []
    try:
        look = Look(subject, module, batch, samples, draws)
        always = _looked(look)
        if not always:
            rule = find_rule(subject, module, batch, samples, look=look)
            buffers, faults = find_buffers(subject, module, batch, samples)
            carried, microbatched = find_carried(look)
            faults += carried
    except Refused as refused:
        faults = list(refused.faults)
    except Exception as error:  # the user's module may bear no part of its batch
        faults = [_whole_only(module, samples, error)]
    told = {"faults": faults, "always": always, "microbatched": microbatched}
    return {"rule": asdict(rule) if rule else None, "buffers": buffers, **{k: [asdict(f) for f in v] for k, v in told.items()}}


def _looked(look: Look) -> list[Fault]:
    """What is wrong whatever the layout: the form of the loss, or another loss each time one asks."""
    share = Share(0, min(look.samples, PROBE))
    faults, first = look(share, _number)
    if faults:
        return faults
    _, second = look(share, _number)
    if first == second or abs(first - second) <= look.tolerance * abs(first) or math.isnan(first) or math.isnan(second):
        return []
    return [
        Fault(
            "P115",
            "the loss of the same samples is another one each time it is asked for",
            have=f"{first:.9g}, then {second:.9g}, of {share.samples} samples and two fresh copies of the module",
            law="a step is captured and looked at before it is run: what is counted outside of the module has moved on by then",
            cure="a registered buffer of the module that counts, or a number in the batch: batches(step) knows the step",
            at="loss",
        )
    ]


def _number(value: Any, counts: Counts) -> tuple[list[Fault], float]:
    faults = formed(value)
    if faults:
        return faults, 0.0
    return [], float((value if isinstance(value, Tensor) else value[0]).detach())


def _whole_only(module: nn.Module, samples: int, error: Exception) -> Fault:
    text = str(error).strip().splitlines() or [""]
    return Fault(
        "P115",
        f"{type(module).__name__} does not run on a part of its batch",
        have=f"on a few of {samples} samples it raised {type(error).__name__}: {text[0]}",
        law="every part of a batch is run by itself",
        cure="a module that takes any number of samples; or one data rank with accumulate = 1",
        at="model",
    )
