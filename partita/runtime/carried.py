"""What a module keeps from one forward pass to the next besides buffers: parameters it writes to, counts, hidden states.

One device runs forward once a step. A data rank that keeps a count of its own does the same as long as it runs forward once a
step too; under accumulation it would count on, microbatch by microbatch. What depends on the samples each part keeps alone.
"""

from typing import Any

import torch
from torch import Tensor, nn

from partita.errors import Fault
from partita.runtime.batch import Share
from partita.runtime.look import Look, drawn, twin
from partita.runtime.loss_terms import Counts

PLAIN = (int, float, str, bool, type(None))
OWN = {"training"}  # attributes that are torch's business
FEW = 4  # samples looked at
AGAIN = 3  # further looks where a count is kept: paths are often taken in turns


def find_carried(look: Look) -> tuple[list[Fault], list[Fault]]:
    """(faults of a batch that is cut at all, faults of microbatches), from looks at one twin with its buffers put back."""
    own = _Watched(look)
    before = {name: p._version for name, p in look.module.named_parameters()}
    first, reached = own.look()
    written = [name for name, p in look.module.named_parameters() if p._version != before[name]]
    if written:
        have = f"{len(written)} such parameters"
        return [_fault(f"parameter {written[0]!r} is written to by the forward pass", have, written[0])], []
    if own.sparse:
        return [_sparse(own.sparse)], []
    if own.draws:
        return [], [_drawing()]
    plain = _plain(own.module)
    second, again = own.look()
    changed = sorted(name for name, value in _plain(own.module).items() if name not in plain or plain[name] != value)
    if changed:
        return own.in_turns([reached, again], changed[0]), [_counting(changed[0], len(changed))]
    if abs(first - second) > look.tolerance * max(abs(first), 1e-12):
        have = f"two forward passes over the same samples gave the losses {first:.9g} and {second:.9g}"
        return [_fault(f"{type(look.module).__name__} keeps something from one forward pass to the next", have, "")], []
    return [], []


class _Watched:
    """One twin, looked at again and again."""

    def __init__(self, look: Look) -> None:
        self.on, self.module = look, twin(look.module)
        self.share = Share(0, min(look.samples, FEW))
        self.kept = {name: b.detach().clone() for name, b in self.module.named_buffers()}
        self.sparse = ""  # a parameter with sparse gradients
        self.draws = False  # from Python's or numpy's random numbers

    def look(self) -> tuple[float, frozenset[str]]:
        """(the loss, the parameters it reaches), with buffers as they were at first."""
        with torch.no_grad():
            for name, b in self.module.named_buffers():
                if name in self.kept and self.kept[name].shape == b.shape:
                    b.copy_(self.kept[name])
        self.state = drawn()
        return self.on(self.share, self._see, self.module)

    def _see(self, value: Any, counts: Counts) -> tuple[float, frozenset[str]]:
        self.draws = drawn() != self.state
        loss = value if isinstance(value, Tensor) else value[0]
        found = self.on.gradients(loss)
        self.sparse = next((n for n, g in found.items() if g.is_sparse), "")
        return float(loss.detach()), frozenset(found)

    def in_turns(self, reached: list[frozenset[str]], name: str) -> list[Fault]:
        """A fault if a count decides which parameters a step reaches."""
        reached = [*reached, *(self.look()[1] for _ in range(AGAIN))]
        turns = sorted(frozenset.union(*reached) - frozenset.intersection(*reached))
        if not turns:
            return []
        have = f"attribute {name!r} changes, and {len(turns)} parameters are reached by some forward passes only"
        return [_fault(f"parameter {turns[0]!r} is used in some steps only", have, turns[0])]


def _plain(module: nn.Module) -> dict[str, Any]:
    """Numbers and words among the attributes of all submodules."""
    return {
        f"{path}.{key}".lstrip("."): value
        for path, m in module.named_modules()
        for key, value in vars(m).items()
        if key not in OWN and isinstance(value, PLAIN)
    }


def _sparse(name: str) -> Fault:
    law = "gradients of parts are added up in dense buffers, and an optimizer may treat dense ones otherwise"
    cure = "sparse=False; or one data rank with accumulate = 1"
    return Fault("P115", f"parameter {name!r} has sparse gradients", "layout sparse_coo", law, cure, f"model.{name}")


def _drawing() -> Fault:
    law = "one device draws once a step; under accumulation every microbatch would draw anew"
    cure = "torch.rand or torch.randn, which are keyed by sample; or accumulate = 1"
    return Fault("P115", "the model or its loss draws Python's or numpy's random numbers", "", law, cure, "model")


def _counting(name: str, count: int) -> Fault:
    return _fault(f"attribute {name!r} is changed by every forward pass", f"{count} such attributes", name)


def _fault(what: str, have: str, name: str) -> Fault:
    return Fault(
        "P115",
        what,
        have=have,
        law="parts keep no common state: one device runs forward once a step, over all samples",
        cure="a registered buffer that counts steps; or one data rank with accumulate = 1",
        at=f"model.{name}".rstrip("."),
    )
