"""The contract of a strategy, and strategies together."""

from partita.strategy.bucketed import Bucketed
from partita.strategy.composing import (
    Remembered,
    check,
    close,
    compose,
    compose_roles,
    inside,
    microbatches,
    pipeline_of,
)
from partita.strategy.contract import Case, Place, Promise, Strategy
from partita.strategy.pipelined import Pipelined
from partita.strategy.planar import Planar
from partita.strategy.relaxed import Relaxed
from partita.strategy.textfile import TextFile

__all__ = [
    "Bucketed",
    "Case",
    "Pipelined",
    "Place",
    "Planar",
    "Promise",
    "Relaxed",
    "Remembered",
    "Strategy",
    "TextFile",
    "check",
    "close",
    "compose",
    "compose_roles",
    "inside",
    "microbatches",
    "pipeline_of",
]
