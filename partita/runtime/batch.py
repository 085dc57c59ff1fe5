"""Which samples of the global batch a rank runs, and in which microbatch.

    global batch   0 1 2 3 | 4 5 6 7        data ranks take contiguous runs,
    microbatches   0 1 , 2 3 | 4 5 , 6 7    each of which is cut into `accumulate` contiguous microbatches

Every sample is run by exactly one data rank in exactly one microbatch. Tensors carry samples on dim 0: the size of dim 0 of the
first tensor is the batch, and every tensor whose dim 0 has that size is cut; anything else goes to every rank whole.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from partita.errors import Fault, Refused

Batch = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Share:
    """A run of samples of the global batch: `samples` from number `first` on."""

    first: int
    samples: int


def shares(samples: int, part: int, parts: int, microbatches: int) -> list[Share]:
    """The microbatches of data rank `part` of `parts`; sizes must divide."""
    each = samples // (parts * microbatches)
    assert each * parts * microbatches == samples, f"{samples} samples do not divide into {parts} x {microbatches}"
    return [Share((part * microbatches + m) * each, each) for m in range(microbatches)]


def samples_of(batch: Mapping[str, Any]) -> int | None:
    """Samples of a batch; None if it has no tensor with dims."""
    return next((t.shape[0] for t in tree_leaves(dict(batch)) if isinstance(t, Tensor) and t.dim()), None)


def taken(batch: Mapping[str, Any], share: Share, samples: int, device: torch.device | None = None) -> Batch:
    """The part of a batch of `samples` samples that is `share`, on `device`."""

    def part(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        if t.dim() and t.shape[0] == samples and share.samples != samples:
            t = t.narrow(0, share.first, share.samples)
        return t if device is None or t.device == device else t.to(device)

    return tree_map(part, dict(batch))


class Feed:
    """The batches of a run, checked as they come.

    A function is asked for any step. An iterable is read in order and once: a forked rank goes on where its parent was, so that
    a loader that shuffles is not shuffled again. The first batch may be asked for at any time.

    Args:
        source: batches(step), or an iterable.
        samples: Samples of every batch; None takes those of the first.
    """

    def __init__(self, source: Callable[[int], Batch] | Iterable[Batch], samples: int | None = None) -> None:
        self.samples = samples
        self._source = source
        self._iterator: Iterator[Batch] | None = None
        self._kept: dict[int, Batch] = {}  # the first and the newest
        self._next = 0

    def __call__(self, step: int) -> Batch:
        """The global batch of a step."""
        batch = self._source(step) if callable(self._source) else self._read(step, self._source)
        if not isinstance(batch, Mapping):
            raise Refused(_no_mapping(step, batch))
        have = samples_of(batch)
        if not have:
            law = "some tensor of a batch has samples on dim 0"
            raise Refused(Fault("P110", f"the batch of step {step + 1} holds no samples", law=law, at="batches"))
        self.samples = self.samples or have
        if have != self.samples:
            raise Refused(_other_size(step, have, self.samples))
        return dict(batch)

    def ahead(self, steps: int) -> list[Fault]:
        """What can be told of a run of so many steps before it starts: of batches in a list, and of loaders."""
        source = self._source
        if isinstance(source, Feed):
            return source.ahead(steps)
        if isinstance(source, DataLoader) and source.num_workers:
            return [_workers(source.num_workers)]
        if not isinstance(source, Sized) or callable(source):
            return []
        try:
            count = len(source)
        except TypeError:  # a loader of a stream
            return []
        if 0 < count < steps:
            return [_ended(steps - 1, count)]
        sizes = _sizes(source, steps)
        return [_other_size(k, size, sizes[0]) for k, size in enumerate(sizes) if size != sizes[0]][:1]

    def _read(self, step: int, source: Iterable[Batch]) -> Batch:
        if self._iterator is None:
            self._iterator = iter(source)
        while self._next <= step:
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise Refused(_ended(step, self._next)) from None
            self._kept = {k: b for k, b in self._kept.items() if k == 0} | {self._next: batch}
            self._next += 1
        assert step in self._kept, f"batch {step} of an iterable was asked for after batch {self._next - 1}"
        return self._kept[step]


def _sizes(source: Any, steps: int) -> list[int]:
    """Samples of the batches a run will read, where that is known without reading."""
    if isinstance(source, list | tuple):
        return [samples_of(b) or 0 for b in source[:steps] if isinstance(b, Mapping)]
    if isinstance(source, DataLoader) and not source.drop_last and source.batch_size and isinstance(source.sampler, Sized):
        whole, rest = divmod(len(source.sampler), source.batch_size)
        return ([source.batch_size] * whole + [rest] * bool(rest))[:steps]
    return []


def _workers(count: int) -> Fault:
    return Fault(
        "P115",
        f"the loader has {count} worker process{'es' * (count != 1)}",
        have=f"num_workers = {count}",
        law="ranks are forked, and have no processes of their own; every rank reads the same batches",
        cure="num_workers=0, or batches(step) that reads what is prepared",
        at="batches",
    )


def _no_mapping(step: int, batch: Any) -> Fault:
    return Fault(
        "P102",
        f"the batch of step {step + 1} is a {type(batch).__name__}",
        law="a batch is a mapping: keyword arguments of the module, and whatever the loss needs",
        cure='{"x": x, "y": y}',
        at="batches",
    )


def _other_size(step: int, have: int, want: int) -> Fault:
    return Fault(
        "P112",
        f"the batch of step {step + 1} has {have} samples",
        have=f"the plan's batch is {want}",
        law="every step trains on one global batch, cut over the same ranks",
        cure=f"batches of {want} samples (drop_last=True for a loader)",
        at="batches",
    )


def _ended(step: int, count: int) -> Fault:
    return Fault(
        "P110",
        f"the batches end after {count} step{'s' * (count != 1)}",
        have=f"step {step + 1} was asked for",
        law="there is one batch for every step",
        cure=f"steps = {count}, or batches that go on" if count else "batches that hold something",
        at="batches",
    )


def divides(samples: int, parts: int, microbatches: int) -> list[Fault]:
    """The fault of a batch that cannot be cut evenly; empty if it can."""
    unit = parts * microbatches
    if samples % unit == 0:
        return []
    return [
        Fault(
            "P104",
            f"a batch of {samples} samples cannot be cut into {unit} equal microbatches",
            have=f"batch = {samples}, data ranks = {parts}, accumulate = {microbatches}",
            law=f"batch = data ranks x accumulate x microbatch size (a pipeline's count too), so {unit} must divide {samples}",
            cure=f"batch = {samples // unit * unit or unit} or {(samples // unit + 1) * unit}",
            at="workload.batch",
        )
    ]
