"""Schedules whose backward is run in two parts, I and W: zero_bubble, zbv, dualpipev.

A stage waits only for the I of the stage after it; W can be put where a rank would wait. Pictures of 3 ranks (both stages of
a rank in one line) and 4, 5 and 6 microbatches, F, I and W of one slot each: 0 is a forward, a its I, `=` a W, `0<` a whole
backward, a dot a slot a rank waits.

    zero_bubble
    012..a=3b=c=d=
    .01.a2b=3c=d==
    ..0a1b2c=3d===

    zbv
    012340a=1b=2c=a=3d=b=4e=c=d=e=..
    .012031a=2b=4a=3c=b=4d=ced=e===.
    ..001122a=3a=3b=4b=4c=cddee=====

    dualpipev
    012340a=1b=252<30<3<4.1<4<5.2<5<d=e=f=
    .012031a=241<30<52<41<3<5.2<4<3<fe=f==
    ..00112230<30<41<41<52<52<3<3<4<eff===

Sources: ZB-H1 and ZB-V, arXiv:2401.10241; V-shaped placement and its memory, arXiv:2405.15362; DualPipe, arXiv:2412.19437, of
which DualPipeV is the half on a V.
"""

from collections import Counter, deque

from partita.program.schedules.action import Action, Pass, Schedule, loop, rows, vee
from partita.program.schedules.filled import depth_first


def zero_bubble(ranks: int, microbatches: int, virtual: int = 1) -> Schedule:
    """ZB-H1: 1F1B whose W comes as many microbatches late as there are ranks before this one.

    Each rank then keeps as many microbatches as the first rank of 1F1B, and what 1F1B waits at the end is filled with W: of its
    bubble (p - 1)(F + I + W) there stays (p - 1)(F + I - W).
    """
    order = []
    for rank in range(ranks):
        forward, backward, round_size = depth_first(rank, ranks, microbatches, virtual)
        ahead = min(ranks - 1 - rank + (virtual - 1) * round_size, len(forward))
        inputs, weights = ([Action(s, kind, k) for s, _, k in backward] for kind in (Pass.INPUT, Pass.WEIGHT))
        row = forward[:ahead]
        for at, action in enumerate(inputs):
            row += [*forward[ahead + at : ahead + at + 1], action]
            row += weights[at - rank : at - rank + 1] if at >= rank else []
        order.append([*row, *weights[len(weights) - rank :]])
    return Schedule("zero_bubble", rows(order), loop(ranks, virtual), microbatches)


def zbv(ranks: int, microbatches: int) -> Schedule:
    """ZB-V: two stages a rank on a V, so backward starts where forward ended; no rank waits once it has begun.

    That holds where F, I and W are equally long. It keeps 2 p half-size microbatches on every rank: the memory of 1F1B.
    """
    filling = max(microbatches, 2 * ranks - 1)  # fewer do not fill the V: those that are not there are left out below
    order = []
    for rank in range(ranks):
        line = _Line(rank, 2 * ranks - 1 - rank)
        after, before = ranks - 1 - rank, rank
        line.run("F0", 2 * after + 1)
        line.run("F1 F0", before)
        line.run("F1 I1 W1", after + 1)
        line.run("F0 I0 W0 F1 I1 W1", filling - 2 * ranks + 1 + before)
        line.run("I0 W0 F1 I1 W1", after)
        line.run("I0 I1", before)
        line.run("I0 W0", after + 1)
        line.run("W1", before)
        line.run("W0", before)
        order.append([action for action in line.actions if action.microbatch < microbatches])
    return Schedule("zbv", rows(order), vee(ranks), microbatches)


def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV: a V on which the forward of one stage runs beside the whole backward of the other.

    Backwards are split only where the pipeline fills and drains. `W` is the oldest one that is owed.
    """
    order = []
    for rank in range(ranks):
        line = _Line(rank, 2 * ranks - 1 - rank)
        after, before = ranks - 1 - rank, rank
        line.run("F0", 2 * after)
        line.run("F0 F1", before + 1)
        line.run("I1 W F1", after)
        line.run("F0 B1 F1 B0", microbatches - 2 * ranks + before + 1)
        line.run("B1 F1 B0", after)
        ending = [*("B1 B0 " * (before + 1)).split()]  # its first half whole, its second split
        line.run(" ".join(ending[: before + 1]))
        line.run(" ".join(ending[before + 1 :]).replace("B", "I"))
        line.run("W I0", after)
        line.run("W", before + 1)
        order.append(line.actions)
    return Schedule("dualpipev", rows(order), vee(ranks), microbatches)


class _Line:
    """One rank with two stages, 0 and 1: each pass takes the next microbatch that has not had it."""

    def __init__(self, *stages: int) -> None:
        self.stages = stages
        self.actions: list[Action] = []
        self.next: Counter[tuple[int, str]] = Counter()
        self.owed: deque[tuple[int, int]] = deque()  # (stage, microbatch) with I behind and W ahead

    def run(self, passes: str, times: int = 1) -> None:
        """Append `passes`, e.g. "F1 I1 W1", `times` times."""
        for _ in range(times):
            for name in passes.split():
                self._add(name)

    def _add(self, name: str) -> None:
        kind, side = Pass(name[0]), name[1:]
        if kind is Pass.WEIGHT:
            at = next(owed for owed in self.owed if not side or owed[0] == self.stages[int(side)])
            self.owed.remove(at)
            stage, microbatch = at
        else:
            stage = self.stages[int(side)]
            backward = "F" if kind is Pass.FORWARD else "B"  # I and B share a count
            microbatch = self.next[stage, backward]
            self.next[stage, backward] += 1
            if kind is Pass.INPUT:
                self.owed.append((stage, microbatch))
        self.actions.append(Action(stage, kind, microbatch))
