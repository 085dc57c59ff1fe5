"""Calls that are another call on a shard: vocabulary kernels, and dropout that draws whole rows."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from partita.program import Compute, Split
from partita.program.events import WIDTH
from partita.runtime.calls import Call
from partita.runtime.kernels.vocabulary import Classes, CrossEntropy, Known, LogSoftmax, Pick, Picked, embedding
from partita.runtime.layouts import Layouts
from partita.runtime.literals import NoRule, Run, literal
from partita.runtime.loss_terms import CROSS_ENTROPY, NLL
from partita.runtime.random import SERVED, Row, Stream, row

EMBEDDING = torch.embedding
LOG_SOFTMAX = {Tensor.log_softmax, torch.log_softmax, torch.special.log_softmax}
REDUCTIONS = ("none", "mean", "sum")  # by torch's number
Reduce = Callable[[Tensor, str, str], None]  # all_reduce in place: tensor, "sum" or "max", for whom


@dataclass
class Forms:
    """Finds how a call runs on this rank.

    Args:
        layouts: Of its tensors.
        reduce: The axis's all_reduce.
        stream: Serves dropout; None if there is none.

    Attributes:
        cells: Result of a log-softmax -> where its loss leaves what the gradient sums to.
        moved: (bytes, dtype) of the statistics exchanged by the last form.
    """

    layouts: Layouts
    reduce: Reduce
    stream: Stream | None
    cells: dict[int, list[Known]] = field(default_factory=dict)
    moved: list[tuple[int, str]] = field(default_factory=list)

    def has_kernel(self, call: Call, op: str) -> bool:
        """Whether an op that runs along a split dim, under this call, has a kernel."""
        if call.func is EMBEDDING:
            return op == "embedding" and not call.argument(3, "scale_grad_by_freq", default=False)
        if call.func is CROSS_ENTROPY:
            plain = call.argument(2, "weight") is None and len(call.ins) == 2 and not call.argument(5, "label_smoothing", 0.0)
            return plain and op in ("_log_softmax", "nll_loss_forward")
        if call.func in LOG_SOFTMAX:
            return op == "_log_softmax"
        return call.func is NLL and len(call.ins) == 2 and op == "nll_loss_forward" and call.ins[0] in self.cells

    def form(self, call: Call) -> Run | None:
        """How it runs; None if just as it is.

        Raises:
            NoRule: If it has no form on a shard.
        """
        self.moved = []
        first = call.ins[0] if call.ins else -1
        drawing = next((e for n in call.events if (e := self.layouts.compute(n)) and e.op in SERVED), None)
        if drawing is not None:
            return self._drawn(call, first, row(self.layouts.program, drawing))
        split = self.layouts.dim(first)
        if split is not None and (run := self._kernel(call, split)):
            return run
        rank = len(self.layouts.program.tensors[first].shape) if first >= 0 else 0
        out = self.layouts.dim(call.outs[0]) if call.outs else None
        return literal(call, split, out, rank, self.layouts.ranks)

    # ---- dropout
    def _drawn(self, call: Call, v: int, samples: Row) -> Run | None:
        """A draw on a split tensor: the stream draws whole rows, this rank keeps its part."""
        layout, stream = self.layouts.born.get(v), self.stream
        if not isinstance(layout, Split):
            return None
        if call.func is F.scaled_dot_product_attention and layout.dim != len(self.layouts.program.tensors[v].shape) - 3:
            raise NoRule("attention with dropout is split by something else than heads")
        if stream is None:
            raise NoRule(f"{call.name} draws on a split tensor, and there is no stream")
        if samples.dim == layout.dim:
            part = self.layouts.part_of_sample(v, layout, self.layouts.program.classes.get("batch", frozenset()))
        else:
            part = self.layouts.part(v, layout)
        if part is None:
            raise NoRule("a dropout whose split dim stands outside its samples")

        def run(func: Any, args: Any, kwargs: Any) -> Any:
            with stream.split(part):
                return func(*args, **kwargs)

        return run

    # ---- vocabulary
    def _kernel(self, call: Call, split: int) -> Run | None:
        if call.func is EMBEDDING:
            return self._embedding(call) if split == 0 else None
        if call.func is NLL:
            return self._picked(call) if call.ins[0] in self.cells else None
        inner = next(
            (e for n in call.events if (e := self.layouts.compute(n)) and e.op == "_log_softmax" and self._along(n, e)), None
        )
        if inner is None:
            return None
        return self._cross_entropy(call, inner) if call.func is CROSS_ENTROPY else self._log_softmax(call, inner)

    def _along(self, number: int, event: Compute) -> bool:
        label = self.layouts.taken(number).label
        return label is not None and event.signature is not None and label[0] in event.signature.inner

    def _classes(self, v: int) -> Classes:
        layout = self.layouts.born.get(v)
        assert isinstance(layout, Split)
        part = self.layouts.part(v, layout)
        if len(part.spans) != 1:
            raise NoRule("the classes of a rank are not one block")
        return Classes(*part.spans[0], part.size)

    def _embedding(self, call: Call) -> Run:
        classes, padding = self._classes(call.ins[0]), call.argument(2, "padding_idx", -1)
        if call.argument(4, "sparse", default=False):
            raise NoRule("an embedding with sparse gradients")
        return lambda func, args, kwargs: embedding(args[1], args[0], classes, padding if padding >= 0 else None)

    def _statistics(self, event: Compute) -> Callable[[Tensor, str], None]:
        """The two exchanges of a log-softmax: as many numbers as targets, float32 at least."""
        v, label, reduce = event.ins[0], event.module, self.reduce
        dtype = self.layouts.program.tensors[v].dtype
        dtype = "float32" if dtype in ("float16", "bfloat16") else dtype
        local = self.layouts.program.local_shape(v)
        size = math.prod(n for d, n in enumerate(local) if d != self.layouts.dim(v)) * WIDTH[dtype]
        self.moved = [(size, dtype)] * 2
        return lambda x, how: reduce(x, how, label)

    def _pick(self, call: Call) -> Pick:
        return Pick(
            self._classes(call.ins[0]), REDUCTIONS[call.argument(3, "reduction", 1)], call.argument(4, "ignore_index", -100)
        )

    def _cross_entropy(self, call: Call, event: Compute) -> Run:
        pick, reduce = self._pick(call), self._statistics(event)
        return lambda func, args, kwargs: CrossEntropy.apply(args[0], args[1], pick, reduce)

    def _log_softmax(self, call: Call, event: Compute) -> Run:
        reduce, dim = self._statistics(event), call.argument(1, "dim")
        dtype, cell = call.argument(2, "dtype"), self.cells.setdefault(call.outs[0], [])

        def run(func: Any, args: Any, kwargs: Any) -> Any:
            cell[:] = [Known()]
            return LogSoftmax.apply(args[0] if dtype is None else args[0].to(dtype), dim, cell[0], reduce)

        return run

    def _picked(self, call: Call) -> Run:
        pick, cell = self._pick(call), self.cells[call.ins[0]]
        return lambda func, args, kwargs: Picked.apply(args[0], args[1], replace(pick, known=cell[0]))
