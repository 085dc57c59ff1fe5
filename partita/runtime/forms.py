"""Calls that are another call on a shard: products in blocks, norms, means, vocabulary kernels, dropout of whole rows."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from partita.program import Compute, Split
from partita.program.events import WIDTH
from partita.program.grid import PRODUCTS
from partita.program.tensor import NORMS
from partita.runtime.calls import SIZES, Call, at
from partita.runtime.grid import Plane, ab, abt, lookup
from partita.runtime.kernels.norms import layer_norm, rms_norm
from partita.runtime.kernels.vocabulary import Classes, CrossEntropy, Known, LogSoftmax, Pick, Picked, embedding
from partita.runtime.layouts import Layouts
from partita.runtime.literals import NoRule, Run, literal
from partita.runtime.loss_terms import CROSS_ENTROPY, NLL
from partita.runtime.random import SERVED, Row, Stream, row

EMBEDDING = torch.embedding
LAYER_NORM, RMS_NORM = {F.layer_norm, torch.layer_norm}, {F.rms_norm, torch.rms_norm}
MEAN = {Tensor.mean, torch.mean}
# Calls that are one product: where the two factors stand, and what is added; a linear layer's weight is stored (out, in).
LINEAR, MATMUL = F.linear, {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}
ADDMM = {torch.addmm, Tensor.addmm}
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
        plane: Of products in blocks; None if there is none.

    Attributes:
        cells: Result of a log-softmax -> where its loss leaves what the gradient sums to.
        moved: (bytes, dtype) of the statistics exchanged by the last form.
        alone: The last form is another call, or draws: no form of another axis can stand around it.
    """

    layouts: Layouts
    reduce: Reduce
    stream: Stream | None
    plane: Plane | None = None
    cells: dict[int, list[Known]] = field(default_factory=dict)
    moved: list[tuple[int, str]] = field(default_factory=list)
    alone: bool = False

    def has_kernel(self, call: Call, op: str) -> bool:
        """Whether an op that runs along a split dim, under this call, has a kernel."""
        if op in NORMS:
            return call.func in LAYER_NORM | RMS_NORM
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
        self.moved, self.alone = [], True
        first = call.ins[0] if call.ins else -1
        drawing = next((e for n in call.events if (e := self.layouts.compute(n)) and e.op in SERVED), None)
        if drawing is not None:
            return self._drawn(call, first, row(self.layouts.program, drawing))
        if any(self.layouts.taken(n).product for n in call.events):
            return self._product(call)
        split = self.layouts.dim(first)
        if split is not None and (run := self._kernel(call, split)):
            return run
        self.alone = False
        if first in self.layouts.derivation.blocks and call.func in SIZES:
            return self._whole_sizes(call, first)
        rank = len(self.layouts.program.tensors[first].shape) if first >= 0 else 0
        out = self.layouts.dim(call.outs[0]) if call.outs else None
        run = literal(call, split, out, rank, self.layouts.ranks)
        averaged = any(e and e.op == "mean" and self._contracted(n) for n in call.events if (e := self.layouts.compute(n)))
        return self._mean(call) if averaged else run

    def _contracted(self, number: int) -> bool:
        """Whether an event sums over a split dim."""
        label, event = self.layouts.taken(number).label, self.layouts.compute(number)
        assert event is not None
        assert event.signature is not None
        return label is not None and not any(label[0] in cell for cells in event.signature.outs for cell in cells)

    def _mean(self, call: Call) -> Run:
        """A mean over equal parts is the mean of their means."""
        if call.func not in MEAN:
            raise NoRule(f"{call.name} takes a mean over a split dim")
        ranks = self.layouts.ranks
        return lambda func, args, kwargs: func(*args, **kwargs) / ranks

    # ---- blocks
    def _product(self, call: Call) -> Run:
        """A product in blocks, or rows of a table in blocks."""
        plane, label = self.plane, call.module
        assert plane is not None, "products in blocks need a plane"
        events = [(n, e) for n in call.events if (e := self.layouts.compute(n)) and self.layouts.taken(n).product]
        if len(events) != 1:
            raise NoRule(f"{call.name} has several products")
        number, event = events[0]
        form = self.layouts.taken(number).product
        if form == "lookup":
            return self._looked_up(call, plane)
        where = {self.layouts.same[v]: path for path, v in zip(call.paths, call.ins, strict=True) if v >= 0}
        roots = [self.layouts.same[event.ins[k]] for k in PRODUCTS[event.op]]
        known = call.func is LINEAR or call.func in ADDMM or call.func in MATMUL
        if not known or not all(root in where for root in roots):
            raise NoRule(f"{call.name} is no product of its arguments that can be done in blocks")
        if call.func in ADDMM and any(call.argument(k + 3, n, 1) != 1 for k, n in enumerate(("beta", "alpha"))):
            raise NoRule(f"{call.name} scales what it adds")
        x_path, w_path = (where[root] for root in roots)
        added = next((p for p in call.paths if p not in (x_path, w_path)), None)
        first = event.op == "mm"  # its backward begins with the gradient of the matrix, that of addmm with the other one
        turned = (call.func is LINEAR) == (form == "ab")
        product = ab if form == "ab" else abt

        def run(func: Any, args: Any, kwargs: Any) -> Any:
            x, w = at(args, kwargs, x_path), at(args, kwargs, w_path)
            y = product(x, w.t() if turned else w, plane, label, weight_first=first)
            return y if added is None else y + at(args, kwargs, added)

        return run

    def _looked_up(self, call: Call, plane: Plane) -> Run:
        padding, label = call.argument(2, "padding_idx", -1), call.module
        if call.func is not EMBEDDING or call.argument(3, "scale_grad_by_freq", default=False):
            raise NoRule(f"{call.name} of a table in blocks")
        if call.argument(4, "sparse", default=False):
            raise NoRule("an embedding with sparse gradients")
        return lambda func, args, kwargs: lookup(args[1], args[0], plane, padding if padding >= 0 else None, label=label)

    def _whole_sizes(self, call: Call, v: int) -> Run | None:
        """The sizes of a matrix in blocks, as user code knows them."""
        rank, derivation = len(self.layouts.program.tensors[v].shape), self.layouts.derivation
        along = literal(call, self.layouts.dim(v), None, rank, derivation.size)
        across = literal(call, derivation.blocks[v].dim, None, rank, derivation.ranks)
        if along is None or across is None:
            return along or across
        return lambda func, args, kwargs: across(lambda *a, **k: along(func, a, k), args, kwargs)

    # ---- norms
    def covers(self, call: Call) -> bool:
        """Whether a kernel does all that is captured under a call: an RMS norm that torch takes apart, along a split dim."""
        if call.func not in RMS_NORM or any(e and e.op in NORMS for n in call.events if (e := self.layouts.compute(n))):
            return False
        last = len(self.layouts.program.tensors[call.ins[0]].shape) - 1
        return len(call.argument(1, "normalized_shape")) == 1 and self.layouts.dim(call.ins[0]) == last

    def _norm(self, call: Call, event: Compute | None) -> Run:
        """A norm along a split dim: the statistics of whole rows are exchanged."""
        inner = event.signature.inner if event is not None and event.signature is not None else {"": (1, 1, True)}
        if len(inner) != 1:
            raise NoRule(f"{call.name} over several dims, one of them split")
        v, label = call.ins[0], call.module
        whole = self.layouts.program.tensors[v].shape[-1]
        ((times, values, _),) = inner.values()
        dtype = self.layouts.program.tensors[v].dtype
        dtype = "float32" if dtype in ("float16", "bfloat16") else dtype
        size = values * math.prod(self.layouts.program.local_shape(v)[:-1]) * WIDTH[dtype]
        self.moved = [(size, dtype)] * times

        def reduce(x: Tensor, how: str) -> None:
            self.reduce(x, how, label)

        def rms(func: Any, args: Any, kwargs: Any) -> Tensor:
            given = call.argument(3, "eps")
            epsilon = torch.finfo(args[0].dtype).eps if given is None else given  # as torch has it
            return rms_norm(args[0], _given(args, kwargs, 2, "weight"), epsilon, whole, reduce)

        def layer(func: Any, args: Any, kwargs: Any) -> Tensor:
            weight, bias = _given(args, kwargs, 2, "weight"), _given(args, kwargs, 3, "bias")
            return layer_norm(args[0], weight, bias, call.argument(4, "eps", 1e-5), whole, reduce)

        return rms if call.func in RMS_NORM else layer

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
        if self.covers(call):
            return self._norm(call, None)
        along = [e for n in call.events if (e := self.layouts.compute(n)) and self._along(n, e)]
        if normed := next((e for e in along if e.op in NORMS), None):
            return self._norm(call, normed)
        inner = next((e for e in along if e.op == "_log_softmax"), None)
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


def _given(args: Any, kwargs: Any, position: int, name: str) -> Any:
    """An argument, however it was passed."""
    return args[position] if len(args) > position else kwargs.get(name)
