"""Capture: one training step of any module as a Program, on fake parameters.

The user's module runs once, eagerly: fake parameters (shapes without memory), the real batch, no fake mode entered, so that
whatever decides the path (masks, positions, lengths) keeps its values and the path is the one a real run takes. Three tries:
built under fake tensors; built really and made fake; run really on a small batch, for control flow that depends on activations.
"""

import contextlib
import copy
import gc
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

from partita.errors import Fault, Refused, refuse
from partita.program.classes import classes_of
from partita.program.dims import Dim, Signature
from partita.program.events import Compute, Kind, Phase, Repeat
from partita.program.events import Tensor as Said
from partita.program.program import Program
from partita.program.resize import resized
from partita.runtime.loss import formed
from partita.runtime.subject import Subject, optimizer_faults
from partita.runtime.tape import Tape, Where, nested

DATA_DEPENDENT = "control flow depends on data"
REAL_LIMIT = 4 << 30  # bytes of parameters up to which a module is run for real, as the last try
Listener = Callable[[Tape], AbstractContextManager[Any]]


def capture(subject: Subject, samples: int, *, listen: Listener | None = None) -> Program:
    """One microbatch of `samples` samples on one device: forward, loss, backward, optimizer.

    Args:
        subject: What is trained.
        samples: Samples of the microbatch, over all ranks.
        listen: Makes a context entered around the forward and the loss, given the tape (what `apply` replays is heard there).

    Raises:
        Refused: P115, if no try succeeds; it names the module.
    """
    with _quiet():
        if samples == 1 and listen is None:  # a dim of size 1 has no name: capture two, say one
            with contextlib.suppress(ValueError, Refused):
                return resized(_tried(subject, 2, listen), "batch", 1)
        return _tried(subject, samples, listen)


def _tried(subject: Subject, samples: int, listen: Listener | None) -> Program:
    fault, where = "", ""
    for kind in ("light", "heavy", "real"):
        step = _Step(subject, samples, kind, listen)
        try:
            step.run()
        except Refused:
            raise
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            fault, where = f"{type(error).__name__}: {first}", step.place() or where
        else:
            return step.program()
    raise Refused(
        Fault(
            "P115",
            f"the step of this module cannot be captured: it fails in {where or 'the module or the loss'}",
            fault,
            f"capture runs one step on one device, over {samples} samples: so many of each tensor whose dim 0 is the batch",
            "make the module run on so many samples under plain torch",
        )
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Random state is kept, no cycle collector frees storages at an arbitrary op, a failed try is not logged."""
    collecting, log = gc.isenabled(), logging.getLogger(fake_tensor.__name__)
    gc.disable()
    silent, log.disabled = log.disabled, True
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        log.disabled = silent
        if collecting:
            gc.enable()


class _Step:
    """One try at a step."""

    def __init__(self, subject: Subject, samples: int, kind: str, listen: Listener | None) -> None:
        self.subject, self.samples, self.kind, self.listen = subject, samples, kind, listen
        self.where: Where | None = None
        self.making = "the factory of the model"

    def place(self) -> str:
        """What was running."""
        return self.making or (repr(self.where.last) if self.where and self.where.last else "")

    def run(self) -> None:
        """Run the user's code."""
        subject = self.subject
        self.batch = narrowed(subject.batches(0), self.samples)
        refuse(_unknown_keys(subject, self.batch))
        self.model = model = _built(subject, self.kind)
        self.making = "the factory of the optimizer"
        optimizer = subject.optimizer(model)
        refuse(optimizer_faults(optimizer))
        self.making = ""
        self.where = Where(model)
        self.tape = tape = Tape(self.where)
        self._enter_tensors()
        with self.where, tape:
            with self.listen(tape) if self.listen else contextlib.nullcontext():
                loss = subject.evaluate(model, self.batch)
            refuse(formed(loss))
            if isinstance(loss, tuple):
                loss = loss[0]
            self.loss = tape.now.get(id(loss), -1)
            loss.backward()
            if self.kind == "real" or tape.steered:
                for p in model.parameters():  # another batch may take another path and reach any of them
                    if p.requires_grad and p.grad is None:
                        p.grad = torch.zeros_like(p)
        del loss
        self.gradients = {
            tape.now[id(p)]: tape.now[id(p.grad)] for p in model.parameters() if p.grad is not None and id(p.grad) in tape.now
        }
        self._mark()
        self.notes = self._optimize(optimizer)

    def _enter_tensors(self) -> None:
        tape = self.tape
        shared: Dim = ()
        for name, t in nested({k: self.batch[k] for k in self.batch}, ""):
            dims = [tape.atoms.new(n) for n in t.shape]
            if t.dim() and t.shape[0] == self.samples:  # the samples of all inputs are the same samples
                shared = shared or dims[0]
                dims[0] = shared
            tape.values[tape.add(t, Kind.INPUT, name, dims)].tainted = True
        for kind, tensors in ((Kind.PARAMETER, self.model.named_parameters()), (Kind.BUFFER, self.model.named_buffers())):
            for name, t in tensors:
                tape.values[tape.add(t, kind, name)].tainted = True

    def _mark(self) -> None:
        values = self.tape.values
        for w, g in self.gradients.items():
            values[g].kind, values[g].name = Kind.GRADIENT, values[w].name
            if values[root := values[g].root].kind == Kind.ACTIVATION:
                values[root].kind = Kind.GRADIENT

    def _optimize(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Record a step of the optimizer as it is once its state exists."""
        tape = self.tape
        names = {id(p): name for name, p in self.model.named_parameters()}
        before = len(tape.events)
        try:
            optimizer.step()
            tape.owners = {name: name.rpartition(".")[0] for name in names.values()}
            for p, state in optimizer.state.items():
                for key, t in state.items():
                    if isinstance(t, Tensor):
                        name = f"{names.get(id(p), '')}.{key}"
                        tape.add(t, Kind.OPTIMIZER, name)
                        tape.owners[name] = names.get(id(p), "").rpartition(".")[0]
            tape.optimizing = True
            with tape:
                optimizer.step()
        except Exception as error:
            del tape.events[before:]
            return [f"the optimizer was not captured: {type(error).__name__}"]
        return []

    # ---- the program
    def program(self) -> Program:
        """What was recorded, dims settled and classes named."""
        tape, atoms = self.tape, self.tape.atoms
        atoms.settle()
        known: dict[Dim, Dim] = {}

        def leaves(dim: Dim) -> Dim:
            if dim not in known:
                known[dim] = atoms.leaves(dim)
            return known[dim]

        tensors = tuple(
            Said(i, v.shape, v.dtype, tuple(leaves(d) for d in v.dims), v.kind, v.name, v.root)
            for i, v in enumerate(tape.values)
        )
        sums: dict[int, tuple[Dim, ...]] = {}
        for s in (e.signature for e in tape.events if e.signature):
            s.dims = {k: leaves(d) for k, d in s.dims.items()}
            if s.summands:
                sums[s.dims["big"][0]] = tuple(leaves(d) for d in s.summands)
        used = {a for t in tensors for d in t.dims for a in d} | {a for parts in sums.values() for d in parts for a in d}
        used |= {a for e in tape.events if e.signature for d in e.signature.dims.values() for a in d}
        flat = Program(
            atoms={a: atoms.size[a] for a in sorted(used)},
            tensors=tensors,
            segments=_segments(_with_drops(tape, tensors)),
            gradients=self.gradients,
            sums=sums,
            loss=self.loss,
            dynamic=self.kind == "real" or bool(tape.steered),
            calls={name: n for name, n in tape.where.calls.items() if n > 1},
            notes=tuple(self.notes + self._notes()),
            runs=self._runs(),
        )
        return replace(flat, classes=classes_of(flat, self.subject.hints))

    def _runs(self) -> tuple[str, ...]:
        ran = self.where.calls if self.where else {}
        return tuple(path for path, times in ran.items() if times == 1 and path.rpartition(".")[2].isdigit())

    def _notes(self) -> list[str]:
        tape, found = self.tape, []
        opaque = sorted({e.op for e in tape.events if e.signature is None})
        if opaque:
            found.append(f"ops without a rule, left whole: {', '.join(opaque)}")
        if self.kind == "real" or tape.steered:
            where = sorted(set(tape.steered))
            found.append(f"{DATA_DEPENDENT}: {', '.join(repr(w) for w in where[:3])}" if where else DATA_DEPENDENT)
        return found


def _with_drops(tape: Tape, tensors: tuple[Said, ...]) -> list[Compute]:
    """The events, with a `drop` where a storage lives on after its last reader (Python still held it)."""
    late: dict[int, list[int]] = {}
    for root, at in tape.drops:
        if (
            tape.last_use.get(root, at) + 1 < at < len(tape.events)
            and tensors[root].shape
            and tensors[root].kind == Kind.ACTIVATION
        ):
            late.setdefault(at, []).append(root)
    found: list[Compute] = []
    tape.index, saving = [], tape.saving()
    for n, event in enumerate(tape.events):
        tape.index.append(len(found) + (n in late))
        if n in late:
            before = tape.events[n - 1]
            nothing = Signature([], [], creates=True)
            found.append(Compute("drop", before.module, before.phase, tuple(late[n]), (), 0, nothing, view=True))
        found.append(replace(event, saves=True) if n in saving else event)
    return found


def _segments(events: list[Compute]) -> tuple[Repeat, ...]:
    """What runs once per microbatch, and what runs once per step."""
    step = tuple(e for e in events if e.phase != Phase.OPTIMIZER)
    return tuple(Repeat(1, run) for run in (step, tuple(e for e in events if e.phase == Phase.OPTIMIZER)) if run)


# ---- the module on fake parameters, the batch of the microbatch
def _built(subject: Subject, kind: str) -> nn.Module:
    """The module of one try: built without memory, built really and made fake, or real."""
    if kind == "light":
        with torch.device("meta"):
            model = subject.make()
        refuse(_no_module(model))
        return _faked(model)
    model = subject.make()
    refuse(_shapeless(model))
    if kind == "heavy":
        return _faked(model)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    if size > REAL_LIMIT:
        raise RuntimeError(f"the module steers by activations and is too large to run here ({size} bytes of parameters)")
    return copy.deepcopy(model)


def _unknown_keys(subject: Subject, batch: Mapping[str, Any]) -> list[Fault]:
    have, law = ", ".join(map(repr, batch)), "forward= names the entries of a batch that are passed to the module"
    unknown = [key for key in subject.forward or () if key not in batch]
    return [Fault("P119", f"the batch has no {key!r}", have, law, "one of them", "forward") for key in unknown]


def _no_module(model: Any) -> list[Fault]:
    law = "model= is a factory that returns a module, or a module"
    if not isinstance(model, nn.Module):
        return [Fault("P102", f"model= returned a {type(model).__name__}", "", law, "return the module", "model")]
    if isinstance(model, torch.jit.ScriptModule):
        law = "the calls of a module are heard from Python"
        return [Fault("P115", "the model is a scripted module", "", law, "the module before torch.jit.script", "model")]
    return []


def _shapeless(model: nn.Module) -> list[Fault]:
    """Parameters of lazy modules, which have no shape before the first forward pass."""
    law = "a step is planned from the shapes of parameters, and every rank must start from the same values"
    cure = "run the module once on a batch in the factory, before it is returned"
    return [
        Fault("P115", f"parameter {name!r} has no shape yet", "a lazy module", law, cure, "model")
        for name, p in (*model.named_parameters(), *model.named_buffers())
        if isinstance(p, nn.parameter.UninitializedTensorMixin)  # pyright: ignore[reportAttributeAccessIssue]
    ][:1]


def _faked(model: nn.Module) -> nn.Module:
    """The module on fake CPU parameters; ties are kept, and a module with real parameters is copied, never changed.

    Buffers with values keep them: what they decide is decided as in a real run.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    for t in itertools.chain(model.parameters(), model.buffers()):
        if t.device.type == "meta":
            fake: Tensor = FakeTensor(mode, t.detach(), torch.device("cpu"))
        elif isinstance(t, nn.Parameter):
            fake = mode.from_tensor(t.detach())
        else:
            continue
        memo[id(t)] = nn.Parameter(fake, t.requires_grad) if isinstance(t, nn.Parameter) else fake
    if any(p.device.type != "meta" for p in model.parameters()):
        return copy.deepcopy(model, memo)
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: memo.get(id(t), t) for name, t in held.items() if t is not None})
    return model


def narrowed(batch: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """The first `samples` samples of a batch; a smaller batch is repeated."""
    whole = next((t.shape[0] for _, t in nested(dict(batch), "") if t.dim()), samples)

    def part(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.dim() or t.shape[0] != whole or whole == samples:
            return t
        return t[:samples] if samples < whole else t[torch.arange(samples) % whole]

    return tree_map(part, dict(batch))
