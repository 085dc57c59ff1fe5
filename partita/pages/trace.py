"""A timeline as a Chrome trace: open it in ui.perfetto.dev or chrome://tracing.

Format: the JSON object form of the Trace Event Format, complete events (ph X), times in microseconds. Times are rounded to
whole nanoseconds at both ends, so events that touch do not overlap.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from partita.simulate import Span

Json = dict[str, Any]


def chrome(spans: Iterable[Span], name: str) -> Json:
    """The trace of one rank, a row per stream."""
    spans = list(spans)
    rows = {stream: (at, stream) for at, stream in enumerate(dict.fromkeys(s.stream for s in spans))}
    return _trace(_process(0, name, rows.values(), ((rows[s.stream][0], s) for s in spans)))


def trace(predicted: Mapping[int, Iterable[Span]], measured: Mapping[int, Iterable[Span]] | None = None) -> Json:
    """The traces of all ranks: what was predicted and, where there is one, what was measured, one under the other.

    Args:
        predicted, measured: Rank -> its spans, in seconds from the start of the step (`simulate.spans_of`).

    Returns:
        Two processes, "predicted" and "measured"; in each a row a rank and, under it, one for each further stream of the rank.
    """
    sides = {"predicted": predicted, "measured": measured or {}}
    events: list[Json] = []
    for process, (name, ranks) in enumerate(sides.items()):
        spans = [(rank, span) for rank, row in sorted(ranks.items()) for span in row]
        if spans:
            lanes = _lanes((rank, span.stream) for rank, span in spans)
            events += _process(process, name, lanes.values(), ((lanes[rank, span.stream][0], span) for rank, span in spans))
    return _trace(events)


def _lanes(seen: Iterable[tuple[int, str]]) -> dict[tuple[int, str], tuple[int, str]]:
    """(rank, stream) -> its row and the row's name; computing stands first."""
    order = sorted(dict.fromkeys(seen), key=lambda lane: (lane[0], lane[1] != "compute"))
    names = {lane: f"rank {lane[0]}" if lane[1] == "compute" else f"rank {lane[0]}: {lane[1]}" for lane in order}
    return {lane: (at, names[lane]) for at, lane in enumerate(order)}


def _process(pid: int, name: str, rows: Iterable[tuple[int, str]], spans: Iterable[tuple[int, Span]]) -> list[Json]:
    """A process with its named rows and their spans."""
    events: list[Json] = [{"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}]
    events += [{"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": row}} for tid, row in rows]
    return events + [_event(pid, tid, span) for tid, span in spans]


def _event(pid: int, tid: int, span: Span) -> Json:
    start, end = round(span.start * 1e9), round(span.end * 1e9)
    return {
        "name": span.name,
        "cat": span.phase,
        "ph": "X",
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "pid": pid,
        "tid": tid,
        "args": {"module": span.module, "phase": span.phase},
    }


def _trace(events: list[Json]) -> Json:
    return {"traceEvents": events, "displayTimeUnit": "ms"}
