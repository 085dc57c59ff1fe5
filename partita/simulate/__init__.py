"""Program × Cluster → Timeline and Figures: the step by the clock."""

from partita.simulate.clock import Span, Streams, Timeline, run_clock, simulate
from partita.simulate.costs import Costs, costs_of
from partita.simulate.figures import estimate, explain, traffic
from partita.simulate.pipeline import spans_of
from partita.simulate.roles import Played, busiest_of, estimate_roles, play_roles, predict

__all__ = [
    "Costs",
    "Played",
    "Span",
    "Streams",
    "Timeline",
    "busiest_of",
    "costs_of",
    "estimate",
    "estimate_roles",
    "explain",
    "play_roles",
    "predict",
    "run_clock",
    "simulate",
    "spans_of",
    "traffic",
]
