"""When a solver stops, and what it hands back."""

from dataclasses import dataclass

from partita.linear.problem import Certificate
from partita.linear.rows import Vector


@dataclass(frozen=True)
class Stop:
    """Stop at a duality gap of `tol` times the objective, or after `most` rounds."""

    tol: float
    most: int


@dataclass(frozen=True)
class Outcome:
    """Weights with the intercept last, rounds made, and the certificate they stopped with."""

    w: Vector
    rounds: int
    certificate: Certificate
    moved: tuple[int, ...] = ()  # bytes into fast memory, by round
