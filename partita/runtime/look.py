"""Runs a whole module on some samples as a part of a step would run them, and changes nothing of it.

Every look has a fresh twin of the module: the parameters are shared, buffers and whatever else it keeps are its own. The twin
stays in its own mode, for a module may do other things in evaluation; batch norms use fixed statistics instead of those of the
samples, and draws are keyed by sample, so that nothing but a true mixing of samples can make parts differ from the whole.
"""

import copy
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from partita.runtime.batch import Batch, Share, taken
from partita.runtime.batch_norm import FixedStatistics
from partita.runtime.loss_sources import Sources
from partita.runtime.loss_terms import Counts
from partita.runtime.random import Row, Stream
from partita.runtime.subject import Subject
from partita.runtime.wide import Wide

WIDE_LIMIT = 200_000_000  # parameters up to which a float64 copy is looked at
HALF = (torch.float16, torch.bfloat16)
Seen = TypeVar("Seen")


def copied(module: nn.Module) -> nn.Module:
    """A copy; of tensors that hooks make anew in every forward pass (old weight norms) there can be none."""
    return copy.deepcopy(module, _made(module))


def twin(module: nn.Module) -> nn.Module:
    """A copy that shares the parameters; buffers, and whatever else the module keeps, are its own."""
    return copy.deepcopy(module, {id(p): p for p in module.parameters()} | _made(module))


def _made(module: nn.Module) -> dict[int, Any]:
    return {id(t): t for m in module.modules() for t in vars(m).values() if isinstance(t, Tensor) and not t.is_leaf}


class Look:
    """A subject to be looked at.

    Args:
        subject: What runs.
        module: Whole; it is not changed.
        batch: A global batch.
        samples: Its size.
        draws: Where the samples are in each draw of the forward pass (`random.rows`).
        wide: In float64, where that runs.

    Attributes:
        tolerance: Of a comparison of two looks.
    """

    def __init__(
        self,
        subject: Subject,
        module: nn.Module,
        batch: Batch,
        samples: int,
        draws: Sequence[Row] = (),
        *,
        wide: bool = True,
    ) -> None:
        self.subject, self.batch, self.samples = subject, batch, samples
        self.module = copied(module)
        self.stream = Stream(0, list(draws))
        half = any(p.dtype in HALF for p in module.parameters())
        self.tolerance = 3e-2 if half else 1e-4
        self.wide = False
        if wide and sum(p.numel() for p in module.parameters()) <= WIDE_LIMIT:
            self._widen()

    def _widen(self) -> None:
        plain = self.module, self.batch, self.tolerance
        try:
            self.module = copied(self.module)._apply(_widest)
            self.batch = tree_map(lambda t: _widest(t) if isinstance(t, Tensor) else t, self.batch)
            self.tolerance, self.wide = 1e-9, True
            with torch.no_grad():
                self(Share(0, min(self.samples, 2)), lambda value, counts: None)
        except (RuntimeError, TypeError, ValueError):  # it insists on its own dtype
            (self.module, self.batch, self.tolerance), self.wide = plain, False

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        """Of a loss seen here, by parameter; of those it reaches."""
        named = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if loss.requires_grad:
            loss.backward()  # not `autograd.grad`, which recomputed parts do not bear
        found = {name: p.grad for name, p in named.items() if p.grad is not None}
        for p in named.values():
            p.grad = None
        return found

    @property
    def device(self) -> torch.device | None:
        return next((t.device for t in (*self.module.parameters(), *self.module.buffers())), None)

    def __call__(
        self,
        share: Share,
        then: Callable[[Any, Counts], Seen],
        module: nn.Module | None = None,
        *,
        given: Mapping[int, float] | None = None,
        batch: Batch | None = None,
    ) -> Seen:
        """Evaluate the loss of some samples and see `then` about it.

        Args:
            share: Which samples.
            then: Called with the loss and what was heard.
            module: One that was looked at before; None for a fresh twin.
            given: Other values for the loss's sources, which are heard if this is not None.
            batch: Another global batch.
        """
        own = twin(self.module) if module is None else module
        part = self.part(share, batch)
        with self._alone(own, share), Counts() as counts:
            if given is not None:
                counts.sources = Sources(part, given)
            with counts.sources or nullcontext():
                value = self.subject.evaluate(own, part)
            return then(value, counts)

    def part(self, share: Share, batch: Batch | None = None) -> Batch:
        """The samples looked at."""
        return taken(self.batch if batch is None else batch, share, self.samples, self.device)

    def output(self, share: Share) -> Any:
        """What a fresh twin makes of some samples."""
        own = twin(self.module)
        with self._alone(own, share):
            return self.subject.call(own, self.part(share))

    def judged(self, output: Any, share: Share, batch: Batch, then: Callable[[Any, Counts], Seen]) -> Seen:
        """See `then` about the loss of an output that is there, given another batch."""
        with self._alone(self.module, share), Counts() as counts:
            counts.sources = Sources(part := self.part(share, batch), {})
            with counts.sources:
                value = self.subject.judge(output, part)
            return then(value, counts)

    @contextmanager
    def _alone(self, own: nn.Module, share: Share) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(_undisturbed())
            if self.wide:
                stack.enter_context(Wide())
            stack.enter_context(FixedStatistics())
            if own.training:
                stack.enter_context(self.stream.step(0, share.first, share.samples))
            yield


def _widest(t: Tensor) -> Tensor:
    return t.to(torch.complex128) if t.is_complex() else t.double() if t.is_floating_point() else t


def drawn() -> tuple[Any, Any]:
    """How far Python's and numpy's own random numbers have been drawn."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), (name, tuple(keys), *rest)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Random state is kept, and nobody is warned of what happens to a handful of samples."""
    state, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numbers)
