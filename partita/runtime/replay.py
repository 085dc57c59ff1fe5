"""Runs an unmodified module on its shards: a torch-function mode replays the captured calls and changes only the marked ones.

user code        q = self.q(x).view(b, t, heads, -1)          loss = F.cross_entropy(logits, targets)
on a rank        enter x; its own rows; view(b, t, heads / n) its own classes; two exchanges of statistics; sum
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from partita.errors import Fault, Refused, RunFailed
from partita.program import Program
from partita.program.split import Derivation, ranges, rewrite
from partita.program.tensor import derive_tensor
from partita.runtime.calls import Heard, Listener, at, counts, mark, put, writes
from partita.runtime.capture import capture, narrowed
from partita.runtime.net import Net
from partita.runtime.random import Stream
from partita.runtime.steps import Edge, Script, Step, not_splittable, write
from partita.runtime.subject import Subject
from partita.runtime.tape import Tape
from partita.runtime.through import Place, Resumable, Through

AGAIN = 3  # further rehearsals of a module that keeps something from pass to pass


class Axis:
    """The all_reduce of one mesh axis; silent while a script is tried out."""

    def __init__(self, net: Net, name: str) -> None:
        self.net, self.name, self.silent = net, name, False

    def reduce(self, tensor: Tensor, how: str = "sum", label: str = "") -> None:
        """All_reduce in place."""
        if not self.silent:
            self.net.all_reduce(tensor, self.name, op=how, label=label)


class Sum(torch.autograd.Function):
    """Makes a Partial value whole; its gradient is whole already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, label: str) -> Tensor:
        whole = x.clone(memory_format=torch.contiguous_format)
        axis.reduce(whole, "sum", label)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None, None


class Enter(torch.autograd.Function):
    """Takes a whole value into a split region: its gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, label: str) -> Tensor:
        ctx.axis, ctx.label = axis, label
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        whole = grads[0].clone(memory_format=torch.contiguous_format)
        ctx.axis.reduce(whole, "sum", ctx.label)
        return whole, None, None


class Zero(torch.autograd.Function):
    """What another rank adds: zero here, the gradient untouched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


class Replay(Through, Resumable):
    """The mode; entered around one forward pass and its loss.

    Args:
        axis: The axis its calls talk over.
        script: Of a module in training mode.
        module: Whose mode decides which script is followed.
        evaluation: Writes the script of evaluation, when it is first needed.
    """

    def __init__(
        self, axis: Axis, script: Script, module: nn.Module | None = None, evaluation: Callable[[], Script] | None = None
    ) -> None:
        super().__init__()
        self.axis, self.module, self.evaluation = axis, module, evaluation
        self.scripts = {True: script}
        self.steps, self.next = script.steps, 0
        self.store: dict[tuple[str, int], Tensor] = {}
        self.names: dict[int, str] = {}  # of the parameters, by id
        self.rehearsing = False

    def __enter__(self) -> Self:
        training = self.module is None or self.module.training or self.evaluation is None
        if training not in self.scripts:
            assert self.evaluation is not None
            with torch.inference_mode(mode=False), torch.enable_grad():
                self.scripts[training] = self.evaluation()
        self.steps, self.next, self.store = self.scripts[training].steps, 0, {}
        if not self.names and self.module is not None:
            self.names = _names(self.module)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        self.store = {}
        super().__exit__(*exc)
        if exc[0] is None and self.next < len(self.steps):
            raise RunFailed(_strayed(self.next, self.steps[self.next], "the end"))

    def place(self) -> Place:
        return _Stood(self, self.steps, self.next, dict(self.store))

    @contextmanager
    def resumed(self, steps: tuple[Step, ...], at: int, store: Mapping[tuple[str, int], Tensor]) -> Iterator[None]:
        """Once more from a step on, with what earlier steps left for it."""
        kept, (self.steps, self.next, self.store) = (self.steps, self.next, self.store), (steps, at, dict(store))
        try:
            with self.on():
                yield
        finally:
            self.steps, self.next, self.store = kept

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not counts(func, args, kwargs):
            return func(*args, **kwargs) if kwargs else func(*args)
        step = self.steps[self.next] if self.next < len(self.steps) else None
        if step is None or (step.func is not func and step.func != func):
            raise RunFailed(_strayed(self.next, step, func.__name__))
        for path, name in step.reads:
            if self.names.get(id(at(args, kwargs or {}, path)), name) != name:
                raise RunFailed(_strayed(self.next, step, f"{func.__name__} of another parameter than {name!r}"))
        self.next += 1
        out = self.call(step, args, kwargs or {})
        if writes(func):
            mark(args[0])
        if self.rehearsing:
            _fits(step, out)
        return mark(out)

    def call(self, step: Step, args: tuple, kwargs: dict) -> Any:
        """One call, as its step says."""
        if step.edges:
            changed, named = list(args), dict(kwargs)
            for edge in step.edges:
                put(changed, named, edge.path, self.changed(edge, step, at(changed, named, edge.path)))
            args, kwargs = tuple(changed), named
        out = step.run(step.func, args, kwargs) if step.run else step.func(*args, **kwargs)
        return Sum.apply(out, self.axis, step.module) if step.summed else out

    def changed(self, edge: Edge, step: Step, x: Tensor) -> Tensor:
        """What stands in for an argument."""
        key = edge.kind, edge.value
        if edge.again:
            return self.store.pop(key) if edge.last else self.store[key]
        if edge.kind == "sum":
            with nullcontext() if step.graded else torch.enable_grad():
                y = Sum.apply(x, self.axis, step.module)
        elif edge.kind == "enter":
            y = Enter.apply(x, self.axis, step.module)
        elif edge.kind == "one":
            y = Zero.apply(x)
        else:
            assert edge.part is not None
            y = edge.part.of(x, edge.part.dim)
        if not edge.last:
            self.store[key] = y
        return y


@dataclass
class _Stood(Place):
    """Where a replay stands: the next of its steps, and what earlier ones left for later ones."""

    replay: Replay
    steps: tuple[Step, ...]
    at: int
    store: dict[tuple[str, int], Tensor]

    def passed(self) -> None:
        read = {(e.kind, e.value) for step in self.steps[self.at : self.replay.next] for e in step.edges if e.again}
        self.store = {key: value for key, value in self.store.items() if key in read}

    def resumed(self) -> AbstractContextManager[None]:
        return self.replay.resumed(self.steps, self.at, self.store)


def _fits(step: Step, out: Any) -> None:
    """Raise ValueError unless the results have their local shapes."""
    have = tuple(tuple(t.shape) for t in tree_leaves(out) if isinstance(t, Tensor))
    fits = [mine == part or (0 in mine and 0 in part) for mine, part in zip(have, step.shapes, strict=True)]
    if not all(fits):
        raise ValueError(f"shape {have} on a rank where {step.shapes} is its part")


def _names(module: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in module.named_parameters()}


def _strayed(number: int, step: Step | None, now: str) -> str:
    was = f"{step.func.__name__} in {step.module or 'the model'!r}" if step else "the end"
    return (
        f"call {number} was {was} when the module was captured and is {now} now: the module took another path\n"
        "  try    make the calls of the module independent of the data and of the step, or leave the split out"
    )


# ---------------------------------------------------------------- setting it up
Placement = tuple[int, tuple[tuple[int, int], ...]]  # dim, and the (start, length) ranges of it that a rank holds


@dataclass(frozen=True)
class Installed:
    """A module that has been cut.

    Args:
        replay: To be entered around each forward pass and its loss.
        late: Parameters whose gradients are to be summed over the axis once a step, after the backward pass, in this order.
        placements: How each cut parameter is cut, by its name.
    """

    replay: Replay
    late: tuple[str, ...]
    placements: dict[str, Placement]


def install(
    module: nn.Module, subject: Subject, samples: int, program: Program, derivation: Derivation, net: Net, stream: Stream | None
) -> Installed:
    """Cut the module's parameters for this rank and prepare the replay of its calls.

    Args:
        module: Whole; its parameters are replaced by this rank's parts.
        subject: What it is trained on; captured once more here, with its calls.
        samples: Of the captured microbatch.
        program, derivation: What was said: a flat program of the same subject and its split along the axis.
        net: The network.
        stream: Serves dropout; None if the program draws nothing.

    Raises:
        Refused: P116, naming every module that cannot run on shards.
    """
    axis, coordinate = Axis(net, derivation.axis), net.coordinate[derivation.axis]
    subject = replace(subject, batches=_kept(subject, max(samples, 2)))

    def written(subject: Subject, stream: Stream | None) -> tuple[Captured, Script]:
        captured = hear(subject, samples, program, derivation)
        script = write(captured.program, captured.heard, captured.derivation, coordinate, axis.reduce, stream)
        return captured, replace(script, calls=tuple(captured.heard.calls))

    def evaluation() -> Script:
        _, script = written(replace(subject, make=lambda: subject.make().eval()), None)
        rehearse(Replay(axis, script), subject, spare)
        return script

    captured, script = written(subject, stream)
    placements = cut(module, rewrite(captured.program, captured.derivation), derivation.axis, coordinate)
    spare = twin_of(module).eval()  # the module itself may be one that cannot be copied by the time it is evaluated
    replay = Replay(axis, script, module, evaluation)
    rehearse(replay, subject, module)
    if captured.program.dynamic and placements:
        _rehearse_paths(replay, subject, module)
    return Installed(replay, script.late, placements)


def _kept(subject: Subject, samples: int) -> Callable[[int], dict[str, Any]]:
    """The first batch only, as captured: data that is read once cannot be asked for it again later."""
    batch = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, narrowed(subject.batches(0), samples))
    return lambda _: batch


@dataclass(frozen=True)
class Captured:
    """The calls of a subject, its flat program, and the derivation on it."""

    program: Program
    heard: Heard
    derivation: Derivation


def hear(subject: Subject, samples: int, program: Program, derivation: Derivation) -> Captured:
    """Capture the subject with its calls, and split it as `program` is split by `derivation`."""
    flat, heard = hear_whole(subject, samples)
    atoms = matched(program, derivation.atoms, flat)
    return Captured(flat, heard, derive_tensor(flat, derivation.axis, derivation.size, atoms))


def hear_whole(subject: Subject, samples: int) -> tuple[Program, Heard]:
    """Capture the subject with its calls."""
    listeners: list[Listener] = []

    def listen(tape: Tape) -> Listener:
        listeners.append(Listener(tape))
        return listeners[-1]

    return capture(subject, max(samples, 2), listen=listen), listeners[-1].heard


def matched(program: Program, atoms: frozenset[int], other: Program) -> set[int]:
    """The atoms of another capture of the same module: those at the same places of its parameters."""
    known = {t.name: t for t in program.parameters()}
    alike = {re.sub(r"\d+", "*", name): t for name, t in known.items()}  # of a folded program, one block stands for many
    found = set()
    for t in other.parameters():
        same = known.get(t.name) or alike[re.sub(r"\d+", "*", t.name)]
        for mine, theirs in zip(same.dims, t.dims, strict=True):
            found |= {b for a, b in zip(mine, theirs, strict=True) if a in atoms}
    return found


def cut(module: nn.Module, split: Program, axis: str, coordinate: int) -> dict[str, Placement]:
    """Leave of every parameter what this rank holds, ties kept; returns (dim, ranges) of those that were cut."""
    found: dict[str, Placement] = {}
    made: dict[int, nn.Parameter] = {}
    for t in split.parameters():
        if axis in t.layouts:
            dim, spans = ranges(split, t.id, axis, coordinate)
            old = module.get_parameter(t.name)
            part = torch.cat([old.detach().narrow(dim, *span) for span in spans], dim)
            made[id(old)] = nn.Parameter(part.contiguous().clone(), old.requires_grad)
            found[t.name] = dim, spans
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in made:
                setattr(owner, name, made[id(parameter)])
    for parameter in module.parameters():
        mark(parameter)
    return found


def rehearse(replay: Replay, subject: Subject, module: nn.Module) -> None:
    """Run the script once on fake shards, without a network: every result must have the shape its part of the whole has.

    Raises:
        Refused: P116, naming the module of the first call that does not.
    """
    try:
        _rehearsed(replay, subject, module, dict(subject.batches(0)))
    except (Refused, KeyboardInterrupt):
        raise
    except Exception as error:
        raise Refused(_misfit(replay, error)) from error


def _rehearsed(replay: Replay, subject: Subject, module: nn.Module, batch: dict[str, Any]) -> None:
    twin, names = twin_of(module), replay.names
    replay.axis.silent = replay.rehearsing = True
    replay.names = _names(twin)
    try:
        for _ in range(1 + AGAIN):
            before = _kept_by(twin)
            with torch.random.fork_rng(devices=[]), replay:
                subject.evaluate(twin, batch)
            if _kept_by(twin) == before:  # nothing it keeps can lead the next pass elsewhere
                break
    finally:
        replay.axis.silent = replay.rehearsing = False
        replay.names = names


def _rehearse_paths(replay: Replay, subject: Subject, module: nn.Module) -> None:
    """Where numbers of the batch steer Python: the calls must be the same on batches of other numbers.

    Raises:
        Refused: P116, naming the module whose call was another one.
    """
    for change in (torch.zeros_like, lambda t: -t if t.is_floating_point() else t):
        batch = tree_map(lambda t, change=change: change(t) if isinstance(t, Tensor) else t, dict(subject.batches(0)))
        try:
            _rehearsed(replay, subject, module, batch)
        except RunFailed as error:
            step = replay.steps[min(replay.next, len(replay.steps) - 1)]
            why = f"on a batch of other numbers, {str(error).splitlines()[0]}"
            raise Refused(not_splittable(step.module, [why], replay.axis.name)) from error
        except Exception:  # the module may not bear such a batch: its path is then watched as it runs
            continue


def _kept_by(module: nn.Module) -> dict[tuple[int, str], Any]:
    """What a module keeps in plain attributes: numbers and words as they are, the rest by identity."""
    plain = (int, float, str, bool, type(None))
    inner = ("_parameters", "_buffers", "_modules")
    kept = ((n, k, v) for n, m in enumerate(module.modules()) for k, v in vars(m).items() if k not in inner)
    return {(n, k): v if isinstance(v, plain) else id(v) for n, k, v in kept}


def twin_of(module: nn.Module) -> nn.Module:
    """A copy on fake parameters: what a forward changes in the module, it changes there."""
    mode, memo = FakeTensorMode(allow_non_fake_inputs=True), {}
    for b in module.buffers():
        memo[id(b)] = b.detach().cpu().clone()
    with mode:
        for p in module.parameters():
            memo[id(p)] = mark(nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad))
    return copy.deepcopy(module, memo)


def _misfit(replay: Replay, error: Exception) -> Fault:
    step = replay.steps[max(0, min(replay.next, len(replay.steps)) - 1)]
    why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        why = "what it returns depends on the numbers, which a script of calls cannot follow"
    return not_splittable(step.module, [f"{step.func.__name__}: {why}"], replay.axis.name)
