"""Schedules whose backward is whole: gpipe, looped_bfs, one_f_one_b, interleaved.

Pictures of 3 ranks and 4 microbatches (two stages a rank where there are several, both in one line), F and B of one slot
each: 0 is a forward, a its backward, a dot a slot a rank waits.

    gpipe
    0123....abcd
    .0123..abcd.
    ..0123abcd..

    one_f_one_b
    012..a3b.c.d
    .01.a2b3c.d.
    ..0a1b2c3d..

    interleaved
    01230123.a.b.c.dabcd
    .0123012a3b.c.dabcd.
    ..01230a1b2c3dabcd..

    looped_bfs
    01230123....abcdabcd
    .01230123..abcdabcd.
    ..01230123abcdabcd..

On each stage the backwards come in the order of the microbatches, so gradients are summed as on one device.
Sources: GPipe, arXiv:1811.06965; PipeDream-flush, arXiv:2006.09503; interleaving, arXiv:2104.04473; breadth first,
arXiv:2211.05953.
"""

from itertools import pairwise

from partita.program.schedules.action import Action, Pass, Schedule, loop, rows

F, B = Pass.FORWARD, Pass.BACKWARD


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards: every microbatch is alive at the turn."""
    return looped_bfs(ranks, microbatches, 1, name="gpipe")


def looped_bfs(ranks: int, microbatches: int, virtual: int, *, name: str = "looped_bfs") -> Schedule:
    """Breadth first: a rank runs all microbatches of a stage before those of its next stage, then back."""
    order = []
    for rank in range(ranks):
        stages = range(rank, ranks * virtual, ranks)
        forward = [Action(s, F, k) for s in stages for k in range(microbatches)]
        order.append([*forward, *(Action(s, B, k) for s in reversed(stages) for k in range(microbatches))])
    return Schedule(name, rows(order), loop(ranks, virtual), microbatches)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """One forward, one backward: a rank keeps as many microbatches as there are stages from it to the end."""
    return interleaved(ranks, microbatches, 1, name="one_f_one_b")


def interleaved(ranks: int, microbatches: int, virtual: int, *, name: str = "interleaved") -> Schedule:
    """One forward, one backward over several stages a rank, depth first: it fills and drains in steps 1 / virtual as long.

    Microbatches go in rounds of at least `ranks`: a round passes through all stages of a rank before the next round enters.
    A rank first runs as many forwards as lie before the first backward that reaches it.
    """
    order = []
    for rank in range(ranks):
        forward, backward, round_size = depth_first(rank, ranks, microbatches, virtual)
        after = ranks - 1 - rank
        ahead = after if virtual == 1 else 2 * after + (virtual - 1) * round_size
        order.append(_paired(forward, backward, min(ahead, len(forward))))
    return Schedule(name, rows(order), loop(ranks, virtual), microbatches)


def depth_first(rank: int, ranks: int, microbatches: int, virtual: int) -> tuple[list[Action], list[Action], int]:
    """Forwards and backwards of one rank, round by round through its stages, and the size of the first round."""
    rounds = _rounds(ranks, microbatches)
    stages = range(rank, ranks * virtual, ranks)
    forward = [Action(s, F, k) for turn in rounds for s in stages for k in turn]
    backward = [Action(s, B, k) for turn in rounds for s in reversed(stages) for k in turn]
    return forward, backward, len(rounds[0])


def _paired(forward: list[Action], backward: list[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then one forward and one backward in turn, then the backwards that are left."""
    body = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
    return forward[:ahead] + body + backward[len(forward) - ahead :]


def _rounds(ranks: int, microbatches: int) -> list[range]:
    """Microbatches in rounds of `ranks` or more, as even as can be, the larger first."""
    turns = max(1, microbatches // ranks)
    size, longer = divmod(microbatches, turns)
    starts = [turn * size + min(turn, longer) for turn in range(turns + 1)]
    return [range(a, b) for a, b in pairwise(starts)]
