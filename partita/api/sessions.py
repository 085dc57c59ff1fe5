"""spawn and session: a user's own training loop on the ranks a plan needs."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from partita.errors import Fault, Refused
from partita.plans import Plan
from partita.runtime.launch import ranks_from_environment
from partita.runtime.net import Net
from partita.runtime.outcome import switch_of
from partita.runtime.ranks import joined, run_ranks
from partita.runtime.session import Session

Story = Callable[[Session], Any]


def spawn(plan: Plan, story: Story, *, batch_norm: str | None = None, forward: tuple[str, ...] | None = None) -> list[Any]:
    """Run `story(session)` on every rank of a plan: forked here, or the ranks torchrun made.

    Args:
        plan: Its workload, if it has one, gives no more than the seed.
        story: The user's loop; what it returns must be plain data, for it comes back as JSON.
        batch_norm: "microbatch" accepts batch statistics of microbatches.
        forward: Batch keys passed to the module [those its forward accepts].

    Returns:
        What each rank's story returned, in rank order.

    Example:
        >>> spawn(Plan(), lambda session: session.rank)
        [0]
    """

    def work(net: Net) -> Any:
        told = story(_session(net, plan, batch_norm, forward))
        try:
            return json.loads(json.dumps(told))
        except TypeError as error:
            law = "results come back from the ranks as JSON"
            cure = "return numbers, strings, lists and dicts; save tensors with session.save"
            raise Refused(
                Fault("P102", "the story returned what is no plain data", str(error), law, cure, "spawn(story=)")
            ) from None

    return run_ranks(plan.mesh, work, cluster=plan.cluster, switch=switch_of(plan.strategies))


@contextmanager
def session(plan: Plan, *, batch_norm: str | None = None, forward: tuple[str, ...] | None = None) -> Iterator[Session]:
    """This process's session under torchrun; in a plain process, of a plan with one rank.

    Raises:
        Refused: P118 in a plain process when the plan has several ranks; it shows the torchrun line.
    """
    launched = ranks_from_environment()
    if launched is not None:
        yield _session(joined(plan.mesh, launched), plan, batch_norm, forward)
        return
    if plan.mesh.ranks > 1:
        have = " x ".join(f"{name} = {size}" for name, size in plan.mesh.axes) + ", one process"
        law = "session uses the ranks there are; spawn makes them"
        cure = f"torchrun --nproc-per-node {plan.mesh.ranks} {sys.argv[0] or 'script.py'}, or spawn(plan, story)"
        raise Refused(
            Fault("P118", f"the plan needs {plan.mesh.ranks} ranks and this is one process", have, law, cure, "session")
        )
    yield _session(Net(plan.mesh, 0), plan, batch_norm, forward)


def _session(net: Net, plan: Plan, batch_norm: str | None, forward: tuple[str, ...] | None) -> Session:
    seed = plan.workload.seed if plan.workload else 0
    return Session(net, plan.strategies, accumulate=plan.microbatches, seed=seed, batch_norm=batch_norm, forward=forward)
