"""Buffers a module changes as it trains, and how a rank keeps them as one device would have them.

    fixed       never changed
    steps       changed alike by every forward pass, whatever the batch    a rank keeps the change of its first microbatch
    samples     grows in proportion to the samples it saw                  a rank's growth times the number of parts
    norm        running statistics of batch norm: kept right by `batch_norm`
    running     changed by each microbatch in turn, on one data rank       nothing to do

Everything else depends on which samples a rank saw, and is refused by name before step 1.
"""

import copy
import warnings

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from partita.errors import Fault, RunFailed
from partita.runtime.batch import Batch, Share, taken
from partita.runtime.subject import Subject


def find_buffers(subject: Subject, module: nn.Module, batch: Batch, samples: int) -> tuple[dict[str, str], list[Fault]]:
    """({name: "steps" | "samples"} of the buffers that need care, faults), seen on a copy in its own mode.

    Args:
        subject, module: What runs; the module is not changed.
        batch, samples: A global batch and its size.
    """
    own = {
        f"{path}.{name}".lstrip(".")
        for path, m in module.named_modules()
        if _is_norm(m)
        for name, _ in m.named_buffers(recurse=False)
    }
    before = {name: b.detach().clone() for name, b in module.named_buffers() if name not in own}
    if not before or samples < 2:
        return {}, []
    few = min(samples, 5)
    n = 2 if few >= 4 else 1
    looks = [Share(0, few), Share(0, n), Share(few - n, n)]
    changes = [_change(subject, module, batch, samples, share, before) for share in looks]
    changes.append(_blank(subject, module, batch, samples, looks[0], before) or changes[0])
    changes.append(_change(subject, module, batch, samples, looks[0], before, times=2))
    found, faults = {}, []
    for name in before:
        deltas = [c[name] for c in changes]
        if all(not d.any() for d in deltas):
            continue
        if not _same(deltas[0], deltas[3]):
            faults.append(_fault(name, before[name]))
        elif _same(deltas[0], deltas[1]) and _same(deltas[1], deltas[2]):
            found[name] = "steps"
        elif _same(deltas[1], deltas[2]) and _same(deltas[0] * n, deltas[1] * few) and _same(deltas[0] * 2, deltas[4]):
            found[name] = "samples"
        else:
            faults.append(_fault(name, before[name]))
    return found, faults


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def _change(
    subject: Subject, module: nn.Module, batch: Batch, samples: int, share: Share, before: dict[str, Tensor], times: int = 1
) -> dict[str, Tensor]:
    own = copy.deepcopy(module)
    device = next((t.device for t in (*own.parameters(), *own.buffers())), None)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for m in own.modules():  # their own statistics are not the question, and one sample may be too few for them
            if _is_norm(m):
                m.eval()
        for _ in range(times):
            subject.evaluate(own, taken(batch, share, samples, device))
    after = dict(own.named_buffers())
    return {name: _minus(after[name], b) for name, b in before.items()}


def _blank(
    subject: Subject, module: nn.Module, batch: Batch, samples: int, share: Share, before: dict[str, Tensor]
) -> dict[str, Tensor] | None:
    """The same with every number zero: a count that looks at the samples (padding, say) comes out otherwise."""
    blank = tree_map(lambda t: torch.zeros_like(t) if isinstance(t, Tensor) else t, batch)
    try:
        return _change(subject, module, blank, samples, share, before)
    except Exception:  # the module may not bear such a batch; then the other looks decide
        return None


def _minus(after: Tensor, before: Tensor) -> Tensor:
    if after.shape != before.shape:
        return torch.full((1,), float("nan"), dtype=torch.float64)
    return torch.nan_to_num(after.double()) - torch.nan_to_num(before.double())


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.allclose(a, b, rtol=1e-6, atol=1e-12))


def _fault(name: str, buffer: Tensor) -> Fault:
    return Fault(
        "P115",
        f"buffer {name!r} is changed by the forward pass in a way that depends on the samples",
        have=f"shape {tuple(buffer.shape)}, {str(buffer.dtype).removeprefix('torch.')}",
        law="each part sees its own samples, so the parts would disagree on its value",
        cure="a buffer that does not change, counts steps or counts samples; or one data rank with accumulate = 1",
        at=f"model.{name}",
    )


class Keeper:
    """Keeps the buffers of a rank as one device would have them.

    Args:
        module: Of the rank.
        kinds: {name: "steps" | "samples"}.
        parts: Data ranks.
        microbatches: Of a step.
    """

    def __init__(self, module: nn.Module, kinds: dict[str, str], parts: int, microbatches: int) -> None:
        held = dict(module.named_buffers())
        self.module, self.parts, self.microbatches = module, parts, microbatches
        self.steps = [n for n, kind in kinds.items() if kind == "steps" and n in held]
        self.samples = [n for n, kind in kinds.items() if kind == "samples" and n in held]
        self.start: dict[str, Tensor] = {}  # before the step
        self.once: dict[str, Tensor] = {}  # after its first microbatch
        self.grew: dict[str, Tensor] = {}  # in the first step

    def begin(self) -> None:
        """Before a step."""
        self.start = self._copies([*self.samples, *self.steps])

    def starting(self, microbatch: int) -> None:
        """Before the forward pass of a microbatch: every one finds the counters of the step's start."""
        if microbatch:
            self._set({n: self.start[n] for n in self.steps})

    def ran(self, microbatch: int) -> None:
        """After it."""
        if not microbatch:
            self.once = self._copies(self.steps)

    def finish(self) -> None:
        """After the last microbatch."""
        now = self._copies(self.samples)
        for name in self.samples:
            grown = now[name] - self.start[name]
            if not torch.equal(self.grew.setdefault(name, grown), grown):
                raise RunFailed(f"buffer {name!r} grows by other amounts from step to step: it does not count samples alone")
            now[name] = self.start[name] + grown * self.parts
        self._set({**now, **self.once})

    def _copies(self, names: list[str]) -> dict[str, Tensor]:
        held = dict(self.module.named_buffers()) if names else {}
        return {n: held[n].detach().clone() for n in names}

    def _set(self, values: dict[str, Tensor]) -> None:
        held = dict(self.module.named_buffers()) if values else {}
        with torch.no_grad():
            for name, value in values.items():
                held[name].copy_(value)
