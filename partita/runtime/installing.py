"""Cuts an unmodified module for this rank and writes the script that its calls are replayed by.

whole module ── captured once more with its calls ──▶ script (what changes, call by call) ── rehearsed on fake shards ──▶ Replay
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_map

from partita.errors import Fault, Refused, RunFailed
from partita.program import Program
from partita.program.grid import Plane as Axes
from partita.program.grid import derive_grid
from partita.program.saying import placed
from partita.program.split import Derivation, ranges
from partita.program.tensor import derive_tensor
from partita.runtime.calls import Heard, Listener, mark
from partita.runtime.capture import capture, narrowed
from partita.runtime.cuts import Cut
from partita.runtime.grid import Plane
from partita.runtime.merging import merged
from partita.runtime.net import Net
from partita.runtime.random import Stream
from partita.runtime.replay import Replay, Talk, names_of
from partita.runtime.steps import Script, not_splittable, write
from partita.runtime.subject import Subject
from partita.runtime.tape import Tape

AGAIN = 3  # further rehearsals of a module that keeps something from pass to pass


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
    replay.names = names_of(twin)
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
