"""prove and check_strategy."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from partita.api.own import Loss, OptimizerFactory, subject_from
from partita.api.planning import with_workload
from partita.plans import Plan
from partita.proof.conformance import check_strategy
from partita.proof.prove import STEPS, Proof, prove_plan, prove_subject
from partita.runtime.training import Training

__all__ = ["check_strategy", "prove"]


def prove(  # noqa: PLR0913 - the contract's keywords
    plan: Plan,
    *,
    model: Callable[[], nn.Module] | nn.Module | None = None,
    batches: Callable[[int], dict[str, Any]] | Iterable[dict[str, Any]] | None = None,
    loss: Loss | None = None,
    optimizer: OptimizerFactory | None = None,
    forward: tuple[str, ...] | None = None,
    steps: int = STEPS,
    clip: tuple[float, float] | float | None = None,
    ranks: int | None = None,
) -> Proof:
    """Prove that the split run equals one device, and moves exactly the bytes that were said.

    Args:
        plan: With a workload, a small copy of it is proved; without one, the model given here, at its own size.
        model, batches, loss, optimizer, forward: As for `train`.
        steps: Optimizer steps compared.
        clip: Largest gradient norm, or (norm, p).
        ranks: Ranks a small copy may use; None means the fewest.
    """
    if model is None:
        with_workload(plan)
        return prove_plan(plan, ranks=ranks)
    subject = subject_from(model, batches, loss, optimizer, forward)
    pair = (float(clip), 2.0) if isinstance(clip, int | float) else clip
    return prove_subject(subject, plan.strategies, plan.mesh, Training(steps, plan.microbatches, pair), cluster=plan.cluster)
