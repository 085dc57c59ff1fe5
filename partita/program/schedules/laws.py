"""Which (ranks, microbatches, virtual) a schedule can be made for, and the one table of the schedules there are."""

from collections.abc import Callable
from dataclasses import dataclass

from partita.errors import Fault, refuse
from partita.program.schedules.action import Schedule
from partita.program.schedules.filled import gpipe, interleaved, looped_bfs, one_f_one_b
from partita.program.schedules.split_backward import dualpipev, zbv, zero_bubble


@dataclass(frozen=True)
class Method:
    """A published schedule.

    Args:
        make: (ranks, microbatches, virtual) -> the schedule.
        virtual: Stages a rank holds; None: as the user says.
        split: Its backward is run as I and W.
        least: The fewest microbatches, in ranks.
        law: Why fewer cannot be.
    """

    make: Callable[[int, int, int], Schedule]
    virtual: int | None = 1
    split: bool = False
    least: int = 1
    law: str = "a microbatch is on one stage at a time, so with fewer microbatches than ranks some ranks idle all the time"


STEADY = "its steady part starts when 2 x ranks microbatches are under way, one for each of its stages"

SCHEDULES: dict[str, Method] = {
    "gpipe": Method(lambda p, m, _: gpipe(p, m)),
    "one_f_one_b": Method(lambda p, m, _: one_f_one_b(p, m)),
    "interleaved": Method(interleaved, virtual=None),
    "looped_bfs": Method(looped_bfs, virtual=None),
    "zero_bubble": Method(lambda p, m, _: zero_bubble(p, m), split=True),
    "zbv": Method(lambda p, m, _: zbv(p, m), virtual=2, split=True),
    "dualpipev": Method(lambda p, m, _: dualpipev(p, m), virtual=2, split=True, least=2, law=STEADY),
}


def laws_of(name: str, ranks: int, microbatches: int, virtual: int | None = None, *, at: str = "") -> list[Fault]:
    """Why the schedule cannot be made; an empty list if it can.

    Args:
        name: A key of `SCHEDULES`.
        ranks: Of the pipeline axis.
        microbatches: Of a step.
        virtual: Stages a rank, for the schedules that leave the choice.
        at: Path of the strategy's table in the user's file.
    """
    if name not in SCHEDULES:
        what = f"there is no pipeline schedule {name!r}"
        return [Fault("P107", what, law="a schedule is one of the published ones or a file", cure=", ".join(SCHEDULES), at=at)]
    return [
        *_count_faults({"ranks": ranks, "microbatches": microbatches, "virtual": 1 if virtual is None else virtual}, at),
        *_microbatch_faults(name, ranks, microbatches, at),
        *_virtual_faults(name, virtual, at),
    ]


def generate(name: str, ranks: int, microbatches: int, virtual: int | None = None, *, at: str = "") -> Schedule:
    """The schedule of a published method.

    Args:
        name, ranks, microbatches, virtual, at: As of `laws_of`; two stages a rank where the choice is free and not made.

    Raises:
        Refused: With every law it breaks.

    Example:
        >>> [str(a) for a in generate("one_f_one_b", ranks=2, microbatches=2).order[0]]
        ['0F0', '0F1', '0B0', '0B1']
    """
    refuse(laws_of(name, ranks, microbatches, virtual, at=at))
    method = SCHEDULES[name]
    return method.make(ranks, microbatches, method.virtual or virtual or 2)


def _count_faults(counts: dict[str, int], at: str) -> list[Fault]:
    law = "a pipeline has one or more of each"
    return [
        Fault("P112", f"{name} = {count} of a pipeline", law=law, cure=f"{name} = 1 or more", at=_under(at, name))
        for name, count in counts.items()
        if count < 1
    ]


def _microbatch_faults(name: str, ranks: int, microbatches: int, at: str) -> list[Fault]:
    least = SCHEDULES[name].least * ranks
    if not 1 <= microbatches < least:
        return []
    fits = microbatches // SCHEDULES[name].least
    others = [n for n, method in SCHEDULES.items() if n != name and method.least * ranks <= microbatches]
    cures = [f"microbatches = {least} or more"]
    cures += [f"{fits} ranks or fewer"] if fits else []
    cures += [f"another schedule ({', '.join(others)})"] if others else []
    have = f"microbatches = {microbatches}, ranks = {ranks}, fewest = {least}"
    what = f"{name!r} cannot run {microbatches} microbatches on {ranks} ranks"
    return [Fault("P112", what, have, SCHEDULES[name].law, ", or ".join(cures), _under(at, "microbatches"))]


def _virtual_faults(name: str, virtual: int | None, at: str) -> list[Fault]:
    fixed = SCHEDULES[name].virtual
    if virtual is None or fixed is None or virtual == fixed:
        return []
    free = ", ".join(n for n, method in SCHEDULES.items() if method.virtual is None)
    what = f"{name!r} cannot have virtual = {virtual}"
    law = f"each of its ranks holds {fixed} stage{'s' * (fixed > 1)}"
    return [Fault("P112", what, f"virtual = {virtual}", law, f"leave virtual out, or take {free}", _under(at, "virtual"))]


def _under(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name
