"""Pushing to servers and pulling from them: how much of the flat buffer goes, in which steps, and how it is said.

n elements of v bytes over K ranks, each of which serves one shard of width = ceil(n / K); all sizes below are of the padded n.

    full      push all_to_all n v              pull all_gather n v                 in collective form: one all_reduce n v
    regular   push all_to_all alpha n v, all_to_all (alpha - beta) n key           pull all_to_all alpha n v
    keys      all_gather: 4 beta n, or n / 8 as a bitmap                            after a full exchange that chooses a core

Every shard has beta of its elements in the core and a worker explores (alpha - beta) of each, so all sizes are known before.

Source: Sun et al. 2017, "Slim-DP", arXiv:1709.09393.
"""

from dataclasses import dataclass

from partita.program.events import Collective, Phase
from partita.program.program import Program
from partita.program.relaxing import Lane, Said, beside, call, lanes_of, say_relaxed, served

KEY = "int32"


@dataclass(frozen=True)
class Slim:
    """Which part of the buffer goes in a regular round.

    Args:
        alpha: Share that is exchanged.
        beta: Share that is core.
        q: Exchanges from one full one to the next.
        c: Weight of the gradient in the significance; "auto": so that both terms have one mean; "gradient": nothing else.
        merge: "mean" over those who pushed an element; "sum" / K.
        explorer: "keys" are sent; "seed": both ends draw them.
        keys: How a new core is told: "list", "bitmap", or "auto", the shorter.
    """

    alpha: float
    beta: float
    q: int
    c: float | str = "auto"
    merge: str = "mean"
    explorer: str = "keys"
    keys: str = "auto"

    def core(self, width: int) -> int:
        """Elements of the core among `width`."""
        return round(self.beta * width)

    def explored(self, width: int) -> int:
        """Elements beside the core that one worker explores in a round."""
        return max(round(self.alpha * width), 1) - self.core(width)

    def bitmap(self, width: int) -> bool:
        """Whether a new core of a shard is told as a bitmap."""
        return self.keys == "bitmap" or (self.keys == "auto" and -(-width // 8) < 4 * self.core(width))


@dataclass(frozen=True)
class PushPull:
    """How workers and servers exchange.

    Args:
        every: Steps from one exchange to the next.
        at: Who runs the optimizer: "worker" pushes what it changed, "server" is pushed gradients.
        form: "server": every rank serves a shard; "collective": every rank serves everything, and pushing is a sum.
        slim: What goes; None: everything, always.
    """

    every: int
    at: str
    form: str
    slim: Slim | None = None

    @property
    def period(self) -> int:
        """In optimizer steps."""
        return self.every * (self.slim.q if self.slim else 1)

    @property
    def sharded(self) -> bool:
        """Whether the optimizer steps on shards."""
        return self.form == "server" and self.at == "server"

    def full(self, step: int) -> bool | None:
        """Whether the exchange after a step is of everything; None if there is none."""
        if step % self.every != self.every - 1:
            return None
        return self.slim is None or step // self.every % self.slim.q == 0


def say_push_pull(program: Program, axis: str, size: int, name: str, plan: PushPull) -> Program:
    """The program of one of `size` ranks that push and pull."""
    lanes = lanes_of(program)
    push = Phase.SYNC if plan.at == "server" else Phase.OPTIMIZER
    steps: dict[bool, list[int]] = {True: [], False: []}
    for step in range(plan.period):
        if (full := plan.full(step)) is not None:
            steps[full].append(step)
    said = []
    for full in (True, False):
        when = () if len(steps[full]) == plan.period else tuple(steps[full])
        pushed = [c for lane in lanes for c in _pushed(lane, axis, size, plan, push, full=full)]
        pulled = [c for lane in lanes for c in _pulled(lane, axis, size, plan, full=full)]
        if steps[full]:
            said += [Said(tuple(calls), when, phase) for calls, phase in ((pushed, push), (pulled, Phase.OPTIMIZER)) if calls]
    return _kept(say_relaxed(program, axis, size, name, said, plan.period), axis, plan)


def _kept(program: Program, axis: str, plan: PushPull) -> Program:
    """With what ranks keep beside the model."""
    if plan.form == "server":
        program = beside(program, "served", axis)
    if plan.at == "worker" or plan.every > 1 or plan.slim:
        program = beside(program, "base")
    return served(program, axis) if plan.sharded else program


def _pushed(lane: Lane, axis: str, size: int, plan: PushPull, phase: Phase, *, full: bool) -> list[Collective]:
    slim, width = plan.slim, lane.width(size)
    if plan.form == "collective":
        some = lane.size if full or slim is None else slim.core(lane.size) + slim.explored(lane.size)
        return [call("all_reduce", axis, some, lane.dtype, phase, "push")]
    if full or slim is None:
        return [call("all_to_all", axis, size * width, lane.dtype, phase, "push")]
    explored = slim.explored(width)
    calls = [call("all_to_all", axis, size * (slim.core(width) + explored), lane.dtype, phase, "push")]
    if explored and slim.explorer == "keys":
        calls.append(call("all_to_all", axis, size * explored, KEY, phase, "keys"))
    return calls


def _pulled(lane: Lane, axis: str, size: int, plan: PushPull, *, full: bool) -> list[Collective]:
    slim, width, phase = plan.slim, lane.width(size), Phase.OPTIMIZER
    if plan.form == "collective":
        return []
    if not full and slim is not None:
        return [call("all_to_all", axis, size * (slim.core(width) + slim.explored(width)), lane.dtype, phase, "pull")]
    calls = [call("all_gather", axis, size * width, lane.dtype, phase, "pull")]
    if slim is not None and slim.core(width):
        if slim.bitmap(width):
            calls.append(call("all_gather", axis, size * -(-width // 8), "uint8", phase, "core"))
        else:
            calls.append(call("all_gather", axis, size * slim.core(width), KEY, phase, "core"))
    return calls
