"""The tape: a dispatch mode that writes down every op of a step, names its dims, and sees storages die.

Each op becomes a `Compute` with single-assignment tensors. Nothing here keeps a tensor alive: a reference more would make
autograd copy gradients it would otherwise take over, so tensors and storages are watched through weak references.
"""

import re
import sys
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partita.program import events
from partita.program.dims import Atoms, Dim, Signature
from partita.program.events import Compute, Kind, Phase
from partita.runtime.flop import flop_of
from partita.runtime.patterns import Call, Value, created
from partita.runtime.rules import rule_of

DTYPES = {getattr(torch, name): name for name in events.WIDTH if name in torch.__dict__}
IOTA = ("unsqueeze", "view", "expand", "_to_copy", "alias", "detach")  # what keeps an arange an arange
EMPTY = ("cat", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")  # may have empty pieces beside full ones
SPLITS = ("split", "split_with_sizes", "unsafe_split")
READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "item")  # ops by which numbers steer Python

# Files of torch that read numbers in order to check arguments, and those between them and a dispatch mode.
CHECKING = re.compile(r"torch[/\\](nn[/\\]functional\.py|distributions[/\\]\w+\.py)$")
PASSED = re.compile(
    r"partita[/\\]runtime[/\\]\w+\.py$|torch[/\\](overrides|_tensor|_ops|_compile)\.py$|torch[/\\](_dynamo|utils|_subclasses)[/\\]"
)


class Where:
    """Path of the running module, in forward and, through autograd's sequence numbers, in backward.

    It touches no tensor, so it adds no op and changes no reference count.
    """

    def __init__(self, module: nn.Module) -> None:
        self.names = {m: name for name, m in module.named_modules()}
        self.stack: list[str] = [""]
        self.depths: list[int] = []
        self.ran: dict[str, int] = {}  # module -> how often its forward ran outside backward
        self.again = 0  # forwards that started inside backward: recomputation
        self.of: dict[int, str] = {}  # autograd sequence number -> module
        self.last = ""

    def __enter__(self) -> "Where":
        enter = nn.modules.module.register_module_forward_pre_hook(self._enter)
        leave = nn.modules.module.register_module_forward_hook(self._leave, always_call=True)
        self.hooks = [enter, leave]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _enter(self, module: nn.Module, _: object) -> None:
        self.stack.append(self.names.get(module, self.stack[-1]))
        backward = torch._C._current_graph_task_id() != -1
        self.again += backward
        if not backward and module in self.names:
            self.ran[self.stack[-1]] = self.ran.get(self.stack[-1], 0) + 1

    def _leave(self, *_: object) -> None:
        if len(self.stack) > 1:
            self.stack.pop()
        self.again -= torch._C._current_graph_task_id() != -1

    def here(self) -> str:
        """The module an op that is about to run belongs to."""
        if torch._C._current_graph_task_id() == -1 or self.again:
            self.last = self.stack[-1]
            self.of.setdefault(torch.autograd._get_sequence_nr() - 1, self.last)
            return self.last
        node = torch._C._current_autograd_node()
        if node is not None:
            self.last = self.of.get(node._sequence_nr(), self.last)
        return self.last

    def phase(self) -> Phase:
        if torch._C._current_graph_task_id() == -1:
            return Phase.FORWARD
        return Phase.RECOMPUTE if self.again or torch.is_grad_enabled() else Phase.BACKWARD


class Tape(TorchDispatchMode):
    """Records one step.

    Attributes:
        values: What became of every tensor, by id.
        events: The ops, in order.
        now: id() of a live tensor -> its tensor id.
        faults: Ops whose dims did not fit their rule.
        owners: In the optimizer: name of a parameter, gradient or state -> module of the parameter.
        index: Event number here -> event number in the finished program (which has `drop` events too); set at the end.
        steered: Modules in which numbers that depend on data decided what Python did next.
    """

    def __init__(self, where: Where) -> None:
        super().__init__()
        self.atoms, self.where = Atoms(), where
        self.values: list[Value] = []
        self.events: list[Compute] = []
        self.now: dict[int, int] = {}
        self.roots: dict[int, int] = {}
        self.watched: dict[int, Any] = {}
        self.storages: dict[int, Any] = {}
        self.base: dict[int, int] = {}
        self.last_use: dict[int, int] = {}
        self.drops: list[tuple[int, int]] = []
        self.faults: list[str] = []
        self.steered: list[str] = []
        self.index: list[int] = []
        self.owners: dict[str, str] = {}
        self.optimizing = False

    # ---- tensors
    def add(self, t: Tensor, kind: Kind = Kind.ACTIVATION, name: str = "", dims: list[Dim] | None = None) -> int:
        """A new value: the tensor is new, or was just written to."""
        number = len(self.values)
        dtype = DTYPES.get(t.dtype, "uint8")
        if dims is None:
            dims = [self.atoms.new(n) for n in t.shape]
        root = self._root(t, number)
        self.values.append(Value(tuple(t.shape), dtype, dims, kind, name, root))
        key = id(t)
        self.now[key] = number
        if key not in self.watched:
            self.watched[key] = weakref.ref(t, lambda _, key=key: self._forget(key))
        return number

    def _forget(self, key: int) -> None:
        self.watched.pop(key, None)
        self.now.pop(key, None)
        self.base.pop(key, None)

    def _root(self, t: Tensor, number: int) -> int:
        """Id of the first tensor seen in the same storage."""
        if t.layout != torch.strided:
            return number
        storage = t.untyped_storage()
        key = storage._cdata
        if key not in self.roots:
            self.roots[key] = number
            self.storages[key] = weakref.ref(storage, lambda _, key=key: self._died(key))
        return self.roots[key]

    def _died(self, key: int) -> None:
        self.storages.pop(key, None)
        self.drops.append((self.roots.pop(key), len(self.events)))

    def number(self, t: Tensor) -> int:
        """Tensor id of a live tensor; one never seen is a constant."""
        found = self.now.get(id(t))
        return self.add(t, Kind.CONSTANT) if found is None else found

    # ---- ops
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        ins = [self.number(t) for t in tensors]
        name = func._schema.name.split("::")[1]
        module, phase = (self._owner(ins), Phase.OPTIMIZER) if self.optimizing else (self.where.here(), self.where.phase())
        if name in READS and _checks():
            self._lose(ins)
        elif name in READS and any(self.values[i].tainted for i in ins):
            self.steered.append(module)
        out = func(*args, **kwargs)
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if results:
            shapes = [tuple(t.shape) for t in results]
            call = Call(self.atoms, name, args, kwargs, [self.values[i] for i in ins], shapes)
            self._write(func, call, (tensors, ins, results), (module, phase, flop_of(func, args, kwargs, out)))
        elif ins and func._schema.is_mutable:  # a fused optimizer: it writes, and returns nothing
            self.events.append(Compute(name, module, phase, tuple(ins), (), 0, Signature([], [], creates=True)))
            self.last_use.update((self.values[i].root, len(self.events) - 1) for i in ins)
        return out

    def _lose(self, ins: list[int]) -> None:
        """Lose from sight how numbers were made that torch only checks: nobody computes with them."""
        for k in range(len(self.events) - 1, -1, -1):
            if any(i in self.events[k].outs for i in ins):
                self.events[k] = replace(self.events[k], signature=None)
                return

    def _owner(self, ins: list[int]) -> str:
        """In the optimizer: the module of the parameter an op works for."""
        for i in ins:
            if name := self.values[i].name or self.values[self.values[i].root].name:
                self.where.last = self.owners.get(name, self.where.last)
                break
        return self.where.last

    def _write(
        self, func: Any, call: Call, found: tuple[list[Tensor], list[int], list[Tensor]], at: tuple[str, Phase, int]
    ) -> None:
        (tensors, ins, results), (module, phase, flop), name = found, at, call.name
        signature, dims = self.name(func, call)
        written = name.endswith("_") and not name.startswith("__")
        outs = [self.add(t, dims=d) for t, d in zip(results, dims, strict=True)]
        tainted, pieces = any(v.tainted for v in call.ins), {v.piece for v in call.ins if v.piece}
        for k, i in enumerate(outs):
            v = self.values[i]
            v.origin, v.tainted = name, tainted
            along = call.arg(2 if name in SPLITS else 1, "dim", 0)
            every = name == "unbind" or (name in SPLITS and all(s[along] == 1 for s in call.shapes))
            number = k if every else signature.index if signature else -1
            if number >= 0:
                v.piece = (call.ins[0].dims[along], number)
            elif len(pieces) == 1 and name not in ("stack", "cat", "select_backward"):
                v.piece = next(iter(pieces))
        if (ins and call.ins[0].iota) or name == "arange":
            self.values[outs[0]].iota = self._iota(call)
        roots = {self.values[i].root for i in ins}
        view = bool(ins) and not written and all(self.values[i].root in roots for i in outs)
        self.events.append(Compute(name, module, phase, tuple(ins), tuple(outs), flop, signature, view))
        for i in (*ins, *outs):
            self.last_use[self.values[i].root] = len(self.events) - 1
        if view and func.is_view:
            for t in results:
                if t is not tensors[0]:
                    self.base[id(t)] = self.base.get(id(tensors[0]), id(tensors[0]))
        elif written and id(results[0]) in self.base:
            self._through(self.base[id(results[0])], outs[0], phase)

    def _iota(self, call: Call) -> bool:
        if call.name == "arange":
            return len([a for a in call.args if isinstance(a, int)]) == 1 or call.args[:1] == (0,)
        plus_zero = call.name == "add" and len(call.args) > 1 and type(call.args[1]) is int and call.args[1] == 0
        return call.name in IOTA or plus_zero

    def _through(self, base: int, seen: int, phase: Phase) -> None:
        """A write through a view makes a new value of its base: same dims, tied to the view's by atom."""
        old = self.now.get(base)
        ref = self.watched.get(base)
        target = ref() if ref else None
        if old is None or target is None:
            return
        pair = self.values[old], self.values[seen]

        def cells(dims: list[Dim]) -> list[tuple[str, ...]]:
            return [tuple(f"a{a}" for a in self.atoms.leaves(d)) for d in dims]

        signature = Signature([cells(v.dims) for v in pair], [cells(pair[0].dims)])
        signature.dims = {f"a{a}": (a,) for v in pair for d in v.dims for a in self.atoms.leaves(d)}
        new = self.add(target, dims=pair[0].dims)
        self.values[new].tainted = pair[0].tainted or pair[1].tainted
        self.events.append(Compute("(write)", self.where.last, phase, (old, seen), (new,), 0, signature, view=True))

    # ---- naming
    def name(self, func: Any, call: Call) -> tuple[Signature | None, list[list[Dim]]]:
        """The op's signature with its labels tied to dims, and the dims of its results."""
        signature = self._fitting(func, call)
        if signature is not None:
            dims = self._tie(signature, call)
            if dims is not None:
                return signature, dims
        return None, [[self.atoms.new(n) for n in s] for s in call.shapes]

    def _fitting(self, func: Any, call: Call) -> Signature | None:
        if all(0 in s for s in call.shapes) or (call.name == "slice_backward" and 0 in call.ins[0].shape):
            return created(call)  # nothing in it, or nothing but zeros
        if call.name not in EMPTY and (any(0 in s for s in call.shapes) or any(0 in v.shape for v in call.ins)):
            return None
        rule = rule_of(call.name, func)
        try:
            return rule(call) if rule else None
        except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:  # a use the rule does not know
            self.faults.append(f"{call.name} {[v.shape for v in call.ins]}: {error!r}")
            return None

    def _tie(self, s: Signature, call: Call) -> list[list[Dim]] | None:
        s.ins = [list(cells) for cells in s.ins]
        ranks = [len(v.shape) for v in call.ins], [len(shape) for shape in call.shapes]
        if ([len(cells) for cells in s.ins], [len(cells) for cells in s.outs]) != ranks:
            self.faults.append(f"{call.name} of ranks {ranks} has a rule for others")
            return None
        for v, cells in zip(call.ins, s.ins, strict=True):
            for i, cell in enumerate(cells):
                if not self._tie_cell(s, v, cells, i, cell):
                    self.faults.append(f"{call.name} {[v.shape for v in call.ins]} dim {i} {cell}")
                    return None
        dims: list[list[Dim]] = []
        for shape, cells in zip(call.shapes, s.outs, strict=True):
            for n, cell in zip(shape, cells, strict=True):
                if len(cell) == 1 and cell[0] not in s.dims:
                    s.dims[cell[0]] = self.atoms.new(n)
            dims.append([self._whole(s, cell) for cell in cells])
            if tuple(map(self.atoms.numel, dims[-1])) != shape:
                self.faults.append(f"{call.name} output {shape} named {[self.atoms.numel(d) for d in dims[-1]]}")
                return None
        for k in (k for cells in s.ins + s.outs for c in cells for k in c):
            s.dims.setdefault(k, ())  # a label whose dims all have size 1
        return dims

    def _whole(self, s: Signature, cell: tuple[str, ...]) -> Dim:
        if len(cell) == 1:
            return s.dims.get(cell[0], ())
        return sum((s.dims.get(k, ()) for k in cell), ())

    def _tie_cell(self, s: Signature, v: Value, cells: list[tuple[str, ...]], i: int, cell: tuple[str, ...]) -> bool:
        n, single = v.shape[i], len(cell) == 1 and cell[0] not in s.dims
        if n == 0 or (n == 1 and (single or self.atoms.leaves(self._whole(s, cell)))):
            cells[i] = ()  # broadcast: this input does not carry the label
        elif single:
            s.dims[cell[0]] = v.dims[i]
        else:
            return self.atoms.unify(v.dims[i], self._whole(s, cell))
        return True


def _checks() -> bool:
    """Whether torch itself reads a number to check an argument: it raises, or goes on as if nothing had been read."""
    frame = sys._getframe(2)
    while frame is not None and not CHECKING.search(frame.f_code.co_filename):
        if not PASSED.search(frame.f_code.co_filename):
            return False
        frame = frame.f_back
    return frame is not None


def nested(tree: Any, prefix: str) -> Iterable[tuple[str, Tensor]]:
    """(name, tensor) of everything in a batch, whatever it is made of."""
    if isinstance(tree, Tensor):
        yield prefix, tree
    elif isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from nested(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list | tuple):
        for n, item in enumerate(tree):
            yield from nested(item, f"{prefix}.{n}" if prefix else str(n))
