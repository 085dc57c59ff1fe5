"""Plays a schedule by the clock: when each action starts and ends, who waits, how many microbatches are alive.

A rank runs its actions in order, each as soon as what it needs has ended and, from another rank, has arrived. Plain Python,
about a million actions a second.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from partita.program.schedules.action import Action, Pass, Schedule

Cost = float | Sequence[float]  # of every stage alike, or per stage


@dataclass(frozen=True)
class Durations:
    """Seconds of the passes of one microbatch, of every stage alike or stage by stage.

    Args:
        forward, input, weight: Of F, I and W.
        backward: Of B; by default of I and W together.
        send, send_back: From a stage to the next on another rank, and back to the one before, of every cut alike or cut by cut
            (the cut between stages s and s + 1 is number s); computing goes on beside it. The way back is by default as long.
    """

    forward: Cost = 1.0
    input: Cost = 1.0
    weight: Cost = 1.0
    backward: Cost | None = None
    send: Cost = 0.0
    send_back: Cost | None = None

    def of(self, stages: int) -> dict[Pass, list[float]]:
        """Pass -> seconds per stage."""
        input, weight = _each(self.input, stages), _each(self.weight, stages)
        whole = [i + w for i, w in zip(input, weight, strict=True)] if self.backward is None else _each(self.backward, stages)
        return {Pass.FORWARD: _each(self.forward, stages), Pass.INPUT: input, Pass.WEIGHT: weight, Pass.BACKWARD: whole}

    def arriving(self, placement: Sequence[int]) -> tuple[list[float], list[float]]:
        """Per stage, the seconds its input is under way, and what comes back to it; 0 from a stage on the same rank."""
        cuts = len(placement) - 1
        there = _each(self.send, cuts)
        back = there if self.send_back is None else _each(self.send_back, cuts)
        apart = [a != b for a, b in pairwise(placement)]
        there, back = ([t * far for t, far in zip(times, apart, strict=True)] for times in (there, back))
        return [0.0, *there], [*back, 0.0]


def _each(cost: Cost, count: int) -> list[float]:
    each = [float(cost)] * count if isinstance(cost, int | float) else list(map(float, cost))
    assert len(each) == count, f"{len(each)} durations where there are {count}"
    return each


@dataclass(frozen=True)
class Timetable:
    """When the actions of a schedule run.

    Args:
        starts, ends: Per rank, seconds of each action from the start of the step, in the order of the schedule.
    """

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return max((row[-1] for row in self.ends if row), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Per rank, the seconds it computes."""
        return tuple(sum(self.ends[r]) - sum(self.starts[r]) for r in range(len(self.starts)))

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Per rank, the share of the step it waits."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Share of all ranks' time that is waited."""
        return sum(self.bubbles) / len(self.bubbles)


class Stuck(Exception):
    """The schedule cannot go on; `at` is, per rank, how many of its actions ran."""

    def __init__(self, at: list[int]) -> None:
        self.at = at
        super().__init__(f"ranks wait for each other; each ran {at} of its actions")


def play(schedule: Schedule, durations: Durations | None = None) -> Timetable:
    """The schedule by the clock.

    Args:
        schedule: A legal one (`faults_of`).
        durations: By default every pass takes one second, a whole backward two, sending nothing.

    Raises:
        Stuck: If ranks wait for each other.

    Example:
        >>> forward, backward = Action(0, Pass.FORWARD, 0), Action(0, Pass.BACKWARD, 0)
        >>> play(Schedule("one", ((forward, backward),), (0,), 1)).ends
        ((1.0, 3.0),)
    """
    player = _Player(schedule, durations or Durations())
    player.run()
    if any(at < len(row) for at, row in zip(player.at, schedule.order, strict=True)):
        raise Stuck(player.at)
    return Timetable(tuple(map(tuple, player.starts)), tuple(map(tuple, player.ends)))


class _Player:
    """Runs each rank as far as it can go and wakes the one rank that waits for what has just ended."""

    def __init__(self, schedule: Schedule, durations: Durations) -> None:
        self.schedule = schedule
        self.seconds = durations.of(schedule.stages)
        self.there, self.back = durations.arriving(schedule.placement)
        self.at = [0] * schedule.ranks
        self.starts: list[list[float]] = [[] for _ in self.at]
        self.ends: list[list[float]] = [[] for _ in self.at]
        # when forward (microbatch, stage) has ended, and its backward towards the input
        size = schedule.microbatches * schedule.stages
        self.forward: list[float | None] = [None] * size
        self.backward: list[float | None] = [None] * size
        self.waiting: dict[int, int] = {}  # place of a forward, or ~place of a backward -> the rank that waits for it

    def run(self) -> None:
        ready = list(range(self.schedule.ranks))
        while ready:
            ready += self._rank(ready.pop())

    def _rank(self, rank: int) -> list[int]:
        """Go on with one rank; the ranks that can go on after it."""
        order, stages, last = self.schedule.order[rank], self.schedule.stages, self.schedule.stages - 1
        starts, ends, waiting = self.starts[rank], self.ends[rank], self.waiting
        seconds, there, back, forward, backward = self.seconds, self.there, self.back, self.forward, self.backward
        now = ends[-1] if ends else 0.0
        woken = []
        for at in range(self.at[rank], len(order)):
            stage, kind, microbatch = order[at]
            place = microbatch * stages + stage
            done, mark, before = (forward, place, -1) if kind == "F" else (backward, ~place, 1)
            if kind != "W" and (stage if kind == "F" else stage < last):
                ended = done[place + before]
                if ended is None:
                    waiting[mark + before if kind == "F" else mark - before] = rank
                    self.at[rank] = at
                    return woken
                ended += there[stage] if kind == "F" else back[stage]
                if ended > now:
                    now = ended
            starts.append(now)
            now += seconds[kind][stage]
            ends.append(now)
            if kind != "W":
                done[place] = now
                if waiting and (waiter := waiting.pop(mark, None)) is not None:
                    woken.append(waiter)
        self.at[rank] = len(order)
        return woken


def alive(schedule: Schedule, rank: int) -> Iterator[tuple[Action, dict[int, int]]]:
    """After each action of a rank: how many microbatches each of its stages keeps activations of.

    A microbatch is alive from its forward to the end of its backward: B, or W where the backward is split. The same dict is
    changed and given again.
    """
    count = dict.fromkeys(schedule.held[rank], 0)
    for action in schedule.order[rank]:
        if action.kind is Pass.FORWARD:
            count[action.stage] += 1
            yield action, count
        else:
            yield action, count
            if action.kind is not Pass.INPUT:
                count[action.stage] -= 1


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most microbatches alive at once."""
    peaks = [0] * schedule.stages
    for rank in range(schedule.ranks):
        for action, count in alive(schedule, rank):
            peaks[action.stage] = max(peaks[action.stage], count[action.stage])
    return tuple(peaks)


def held_peak(schedule: Schedule, sizes: Sequence[float] | None = None) -> tuple[float, ...]:
    """Per rank, the most that is alive at once over all its stages.

    Args:
        schedule: A legal one.
        sizes: Per stage, what one microbatch keeps there (bytes); by default one each, so microbatches are counted.
    """
    sizes = sizes or [1] * schedule.stages
    peaks = []
    for rank in range(schedule.ranks):
        now, peak = 0.0, 0.0
        for stage, kind, _ in schedule.order[rank]:
            now += {"F": 1, "I": 0}.get(kind, -1) * sizes[stage]
            peak = max(peak, now)
        peaks.append(peak)
    return tuple(peaks)
