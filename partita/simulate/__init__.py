"""Program × Cluster → Timeline and Figures: the step by the clock."""

from partita.simulate.clock import Span, Streams, Timeline, run_clock, simulate
from partita.simulate.costs import Costs, costs_of
from partita.simulate.figures import estimate, explain, traffic
from partita.simulate.pipeline import spans_of

__all__ = [
    "Costs",
    "Span",
    "Streams",
    "Timeline",
    "costs_of",
    "estimate",
    "explain",
    "run_clock",
    "simulate",
    "spans_of",
    "traffic",
]
