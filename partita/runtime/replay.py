"""Runs an unmodified module on its shards: a torch-function mode replays the captured calls and changes only the marked ones.

user code        q = self.q(x).view(b, t, heads, -1)          loss = F.cross_entropy(logits, targets)
on a rank        enter x; its own rows; view(b, t, heads / n) its own classes; two exchanges of statistics; sum
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from partita.errors import Fault, Refused, RunFailed
from partita.program import Program
from partita.program.grid import Plane as Axes
from partita.program.grid import derive_grid
from partita.program.saying import placed
from partita.program.split import Derivation, ranges
from partita.program.tensor import derive_tensor
from partita.runtime.calls import Heard, Listener, at, counts, mark, put, writes
from partita.runtime.capture import capture, narrowed
from partita.runtime.cuts import Cut
from partita.runtime.grid import Plane
from partita.runtime.merging import merged
from partita.runtime.net import Net
from partita.runtime.random import Stream
from partita.runtime.steps import Edge, Script, Step, not_splittable, write
from partita.runtime.subject import Subject
from partita.runtime.tape import Tape
from partita.runtime.through import Place, Resumable, Through

AGAIN = 3  # further rehearsals of a module that keeps something from pass to pass


class Talk:
    """What calls on shards send: all_reduces over axes, and products in blocks on a plane; silent while a script is tried out.

    Args:
        net: The network.
        axes: Along which the calls are split; none in a module that is whole.
        plane: Of products in blocks; None if there are none.
    """

    def __init__(self, net: Net, axes: Sequence[str] = (), plane: Plane | None = None) -> None:
        self.net, self.axes, self.plane = net, tuple(axes), plane
        self._silent = False

    @property
    def silent(self) -> bool:
        """Whether nothing is sent."""
        return self._silent

    @silent.setter
    def silent(self, silent: bool) -> None:
        self._silent = silent
        if self.plane is not None:
            self.plane.silent = silent

    def reduce(self, tensor: Tensor, axis: str, how: str = "sum", label: str = "") -> None:
        """All_reduce in place."""
        if not self._silent:
            self.net.all_reduce(tensor, axis, op=how, label=label)


class Sum(torch.autograd.Function):
    """Makes a Partial value whole; its gradient is whole already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, talk: Talk, axis: str, label: str) -> Tensor:
        whole = x.clone(memory_format=torch.contiguous_format)
        talk.reduce(whole, axis, "sum", label)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None, None, None


class Enter(torch.autograd.Function):
    """Takes a whole value into a split region: its gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, talk: Talk, axis: str, label: str) -> Tensor:
        ctx.talk, ctx.axis, ctx.label = talk, axis, label
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        whole = grads[0].clone(memory_format=torch.contiguous_format)
        ctx.talk.reduce(whole, ctx.axis, "sum", ctx.label)
        return whole, None, None, None


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
        talk: What its calls send.
        script: Of a module in training mode.
        module: Whose mode decides which script is followed.
        evaluation: Writes the script of evaluation, when it is first needed.
    """

    def __init__(
        self, talk: Talk, script: Script, module: nn.Module | None = None, evaluation: Callable[[], Script] | None = None
    ) -> None:
        super().__init__()
        self.talk, self.module, self.evaluation = talk, module, evaluation
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
        for axis in step.summed:
            out = Sum.apply(out, self.talk, axis, step.module)
        return out

    def changed(self, edge: Edge, step: Step, x: Tensor) -> Tensor:
        """What stands in for an argument."""
        key = edge.key
        if edge.again:
            return self.store.pop(key) if edge.last else self.store[key]
        if edge.kind == "sum":
            with nullcontext() if step.graded else torch.enable_grad():
                y = Sum.apply(x, self.talk, edge.axis, step.module)
        elif edge.kind == "enter":
            y = Enter.apply(x, self.talk, edge.axis, step.module)
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
        read = {e.key for step in self.steps[self.at : self.replay.next] for e in step.edges if e.again}
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
@dataclass(frozen=True)
class Installed:
    """A module that has been cut.

    Args:
        replay: To be entered around each forward pass and its loss.
        late: Axis -> parameters whose gradients are to be summed over it once a step, after the backward pass, in this order.
        placements: How each cut parameter is cut, by its name.
    """

    replay: Replay
    late: Mapping[str, tuple[str, ...]]
    placements: dict[str, list[Cut]]


def install(
    module: nn.Module,
    subject: Subject,
    samples: int,
    program: Program,
    derivations: Sequence[Derivation],
    net: Net,
    stream: Stream | None,
) -> Installed:
    """Cut the module's parameters for this rank and prepare the replay of its calls.

    Args:
        module: Whole; its parameters are replaced by this rank's parts.
        subject: What it is trained on; captured once more here, with its calls.
        samples: Of the captured microbatch.
        program, derivations: What was said: a flat program of the same subject and its split along each axis.
        net: The network.
        stream: Serves dropout; None if the program draws nothing.

    Raises:
        Refused: P116, naming every module that cannot run on shards.
    """
    planes = [Plane(net, d.across, d.axis) for d in derivations if d.across]
    talk = Talk(net, [d.axis for d in derivations], planes[0] if planes else None)
    subject = replace(subject, batches=_kept(subject, max(samples, 2)))

    def written(subject: Subject, stream: Stream | None) -> tuple[Captured, Script]:
        captured = hear(subject, samples, program, derivations)
        scripts = [_script(captured, d, talk, stream) for d in captured.derivations]
        script = scripts[0] if len(scripts) == 1 else merged(scripts, captured.heard, captured.program)
        return captured, replace(script, calls=tuple(captured.heard.calls))

    def evaluation() -> Script:
        _, script = written(replace(subject, make=lambda: subject.make().eval()), None)
        rehearse(Replay(talk, script), subject, spare)
        return script

    captured, script = written(subject, stream)
    split = captured.program
    for derivation in captured.derivations:
        split = placed(split, derivation)
    axes = [axis for axis, size in split.axes.items() if size > 1]
    placements = cut(module, split, {axis: net.coordinate[axis] for axis in axes})
    spare = twin_of(module).eval()  # the module itself may be one that cannot be copied by the time it is evaluated
    replay = Replay(talk, script, module, evaluation)
    rehearse(replay, subject, module)
    if captured.program.dynamic and placements:
        _rehearse_paths(replay, subject, module)
    return Installed(replay, script.late, placements)


def _script(captured: "Captured", derivation: Derivation, talk: Talk, stream: Stream | None) -> Script:
    """What each call becomes along one axis."""

    def reduce(tensor: Tensor, how: str, label: str) -> None:
        talk.reduce(tensor, derivation.axis, how, label)

    at = talk.net.coordinate.get(derivation.axis, 0)
    return write(captured.program, captured.heard, derivation, at, reduce, stream, talk.plane)


def _kept(subject: Subject, samples: int) -> Callable[[int], dict[str, Any]]:
    """The first batch only, as captured: data that is read once cannot be asked for it again later."""
    batch = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, narrowed(subject.batches(0), samples))
    return lambda _: batch


@dataclass(frozen=True)
class Captured:
    """The calls of a subject, its flat program, and the derivations on it, one for each axis."""

    program: Program
    heard: Heard
    derivations: tuple[Derivation, ...]


def hear(subject: Subject, samples: int, program: Program, derivations: Sequence[Derivation]) -> Captured:
    """Capture the subject with its calls, and split it as `program` is split by the derivations."""
    flat, heard = hear_whole(subject, samples)
    return Captured(flat, heard, tuple(_derived(program, d, flat) for d in derivations))


def _derived(program: Program, derivation: Derivation, flat: Program) -> Derivation:
    """What was derived on a program, on another capture of it."""
    atoms = matched(program, derivation.atoms, flat)
    if not derivation.across:
        return derive_tensor(flat, derivation.axis, derivation.size, atoms)
    return derive_grid(flat, Axes(derivation.across, derivation.ranks, derivation.axis, derivation.size), atoms)


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


def cut(module: nn.Module, split: Program, coordinates: Mapping[str, int]) -> dict[str, list[Cut]]:
    """Leave of every parameter what the rank at these coordinates holds, ties kept; returns the cuts of those that were cut."""
    found: dict[str, list[Cut]] = {}
    made: dict[int, nn.Parameter] = {}
    for t in split.parameters():
        cuts = [(axis, *ranges(split, t.id, axis, at)) for axis, at in coordinates.items() if axis in t.layouts]
        if cuts:
            old = module.get_parameter(t.name)
            part = old.detach()
            for _, dim, spans in cuts:
                part = torch.cat([part.narrow(dim, *span) for span in spans], dim)
            made[id(old)] = nn.Parameter(part.contiguous().clone(), old.requires_grad)
            found[t.name] = cuts
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
    replay.talk.silent = replay.rehearsing = True
    replay.names = _names(twin)
    try:
        for _ in range(1 + AGAIN):
            before = _kept_by(twin)
            with torch.random.fork_rng(devices=[]), replay:
                subject.evaluate(twin, batch)
            if _kept_by(twin) == before:  # nothing it keeps can lead the next pass elsewhere
                break
    finally:
        replay.talk.silent = replay.rehearsing = False
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
            raise Refused(not_splittable(step.module, [why], replay.talk.axes[0])) from error
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
    return not_splittable(step.module, [f"{step.func.__name__}: {why}"], replay.talk.axes[0])
