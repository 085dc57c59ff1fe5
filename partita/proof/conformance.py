"""The conformance kit: holds any strategy, ours or an outsider's, to the law.

    check_strategy(MyStrategy)     raises Unlawful with every broken law, or returns the proofs

Laws: it is a frozen dataclass with name, place and promise · its settings are plain data · saying is pure and works on 4,096
ranks · folding changes nothing · every case is proved, alone and on two axes · a size that does not divide is refused.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from partita.errors import PartitaError, Refused
from partita.mesh import Mesh
from partita.plans import Plan
from partita.program import Program
from partita.program.fold import unfold
from partita.proof.prove import Proof, prove_plan
from partita.proof.shrink import SAMPLES, shrink_spec
from partita.runtime.programs import program_of
from partita.strategies import GARDEN
from partita.strategy import Case, Place, Promise, Strategy, compose
from partita.workload import GPT, MODELS, Workload

MANY = 4096  # ranks on which saying must work


class Unlawful(PartitaError):
    """A strategy breaks the law; `reasons` holds every way in which it does."""

    def __init__(self, name: str, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(f"{name} breaks {len(reasons)} law(s):\n" + "\n".join(f"  - {r}" for r in reasons))


class _Forbidden(AssertionError):
    """torch was called where only saying is allowed."""


class _NoCalls(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Forbidden(f"torch was called: {func}")


class _NoOps(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Forbidden(f"torch was called: {func}")


def check_strategy(kind: type[Strategy], *, cases: Sequence[Case] | None = None) -> list[Proof]:
    """Hold a strategy to the law.

    Args:
        kind: The class.
        cases: What to prove; its own `cases()` by default.

    Returns:
        A proof per case.

    Raises:
        Unlawful: With every broken law at once.
    """
    reasons = list(_form(kind))
    if reasons:
        raise Unlawful(getattr(kind, "__name__", repr(kind)), reasons)
    tried = list(kind.cases() if cases is None else cases)
    if not any(len(case.mesh) > 1 for case in tried):
        reasons.append("no case has two axes: a wrong axis cannot be seen on one")
    for law in (_pure, _folds, _refuses):
        reasons += _told(law, kind)
    proofs = []
    for case in tried:
        found = _prove(kind, case)
        proofs += [found] if isinstance(found, Proof) else []
        reasons += [f"{_case(case)}: {found}"] if isinstance(found, str) else [f"{_case(case)}: {w}" for w in found.reasons]
    if reasons:
        raise Unlawful(kind.__name__, reasons)
    return proofs


def plan_of(kind: type[Strategy], case: Case) -> Plan:
    """The small plan a case describes; axes the strategy does not use get the garden's own strategy for them."""
    own = kind(**case.settings)
    others = [_companion(axis, own) for axis in case.mesh if axis not in own.axes]
    strategies = tuple(sorted((own, *others), key=lambda s: s.place))
    mesh = Mesh.of(case.mesh)
    unit = max(case.mesh.values(), default=1)
    ranks = _data_ranks(strategies, mesh)
    workload = Workload(case.workload, shrink_spec(MODELS[case.workload](), unit), batch=ranks * SAMPLES, seed=1)
    return Plan(workload, "here", mesh.ranks, mesh, strategies)


def _data_ranks(strategies: Sequence[Strategy], mesh: Mesh) -> int:
    ranks = 1
    for axis in (a for s in strategies if s.place == Place.DATA for a in s.axes):
        ranks *= mesh.size(axis)
    return ranks


def _companion(axis: str, own: Strategy) -> Strategy:
    for other in GARDEN.values():
        made = other()
        if made.axes == (axis,) and made.place != own.place:
            return made
    raise LookupError(f"no strategy of the garden uses axis {axis!r} by default")


def _case(case: Case) -> str:
    mesh = ", ".join(f"{k}={v}" for k, v in case.mesh.items())
    return f"{case.workload} on {mesh}" + (f" with {dict(case.settings)}" if case.settings else "")


def _told(law: Callable[[type[Strategy]], list[str]], kind: type[Strategy]) -> list[str]:
    try:
        return law(kind)
    except Exception as error:
        return [f"{(law.__doc__ or law.__name__).strip()} — {type(error).__name__}: {error}"]


# ---- the laws
def _form(kind: type[Strategy]) -> list[str]:
    if not (isinstance(kind, type) and issubclass(kind, Strategy)):
        return [f"{kind!r} is no subclass of partita.strategy.Strategy"]
    reasons = []
    if not dataclasses.is_dataclass(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        reasons.append("it is no frozen dataclass: a setting is a field")
    for word, type_ in (("name", str), ("place", Place), ("promise", Promise)):
        if not isinstance(getattr(kind, word, None), type_):
            reasons.append(f"it has no class variable {word} of type {type_.__name__}")
    if not reasons:
        try:
            json.dumps(kind().settings())
        except TypeError as error:
            reasons.append(f"its defaults are no plain data: {error}")
    return reasons


def _pure(kind: type[Strategy]) -> list[str]:
    """Saying is pure, on 4,096 ranks."""
    program, mesh = _large(), Mesh(tuple((axis, _even(kind, i)) for i, axis in enumerate(kind().axes)))
    with _NoCalls(), _NoOps():
        compose(program, (kind(),), mesh)
    return []


def _even(kind: type[Strategy], number: int) -> int:
    """Sizes whose product is MANY: all of it on one axis, or 64 x 64, or 16 x 16 x 16."""
    axes = len(kind().axes)
    sizes = {1: (MANY,), 2: (64, 64), 3: (16, 16, 16), 4: (8, 8, 8, 8)}[axes]
    return sizes[number]


def _large() -> Program:
    spec = GPT(layers=5, hidden=8 * MANY, heads=MANY, vocab=8 * MANY, sequence=16)
    return program_of(Workload("gpt", spec, batch=2 * MANY))


def _folds(kind: type[Strategy]) -> list[str]:
    """What is said of a folded program is what is said of the same program written out."""
    spec = GPT(layers=5, hidden=256, heads=16, vocab=256, sequence=16)
    program = program_of(Workload("gpt", spec, batch=32))
    mesh = Mesh(tuple((axis, 2) for axis in kind().axes))
    folded, flat = (compose(p, (kind(),), mesh).collectives() for p in (program, unfold(program)))
    said = [(c.op, c.axis, c.nbytes, c.dtype) for c in folded]
    return [] if said == [(c.op, c.axis, c.nbytes, c.dtype) for c in flat] else ["folding changes what it says"]


def _refuses(kind: type[Strategy]) -> list[str]:
    """A size that divides nothing is refused."""
    program = program_of(Workload("gpt", GPT(layers=3, hidden=32, heads=4, vocab=64, sequence=8), batch=8))
    mesh = Mesh(tuple((axis, 7) for axis in kind().axes))
    try:
        faults = kind().check(program, mesh)
    except Refused:
        faults = [None]
    return [] if faults else ["it does not refuse 7 ranks for 4 heads and 8 samples"]


def _prove(kind: type[Strategy], case: Case) -> Proof | str:
    try:
        return prove_plan(plan_of(kind, case), shrink=False)
    except PartitaError as error:
        return str(error)
    except LookupError as error:
        return str(error)
