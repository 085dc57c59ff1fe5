"""Runs a Program on a Cluster by the clock: one compute stream and one communication stream an axis.

    compute   ──ops──ops──ops──────ops──────────┤wait├──optimizer──
    dp                  └─bucket──┘ └─bucket─────┘           overlapped: its own stream, waited for after backward
    tp        ─────╫────────╫────────                        blocking: compute waits at once

While both run, compute goes at 1 - u and communication at 1 - w (two-rate model, `interference.*`). Where ranks share cores
with the backend's threads u + w = 1: overlap then buys nothing.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from partita.cluster import Cluster
from partita.mesh import Mesh
from partita.program.events import Collective, Event, Phase, Repeat
from partita.program.program import Program
from partita.simulate.costs import Costs, costs_of

AFTER = (Phase.SYNC, Phase.OPTIMIZER)  # by then every overlapped call has been waited for


@dataclass(frozen=True, slots=True)
class Span:
    """One event with its start and end, in seconds from the start of the step."""

    name: str
    stream: str
    phase: str
    module: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A step by the clock.

    Args:
        seconds: Its length.
        compute: Seconds the compute stream would need alone.
        exposed: axis -> seconds by which its communication lengthens the step.
        spans: Every event, if asked for.
    """

    seconds: float
    compute: float
    exposed: dict[str, float]
    spans: tuple[Span, ...] = ()


@dataclass
class Streams:
    """The clock of one rank: compute runs in order, each axis has a queue of calls in flight."""

    slow_compute: float
    slow_communication: float
    now: float = 0.0
    queues: dict[str, deque[list]] = field(default_factory=dict)
    exposed: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    spans: list[Span] = field(default_factory=list)
    compute: float = 0.0

    def run(self, seconds: float) -> None:
        """Compute for `seconds` of undisturbed time; calls in flight go on beside it."""
        self.compute += seconds
        while seconds > 0:
            busy = [queue for queue in self.queues.values() if queue]
            if not busy:
                self.now += seconds
                return
            rate, other = 1 - self.slow_compute, 1 - self.slow_communication
            step = min(seconds / rate if rate else float("inf"), min(queue[0][0] for queue in busy) / other)
            lost = step * self.slow_compute / len(busy)
            for axis, queue in self.queues.items():
                if queue:
                    self.exposed[axis] += lost
            seconds -= step * rate
            self._progress(step, step * other)
            if seconds < 1e-15:
                return

    def launch(self, axis: str, seconds: float, event: Collective) -> None:
        """Start a call on the axis's own stream."""
        self.queues.setdefault(axis, deque()).append([seconds, self.now, event])

    def wait(self, axis: str | None = None) -> None:
        """Wait for the calls of one axis, or of all."""
        while any(queue for name, queue in self.queues.items() if axis in (None, name)):
            busy = {name: queue for name, queue in self.queues.items() if queue}
            step = min(queue[0][0] for queue in busy.values())
            for name in busy:
                self.exposed[name] += step / len(busy)
            self._progress(step, step)

    def block(self, axis: str, seconds: float, event: Collective) -> None:
        """A call that compute waits for; it queues behind what its axis already carries."""
        self.launch(axis, seconds, event)
        self.wait(axis)

    def _progress(self, step: float, work: float) -> None:
        self.now += step
        for axis, queue in self.queues.items():
            if queue:
                queue[0][0] -= work
                if queue[0][0] <= 1e-15:
                    _, start, event = queue.popleft()
                    if self.spans is not None:
                        self.spans.append(Span(event.op, axis, event.phase.value, event.module, start, self.now))
                    if queue:
                        queue[0][1] = max(queue[0][1], self.now)


def simulate(program: Program, cluster: Cluster, mesh: Mesh, *, traced: bool = False) -> Timeline:
    """One step of one rank by the clock.

    Args:
        program: As rewritten by every strategy.
        cluster, mesh: Where it runs.
        traced: Keep every event's start and end.
    """
    return run_clock(program, cluster, costs_of(program, cluster, mesh), traced=traced)


def run_clock(program: Program, cluster: Cluster, costs: Costs, *, traced: bool = False) -> Timeline:
    """The step by the clock, from priced events."""
    streams = Streams(cluster.value("interference.compute"), cluster.value("interference.communication"))
    inner = [s for s in program.segments if any(e.phase not in AFTER for e in s.events)]
    outer = [s for s in program.segments if s not in inner]
    plain = program.microbatches - 1
    if plain:  # all microbatches but the last are alike, and each ends with nothing in flight
        for segment in inner:
            _play(segment, streams, costs, traced=traced, last=False)
        streams.run(costs.handling(last=False))
        streams.wait()
        _multiply(streams, plain)
    for segment in inner:
        _play(segment, streams, costs, traced=traced, last=True)
    streams.run(costs.handling(last=True))
    streams.wait()
    for segment in outer:
        _play(segment, streams, costs, traced=traced, last=True)
    streams.wait()
    spans = tuple(sorted(streams.spans, key=lambda s: s.start)) if traced else ()
    return Timeline(streams.now, streams.compute, dict(streams.exposed), spans)


def play_segment(segment: Repeat, cluster: Cluster, costs: Costs, *, last: bool) -> float:
    """Seconds of one segment by itself, from priced events; `last`: with what happens in the last microbatch only."""
    streams = Streams(cluster.value("interference.compute"), cluster.value("interference.communication"))
    _play(segment, streams, costs, traced=False, last=last)
    streams.wait()
    return streams.now


def _multiply(streams: Streams, times: int) -> None:
    """The clock after `times` such microbatches; only the first is kept in the spans."""
    streams.now *= times
    streams.compute *= times
    for axis in streams.exposed:
        streams.exposed[axis] *= times


def _play(segment: Repeat, streams: Streams, costs: Costs, *, traced: bool, last: bool) -> None:
    steps = list(_steps(segment, costs, last=last, merged=not traced))
    for _ in range(segment.count):
        for event, seconds in steps:
            if isinstance(event, Collective):
                (streams.launch if event.overlapped else streams.block)(event.axis, seconds, event)
            else:
                start = streams.now
                streams.run(seconds)
                if traced and event is not None:
                    streams.spans.append(Span(event.op, "compute", event.phase.value, event.module, start, streams.now))


def _steps(segment: Repeat, costs: Costs, *, last: bool, merged: bool) -> Iterator[tuple[Event | None, float]]:
    """Events with their seconds; runs of compute merged into one unless every op is wanted."""
    total = 0.0
    for event in segment.events:
        seconds = costs.seconds[id(event)]
        if isinstance(event, Collective):
            if event.once and not last:
                continue
            if total:
                yield None, total
                total = 0.0
            yield event, seconds
        elif merged:
            total += seconds
        else:
            yield event, seconds
    if total:
        yield None, total
