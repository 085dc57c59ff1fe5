"""Runs one stage of an unmodified module: its calls are replayed, and those of other stages are passed over.

user code on the rank of stage 1      x = self.tokens(t)          another stage's call: a stand-in of the right shape
                                      x = self.blocks[0](x)       the same
                                      x = self.blocks[1](x)       its own: the stand-in is replaced by what was received
                                      return self.head(x)         another stage's again; what it would read is sent on

Nothing of the module is rewritten and no graph is cut: control flow, dataclasses and keyword arguments are the user's own code.
A value that two stages read is sent through every stage between them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from partita.errors import RunFailed
from partita.program.stages import under
from partita.runtime.calls import SIZES, Call, mark, put, writes
from partita.runtime.installing import twin_of
from partita.runtime.random import Stream
from partita.runtime.replay import Replay, Talk
from partita.runtime.steps import Script, Step
from partita.runtime.through import Place

Key = tuple[str, int]  # what a value is ("value", or the change of it that was kept), and its tensor id


@dataclass(frozen=True)
class Form:
    """What a tensor looks like on this rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(t: Tensor) -> "Form":
        return Form(tuple(t.shape), t.dtype)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Item:
    """One value that crosses a cut; `graded`: its gradient comes back."""

    key: Key
    form: Form
    graded: bool


@dataclass
class Shown:
    """What a rehearsal saw of every call: the forms of its results, and how often it drew."""

    outs: list[Any] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)
    forms: dict[Key, Form] = field(default_factory=dict)
    fillers: dict[int, Any] = field(default_factory=dict)  # call -> stand-ins for its results


class Cuts:
    """Which stage makes each call of a script, and what crosses each cut.

    Args:
        script: With its calls.
        starts: Module paths at which the stages after the first begin.
    """

    def __init__(self, script: Script, starts: Sequence[str]) -> None:
        self.script, self.count = script, len(starts) + 1
        self.homes = _homes(script.calls, starts)
        self.makers = _makers(script.calls)
        self.kept = _kept(script.steps)
        self.keys = [self._crossing(s) for s in range(1, self.count)]
        self.last = [max((n for n, h in enumerate(self.homes) if h == s), default=-1) for s in range(self.count)]

    def home(self, key: Key) -> int | None:
        """The stage that makes a value; None for what no call makes."""
        kind, v = key
        n = self.makers.get(v) if kind == "value" else self.kept.get(key)
        return None if n is None else self.homes[n]

    def reads(self, n: int) -> list[tuple[Key, bool]]:
        """What call n reads of values that are made by calls, and whether their gradients are wanted."""
        call, step = self.script.calls[n], self.script.steps[n]
        found = []
        for j, (path, v) in enumerate(zip(call.paths, call.ins, strict=True)):
            edges = [e for e in step.edges if e.path == path]
            graded = call.needs[j] and call.graded
            if not (edges and edges[0].again):
                found.append((("value", v), graded))
            found += [(e.key, graded) for e in edges if e.again]
        return [(key, graded) for key, graded in found if self.home(key) is not None]

    def _crossing(self, cut: int) -> list[tuple[Key, bool]]:
        """(value, is its gradient wanted) of what stages from `cut` on read of those before."""
        found: dict[Key, bool] = {}
        for n, home in enumerate(self.homes):
            if home >= cut and self.script.steps[n].func not in SIZES:
                for key, graded in self.reads(n):
                    if self.home(key) < cut:  # type: ignore[operator]
                        found[key] = found.get(key, False) or graded
        return sorted(found.items(), key=lambda one: (one[0][1], one[0][0]))


def _homes(calls: Sequence[Call], starts: Sequence[str]) -> list[int]:
    first = [next((n for n, c in enumerate(calls) if under(c.module, start)), len(calls)) for start in starts]
    homes, stage = [], 0
    for n in range(len(calls)):
        while stage < len(first) and first[stage] <= n:
            stage += 1
        homes.append(stage)
    return homes


def _makers(calls: Sequence[Call]) -> dict[int, int]:
    """Tensor id -> the call that makes it."""
    found: dict[int, int] = {}
    for n, call in enumerate(calls):
        for v in call.outs:
            if v >= 0 and v not in call.ins:
                found.setdefault(v, n)
    return found


def _kept(steps: Sequence[Step]) -> dict[Key, int]:
    """Changed value that is kept for later calls -> the call it is made at."""
    found: dict[Key, int] = {}
    for n, step in enumerate(steps):
        for edge in step.edges:
            if not edge.again:
                found.setdefault(edge.key, n)
    return found


class Left(BaseException):
    """A stage has made its last call: the rest of the user's code is of other stages."""


Stood = tuple[int, dict[Key, Tensor], dict[int, Tensor], Shown | None]  # stage, received, written, shown


@dataclass(frozen=True)
class _Played(Place):
    """Where a stage stands: the place of its replay, and what it has received and written."""

    replay: Place
    staged: "Staged"
    stood: Stood

    def passed(self) -> None:
        self.replay.passed()

    @contextmanager
    def resumed(self) -> Iterator[None]:
        with self.staged.playing(self.stood), self.replay.resumed():
            yield


class Staged(Replay):
    """The mode of one rank of a pipeline; entered around one forward pass of one of its stages.

    Args:
        talk, script, module, evaluation: As of `Replay`.
        starts: Module paths at which the stages after the first begin.
        evaluate: Runs a module on a batch.
        stream: Serves draws; None if nothing draws.
    """

    def __init__(
        self,
        talk: Talk,
        script: Script,
        module: nn.Module,
        evaluation: Callable[[], Script],
        starts: Sequence[str],
        evaluate: Callable[[nn.Module, Any], Any],
        stream: Stream | None,
    ) -> None:
        super().__init__(talk, script, module, evaluation)
        self.starts, self.evaluate, self.stream = tuple(starts), evaluate, stream
        self.twin = twin_of(module)  # whole, on fake parameters
        self.cuts: dict[bool, Cuts] = {}
        self.seen: dict[tuple[bool, Any], Shown] = {}
        self.stage = -1
        self.shown: Shown | None = None
        self.recording: Shown | None = None
        self.received: dict[Key, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.sent: dict[Key, Tensor] = {}
        self.wanted: set[Key] = set()

    # ---- what the pipeline asks
    def items(self, cut: int, batch: Any) -> list[Item]:
        """What crosses the cut before stage `cut` with a microbatch like this one."""
        shown = self.showing(batch)
        keys = self.cutting().keys[cut - 1]
        return [Item(key, shown.forms[key], graded) for key, graded in keys]

    def owners(self, buffers: Sequence[str]) -> dict[str, int]:
        """Buffer -> the stage whose value counts: the one that calls something in its module, else the last."""
        cuts = self.cutting()
        homes: dict[str, int] = {}
        for call, home in zip(cuts.script.calls, cuts.homes, strict=True):
            homes.setdefault(call.module, home)
        return {name: homes.get(name.rpartition(".")[0], cuts.count - 1) for name in buffers}

    def cutting(self) -> Cuts:
        """The cuts of the calls the module makes in its present mode."""
        training = self._training()
        if training not in self.cuts:
            self.cuts[training] = Cuts(self.scripts[training], self.starts)
        return self.cuts[training]

    def showing(self, batch: Any) -> Shown:
        """What every call returns on a microbatch of this form."""
        key = self._training(), tuple(Form.of(t) for t in tree_leaves(batch) if isinstance(t, Tensor))
        if key not in self.seen:
            self.seen[key] = self._rehearse(batch)
        return self.seen[key]

    def run(
        self, stage: int, batch: Any, received: Mapping[Key, Tensor], run: Callable[[], Any]
    ) -> tuple[Any, dict[Key, Tensor]]:
        """Run one stage: what `run` returns (of the last stage), and what it sends on.

        Args:
            stage: Which.
            batch: The microbatch.
            received: What crossed the cut before it.
            run: Enters this mode and runs the user's code.
        """
        cuts, self.shown = self.cutting(), self.showing(batch)
        self.stage, self.received, self.values = stage, dict(received), {}
        following = cuts.keys[stage] if stage < cuts.count - 1 else []
        self.wanted = {key for key, _ in following}
        self.sent = {key: t for key, t in received.items() if key in self.wanted}
        out = None
        with suppress(Left):
            out = run()
        sent, self.sent, self.received, self.values, self.store = self.sent, {}, {}, {}, {}
        self.stage = -1
        return out, {key: sent[key] for key, _ in following}

    # ---- where it stands, for a second pass
    def place(self) -> Place:
        return _Played(super().place(), self, (self.stage, dict(self.received), dict(self.values), self.shown))

    @contextmanager
    def playing(self, stood: Stood) -> Iterator[None]:
        """A stage once more, with what it had received; nothing is sent on."""
        kept = self.stage, self.received, self.values, self.shown, self.wanted, self.sent
        self.stage, received, values, self.shown = stood
        self.received, self.values, self.wanted, self.sent = received, dict(values), set(), {}
        try:
            yield
        finally:
            self.stage, self.received, self.values, self.shown, self.wanted, self.sent = kept

    # ---- the mode
    def _training(self) -> bool:
        assert self.module is not None
        training = self.module.training
        if training not in self.scripts:
            with torch.inference_mode(mode=False), torch.enable_grad():
                self.scripts[training] = self.evaluation()  # type: ignore[misc]
        return training

    def __enter__(self) -> "Staged":
        super().__enter__()
        self.store |= {key: t for key, t in self.received.items() if key[0] != "value"}
        return self

    def __exit__(self, *exc: Any) -> None:
        if exc[0] is Left:
            self.next = len(self.steps)
        super().__exit__(*exc)

    def call(self, step: Step, args: tuple, kwargs: dict) -> Any:
        n = self.next - 1
        if self.recording is not None:
            return self._record(self.recording, n, step, args, kwargs)
        if self.stage < 0 or step.func in SIZES:
            return super().call(step, args, kwargs)
        cuts = self.cutting()
        if cuts.homes[n] != self.stage:
            if n > cuts.last[self.stage] and self.stage < cuts.count - 1:
                raise Left
            return self._passed(n, step, args)
        call = cuts.script.calls[n]
        args, kwargs = self._given(cuts, call, step, args, kwargs)
        out = super().call(step, args, kwargs)
        self._made(call, step, out)
        return out

    def _passed(self, n: int, step: Step, args: tuple) -> Any:
        """Another stage's call: stand-ins for its results."""
        assert self.shown is not None
        if self.stream is not None:
            for _ in range(self.shown.draws[n]):
                self.stream.skip()
        if writes(step.func):
            return args[0]
        if n not in self.shown.fillers:
            self.shown.fillers[n] = tree_map(self._filler, self.shown.outs[n], is_leaf=lambda x: isinstance(x, Form))
        return self.shown.fillers[n]

    def _filler(self, form: Any) -> Any:
        if not isinstance(form, Form):
            return form
        return mark(torch.zeros((), dtype=form.dtype, device=self.talk.net.device).expand(form.shape))

    def _given(self, cuts: Cuts, call: Call, step: Step, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments with what was received in the place of stand-ins."""
        changed, named = list(args), dict(kwargs)
        for path, v in zip(call.paths, call.ins, strict=True):
            own = self.values.get(v)
            if own is None and (home := cuts.home(("value", v))) is not None and home != self.stage:
                own = self.received.get(("value", v))
                if own is None and not any(e.again for e in step.edges if e.path == path):
                    where = step.module or "the model"
                    raise RunFailed(
                        f"stage {self.stage} did not receive what {step.func.__name__} in {where!r} reads of stage {home}"
                    )
                if own is not None and writes(call.func) and path[:2] == (0, 0):
                    own = own.clone()  # a leaf must not be written to
            if own is not None:
                put(changed, named, path, own)
        return tuple(changed), named

    def _made(self, call: Call, step: Step, out: Any) -> None:
        """Keep what goes on to the next stage, and what was written in the place of a stand-in."""
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        for v, t in zip(call.outs, results, strict=True):
            if writes(call.func):
                self.values[v] = t
            if ("value", v) in self.wanted:
                self.sent[("value", v)] = t
        for edge in step.edges:
            if edge.key in self.wanted and not edge.again and not edge.last:
                self.sent[edge.key] = self.store[edge.key]

    # ---- rehearsing
    def _rehearse(self, batch: Any) -> Shown:
        """Run all stages once on fake parameters and note what every call returns."""
        shown, training = Shown(), self._training()
        module, names, silent = self.module, self.names, self.talk.silent
        self.recording, self.talk.silent = shown, True
        self.module, self.names = self.twin.train(training), {id(p): name for name, p in self.twin.named_parameters()}
        share = next((t.shape[0] for t in tree_leaves(batch) if isinstance(t, Tensor) and t.dim()), 1)
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                if self.stream is None:
                    with self:
                        self.evaluate(self.twin, batch)
                else:
                    with self.stream.step(0, 0, share), self:
                        self.evaluate(self.twin, batch)
        finally:
            self.recording, self.talk.silent = None, silent
            self.module, self.names = module, names
        return shown

    def _record(self, shown: Shown, n: int, step: Step, args: tuple, kwargs: dict) -> Any:
        before = self.stream.count if self.stream is not None else 0
        out = super().call(step, args, kwargs)
        shown.outs.append(tree_map(lambda t: Form.of(t) if isinstance(t, Tensor) else t, out))
        shown.draws.append(self.stream.count - before if self.stream is not None else 0)
        call = self.scripts[self._training()].calls[n]
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if len(results) != len(call.outs):
            raise RunFailed(
                f"{step.func.__name__} in {step.module or 'the model'!r} returned {len(results)} tensors, not {len(call.outs)}"
            )
        for v, t in zip(call.outs, results, strict=True):
            shown.forms.setdefault(("value", v), Form.of(t))
        for edge in step.edges:
            if not edge.again and not edge.last:
                shown.forms[edge.key] = Form.of(self.store[edge.key])
        return out


def plain_script(calls: Sequence[Call], names: Mapping[int, str]) -> Script:
    """The script of a module that no tensor axis splits: every call as it is.

    Args:
        calls: As heard.
        names: Tensor id of each parameter -> its name.
    """

    def step(call: Call) -> Step:
        reads = tuple((path, names[v]) for path, v in zip(call.paths, call.ins, strict=True) if v in names)
        return Step(call.func, call.module, graded=call.graded, reads=reads)

    return Script(tuple(map(step, calls)), {}, tuple(calls))


def keep_stage(module: nn.Module, held: set[str]) -> None:
    """Leave in a module only the parameters of a stage; the others become stand-ins without memory.

    Args:
        module: Whole; tied names keep their parameter if any of them is held.
        held: Names of the parameters the stage holds, as `named_parameters` has them.
    """
    kept = {id(p) for name, p in module.named_parameters() if name in held}
    for owner in module.modules():
        for name, p in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            mark(p)
            if id(p) not in kept:
                filler = mark(torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape))
                del owner._parameters[name]
                owner.__dict__[name] = filler
