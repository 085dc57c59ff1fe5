"""The conformance kit: holds any strategy, ours or an outsider's, to the law.

    check_strategy(MyStrategy)     raises Unlawful with every broken law, or returns the proofs

First the laws that need no ranks (`laws.py`); then every case is proved on real ranks, and a case on two axes with everything
that the step itself may add: accumulation, clipping, dropout, tied embeddings.
"""

from collections.abc import Sequence
from dataclasses import replace

from partita.errors import PartitaError
from partita.mesh import Mesh
from partita.plans import Plan
from partita.proof.laws import broken, settled
from partita.proof.prove import data_ranks, prove_plan, stages_of
from partita.proof.shrink import BLOCKS, SAMPLES, deep, shrink_spec, ways
from partita.proof.verdict import Proof
from partita.strategies import GARDEN, HOUSE
from partita.strategy import Case, Strategy, microbatches
from partita.workload import GPT, MLP, Llama, Model, ResNet, Workload

SPECS: dict[str, Model] = {"gpt": GPT(), "llama": Llama(heads=4, kv_heads=2), "resnet": ResNet(), "mlp": MLP()}
CLIP = 0.5  # below the first norm of every model here, so that it bites


class Unlawful(PartitaError):
    """A strategy breaks the law; `reasons` holds every way in which it does."""

    def __init__(self, name: str, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(f"{name} breaks {len(reasons)} law(s):\n" + "\n".join(f"  - {r}" for r in reasons))


def check_strategy(kind: type[Strategy], *, cases: Sequence[Case] | None = None, quick: bool = False) -> list[Proof]:
    """Hold a strategy to the law.

    Args:
        kind: The class.
        cases: What to prove; its own `cases()` by default.
        quick: Prove only the first case on two axes: seconds instead of half a minute.

    Returns:
        A proof per case.

    Raises:
        Unlawful: With every broken law at once.
    """
    reasons = broken(kind)
    name = kind.__name__ if isinstance(kind, type) else repr(kind)
    if not (isinstance(kind, type) and issubclass(kind, Strategy)) or kind.__abstractmethods__:
        raise Unlawful(name, reasons)
    tried = list(kind.cases() if cases is None else cases)
    if quick:
        tried = [case for case in tried if _two_axes(case)][:1]
    proofs = []
    for case in tried:
        found = _proof(kind, case, band=not quick)
        proofs += [found] if isinstance(found, Proof) else []
        reasons += [f"{_named(case)}: {why}" for why in (found.reasons if isinstance(found, Proof) else [found])]
    if reasons:
        raise Unlawful(name, reasons)
    return proofs


def plan_of(kind: type[Strategy], case: Case) -> Plan:
    """The small plan a case describes; axes the strategy does not use get the house's own strategy for them.

    Raises:
        Refused: When the case is no legal plan.
        LookupError: When no strategy of the house uses an axis of it.
    """
    own = kind(**case.settings)
    others = [_companion(axis, own) for axis in case.mesh if axis not in own.axes]
    strategies = tuple(sorted((own, *others), key=lambda s: s.place))
    mesh = Mesh.of(case.mesh)
    whole = SPECS[case.workload]
    spec = deep(shrink_spec(whole, 1, ways(strategies, mesh)), whole, BLOCKS * stages_of(strategies, mesh))
    rich = _two_axes(case) and not isinstance(spec, ResNet)  # batch norm does not accumulate
    if rich and isinstance(spec, GPT | Llama):
        spec = replace(spec, dropout=0.1, tie_embeddings=True)
    accumulate = 2 if rich else 1
    batch = data_ranks(strategies, mesh) * microbatches(strategies, accumulate) * SAMPLES
    workload = Workload(case.workload, spec, batch, accumulate, clip=CLIP if rich else None, seed=1)
    return Plan(workload, "here", mesh.ranks, mesh, strategies)


def _companion(axis: str, own: Strategy) -> Strategy:
    for name in HOUSE:
        made = settled(GARDEN[name])
        if made.axes == (axis,) and made.place != own.place:
            return made
    raise LookupError(f"no strategy of the house uses axis {axis!r} by default")


def _two_axes(case: Case) -> bool:
    return sum(size > 1 for size in case.mesh.values()) > 1


def _named(case: Case) -> str:
    mesh = ", ".join(f"{k}={v}" for k, v in case.mesh.items())
    return f"case {case.workload} on {mesh}" + (f" with {dict(case.settings)}" if case.settings else "")


def _proof(kind: type[Strategy], case: Case, *, band: bool = True) -> Proof | str:
    """The proof of a case, or why there is none."""
    try:
        return prove_plan(plan_of(kind, case), shrink=False, band=band)
    except (PartitaError, LookupError) as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
