"""A timeline as a Chrome trace: open it in ui.perfetto.dev or chrome://tracing.

Format: the JSON object form of the Trace Event Format, complete events (ph X), times in microseconds.
"""

from collections.abc import Iterable
from typing import Any

from partita.simulate import Span


def chrome(spans: Iterable[Span], name: str) -> dict[str, Any]:
    """The trace of one rank, a row per stream."""
    spans = list(spans)
    streams = {stream: at for at, stream in enumerate(dict.fromkeys(s.stream for s in spans))}
    rows: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": name}}]
    rows += [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": at, "args": {"name": stream}} for stream, at in streams.items()
    ]
    rows += [
        {
            "name": s.name,
            "cat": s.phase,
            "ph": "X",
            "ts": s.start * 1e6,
            "dur": (s.end - s.start) * 1e6,
            "pid": 0,
            "tid": streams[s.stream],
            "args": {"module": s.module, "phase": s.phase},
        }
        for s in spans
    ]
    return {"traceEvents": rows, "displayTimeUnit": "ms"}
